# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`init_method="farandole://"`: rank and size of this process's world, and a store at its
registrar.

In processes that Farandole has started, torch's default `env://` does the same. Torch's own
implementation opens a port on all addresses of rank 0's host, without a password.
"""

from __future__ import annotations

import os
import secrets
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler

from farandole import _variables as variables
from farandole._native import engine
from farandole.common import basics
from farandole.common.termination_notices import is_elastic_worker
from farandole.numpy.plain_value_exchange import broadcast_plain
from farandole.torch.distributed._groups import ensure_session_started
from farandole.torch.distributed._store import RegistrarStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Rendezvous = Callable[..., Iterator[tuple[Store, int, int]]]

_STORE_TIMEOUT = timedelta(minutes=5)
_stores: list[Store] = []
"""Stores of this session. Torch itself keeps only the C++ object, which calls the Python object."""
basics.call_on_each_init(_stores.clear)


def register_rendezvous() -> None:
    """Registers the scheme with torch. If Farandole has started this process, `env://` also uses
    this module.
    """
    register_rendezvous_handler("farandole", _rendezvous_handler)
    handlers = getattr(sys.modules["torch.distributed.rendezvous"], "_rendezvous_handlers", {})
    if "env" in handlers:
        handlers["env"] = _wrap_env_handler(handlers["env"])


def _rendezvous_handler(
    url: str, timeout: timedelta = _STORE_TIMEOUT, **_: Any
) -> Iterator[tuple[Store, int, int]]:
    ensure_session_started()
    yield _create_store(timeout), basics.rank(), basics.size()
    raise RuntimeError(f"{urlparse(url).scheme}:// cannot be used for a second rendezvous")


def _wrap_env_handler(torchs: Rendezvous) -> Rendezvous:
    def env_handler(url: str, **more: Any) -> Iterator[tuple[Store, int, int]]:
        return (_rendezvous_handler if _matches_launched_world(url) else torchs)(url, **more)

    return env_handler


def _matches_launched_world(url: str) -> bool:
    """Returns whether torch's rank and world size are the ones from the launch of this process."""
    if variables.TASK not in os.environ:
        return False
    asked = parse_qs(urlparse(url).query)
    pairs = [
        (
            asked[name][0] if name in asked else os.environ.get(name.upper()),
            os.environ.get(f"HOROVOD_{own}"),
        )
        for name, own in (("rank", "RANK"), ("world_size", "SIZE"))
    ]
    if is_elastic_worker() and not any(one or own for one, own in pairs):
        return True  # a worker of an elastic job has a rank only in a world
    return all(one is not None and one == own for one, own in pairs)


def _create_store(timeout: timedelta) -> Store:
    """Returns an empty store of all ranks, with a name that no earlier store had."""
    if basics.size() == 1:
        return HashStore()
    if is_elastic_worker():
        # No collective: a rank that is lost meanwhile would end new ranks with an error.
        name = f"{engine.world().generation}.{len(_stores)}"
    else:
        name = broadcast_plain(
            secrets.token_hex(8) if basics.rank() == 0 else None, 0, "distributed.store"
        )
    store = RegistrarStore(name, timeout)
    _stores.append(store)
    return store
