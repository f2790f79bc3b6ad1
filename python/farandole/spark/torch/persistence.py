# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Saving and loading `TorchModel` with Spark ML's own persistence.

A saved model is a directory, written and read by Spark, on any file system it reaches:

    metadata/    Spark ML's JSON: class, uid, parameters
    data/        Parquet with rows of (part, chunk, bytes): the parts "state" and "objects", cut in pieces

"state" holds the weights as plain tensors and is loaded without running anything. "objects" is a pickle of module,
optimizer and loss in which every weight is a reference into "state"; loading it runs code.
"""

# ruff: noqa: N802, PLC0415, SLF001 - Spark ML's names and its own helpers; cycle with the model

from __future__ import annotations

import io
import logging
import pickle
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from farandole.spark.torch import payload

if TYPE_CHECKING:
    from farandole.spark.torch.model import TorchModel

_CHUNK = 16 << 20
_OBJECTS = ("model", "optimizer", "loss")
_DATA = "part string, chunk int, bytes binary"
_log = logging.getLogger("farandole")


class _Pickler(cloudpickle.Pickler):
    """Pickles objects with references in place of the weights of one module."""

    def __init__(self, file: io.BytesIO, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(file)
        self._names = {id(tensor): name for name, tensor in weights.items()}

    def persistent_id(self, obj: Any) -> tuple[str, bool, bool] | None:
        if isinstance(obj, torch.Tensor) and id(obj) in self._names:
            return self._names[id(obj)], isinstance(obj, torch.nn.Parameter), obj.requires_grad
        return None


class _Unpickler(pickle.Unpickler):
    """Puts the weights back; the same reference gives the same tensor."""

    def __init__(self, file: io.BytesIO, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(file)
        self._weights = weights
        self._made: dict[str, torch.Tensor] = {}

    def persistent_load(self, pid: tuple[str, bool, bool]) -> torch.Tensor:
        name, is_parameter, requires_grad = pid
        if name not in self._made:
            tensor = self._weights[name]
            self._made[name] = torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor
        return self._made[name]


class TorchModelWriter(MLWriter):
    """Writes a `TorchModel`."""

    def __init__(self, instance: TorchModel) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        """Writes the model to a path where nothing is."""
        from farandole.spark.common.outputs import describe

        model = self._instance
        module = model.getModel()
        weights = {
            name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if torch.is_tensor(tensor)
        }
        pickled = io.BytesIO()
        _Pickler(pickled, weights).dump({name: model.getOrDefault(name) for name in _OBJECTS})
        values = {param.name: value for param, value in model._paramMap.items() if value is not None}
        plain = {name: value for name, value in values.items() if name not in _OBJECTS}
        if "outputs" in plain:
            plain["outputs"] = describe(plain["outputs"])
        DefaultParamsWriter.saveMetadata(model, path, self.sparkSession, paramMap=plain)
        state = payload.pack_state({name: tensor.detach().cpu() for name, tensor in weights.items()})
        rows = [*_chunks("state", state), *_chunks("objects", pickled.getvalue())]
        self.sparkSession.createDataFrame(rows, _DATA).coalesce(1).write.parquet(f"{path}/data")


class TorchModelReader(MLReader["TorchModel"]):
    """Reads a `TorchModel`."""

    def __init__(self, kind: type[TorchModel]) -> None:
        super().__init__()
        self._kind = kind
        self._module: torch.nn.Module | None = None

    def model(self, module: torch.nn.Module) -> TorchModelReader:
        """Takes the saved weights into a module of your own; no saved code runs, optimizer and loss stay unset.

        Args:
            module: with parameters of the same names and shapes.
        """
        self._module = module
        return self

    def load(self, path: str) -> TorchModel:
        """Reads the model at a path.

        Args:
            path: where it was saved.
        """
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        rows = self.sparkSession.read.parquet(f"{path}/data").collect()
        weights = payload.unpack_state(_part(rows, "state"))
        loaded = self._kind()
        loaded._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(loaded, metadata)
        if self._module is not None:
            self._module.load_state_dict(weights)
            return loaded.setModel(self._module)
        _log.warning(
            "loading a model from %s runs the code pickled in it; TorchModel.read().model(module) does not", path
        )
        objects = _Unpickler(io.BytesIO(_part(rows, "objects")), weights).load()
        return loaded.setParams(**{name: value for name, value in objects.items() if value is not None})


def _chunks(part: str, data: bytes) -> list[tuple[str, int, bytearray]]:
    starts = range(0, max(len(data), 1), _CHUNK)
    return [(part, index, bytearray(data[start : start + _CHUNK])) for index, start in enumerate(starts)]


def _part(rows: list[Any], part: str) -> bytes:
    return b"".join(bytes(row.bytes) for row in sorted(rows, key=lambda row: row.chunk) if row.part == part)
