# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Nulls, NaN and infinities of foreign data, on their way to PyTorch and Lightning."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.single.training import Here, estimator, fit, line, linear, weights, write

from farandole.spark.common import LocalStore
from farandole.spark.lightning import TorchEstimator as LightningEstimator

pytestmark = pytest.mark.timeout(300)


def lightning(directory, model, **params):
    known = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
        "loss": torch.nn.MSELoss(),
    }
    known |= {
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 1,
        "verbose": 0,
        "backend": Here(),
    }
    return LightningEstimator(store=LocalStore(str(directory)), **known | params).fit_on_parquet()


@pytest.fixture(params=[fit, lightning], ids=["torch", "lightning"])
def fitting(request):
    return request.param


def holes(directory):
    """Rows whose features have a null and a NaN where those of `filled` are 0.5."""
    a, y = [1.0, None, float("nan"), 2.0] * 8, [float(row % 3) for row in range(32)]
    for name, values in (("holes", a), ("filled", [1.0, 0.5, 0.5, 2.0] * 8)):
        path = directory / name / "intermediate_train_data"
        path.mkdir(parents=True)
        count = pa.array(range(32), pa.int32())
        pq.write_table(
            pa.table({"a": pa.array(values), "b": count, "y": y}), path / "part-0.parquet"
        )
    return directory / "holes", directory / "filled"


@pytest.mark.parametrize("fill", [0.5, {"a": 0.5}, {"*": 0.5}])
def test_a_fill_takes_the_place_of_nulls_and_nan_in_parquet_of_others_too(tmp_path, fitting, fill):
    with_holes, without = holes(tmp_path)
    told = {"feature_cols": [["a", "b"]], "epochs": 1, "random_seed": 1}
    found = fitting(with_holes, linear(), fill=fill, **told)
    assert torch.equal(weights(found), weights(fitting(without, linear(), **told)))
    assert bool(weights(found).isfinite().all())


def test_without_a_fill_they_are_errors_that_name_column_and_file(tmp_path, fitting):
    with_holes, _ = holes(tmp_path)
    with pytest.raises(
        ValueError, match=r"column a has 8 nulls in row group 0 of .*part-0\.parquet"
    ):
        fitting(with_holes, linear(), feature_cols=[["a", "b"]], epochs=1)


@pytest.mark.parametrize(
    ("value", "what"), [(np.nan, "1 NaN"), (np.inf, "1 infinite values"), (-np.inf, "1 infinite")]
)
def test_numbers_that_no_weight_comes_back_from_are_errors_unless_they_are_allowed(
    tmp_path, fitting, value, what
):
    x, y = line()
    x[40, 1] = value
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    with pytest.raises(
        ValueError, match=rf"column x has {what}.* in row group 0 of .*part-0\.parquet; .*allow_nan"
    ):
        fitting(tmp_path, linear(), epochs=1)
    found = fitting(tmp_path, linear(), epochs=1, allow_nan=True, terminate_on_nan=False)
    assert not bool(weights(found).isfinite().all())


def test_a_number_too_large_for_its_input_is_an_error_and_not_an_infinity(tmp_path, fitting):
    x, y = line()
    large = x.astype(np.float64)
    large[40, 1] = 1e39
    write(tmp_path / "intermediate_train_data", x=large, y=y)
    told = (
        r"column x, row 40 of row group 0 of .*part-0\.parquet: 10+ is not in the range of float32"
    )
    with pytest.raises(ValueError, match=told):
        fitting(tmp_path, linear(), epochs=1)
    fitting(tmp_path, linear(), epochs=1, allow_nan=True, terminate_on_nan=False)
    double = linear().double()
    fitting(tmp_path, double, optimizer=torch.optim.SGD(double.parameters(), lr=0.0),
        input_dtypes=["float64"],
            loss=lambda output, label: ((output - label.double()) ** 2).mean(),
            epochs=1)  # fmt: skip


def spoil(row):
    with np.errstate(divide="ignore"):
        return row | {"x": row["x"] / (row["x"] - row["x"])}


def test_the_result_of_a_transformation_is_checked_too(tmp_path, fitting):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    with pytest.raises(
        ValueError, match=r"feature column 'x' has infinite values.* in 8 of 8 rows"
    ):
        fitting(tmp_path, linear(), epochs=1, transformation_fn=spoil)


def masked(output, label):
    known = ~label.isnan()
    return ((output - label)[known] ** 2).mean()


def test_labels_that_are_missing_reach_a_loss_that_knows_them_where_nan_is_allowed(
    tmp_path, fitting
):
    x, y = line()
    y[::4] = np.nan
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    found = fitting(tmp_path, linear(), epochs=1, allow_nan=True, loss=masked)
    assert bool(weights(found).isfinite().all())
    with pytest.raises(ValueError, match="label column 'y' contains fractions"):
        fitting(tmp_path, linear(2), epochs=1, allow_nan=True, loss=torch.nn.CrossEntropyLoss())


def test_a_fill_for_a_column_that_is_not_used_is_refused_by_name(tmp_path):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    with pytest.raises(
        ValueError, match="fill must name features, labels or weights; these are not: z"
    ):
        estimator(tmp_path, linear(), fill={"z": 0, "*": 1}).fit_on_parquet()
