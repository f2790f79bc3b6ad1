# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Elastic state of models, optimizers, samplers and plain objects."""

from __future__ import annotations

import copy
from typing import Any

import torch

from farandole.common import basics
from farandole.common.elastic import ObjectState
from farandole.torch.elastic.sampler import ElasticSampler
from farandole.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class StateHandler:
    """Keeps, restores and spreads one attribute of a `TorchState`.

    Args:
        value: What is handled.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keeps the state as it is."""
        raise NotImplementedError

    def restore(self) -> None:
        """Puts the state back that was kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Spreads the state of rank 0."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Handles something else from now on, and keeps its state."""
        self.value = value
        self.save()


class _DictHandler(StateHandler):
    """Handles what has a `state_dict`."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved: Any = None
        self._spare: Any = None
        """The copy before the last: its memory is used again."""
        self.save()

    def save(self) -> None:
        """Keeps a copy of the state. One that is interrupted changes nothing."""
        taken = copied(self.value.state_dict(), self._spare)
        self._saved, self._spare = taken, self._saved

    def restore(self) -> None:
        """Loads a copy of the state that was kept last, which stays as it is."""
        self.value.load_state_dict(copy.deepcopy(self._saved))


def copied(value: Any, room: Any) -> Any:
    """A copy of nested mappings, lists and tuples of tensors and other values.

    Args:
        value: What to copy.
        room: An earlier copy, whose tensors are written over where they fit: new memory costs more than the copying.
    """
    if isinstance(value, torch.Tensor):
        if (
            isinstance(room, torch.Tensor)
            and (room.shape, room.dtype, room.device) == (value.shape, value.dtype, value.device)
            and room.layout == value.layout == torch.strided
        ):
            return room.copy_(value.detach())
        return value.detach().clone()
    if isinstance(value, dict):
        rooms = room if isinstance(room, dict) else {}
        taken = copy.copy(value)  # of its own class, with what a module notes beside its tensors
        for key, entry in value.items():
            taken[key] = copied(entry, rooms.get(key))
        return taken
    if type(value) in (list, tuple):
        rooms = room if isinstance(room, list | tuple) and len(room) == len(value) else [None] * len(value)
        return type(value)(copied(entry, place) for entry, place in zip(value, rooms, strict=True))
    return copy.deepcopy(value)


class ModelStateHandler(_DictHandler):
    """Handles a module: parameters and buffers."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)

    def sync(self) -> None:
        """Spreads rank 0's parameters and buffers, and keeps them."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(_DictHandler):
    """Handles an optimizer: state and options."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)

    def sync(self) -> None:
        """Spreads rank 0's state and options, and keeps them."""
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(_DictHandler):
    """Handles an `ElasticSampler`: how far the epoch has come."""

    def __init__(self, sampler: Any) -> None:
        super().__init__(sampler)

    def sync(self) -> None:
        """Spreads rank 0's progress, and keeps it."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), root_rank=0))
        self.save()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """The types that are handled, and their handlers; the first that fits counts."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Changes what is handled, for states made from now on."""
    global _registry  # noqa: PLW0603 - Horovod's function
    _registry = registry


def _handler(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in get_handler_registry() if isinstance(value, kind)), None)


class TorchState(ObjectState):
    """State of a model, an optimizer and anything else: each keyword becomes an attribute.

    Modules, optimizers and `ElasticSampler`s are copied by `commit`; other objects are kept as they are. An attribute
    may be given a new value; one that is handled is then kept at once.

    Args:
        model: A module.
        optimizer: Plain or distributed.
        **kwargs: Further attributes and their first values.
    """

    _handlers: dict[str, StateHandler]

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        values = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: _handler(value) for name, value in values.items()}
        self.__dict__["_handlers"] = {name: handler for name, handler in handlers.items() if handler is not None}
        plain = {name: value for name, value in kwargs.items() if handlers[name] is None}
        for name in handlers:
            if name not in plain:
                self.__dict__[name] = values[name]
        super().__init__(bcast_object=broadcast_object, get_rank=basics.rank, **plain)

    def __setattr__(self, name: str, value: Any) -> None:
        """Gives an attribute a new value, which is kept at once if it is handled."""
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Keeps everything as it is."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Puts everything back that was kept last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Spreads everything of rank 0, and keeps it."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Has samplers deal out anew among the ranks there are now."""
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()
