# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Finds which of several objects cannot be pickled. pickle itself names a type that its user may
not know.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from farandole.common import pickling

_MAX_PATH_DEPTH = 6


def describe_unpicklable(things: Mapping[str, Any]) -> str:
    """Returns the first object that cannot be pickled, the part of it that is the cause, and
    pickle's message.

    Args:
        things: Objects by the names that the user knows.

    Returns:
        Such as `loss: variable 'spark' of <lambda>: cannot pickle ...`; empty when each can be
        pickled by itself.
    """
    for name, value in things.items():
        found = _pickle_error(value)
        if found is not None:
            return f"{name}{_path_to_cause(value, found, _MAX_PATH_DEPTH)}: {found}"
    return ""


def _path_to_cause(value: Any, reason: str, depth: int) -> str:
    """Returns the path of the innermost object with this reason. Other parts may be impossible
    to pickle, too.
    """
    for step, inner in _parts_with_access_paths(value) if depth else ():
        if _pickle_error(inner) == reason:
            return f"{step}{_path_to_cause(inner, reason, depth - 1)}"
    return ""


def _pickle_error(value: Any) -> str | None:
    try:
        pickling.pickle_by_value(value)
    except Exception as error:  # noqa: BLE001 - an object's own code may raise any exception
        return str(error) or type(error).__name__
    return None


def _parts_with_access_paths(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object, each with the step that leads to it."""
    if inspect.ismethod(value):
        yield "'s object", value.__self__
    elif inspect.isfunction(value):
        used = inspect.getclosurevars(value)
        for name, inner in {**used.nonlocals, **used.globals}.items():
            yield f": variable {name!r} of {value.__name__}", inner
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield f"[{key!r}]", inner
    elif isinstance(value, list | tuple | set | frozenset):
        for index, inner in enumerate(value):
            yield f"[{index}]", inner
    else:
        for name, inner in getattr(value, "__dict__", {}).items():
            yield f".{name}", inner
