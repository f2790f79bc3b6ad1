# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The predictors of both frameworks treat batches in the same way."""

import keras
import numpy as np
import pyarrow as pa
import pytest
import torch

from farandole.common import pickling
from farandole.spark.keras.predict import KerasPredictor
from farandole.spark.keras.saving import model_bytes as keras_payload
from farandole.spark.torch.columns.model_calls import ModelCall
from farandole.spark.torch.predict import TorchPredictor
from farandole.spark.torch.saving import state_bytes as torch_payload


class TorchSum(torch.nn.Module):
    def forward(self, x):
        return x.sum(dim=1)  # an output of one dimension


def torch_predictor(**options):
    return TorchPredictor(
        model=torch_payload.pickle_with_tensors(TorchSum()),
        shapes=None,
        dtypes=None,
        call=ModelCall(arguments=((),), labels=("y",)),
        use_gpu=False,
        **options,
    )


def keras_predictor(**options):
    x = keras.Input((2,))
    return KerasPredictor(
        model=keras_payload.pack_model(keras.Model(x, keras.ops.sum(x, axis=1))),
        custom_objects=pickling.pickle_by_value({}),
        backend=keras.backend.backend(),
        **options,
    )


def batch_of(rows):
    values = np.arange(rows, dtype=np.float32)
    return pa.RecordBatch.from_pydict({"column0": values, "column1": values * 10})


@pytest.fixture(params=[torch_predictor, keras_predictor])
def predictor(request):
    return request.param(
        columns=("a", "b"), groups=(("a", "b"),), labels=("y",), kinds=("float64",), batch_size=3
    )


def test_a_probe_predicts_one_row_and_reads_all_batches(predictor):
    read = []

    def batches():
        for rows in (0, 4, 2):
            yield batch_of(rows)
            read.append(rows)

    found = [batch.to_pydict() for batch in predictor.probe_output_sizes(batches())]
    assert found == [{"size": [1]}]
    assert read == [0, 4, 2]  # Spark uses a worker again whose task has read its input


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 7])
def test_predictions_in_parts_are_those_of_all_rows(predictor, rows):
    (found,) = predictor.predict_batches(iter([batch_of(rows)]))
    assert found["output0"].to_pylist() == [11.0 * row for row in range(rows)]
    assert found.schema.names == ["column0", "column1", "output0"]
