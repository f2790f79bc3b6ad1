# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`init_method="farandole://"`: rank and size of this process's world, and a store in it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed.rendezvous import register_rendezvous_handler

from farandole.common import basics
from farandole.torch.distributed._groups import join_world
from farandole.torch.functions import broadcast_object

if TYPE_CHECKING:
    from collections.abc import Iterator

_TIMEOUT = timedelta(minutes=5)


def register() -> None:
    """Teaches torch the scheme."""
    register_rendezvous_handler("farandole", _meet)


def _meet(url: str, timeout: timedelta = _TIMEOUT, **_: Any) -> Iterator[tuple[Store, int, int]]:
    del url
    join_world()
    yield _store(timeout), basics.rank(), basics.size()
    raise RuntimeError("farandole:// cannot be used for a second rendezvous")


def _store(timeout: timedelta) -> Store:
    """A store of all ranks: rank 0 serves it on an unused port and tells the others where."""
    size = basics.size()
    if size == 1:
        return HashStore()
    if basics.rank() != 0:
        host, port = broadcast_object(None, 0, "distributed.store")
        return TCPStore(host, port, size, is_master=False, timeout=timeout)
    one_host = basics.local_size() == size
    host = "127.0.0.1" if one_host else os.environ.get("MASTER_ADDR") or socket.gethostname()
    store = TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
    broadcast_object((host, store.port), 0, "distributed.store")
    return store
