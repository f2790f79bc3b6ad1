# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The training loop on Parquet, most of it in this process: a world of one needs no launcher."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from farandole.spark.common import Backend, LocalBackend, LocalStore
from farandole.spark.torch import TorchEstimator
from farandole.spark.torch.columns.losses import label_dtype, shape_label
from farandole.spark.torch.columns.tensors import input_tensor
from farandole.spark.torch.job import TorchInput
from farandole.spark.torch.saving.state_bytes import unpack_state

pytestmark = pytest.mark.timeout(300)


class Here(Backend):
    """Runs the function in this process."""

    def run(self, fn, args=(), kwargs=None, env=None, on_progress=None):  # noqa: ARG002
        return [fn(*args, **(kwargs or {}))]

    def num_processes(self):
        return 1


def write(directory, **columns):
    """A Parquet data set; two-dimensional columns become fixed-size lists."""
    arrays = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
        if values.ndim == 2
        else pa.array(values)
        for name, values in columns.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(arrays), directory / "part-0.parquet")


def line(rows=96, seed=0):
    """y = 2 x0 - 3 x1 + 1, and a class that says whether y is positive."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, 2)).astype(np.float32)
    y = (2 * x[:, 0] - 3 * x[:, 1] + 1).astype(np.float32)
    return x, y


def linear(outputs=1, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(2, outputs)


def fit(tmp_path, model, backend=None, **params):
    known = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
        "loss": torch.nn.MSELoss(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 20,
        "verbose": 0,
        "random_seed": 1,
        "store": LocalStore(str(tmp_path)),
        "backend": backend or Here(),
    }
    return TorchEstimator(**known | params).fit_on_parquet()


def weights(model):
    return torch.cat(
        [parameter.detach().reshape(-1) for parameter in model.getModel().parameters()]
    )


@pytest.fixture
def data(tmp_path):
    x, y = line()
    write(
        tmp_path / "intermediate_train_data",
        x=x,
        y=y,
        c=(y > 0).astype(np.int32),
        w=np.ones(len(y)),
    )
    return tmp_path


def test_a_line_is_learned_and_the_users_model_is_left_alone(data):
    model = linear()
    before = model.weight.detach().clone()
    fitted = fit(data, model, epochs=40)
    assert torch.allclose(weights(fitted), torch.tensor([2.0, -3.0, 1.0]), atol=0.05)
    assert torch.equal(model.weight, before)


def test_batches_go_to_a_gpu_from_locked_memory_without_a_wait(monkeypatch):
    gpu, steps, to = SimpleNamespace(type="cuda"), [], torch.Tensor.to

    def to_gpu(tensor, *arguments, **options):
        if arguments[0] is not gpu:
            return to(tensor, *arguments, **options)
        steps.append(("sent", tensor.dtype, options))
        return tensor

    def pin_memory(tensor):
        steps.append(("locked", tensor.dtype))
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "to", to_gpu)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    columns = {"a": torch.arange(3.0, dtype=torch.float64), "b": torch.ones(3, 2)}
    whole = input_tensor(columns, TorchInput(("a", "b"), (-1, 3)), 2, gpu)
    assert whole.tolist() == [[0.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    assert steps == [("locked", torch.float32), ("sent", torch.float32, {"non_blocking": True})]
    one = input_tensor(columns, TorchInput(("a",), (-1, 1)), 3, gpu)
    assert one.tolist() == [[0.0], [1.0], [2.0]]
    assert steps[2:] == steps[:2]


def test_history_has_a_mean_over_rows_for_every_epoch(data):
    def double(output, label):
        return 2 * torch.nn.functional.mse_loss(output, label)

    fitted = fit(data, linear(), epochs=3, batch_size=36, metrics=[double])
    assert [entry["epoch"] for entry in fitted.getHistory()] == [0, 1, 2]
    for entry in fitted.getHistory():
        assert entry["rows"] == 96
        assert entry["train"]["all_metrics"] == [
            {"double": pytest.approx(2 * entry["train"]["loss"])}
        ]
    assert list(fitted.history_frame().columns) == ["epoch", "loss", "double", "seconds", "rows"]


def test_validation_data_is_scored_with_the_epochs_model(data):
    x, y = line(rows=10, seed=3)
    write(data / "intermediate_val_data", x=x, y=y)
    fitted = fit(data, linear(), epochs=2, val_batch_size=4)
    module = fitted.getModel().eval()
    expected = torch.nn.functional.mse_loss(
        module(torch.from_numpy(x)).reshape(-1), torch.from_numpy(y)
    ).item()
    assert fitted.getHistory()[-1]["validation"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_integer_labels_meet_cross_entropy_and_doubles_do_too(data):
    x, y = line()
    fitted = fit(data, linear(2), label_cols=["c"], loss=torch.nn.CrossEntropyLoss())
    assert fitted.getHistory()[-1]["train"]["loss"] < fitted.getHistory()[0]["train"]["loss"]
    write(data / "intermediate_train_data", x=x, c=(y > 0).astype(np.float64))
    fit(data, linear(2), label_cols=["c"], loss=torch.nn.functional.cross_entropy, epochs=1)


def test_integer_labels_meet_a_regression_loss_as_floats(data):
    fit(data, linear(), label_cols=["c"], loss=torch.nn.BCEWithLogitsLoss(), epochs=1)


def test_rows_of_weight_zero_teach_nothing(data):
    x, y = line()
    wrong = np.arange(96) % 2 == 0
    write(
        data / "intermediate_train_data",
        x=x,
        y=np.where(wrong, 100, y).astype(np.float32),
        w=np.where(wrong, 0.0, 1.0),
    )
    fitted = fit(data, linear(), sample_weight_col="w", epochs=80)
    assert torch.allclose(weights(fitted), torch.tensor([2.0, -3.0, 1.0]), atol=0.1)


def test_two_backward_passes_step_like_a_batch_of_twice_the_size(data):
    small = fit(data, linear(), batch_size=8, backward_passes_per_step=2, epochs=3, shuffle=False)
    large = fit(data, linear(), batch_size=16, epochs=3, shuffle=False)
    assert torch.allclose(weights(small), weights(large), atol=1e-6)


def test_the_rows_of_a_short_accumulation_count_as_much_as_others(data):
    x, y = line(rows=76)  # batches of 8 in pairs: the last pair is whole and 4 rows
    write(data / "intermediate_train_data", x=x, y=y)
    small = fit(data, linear(), batch_size=8, backward_passes_per_step=2, epochs=2, shuffle=False)
    large = fit(data, linear(), batch_size=16, epochs=2, shuffle=False)
    assert torch.allclose(weights(small), weights(large), atol=1e-6)
    x, y = line(rows=72)  # the last pair lacks its second batch
    write(data / "intermediate_train_data", x=x, y=y)
    small = fit(data, linear(), batch_size=8, backward_passes_per_step=2, epochs=2, shuffle=False)
    large = fit(data, linear(), batch_size=16, epochs=2, shuffle=False)
    assert torch.allclose(weights(small), weights(large), atol=1e-6)


def test_padding_does_not_move_a_batch_norm(data):
    x, y = line(rows=17)  # two batches of 8, and one row that goes through the model eight times
    write(data / "intermediate_train_data", x=x, y=y)
    norm = torch.nn.BatchNorm1d(2)
    fitted = fit(data, torch.nn.Sequential(norm, linear()), epochs=1, shuffle=False)
    for batch in (x[:8], x[8:16]):
        norm(torch.from_numpy(batch))
    found = fitted.getModel()[0]
    assert found.num_batches_tracked == 2
    assert torch.allclose(found.running_var, norm.running_var)
    assert torch.allclose(found.running_mean, norm.running_mean)


def test_integer_labels_meet_a_loss_of_ones_own_row_by_row(data):
    def squares(output, label):
        assert output.shape == label.shape
        return ((output - label) ** 2).mean()

    fit(data, linear(), label_cols=["c"], loss=squares, epochs=1)


def test_several_labels_get_an_output_and_a_loss_each(data):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.value, self.sign = linear(), linear(2)

        def forward(self, x):
            return self.value(x), self.sign(x)

    def error(output, label):
        return (output - label).abs().mean()

    def accuracy(output, label):
        return (output.argmax(1) == label).float().mean()

    losses = [torch.nn.MSELoss(), torch.nn.CrossEntropyLoss()]
    fitted = fit(
        data,
        Two(),
        label_cols=["y", "c"],
        loss=losses,
        loss_weights=[1.0, 1.0],
        metrics=[[error, accuracy]],
    )
    last = fitted.getHistory()[-1]["train"]["all_metrics"]
    assert set(last[0]) == {"error_y", "accuracy_c"}
    assert last[0]["accuracy_c"] > 0.9
    assert last[0]["error_y"] < 0.5
    assert fitted.getOutputCols() == ["y__output", "c__output"]


def test_input_shapes_give_the_model_its_view(data):
    class Image(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x):
            assert x.shape[1:] == (1, 2)
            return self.inner(x[:, 0])

    fit(data, Image(), input_shapes=[[-1, 1, 2]], epochs=1)


def test_fewer_steps_are_taken_when_asked_for(data):
    fitted = fit(data, linear(), train_steps_per_epoch=3, epochs=1)
    assert fitted.getHistory()[0]["rows"] == 24


def test_a_run_continues_where_its_checkpoint_ends(data):
    def adam(model):
        return {"optimizer": torch.optim.Adam(model.parameters(), lr=0.05), "run_id": "r"}

    once_model = linear()
    once = fit(data, once_model, epochs=4, **adam(once_model) | {"run_id": "once"})
    first_model, second_model = linear(), linear(seed=7)
    fit(data, first_model, epochs=2, **adam(first_model))
    resumed = fit(data, second_model, epochs=4, **adam(second_model))
    assert [entry["epoch"] for entry in resumed.getHistory()] == [0, 1, 2, 3]
    assert torch.allclose(weights(resumed), weights(once), atol=1e-6)
    assert resumed.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_checkpoint_of_another_model_is_refused_with_its_run(data, capfd):
    fit(data, linear(), epochs=1, run_id="r")
    with pytest.raises(
        ValueError,
        match=r"run 'r' belongs to another model or optimizer: .* file://.*/runs/r elsewhere: ",
    ):
        fit(data, torch.nn.Sequential(linear()), epochs=2, run_id="r", resume="force")
    fit(data, linear(), epochs=2, run_id="r", resume="force", verbose=1)
    told = capfd.readouterr().err
    assert (
        f"run r continues from its checkpoint file://{data}/runs/r/checkpoint, up to epoch 2"
        in told
    )


def test_the_checkpoint_is_plain_tensors_and_the_logs_are_lines(data):
    fitted = fit(data, linear(), epochs=2, run_id="r")
    run = data / "runs" / "r"
    state = unpack_state((run / "checkpoint").read_bytes())
    assert set(state) == {"model", "optimizer", "history", "rate_rows"}
    assert len((run / "logs" / "history.jsonl").read_text().splitlines()) == 2
    assert fitted.getPaths()["checkpoint"] == f"file://{run}/checkpoint"


def test_nothing_is_left_in_the_store_when_runs_are_not_saved(data):
    fit(data, linear(), epochs=1, store=LocalStore(str(data), save_runs=False))
    assert not (data / "runs").exists()


def test_a_model_that_does_not_take_the_columns_is_refused_before_training(data):
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x):
            return self.inner(x), self.inner(x)

    with pytest.raises(
        ValueError, match=r"the model does not take its 1 feature columns as \(x \(2, 2\)\)"
    ):
        fit(data, torch.nn.Linear(5, 1))
    with pytest.raises(
        ValueError, match="label column count 1 must equal the count of model outputs 2"
    ):
        fit(data, Twice())
    with pytest.raises(ValueError, match="it returned tuple of Tensor, tuple"):
        fit(data, torch.nn.LSTM(2, 1))
    with pytest.raises(
        ValueError, match=r"one row per row of its input: .* column 'y' has shape \(\)"
    ):
        fit(data, torch.nn.Sequential(linear(), Mean()))
    torch_warns = pytest.warns(UserWarning, match="due to broadcasting")
    with (
        torch_warns,
        pytest.raises(
            ValueError, match=r"column 'y' does not take output \(3, 2\) and float32 label \(3,\)"
        ),
    ):
        fit(data, linear(2), batch_size=2)
    with pytest.raises(ValueError, match="the loss of column 'y' does not take"):
        fit(data, linear(2), loss=torch.nn.CosineEmbeddingLoss())


def test_losses_and_metrics_that_give_no_number_are_named(data):
    with pytest.raises(
        ValueError, match=r"loss of column 'y' must return one number, .* shape \(2, 1\)"
    ):
        fit(data, linear(), loss=torch.nn.MSELoss(reduction="none"))
    with pytest.raises(ValueError, match="one function, or one per label column: 2 for 1 columns"):
        fit(data, linear(), metrics=[[len, len]])

    def difference(output, label):
        return output - label

    with pytest.raises(
        ValueError, match=r"metric difference must return one number, it returned shape \(8, 1\)"
    ):
        fit(data, linear(), metrics=[difference])


class Mean(torch.nn.Module):
    """One number for all rows."""

    def forward(self, x):
        return x.mean()


def test_a_column_that_is_not_in_the_data_is_named(data):
    with pytest.raises(
        ValueError, match="feature column 'xx' is not in the training data, did you mean 'x'"
    ):
        fit(data, linear(), feature_cols=["xx"])


def test_two_ranks_train_like_one_with_twice_the_batch(data):
    x, y = line(rows=90)  # the last step is short, and shorter still on one rank
    write(data / "intermediate_train_data", x=x, y=y)
    one, two = linear(), linear()
    alone = fit(
        data,
        one,
        backend=LocalBackend(1),
        batch_size=16,
        epochs=3,
        optimizer=torch.optim.SGD(one.parameters(), lr=0.02),
    )
    pair = fit(
        data,
        two,
        backend=LocalBackend(2),
        batch_size=8,
        epochs=3,
        optimizer=torch.optim.SGD(two.parameters(), lr=0.01),
    )
    assert torch.allclose(weights(alone), weights(pair), atol=1e-5)
    for left, right in zip(alone.getHistory(), pair.getHistory(), strict=True):
        assert left["rows"] == right["rows"] == 90
        assert left["train"]["loss"] == pytest.approx(right["train"]["loss"], rel=1e-4)
    assert pair.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.01)


def test_labels_are_cast_by_their_loss():
    from farandole.data.columns import PreparedColumn

    whole, real, vector = (
        PreparedColumn("a", "int32", ()),
        PreparedColumn("b", "float64", ()),
        PreparedColumn("c", "float64", (3,)),
    )
    for loss in (torch.nn.CrossEntropyLoss(), torch.nn.functional.nll_loss):
        assert [label_dtype(loss, column) for column in (whole, real, vector)] == [
            "int64",
            "int64",
            "float32",
        ]
    for loss in (
        torch.nn.MSELoss(),
        torch.nn.functional.l1_loss,
        torch.nn.functional.binary_cross_entropy,
    ):
        assert label_dtype(loss, whole) == "float32"
    assert [label_dtype(lambda output, _: output, column) for column in (whole, real)] == [
        "int64",
        "float32",
    ]


def test_a_label_takes_the_shape_of_an_output_of_its_size():
    assert shape_label(torch.zeros(4), torch.zeros(4, 1), None).shape == (4, 1)
    assert shape_label(torch.zeros(4, dtype=torch.int64), torch.zeros(4, 1), None).shape == (4, 1)
    assert shape_label(torch.zeros(4, dtype=torch.int64), torch.zeros(4, 3), None).shape == (4,)
    assert shape_label(torch.zeros(4, 6), torch.zeros(4), (-1, 2, 3)).shape == (4, 2, 3)
