# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Pickles of modules that contain references instead of weights. The weights are stored apart, as
tensors by name.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch

from farandole.common import pickling

if TYPE_CHECKING:
    import io
    from collections.abc import Mapping


class WeightReferencePickler(pickling.Pickler):
    """A pickler that stores references instead of the weights of one module.

    Args:
        file: takes the pickle.
        weights: by name.
    """

    def __init__(self, file: io.BytesIO, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(file)
        self._names = {id(tensor): name for name, tensor in weights.items()}

    def persistent_id(self, obj: Any) -> tuple[str, bool, bool] | None:
        """Returns the reference to a weight, and `None` for every other object."""
        if isinstance(obj, torch.Tensor) and id(obj) in self._names:
            return self._names[id(obj)], isinstance(obj, torch.nn.Parameter), obj.requires_grad
        return None


class WeightReferenceUnpickler(pickle.Unpickler):
    """An unpickler that puts the weights back; the same reference gives the same tensor.

    Args:
        file: contains the pickle.
        weights: by name.
    """

    def __init__(self, file: io.BytesIO, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(file)
        self._weights = weights
        self._loaded_tensors: dict[str, torch.Tensor] = {}

    def persistent_load(self, pid: tuple[str, bool, bool]) -> torch.Tensor:
        """Returns the weight of a reference."""
        name, is_parameter, requires_grad = pid
        if name not in self._loaded_tensors:
            tensor = self._weights[name]
            self._loaded_tensors[name] = (
                torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor
            )
        return self._loaded_tensors[name]
