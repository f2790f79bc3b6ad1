# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The saved parts of PyTorch estimators and models.

A model has the parts "state" and "objects". "state" contains the weights as safetensors (or as a
zip of torch, if safetensors does not have their type), and loading it runs no code. "objects" is a
pickle of module, optimizer, loss, transformation and objects in a subclass's own parameters, in
which every weight is a reference into "state"; loading it runs code.

An estimator has only the part "objects": a pickle of its model, optimizer, functions and other
objects.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from farandole.spark.common.saving.persistence import (
    ParamsReadable,
    ParamsReader,
    ParamsWritable,
    ParamsWriter,
    pop_subclass_objects,
    split_plain_json,
)
from farandole.spark.torch.saving import safetensors_bytes, state_bytes
from farandole.spark.torch.saving.weight_references import (
    WeightReferencePickler,
    WeightReferenceUnpickler,
)

if TYPE_CHECKING:
    from farandole.spark.torch.model import TorchModel

_PICKLED_PARAMS = ("model", "optimizer", "loss", "loss_constructors", "transformation_fn")
_ZIP_MAGIC = b"PK"


class TorchModelWriter(ParamsWriter):
    """A writer of a `TorchModel`."""

    def split_plain_and_packed(
        self, values: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Like `ParamsWriter.split_plain_and_packed`."""
        module = values["model"]
        weights = {
            name: tensor
            for name, tensor in module.state_dict(keep_vars=True).items()
            if torch.is_tensor(tensor)
        }
        more = pop_subclass_objects(self.instance, values)
        pickled = io.BytesIO()
        WeightReferencePickler(pickled, weights).dump(
            {**{name: values.get(name) for name in _PICKLED_PARAMS}, **more}
        )
        plain = {name: value for name, value in values.items() if name not in _PICKLED_PARAMS}
        bare = {name: tensor.detach().cpu() for name, tensor in weights.items()}
        state = (
            safetensors_bytes.dump_tensors(bare)
            if safetensors_bytes.can_store_as_safetensors(bare)
            else state_bytes.pack_state(bare)
        )
        return plain, {"state": state, "objects": pickled.getvalue()}


class TorchModelReader(ParamsReader["TorchModel"]):
    """A reader of a `TorchModel`."""

    def __init__(self, kind: type[TorchModel]) -> None:
        super().__init__(kind)
        self._given_module: torch.nn.Module | None = None

    def model(self, module: torch.nn.Module) -> TorchModelReader:
        """Loads the saved weights into your own module. No saved code runs; optimizer and loss stay
        unset.

        Args:
            module: with parameters of the same names and shapes.
        """
        self._given_module = module
        return self

    def restore_packed_parts(self, loaded: TorchModel, parts: dict[str, bytes], path: str) -> None:
        """Like `ParamsReader.restore_packed_parts`."""
        state = parts["state"]
        weights = (
            state_bytes.unpack_state(state)
            if state.startswith(_ZIP_MAGIC)
            else safetensors_bytes.load_tensors(state)
        )
        if self._given_module is not None:
            self._given_module.load_state_dict(weights)
            loaded.setModel(self._given_module)
            return
        self.check_pickled_code(
            path, f", or use {self.kind.__name__}.read().model(module), which runs none"
        )
        objects = WeightReferenceUnpickler(io.BytesIO(parts["objects"]), weights).load()
        loaded.setParams(**{name: value for name, value in objects.items() if value is not None})


class TorchEstimatorParamsWriter(ParamsWriter):
    """A writer of an estimator."""

    def split_plain_and_packed(
        self, values: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Like `ParamsWriter.split_plain_and_packed`."""
        plain, rest = split_plain_json(values)
        return plain, {"objects": state_bytes.pickle_with_tensors(rest)}


class TorchEstimatorParamsReader(ParamsReader[Any]):
    """A reader of an estimator."""

    def restore_packed_parts(self, loaded: Any, parts: dict[str, bytes], path: str) -> None:
        """Like `ParamsReader.restore_packed_parts`."""
        self.check_pickled_code(path)
        loaded.setParams(**state_bytes.unpickle_on_cpu(parts["objects"]))


class TorchEstimatorParamsWritable(ParamsWritable):
    """A mixin that saves an estimator by Spark ML's `write()`."""

    _writer_class = TorchEstimatorParamsWriter


class TorchEstimatorParamsReadable(ParamsReadable[Any]):
    """A mixin that loads an estimator by Spark ML's `read()`."""

    _reader_class = TorchEstimatorParamsReader
