# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The saved parts of PyTorch estimators and models.

A model has the parts "state" and "objects". "state" contains the weights as safetensors (or as a
zip of torch, if safetensors does not have their type), and loading it runs no code. "objects" is a
pickle of module, optimizer, loss and transformation, in which every weight is a reference into
"state"; loading it runs code.

An estimator has only the part "objects": a pickle of its model, optimizer, functions and other
objects.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import torch

from farandole.common import pickling
from farandole.spark.common.model.outputs import describe
from farandole.spark.common.saving.persistence import ParamsReader, ParamsWriter, is_plain
from farandole.spark.torch.saving import payload, tensorfile

if TYPE_CHECKING:
    from farandole.spark.torch.model import TorchModel

_OBJECTS = ("model", "optimizer", "loss", "loss_constructors", "transformation_fn")
_ZIP = b"PK"


class _Pickler(pickling.Pickler):
    """Pickles objects with references instead of the weights of one module."""

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


class TorchModelWriter(ParamsWriter):
    """Writes a `TorchModel`."""

    def parts(self, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Like `ParamsWriter.parts`."""
        module = values["model"]
        weights = {
            name: tensor
            for name, tensor in module.state_dict(keep_vars=True).items()
            if torch.is_tensor(tensor)
        }
        pickled = io.BytesIO()
        _Pickler(pickled, weights).dump({name: values.get(name) for name in _OBJECTS})
        plain = {name: value for name, value in values.items() if name not in _OBJECTS}
        if "outputs" in plain:
            plain["outputs"] = describe(plain["outputs"])
        bare = {name: tensor.detach().cpu() for name, tensor in weights.items()}
        state = tensorfile.dump(bare) if tensorfile.can_hold(bare) else payload.pack_state(bare)
        return plain, {"state": state, "objects": pickled.getvalue()}


class TorchModelReader(ParamsReader["TorchModel"]):
    """Reads a `TorchModel`."""

    def __init__(self, kind: type[TorchModel]) -> None:
        super().__init__(kind)
        self._module: torch.nn.Module | None = None

    def model(self, module: torch.nn.Module) -> TorchModelReader:
        """Loads the saved weights into your own module. No saved code runs; optimizer and loss stay
        unset.

        Args:
            module: with parameters of the same names and shapes.
        """
        self._module = module
        return self

    def restore(self, loaded: TorchModel, parts: dict[str, bytes], path: str) -> None:
        """Like `ParamsReader.restore`."""
        state = parts["state"]
        weights = payload.unpack_state(state) if state.startswith(_ZIP) else tensorfile.load(state)
        if self._module is not None:
            self._module.load_state_dict(weights)
            loaded.setModel(self._module)
            return
        self.check_code(
            path, f", or use {self.kind.__name__}.read().model(module), which runs none"
        )
        objects = _Unpickler(io.BytesIO(parts["objects"]), weights).load()
        loaded.setParams(**{name: value for name, value in objects.items() if value is not None})


class TorchParamsWriter(ParamsWriter):
    """Writes an estimator."""

    def parts(self, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Like `ParamsWriter.parts`."""
        plain = {name: value for name, value in values.items() if is_plain(value)}
        rest = {name: value for name, value in values.items() if name not in plain}
        return plain, {"objects": payload.pack(rest)}


class TorchParamsReader(ParamsReader[Any]):
    """Reads an estimator."""

    def restore(self, loaded: Any, parts: dict[str, bytes], path: str) -> None:
        """Like `ParamsReader.restore`."""
        self.check_code(path)
        loaded.setParams(**payload.unpack(parts["objects"]))
