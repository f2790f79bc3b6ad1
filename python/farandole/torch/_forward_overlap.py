# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Parameters that arrive during the next forward pass: each module waits for its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch


class ForwardOverlap:
    """Hooks on the modules of a model that wait for the parameters of each module.

    Some modules read the parameters of a child without calling it (`MultiheadAttention`). The first
    forward pass of the model records which modules are called; parameters of others are waited for
    by the nearest module above them that is called.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._parameters = set(model.parameters())
        self._called: dict[torch.nn.Module, None] = {}
        """Modules in the order of their first call."""
        self._readers: dict[torch.nn.Module, list[torch.Tensor]] | None = None
        self._pending: Mapping[torch.Tensor, Callable[[], None]] = {}
        for module in model.modules():
            module.register_forward_pre_hook(self._before_forward, prepend=True)
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_state_dict)
        model.register_forward_hook(self._after_model)

    @property
    def is_ready(self) -> bool:
        """Whether a forward pass of the model has shown who reads which parameters."""
        return self._readers is not None

    def __deepcopy__(self, _: Any) -> ForwardOverlap:
        """Waits, and stays the same: a copy of the model has hooks, but no parameters that are
        gathered.
        """
        self.wait_for_all()
        return self

    def reads(self, parameter: torch.Tensor) -> bool:
        """Returns whether a module of the model has the parameter."""
        return parameter in self._parameters

    @property
    def is_pending(self) -> bool:
        """Whether parameters may not have arrived yet."""
        return bool(self._pending)

    def first_positions(self) -> dict[torch.Tensor, int]:
        """Returns when each parameter is read in a forward pass: the number of its first reader."""
        positions: dict[torch.Tensor, int] = {}
        for number, module in enumerate(self._called):
            for parameter in (self._readers or {}).get(module, ()):
                positions.setdefault(parameter, number)
        return positions

    def defer(self, pending: Mapping[torch.Tensor, Callable[[], None]]) -> None:
        """Notes parameters that are not there yet.

        Args:
            pending: For each parameter, a function that waits for it. It may be called several
                times.
        """
        self._pending = pending

    def wait_for_all(self) -> None:
        """Waits until all parameters are there."""
        pending, self._pending = self._pending, {}
        for finish in pending.values():
            finish()

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        if self._readers is None:
            self._called.setdefault(module)
            return
        if not self._pending:
            return
        for parameter in self._readers.get(module, ()):
            finish = self._pending.get(parameter)
            if finish is not None:
                finish()

    def _before_state_dict(self, *_: Any) -> None:
        self.wait_for_all()

    def _after_model(self, *_: Any) -> None:
        if self._readers is not None:
            return
        self._readers = {}
        self._attribute_parameters(self._model, self._model)

    def _attribute_parameters(self, module: torch.nn.Module, reader: torch.nn.Module) -> None:
        """Attributes the parameters of a module to the nearest module above that is called."""
        assert self._readers is not None  # noqa: S101 - set by the caller
        if module in self._called:
            reader = module
        self._readers.setdefault(reader, []).extend(module.parameters(recurse=False))
        for child in module.children():
            self._attribute_parameters(child, reader)
