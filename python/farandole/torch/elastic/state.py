# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Elastic state of models, optimizers, samplers and plain objects."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch

from farandole.common import basics
from farandole.common.commits import refuse_unstorable_values
from farandole.common.elastic import ObjectState
from farandole.torch.elastic.sampler import ElasticSampler
from farandole.torch.elastic.state_copies import BackgroundCopyBatch, copy_state
from farandole.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)


class StateHandler:
    """Keeps, restores and spreads one attribute of a `TorchState`.

    Args:
        value: The object to handle.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keeps the present state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restores the state that was kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcasts the state of rank 0."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replaces the handled object, and keeps the state of the new one."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """Handles objects with a `state_dict`."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved: Any = None
        self._spare: Any = None
        """The copy before the last: its memory is used again."""
        self._lent: Any = None
        """A copy that is being written to a store."""
        self.save()

    def save(self, later: BackgroundCopyBatch | None = None) -> None:
        """Keeps a copy of the state. An interrupted call changes nothing.

        Args:
            later: Takes the tensors that may be copied later; default: all are copied now.
        """
        room = None if self._spare is self._lent else self._spare
        taken = copy_state(self.value.state_dict(), room, later)
        self._saved, self._spare = taken, self._saved

    def lend_saved_copy(self) -> Any:
        """Returns the copy that was kept last; it does not change before `take_back_copy`."""
        self._lent = self._saved
        return self._lent

    def take_back_copy(self) -> None:
        """Marks the result of `lend_saved_copy` as unused."""
        self._lent = None

    def restore(self) -> None:
        """Loads a copy of the state that was kept last, which stays as it is."""
        self.value.load_state_dict(copy.deepcopy(self._saved))


class ModelStateHandler(_StateDictHandler):
    """Handles a module: parameters and buffers."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)

    def sync(self) -> None:
        """Spreads rank 0's parameters and buffers, and keeps them."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(_StateDictHandler):
    """Handles an optimizer: state and options."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)

    def sync(self) -> None:
        """Spreads rank 0's state and options, and keeps them."""
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(_StateDictHandler):
    """Handles an `ElasticSampler`: the progress in the epoch."""

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
    """Returns the types that are handled, and their handlers; the first that fits counts."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Sets the handlers for states that are made later."""
    global _registry  # noqa: PLW0603 - Horovod's function
    _registry = registry


def _make_handler(value: Any) -> StateHandler | None:
    return next(
        (handler(value) for kind, handler in get_handler_registry() if isinstance(value, kind)),
        None,
    )


class TorchState(ObjectState):
    """State of a model, an optimizer and anything else: each keyword becomes an attribute.

    Modules, optimizers and `ElasticSampler`s are copied by `commit`; other objects are kept as they
    are. An attribute may be replaced; a module, optimizer or sampler is then kept at once.

    Args:
        model: A module.
        optimizer: Plain or distributed.
        in_background: Whether another thread copies the tensors that optimizers change, while the
            next forward and backward pass run; optimizers wait for the copies before their step.
            Nothing else may change parameters after a commit.
        **kwargs: Further attributes and their first values.

    Raises:
        ValueError: `in_background` without an optimizer.
    """

    _handlers: dict[str, StateHandler]
    _later: BackgroundCopyBatch | None

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        in_background: bool = False,
        **kwargs: Any,
    ) -> None:
        values = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: _make_handler(value) for name, value in values.items()}
        self.__dict__["_handlers"] = {
            name: handler for name, handler in handlers.items() if handler is not None
        }
        optimizers = [
            value for value in values.values() if isinstance(value, torch.optim.Optimizer)
        ]
        if in_background and not optimizers:
            raise ValueError(
                "in_background=True needs an optimizer in the state, whose step waits for the copy"
            )
        self.__dict__["_later"] = BackgroundCopyBatch() if in_background else None
        plain = {name: value for name, value in kwargs.items() if handlers[name] is None}
        for name in handlers:
            if name not in plain:
                self.__dict__[name] = values[name]
        self._make_optimizers_wait()
        super().__init__(bcast_object=broadcast_object, get_rank=basics.rank, **plain)

    def __setattr__(self, name: str, value: Any) -> None:
        """Gives an attribute a new value, which is kept at once if it is handled."""
        if name in self._handlers:
            self._wait_for_copies()
            self._handlers[name].set_value(value)
            self._make_optimizers_wait()
        super().__setattr__(name, value)

    def _make_optimizers_wait(self) -> None:
        """Lets the present optimizers wait for copies."""
        if self._later is not None:
            values = [handler.value for handler in self._handlers.values()]
            self._later.follow_optimizers(
                [value for value in values if isinstance(value, torch.optim.Optimizer)]
            )

    def save(self) -> None:
        """Keeps the present state of everything."""
        self._wait_for_copies()
        if self._later is None:
            for handler in self._handlers.values():
                handler.save()
        else:
            self._save_with_background_copies(self._later)
        super().save()

    def _save_with_background_copies(self, later: BackgroundCopyBatch) -> None:
        later.find_optimizer_tensors()
        try:
            for handler in self._handlers.values():
                if isinstance(handler, _StateDictHandler):
                    handler.save(later)
                else:
                    handler.save()
        finally:
            # also where one of them was interrupted: another one counts on its copies
            later.start_copying()

    def restore(self) -> None:
        """Restores everything that was kept last."""
        self._wait_for_copies()
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Broadcasts everything of rank 0, and keeps it."""
        self._wait_for_copies()
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def _wait_for_copies(self) -> None:
        """Waits for copies in progress."""
        if self._later is not None:
            self._later.wait_for_copies()

    def reset(self) -> None:
        """Makes samplers distribute their samples among the present ranks."""
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()

    # Contents for the store of `save_to`.

    def _refuse_unstorable_state(self) -> None:
        refuse_unstorable_values(
            self._saved_values(),
            _is_loadable_without_code,
            "numbers, strings, tensors, and lists and dicts of them",
        )
        for name, handler in self._handlers.items():
            if not isinstance(handler, _StateDictHandler):
                raise NotImplementedError(
                    f"state.{name} has your own handler, which cannot save to a store"
                )

    def _pin_commit(self) -> Any:
        handled = {
            name: handler.lend_saved_copy()
            for name, handler in self._handlers.items()
            if isinstance(handler, _StateDictHandler)
        }
        whole = None if self._later is None else self._later.completion
        return whole, {"handled": handled, "plain": copy.deepcopy(self._saved_values())}

    def _unpin_commit(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler, _StateDictHandler):
                handler.take_back_copy()

    def _pack_commit(self, lent: Any) -> bytes:
        whole, content = lent
        if whole is not None:
            whole.result()
        return _pack_content(content)

    def _unpack_commit(self, data: bytes) -> Any:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)

    def _plain_values(self, content: Any) -> dict[str, Any]:
        if isinstance(content, tuple):  # of `_pin_commit`
            _, content = content
        return content["plain"]

    def _apply_commit(self, content: Any) -> None:
        handled = content["handled"]
        if sorted(handled) != sorted(self._handlers):
            raise ValueError(f"it has {sorted(handled)}, and this state {sorted(self._handlers)}")
        self._apply_plain_values(content["plain"])
        for name, handler in self._handlers.items():
            handler.value.load_state_dict(handled[name])


def _pack_content(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _is_loadable_without_code(value: Any) -> bool:
    """Returns whether a value can be loaded without running code."""
    try:
        torch.load(io.BytesIO(_pack_content(value)), weights_only=True)
    except Exception:  # noqa: BLE001 - an exception of pickle, or of the pickled object
        return False
    return True
