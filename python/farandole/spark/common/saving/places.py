# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The store and the backend of a saved estimator: the store's URLs, and the backend's kind and numbers.

These contain no secrets: no storage options, no user, no environment, no stream. To use the estimator elsewhere, set
`store` and `backend` as for a new one. The user's own classes are not saved.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from farandole.spark.common import backend as backends
from farandole.spark.common import store as stores

BACKENDS: Final = ("SparkBackend", "LocalBackend")
STORES: Final = ("FilesystemStore", "LocalStore", "ObjectStore", "HDFSStore", "DBFSLocalStore")
_OPTIONS: Final = "had_options"
_log = logging.getLogger("farandole")


def told(values: dict[str, Any]) -> dict[str, Any]:
    """The saved parts of an estimator's store and backend, as JSON.

    Args:
        values: parameters that are set, by name.
    """
    found: dict[str, Any] = {}
    store, backend = values.get("store"), values.get("backend")
    if isinstance(store, stores.AbstractFilesystemStore) and _is_one_of(store, stores, STORES):
        options = {_OPTIONS: True} if store.has_options() else {}
        found["store"] = {"class": type(store).__name__, "arguments": store.plain()} | options
    if isinstance(backend, backends.SparkBackend | backends.LocalBackend) and _is_one_of(backend, backends, BACKENDS):
        found["backend"] = {"class": type(backend).__name__, "arguments": backend.plain()}
    return found


def put(loaded: Any, saved: Any, path: str) -> None:
    """Gives a loaded estimator its store and backend back; what cannot be made here stays unset, and is said.

    Args:
        loaded: the estimator.
        saved: what `told` returned.
        path: it was loaded from, for messages.
    """
    for name, module, known in (("store", stores, STORES), ("backend", backends, BACKENDS)):
        entry = saved.get(name) if isinstance(saved, dict) else None
        if entry is None:
            continue
        try:
            kind = {one: getattr(module, one) for one in known}[entry["class"]]
            loaded.setParams(**{name: kind(**entry["arguments"])})
        except (ValueError, TypeError, KeyError, OSError) as error:
            _log.warning("the %s that was saved at %s cannot be created here, so set one: %s", name, path, error)
            continue
        if entry.get(_OPTIONS):
            _log.warning(
                "the store saved at %s had storage options, which are never saved: without them, the "
                "credentials of the environment are used; set a store that has them",
                path,
            )


def _is_one_of(value: Any, module: Any, names: tuple[str, ...]) -> bool:
    """Whether a value is of a class of ours, and not of one derived from it, whose arguments nobody knows."""
    return any(type(value) is getattr(module, name) for name in names)
