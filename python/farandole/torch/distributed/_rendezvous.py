# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`init_method="farandole://"`: rank and size of this process's world, and a store in it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed.rendezvous import register_rendezvous_handler

from farandole.common import basics
from farandole.torch.distributed._groups import join_world
from farandole.torch.distributed._listen import listener
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
    """A store of all ranks: rank 0 serves it where it may listen, and tells the others where that is."""
    size = basics.size()
    if size == 1:
        return HashStore()
    if basics.rank() != 0:
        host, port = broadcast_object(None, 0, "distributed.store")
        return TCPStore(host, port, size, is_master=False, timeout=timeout)
    made, host = listener(one_host=basics.local_size() == size)
    port = made.getsockname()[1]
    # Torch's own socket would listen on all addresses, on any port. It takes this one, and closes it at its end.
    store = TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=made.detach(),
        use_libuv=True,
    )
    broadcast_object((host, port), 0, "distributed.store")
    return store
