# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Parameters of the estimator: defaults, accessors, checks, and what wins over what."""

import pytest
import torch

from farandole.data.columns import PreparedColumn, check_shapes_fit
from farandole.spark.common import LocalBackend, LocalStore
from farandole.spark.torch import TorchEstimator, TorchModel


def estimator(tmp_path, **params):
    model = torch.nn.Linear(4, 2)
    known = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": torch.nn.CrossEntropyLoss(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "store": LocalStore(str(tmp_path)),
    }
    return TorchEstimator(**known | params)


def test_defaults_are_horovods():
    made = TorchEstimator()
    assert (
        made.getBatchSize(),
        made.getEpochs(),
        made.getVerbose(),
        made.getPartitionsPerProcess(),
    ) == (32, 1, 1, 10)
    assert made.getMetrics() == []
    assert made.getShuffle() is True
    assert made.getUseGpu() is True
    assert made.getBackwardPassesPerStep() == 1
    for name in (
        "num_proc",
        "store",
        "validation",
        "val_batch_size",
        "run_id",
        "random_seed",
        "input_shapes",
    ):
        assert made.getOrDefault(name) is None


def test_every_parameter_has_a_setter_that_returns_the_estimator_and_a_getter():
    made = TorchEstimator()
    for param in made.params:
        name = "".join(part[:1].upper() + part[1:] for part in param.name.split("_"))
        value = made.getOrDefault(param.name)
        assert getattr(made, f"set{name}")(value) is made
        assert getattr(made, f"get{name}")() == value


def test_the_constructor_takes_keywords_only():
    with pytest.raises(TypeError):
        TorchEstimator(2)


def test_only_what_is_passed_is_set():
    made = TorchEstimator(epochs=3)
    assert made.isSet(made.epochs)
    assert not made.isSet(made.batch_size)


def test_a_param_map_wins_over_the_constructor_and_leaves_the_estimator_alone():
    made = TorchEstimator(epochs=3)
    copied = made.copy({made.epochs: 5, made.batch_size: 64})
    assert (copied.getEpochs(), copied.getBatchSize()) == (5, 64)
    assert (made.getEpochs(), made.getBatchSize()) == (3, 32)


def test_an_unknown_parameter_is_named():
    with pytest.raises(TypeError, match="batchsize"):
        TorchEstimator().setParams(batchsize=1)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("batch_size", 0, "batch_size must be at least 1: 0"),
        ("val_batch_size", -1, "val_batch_size must be at least 1: -1"),
        ("epochs", 0, "epochs must be at least 1: 0"),
        ("num_proc", 0, "num_proc must be at least 1: 0"),
        ("validation", 1.0, "validation must be at least 0 and less than 1: 1.0"),
        ("validation", -0.1, "validation must be at least 0 and less than 1: -0.1"),
        ("backward_passes_per_step", 0, "backward_passes_per_step must be at least 1: 0"),
        ("feature_cols", [], "feature_cols must name at least one column"),
        ("feature_cols", ["a", "a"], "feature_cols names a column twice: a"),
        ("input_shapes", [[0, 2]], "input_shapes must hold positive sizes or -1"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name(name, value, told):
    with pytest.raises(ValueError, match=told):
        TorchEstimator(**{name: value})
    made = TorchEstimator()
    with pytest.raises(ValueError, match=told):
        made.copy({made.getParam(name): value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", "many"),
        ("epochs", 1.5),
        ("shuffle", 1),
        ("metrics", ["accuracy"]),
        ("store", 3),
        ("run_id", 7),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_name(name, value):
    with pytest.raises(TypeError, match=name):
        TorchEstimator(**{name: value})


@pytest.mark.parametrize(
    "missing", ["model", "store", "feature_cols", "label_cols", "loss", "optimizer"]
)
def test_a_fit_without_a_required_parameter_names_it(tmp_path, missing):
    with pytest.raises(
        ValueError, match="Model parameter is required" if missing == "model" else missing
    ):
        estimator(tmp_path, **{missing: None}).fit_on_parquet()


def test_backend_and_num_proc_exclude_each_other(tmp_path):
    with pytest.raises(
        ValueError, match='At most one of parameters "backend" and "num_proc" may be specified'
    ):
        estimator(tmp_path, backend=LocalBackend(1), num_proc=1).fit_on_parquet()


def test_an_optimizer_over_other_parameters_is_refused(tmp_path):
    other = torch.optim.SGD(torch.nn.Linear(4, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="that the model does not have: 2"):
        estimator(tmp_path, optimizer=other).fit_on_parquet()


def test_loss_weights_must_match_the_labels(tmp_path):
    with pytest.raises(ValueError, match="loss_weights needs one number per label column 1"):
        estimator(tmp_path, loss_weights=[0.5, 0.5]).fit_on_parquet()


def test_sample_weights_need_a_loss_that_can_be_had_row_by_row(tmp_path):
    with pytest.raises(ValueError, match="reduction"):
        estimator(
            tmp_path, loss=lambda output, _: output.sum(), sample_weight_col="w"
        ).fit_on_parquet()


def test_a_fit_on_parquet_without_data_names_the_path(tmp_path):
    with pytest.raises(
        ValueError, match=f"there is no training data at file://{tmp_path}/intermediate_train_data"
    ):
        estimator(tmp_path, backend=LocalBackend(1)).fit_on_parquet()


def test_a_store_may_be_given_as_a_path(tmp_path):
    assert (
        TorchEstimator(store=str(tmp_path)).getStore().get_runs_path() == f"file://{tmp_path}/runs"
    )


def test_a_shape_must_fit_its_column():
    columns = {"x": PreparedColumn("x", "float32", (64,))}
    for fits in ([-1, 64], [64], [-1, 1, 8, 8], [8, -1], [-1, 8, 8]):
        check_shapes_fit(columns, ["x"], [fits], "feature")
    with pytest.raises(
        ValueError, match=r"feature column 'x' with size 64 does not fit shape \[-1, 65\]"
    ):
        check_shapes_fit(columns, ["x"], [[-1, 65]], "feature")
    with pytest.raises(
        ValueError, match="feature column count 1 must equal the count of feature shapes 2"
    ):
        check_shapes_fit(columns, ["x"], [[64], [64]], "feature")


def test_output_columns_are_named_after_labels_unless_set():
    model = TorchModel(label_columns=["a", "b"])
    assert model.getOutputCols() == ["a__output", "b__output"]
    assert model.setOutputCols(["p", "q"]).getOutputCols() == ["p", "q"]


def test_a_run_id_stays_below_the_runs():
    assert TorchEstimator(run_id="team/first").getRunId() == "team/first"
    for astray in ("../../x", "/x", "a//b", ".", "x/.."):
        with pytest.raises(ValueError, match="run_id must name a directory below the store's runs"):
            TorchEstimator(run_id=astray)
