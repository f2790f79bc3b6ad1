# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`KerasModel`: a fitted Keras model that transforms DataFrames."""

# ruff: noqa: PLC0415 - Spark ML's names; pandas is loaded on demand

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from pyspark.ml.util import MLReadable

from farandole.common import argument_checks, pickling
from farandole.runner.show.history import entries_from_keras
from farandole.spark.common.model.base import FarandoleModel
from farandole.spark.common.model.model_summary import LayerSummary
from farandole.spark.common.parameter import Parameter
from farandole.spark.common.saving.persistence import ParamsWritable
from farandole.spark.keras.keras_inputs import arrange_model_argument, input_keys
from farandole.spark.keras.predict import KerasPredictor, call_model
from farandole.spark.keras.saving import model_bytes
from farandole.spark.keras.saving.onnx import export_onnx
from farandole.spark.keras.saving.persistence import KerasModelReader, KerasModelWriter
from farandole.spark.keras.saving.user_objects import custom_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import pandas as pd
    from pyspark.sql import DataFrame

    from farandole.runner.show.history import Entry
    from farandole.spark.common.model.onnx import Signature

_SAME_SIZE_DTYPES = {"bfloat16": "float16"}
"""Types that NumPy lacks, and a NumPy type of the same size for each."""


class KerasModel(ParamsWritable, FarandoleModel, MLReadable["KerasModel"]):
    """A model that adds predictions to DataFrames, by Arrow batches on the executors.

    Every column of the DataFrame is kept; each label gets a column `<label>__output`. A prediction
    of several elements, or for a vector label, is a dense vector; one element takes the label's
    type. Columns become arrays as they did in `fit`. Executors predict on CPUs, with the Keras
    backend of the driver.

    Saved by `model.write().overwrite().save(path)` and loaded by `KerasModel.load(path)`, on any
    file system Spark reaches. The model is a `.keras` file, which Keras loads without running code
    of it. Classes and functions of yours are a pickle beside it, and loading that runs code: load
    only what you trust, or pass them yourself to
    `KerasModel.read().custom_objects({...}).load(path)`, which runs none.
    """

    history: Parameter[Mapping[str, Sequence[Any]]] = Parameter(
        "Losses and metrics, a list per name with a number per epoch, as `fit` of Keras returns "
        "them.",
        argument_checks.accept_any_value,
        default=None,
    )
    model: Parameter[keras.Model] = Parameter(
        "The trained model.", argument_checks.accept_any_value, default=None
    )
    custom_objects: Parameter[Mapping[str, Any]] = Parameter(
        "Classes and functions by name that loading the model needs.",
        argument_checks.make_conversion_check(dict),
        default={},
    )

    _floatx: Parameter[str] = Parameter(
        "Keras's type of floats in the training.",
        argument_checks.check_nonempty_text,
        default=None,
    )

    _writer_class = KerasModelWriter
    _framework = "Keras"
    _onnx_extras, _onnx_packages = "torch,onnx", ("torch",)

    def _get_floatx(self) -> str | None:
        """Returns Keras's type of floats in the training."""
        return self.getOrDefault("_floatx")

    def history_frame(self) -> pd.DataFrame:
        """Returns the history as a pandas frame: a row per epoch, `loss`, each metric, and the
        same with `val_`.
        """
        import pandas as pd

        history = self.getHistory() or {}
        return pd.DataFrame({"epoch": range(max(map(len, history.values()), default=0)), **history})

    def _history_entries(self) -> list[Entry]:
        return entries_from_keras(self.getHistory() or {})

    @classmethod
    def read(cls) -> KerasModelReader:
        """Returns the reader; `read().custom_objects({...}).load(path)` runs none of the saved
        code.
        """
        return KerasModelReader(cls)

    def _write_onnx(
        self, path: Path, signature: Signature, opset: int | None
    ) -> Callable[[Sequence[Any]], Sequence[Any]]:
        model, labels, backend = self.getModel(), self.getLabelColumns(), keras.backend.backend()
        keys = input_keys(model, self._input_columns())
        known = custom_objects(model, self.getCustomObjects())
        export_onnx(model, known, signature, keys, labels, self.getOutputCols(), path, opset=opset)
        return lambda batch: call_model(model, arrange_model_argument(batch, keys), labels, backend)

    def _write_exported_program(self, *_: Any, **__: Any) -> None:
        raise ValueError(
            "torch.export takes models of torch, and this one is of Keras: export it to a path "
            "that ends in .onnx"
        )

    def _layer_summaries(self) -> list[LayerSummary]:
        return layer_summaries(self.getModel())

    def _create_predictor(self, dataset: DataFrame) -> KerasPredictor:
        return KerasPredictor(
            **self._predictor_arguments(dataset, model_bytes.pack_model(self.getModel())),
            custom_objects=pickling.pickle_by_value(
                custom_objects(self.getModel(), self.getCustomObjects())
            ),
            backend=keras.backend.backend(),
        )


def layer_summaries(model: Any) -> list[LayerSummary]:
    """Returns the layers of a model, and instead of a model among them its own layers.

    Args:
        model: of any kind. Weights that two layers share count where they come first.
    """
    made: list[LayerSummary] = []
    seen: set[int] = set()
    trained = {id(weight) for weight in model.trainable_weights}

    def add_summary(name: str, kind: str, form: str, weights: Sequence[Any]) -> None:
        own = [weight for weight in weights if id(weight) not in seen]
        seen.update(id(weight) for weight in own)
        made.append(
            LayerSummary(
                name=name,
                kind=kind,
                form=form,
                parameters=sum(math.prod(weight.shape) for weight in own),
                trained=sum(math.prod(weight.shape) for weight in own if id(weight) in trained),
                size=sum(math.prod(weight.shape) * _element_bytes(weight.dtype) for weight in own),
            )
        )

    for name, one in _iterate_layers(model, ""):
        add_summary(name, type(one).__name__, _output_shape_text(one), one.weights)
    if any(id(weight) not in seen for weight in model.weights):
        # weights of models, and not of their layers
        add_summary(model.name, type(model).__name__, "", model.weights)
    return made


def _iterate_layers(model: Any, above: str) -> Iterator[tuple[str, Any]]:
    for one in model.layers:
        name = f"{above}{one.name}"
        if getattr(one, "layers", None):
            yield from _iterate_layers(one, f"{name}.")
        else:
            yield name, one


def _element_bytes(dtype: str) -> int:
    """Returns the bytes of an element."""
    return np.dtype(_SAME_SIZE_DTYPES.get(dtype, dtype)).itemsize


def _output_shape_text(layer: Any) -> str:
    """Returns the shape of a layer's output, where Keras knows it."""
    shape = getattr(getattr(layer, "output", None), "shape", None) if layer.built else None
    return (
        ""
        if shape is None
        else f"[{', '.join('rows' if at == 0 else str(size) for at, size in enumerate(shape))}]"
    )
