# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The store and the backend of a saved estimator: the store's URLs, and the backend's kind and
numbers.

These contain no secrets: no storage options, no user, no environment, no stream. To use the
estimator elsewhere, set `store` and `backend` as for a new one. The user's own classes are not
saved, which a warning says.

A saved file may come from a stranger. It chooses a class in `CLASS_MODULES`, and values of the
arguments in `_ARGUMENT_TYPES`, all of them plain. Any other argument is refused: options,
environments and streams have effects beyond the loaded object.
"""

from __future__ import annotations

import importlib
import logging
import math
from typing import Any, Final

_STORE_MODULE: Final = "farandole.spark.common.store"
_BACKEND_MODULE: Final = "farandole.spark.common.backend"
CLASS_MODULES: Final = {
    "store": dict.fromkeys(
        ("FilesystemStore", "LocalStore", "ObjectStore", "HDFSStore", "DBFSLocalStore"),
        _STORE_MODULE,
    ),
    "backend": {
        "SparkBackend": _BACKEND_MODULE,
        "LocalBackend": _BACKEND_MODULE,
        "RayBackend": "farandole.ray",
    },
}
"""The modules of the classes that are saved, by parameter. They are imported by name, since Ray
may be absent.
"""
_WHOLE_NUMBER: Final = (int, type(None))
_NUMBER: Final = (int, float, type(None))
_PATH: Final = (str, type(None))
_FLAG: Final = (bool, type(None))
_ARGUMENT_TYPES: Final[dict[str, dict[str, tuple[type, ...]]]] = {
    "store": {
        "prefix_path": (str,),
        "train_path": _PATH,
        "val_path": _PATH,
        "test_path": _PATH,
        "runs_path": _PATH,
        "save_runs": (bool,),
        "checkpoint_filename": _PATH,
    },
    "backend": {
        "num_proc": _WHOLE_NUMBER,
        "num_workers": _WHOLE_NUMBER,
        "min_num_proc": _WHOLE_NUMBER,
        "max_num_proc": _WHOLE_NUMBER,
        "reset_limit": _WHOLE_NUMBER,
        "verbose": (int, bool, type(None)),
        "gpus_per_worker": _WHOLE_NUMBER,
        "cpus_per_worker": _NUMBER,
        "placement_group_timeout": _NUMBER,
        "start_timeout": _NUMBER,
        "elastic_timeout": _NUMBER,
        "prefix_output_with_timestamp": _FLAG,
        "use_gpu": _FLAG,
        "warm": _FLAG,
    },
}
"""The arguments that a saved file may set, and the types of their values."""
_HAD_OPTIONS_KEY: Final = "had_options"
_log = logging.getLogger("farandole")


def describe_store_and_backend(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the saved parts of an estimator's store and backend, as JSON.

    Args:
        values: parameters that are set, by name.
    """
    found: dict[str, Any] = {}
    for name in CLASS_MODULES:
        value = values.get(name)
        if value is None:
            continue
        if not _is_exact_farandole_class(name, value):
            _log.warning(
                "the %s is a %s, which is not saved: set one after loading",
                name,
                type(value).__qualname__,
            )
            continue
        found[name] = {"class": type(value).__name__, "arguments": value.plain()}
        if name == "store" and value.has_options():
            found[name][_HAD_OPTIONS_KEY] = True
    return found


def restore_store_and_backend(loaded: Any, saved: Any, path: str) -> None:
    """Sets the saved store and backend of a loaded estimator. If one of them cannot be created on
    this host, it stays unset, and a warning says so.

    Args:
        loaded: the estimator.
        saved: result of `describe_store_and_backend`.
        path: path of the saved estimator, for messages.
    """
    for name, known in CLASS_MODULES.items():
        entry = saved.get(name) if isinstance(saved, dict) else None
        if entry is None:
            continue
        try:
            kind = getattr(importlib.import_module(known[entry["class"]]), entry["class"])
            arguments = _require_known_arguments(name, entry["arguments"])
            loaded.setParams(**{name: kind(**arguments)})
        except (ValueError, TypeError, KeyError, OSError, ImportError) as error:
            _log.warning(
                "the %s that was saved at %s cannot be created here, so set one: %s",
                name,
                path,
                error,
            )
            continue
        if entry.get(_HAD_OPTIONS_KEY):
            _log.warning(
                "the store saved at %s had storage options, which are never saved: without them, "
                "the credentials of the environment are used; set a store that has them",
                path,
            )


def _require_known_arguments(name: str, arguments: Any) -> dict[str, Any]:
    """Returns the arguments of a saved file, if all of them are expected.

    Args:
        name: of the parameter.
        arguments: as the file has them.

    Raises:
        TypeError: an argument is unknown, or has another type.
    """
    if not isinstance(arguments, dict):
        raise TypeError(f"the arguments are no object: {type(arguments).__name__}")
    expected = _ARGUMENT_TYPES[name]
    for argument, value in arguments.items():
        if argument not in expected:
            raise TypeError(f"a saved {name} has no argument {argument!r}")
        finite = not isinstance(value, float) or math.isfinite(value)
        if type(value) not in expected[argument] or not finite:
            raise TypeError(f"{argument} of a saved {name} is {type(value).__name__}: {value!r}")
    return arguments


def _is_exact_farandole_class(name: str, value: Any) -> bool:
    """Returns whether a value is of a class of ours, and not of one derived from it, whose
    arguments are unknown.
    """
    kind = type(value)
    module = CLASS_MODULES[name].get(kind.__name__)
    if module is None or kind.__module__.partition(".")[0] != "farandole":
        return False
    return getattr(importlib.import_module(module), kind.__name__) is kind
