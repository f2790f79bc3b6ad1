# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Backends that were written for Horovod: any object with `run(fn, args, kwargs, env)` and
`num_processes()`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from farandole.runner.backend import Backend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farandole.runner.backend import OnProgress
    from farandole.stores.store import Store


class ForeignBackend(Backend):
    """A backend around an object that has Horovod's two methods, and perhaps some of `Backend`'s.

    Args:
        inner: The object.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = {},
        env: Mapping[str, str | None] | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[Any]:
        """Like `Backend.run`. An object whose `run` names no `on_progress` reports no progress.

        Raises:
            TypeError: The object's `run` does not take an argument that the job needs.
        """
        given = {"args": tuple(args), "kwargs": dict(kwargs), "env": dict(env or {})}
        taken = _keyword_names(self._inner.run)
        lacking = [name for name, value in given.items() if value and not taken(name)]
        if lacking:
            raise TypeError(
                f"run of {type(self._inner).__name__} must take {', '.join(lacking)}: a backend "
                "has run(fn, args, kwargs, env)"
            )
        known: dict[str, Any] = {name: value for name, value in given.items() if taken(name)}
        # By name only: a `run` with `**kwargs` may hand them on to one that knows of no progress.
        if "on_progress" in inspect.signature(self._inner.run).parameters:
            known["on_progress"] = on_progress
        return self._inner.run(fn, **known)

    def num_processes(self) -> int:
        """Returns the number of workers."""
        return self._inner.num_processes()

    def max_processes(self) -> int:
        """Like `Backend.max_processes`."""
        return getattr(self._inner, "max_processes", self._inner.num_processes)()

    def min_processes(self) -> int:
        """Like `Backend.min_processes`."""
        return getattr(self._inner, "min_processes", self._inner.num_processes)()

    def check(self) -> None:
        """Like `Backend.check`; does nothing for an object without this method."""
        if check := getattr(self._inner, "check", None):
            check()

    def through(self, store: Store) -> Backend:
        """Like `Backend.through`; an object without this method sends everything by itself."""
        through = getattr(self._inner, "through", None)
        return self if through is None else adapt_backend(through(store))


def adapt_backend(value: Any) -> Backend:
    """Returns an object as a `Backend`: itself, if it is one whose `run` reports progress.

    Args:
        value: Any object with `run(fn, args, kwargs, env)` and `num_processes()`.
    """
    if isinstance(value, Backend) and _keyword_names(value.run)("on_progress"):
        return value
    return ForeignBackend(value)


def _keyword_names(function: Callable[..., Any]) -> Callable[[str], bool]:
    """Returns whether a function takes an argument of a name."""
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return lambda name: takes_all or name in parameters
