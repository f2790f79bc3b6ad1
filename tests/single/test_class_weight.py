# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`class_weight` of the estimators of PyTorch and Lightning."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from tests.single.training import estimator, line, linear, weights, write

from farandole.spark.common.runs.run_fingerprint_check import RunDiffersError
from farandole.spark.lightning import LightningEstimator
from farandole.spark.torch.columns.class_weights import ClassWeights

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*(does not have many workers|isinstance|tensorboard).*"),
]
COUNTS = {0: 24, 1: 6, 2: 2}
KINDS = pytest.mark.parametrize("kind", [None, LightningEstimator], ids=["torch", "lightning"])


@pytest.fixture
def data(tmp_path):
    x, _ = line(sum(COUNTS.values()))
    c = np.repeat(list(COUNTS), list(COUNTS.values())).astype(np.int32)
    share = {one: len(c) / (len(COUNTS) * count) for one, count in COUNTS.items()}
    w = np.array([share[one] for one in c.tolist()], dtype=np.float32)
    columns = {"x": x, "c": c, "w": w, "b": (c > 0).astype(np.float32)}
    columns |= {"w2": np.where(c > 0, 3.0, 1.0).astype(np.float32), "half": w / 2}
    write(tmp_path / "intermediate_train_data", **columns)
    write(tmp_path / "intermediate_val_data", **{name: one[-9:] for name, one in columns.items()})
    return tmp_path


def fit(directory, kind=None, outputs=3, **params):
    known = {"label_cols": ["c"], "loss": torch.nn.CrossEntropyLoss(), "epochs": 2}
    made = estimator(directory, linear(outputs), **known | params)
    if kind is not None:
        made = kind(**{param.name: value for param, value in made._paramMap.items()})
    return made.fit_on_parquet()


@KINDS
@pytest.mark.parametrize(
    ("weighted", "column", "loss", "label"),
    [
        ("balanced", "w", torch.nn.CrossEntropyLoss(), "c"),
        ({1: 3, 2: 3}, "w2", torch.nn.CrossEntropyLoss(), "c"),
        ({1: 3}, "w2", torch.nn.BCEWithLogitsLoss(), "b"),
        ({0.0: 1, 1.0: 3}, "w2", torch.nn.functional.binary_cross_entropy_with_logits, "b"),
    ],
)
def test_a_weight_of_a_class_is_the_weight_of_its_rows(data, kind, weighted, column, loss, label):
    known = {"loss": loss, "label_cols": [label], "outputs": 3 if label == "c" else 1}
    by_class = fit(data, kind, class_weight=weighted, run_id="a", **known)
    by_row = fit(data, kind, sample_weight_col=column, run_id="b", **known)
    plain = fit(data, kind, run_id="c", **known)
    assert torch.allclose(weights(by_class), weights(by_row), atol=1e-6)
    assert not torch.allclose(weights(by_class), weights(plain), atol=1e-3)
    for one, other in zip(by_class.getHistory(), by_row.getHistory(), strict=True):
        for side in ("train", "validation"):
            assert one[side]["loss"] == pytest.approx(other[side]["loss"], rel=1e-5)


@KINDS
def test_weights_of_rows_and_of_classes_are_multiplied(data, kind):
    both = fit(data, kind, class_weight={0: 2, 1: 2, 2: 2}, sample_weight_col="half", run_id="a")
    rows = fit(data, kind, sample_weight_col="w", run_id="b")
    assert torch.allclose(weights(both), weights(rows), atol=1e-6)


def test_balanced_leaves_out_labels_that_the_loss_ignores(data):
    loss = torch.nn.CrossEntropyLoss(ignore_index=0)
    ignoring = fit(data, class_weight="balanced", loss=loss, run_id="a")
    given = fit(data, class_weight={1: 8 / 12, 2: 2.0}, loss=loss, run_id="b")
    assert torch.allclose(weights(ignoring), weights(given), atol=1e-6)


def test_classes_may_be_words(tmp_path):
    x, y = line(32)
    names = np.where(y > 0, "up", "down")
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "c": names, "i": (y > 0).astype("int64")})

    def fitted(**params):
        made = estimator(
            tmp_path,
            linear(2),
            feature_cols=[["a", "b"]],
            loss=torch.nn.CrossEntropyLoss(),
            epochs=2,
            **params,
        )
        return made.fit(frame)

    named = fitted(label_cols=["c"], categories=["c"], class_weight={"up": 5})
    numbered = fitted(label_cols=["i"], class_weight={1: 5})
    assert torch.allclose(weights(named), weights(numbered), atol=1e-6)
    with pytest.raises(ValueError, match=r"no category of column 'c': 'left'.*'down', 'up'"):
        fitted(label_cols=["c"], categories=["c"], class_weight={"left": 5})


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"class_weight": "even"}, 'must be "balanced" or a dict'),
        ({"class_weight": {}}, "dict of weights"),
        ({"class_weight": {0: -1}}, "of class 0 must be a number, 0 or more: -1"),
        ({"class_weight": {0: float("nan")}}, "0 or more: nan"),
        ({"class_weight": {0: 0}}, "is 0 for all of its classes"),
        ({"class_weight": {"a": 1}}, "which are numbers: 'a'"),
        (
            {"class_weight": {0: 1}, "label_cols": ["c", "b"], "loss": torch.nn.MSELoss()},
            "one label column, there are 2",
        ),
        (
            {"class_weight": {0: 1}, "label_cols": ["x"], "feature_cols": ["w"]},
            "one class per row, but column 'x' has 2 values",
        ),
        (
            {"class_weight": "balanced", "transformation_fn": lambda row: row},
            "transformation_fn may change them: set a dict",
        ),
        ({"class_weight": {0: 1}, "loss": lambda o, _: o.mean()}, "sample weights need a loss"),
    ],
)
def test_wrong_weights_are_refused(data, params, told):
    if params.get("label_cols") == ["x"]:
        params = params | {"model": torch.nn.Linear(1, 2), "loss": torch.nn.MSELoss()}
        params["optimizer"] = torch.optim.SGD(params["model"].parameters(), lr=0.1)
        with pytest.raises(ValueError, match=told):
            estimator(data, **params).fit_on_parquet()
        return
    with pytest.raises((ValueError, TypeError), match=told):
        fit(data, **params)


def test_other_weights_are_another_run(data):
    fit(data, class_weight={0: 2}, run_id="r")
    with pytest.raises(RunDiffersError, match="class_weight was"):
        fit(data, class_weight={0: 3}, run_id="r", epochs=3)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.int8])
@pytest.mark.parametrize("shape", [(5,), (5, 1)])
def test_weights_are_found_by_value(dtype, shape):
    known = ClassWeights((-1.0, 2.0), (0.5, 3.0))
    label = torch.tensor([2, 0, -1, 7, -5]).to(dtype).reshape(shape)
    assert known.row_weights(label).tolist() == [3.0, 1.0, 0.5, 1.0, 1.0]
    doubled = known.weigh_rows(label, torch.full((5,), 2.0))
    assert doubled.tolist() == [6.0, 2.0, 1.0, 2.0, 2.0]
