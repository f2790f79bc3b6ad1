# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The user's classes and functions that a model is made of.

A `.keras` file only names them. They are found here, so that users need not list them, and are sent
to training processes and executors in a pickle.
"""

from __future__ import annotations

import copy
import copyreg
import inspect
import io
from typing import TYPE_CHECKING, Any

import keras

from farandole.common import pickling

if TYPE_CHECKING:
    from collections.abc import Mapping

_LIBRARY_PACKAGES = (
    "keras",
    "tensorflow",
    "torch",
    "jax",
    "numpy",
    "builtins",
    "functools",
    "farandole",
)
_MAX_SEARCH_DEPTH = 4


def custom_objects(model: Any, given: Mapping[str, Any], *more: Any) -> dict[str, Any]:
    """Names and objects that loading the model needs.

    Args:
        model: built.
        given: by the user; these win.
        *more: losses, metrics and optimizers, in any structure.
    """
    compiled = getattr(model, "_compile_config", None)
    found = _find_user_objects(*model._flatten_layers(), *more, getattr(compiled, "config", None))  # noqa: SLF001 - no public door
    return {**found, **given}


def training_user_objects(model: Any, compiled: Mapping[str, Any], *more: Any) -> dict[str, Any]:
    """Returns the user's objects that influence the training, by name: all except the metrics.

    Args:
        model: the model, built.
        compiled: the arguments that it was compiled with.
        *more: losses and optimizers, in any structure.
    """
    metrics = _find_user_objects(compiled.get("metrics"), compiled.get("weighted_metrics"))
    found = _find_user_objects(*model._flatten_layers(), *more)  # noqa: SLF001 - as above
    return {name: one for name, one in found.items() if name not in metrics}


def pickle_user_objects(value: Any) -> bytes:
    """Pickles the user's objects, losses with all they hold: as Keras saves them, `Huber` loses its
    delta.

    Args:
        value: anything.
    """
    file = io.BytesIO()
    _FullLossPickler(file).dump(value)
    return file.getvalue()


class _FullLossPickler(pickling.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, keras.losses.Loss):
            return copyreg.__newobj__, (type(obj),), vars(obj)  # pyright: ignore[reportAttributeAccessIssue]
        return super().reducer_override(obj)


def copy_callbacks_without_model(callbacks: list[Any]) -> list[Any]:
    """Copies of callbacks without the model of an earlier fit, which must not travel along.

    Args:
        callbacks: of Keras.
    """
    copies = [copy.copy(callback) for callback in callbacks]
    for one in copies:
        for name in ("_model", "model"):
            if name in vars(one):
                vars(one)[name] = None
    return copies


def _find_user_objects(*values: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for one in values:
        _collect_user_objects(one, found, seen, 0)
    return found


def _collect_user_objects(value: Any, found: dict[str, Any], seen: set[int], depth: int) -> None:
    if (
        depth > _MAX_SEARCH_DEPTH
        or id(value) in seen
        or isinstance(value, str | bytes | int | float | None)
    ):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for one in list(value.values()):
            _collect_user_objects(one, found, seen, depth + 1)
    elif isinstance(value, list | tuple | set):
        for one in list(value):
            _collect_user_objects(one, found, seen, depth + 1)
    elif inspect.isclass(value) or inspect.isfunction(value):
        _record_user_object(value, found)
    elif _has_keras_config(value):
        _record_user_object(type(value), found)
        for name, one in list(vars(value).items()):
            if not _is_wrapped_method(value, name, one):
                _collect_user_objects(one, found, seen, depth + 1)


def _is_wrapped_method(value: Any, name: str, one: Any) -> bool:
    """Returns whether an attribute is Keras's wrapper of a method such as `build`: it refers to
    the layer only.
    """
    return inspect.isfunction(one) and hasattr(type(value), name)


def _has_keras_config(value: Any) -> bool:
    """Returns whether Keras saves the object by its class. Its attributes may be such objects,
    too.
    """
    return hasattr(value, "get_config") and hasattr(value, "__dict__")


def _record_user_object(value: Any, found: dict[str, Any]) -> None:
    module = (getattr(value, "__module__", None) or "").partition(".")[0]
    name = getattr(value, "__name__", "<lambda>")
    if module not in _LIBRARY_PACKAGES and not name.startswith("<"):
        found.setdefault(name, value)
        found.setdefault(keras.saving.get_registered_name(value), value)
