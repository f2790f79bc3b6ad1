# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Pages of `torch.distributed.debug` (torch 2.15) for the ranks of this job, with an additional
page.

Torch's debug server shows stack traces, profiles and more of all ranks on one web page. It finds
the ranks through a `TCPStore` at `MASTER_ADDR`, which jobs of Farandole do not have.
`start_debug_server` here opens one for it, and adds the page "Farandole Ranks": host, process, GPU,
world and process sets of each rank, and the operations of the backend `"farandole"` that it has
started and that are not over.

Torch opens the server, the store and a port on each rank to all hosts, without a password, also in
a job of one host. Who reaches them can read stacks and start profiles. So the server starts only
with `open_to_the_network=True`, which confirms that no one else can reach the ports. It needs the
packages `jinja2`, `tabulate`, and `aiohttp` or `requests`.

Example:
    import torch.distributed as dist
    from farandole.torch.distributed import debug

    dist.init_process_group("farandole")
    # all ranks; the page is on the host of rank 0
    debug.start_debug_server(port=25999, open_to_the_network=True)
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import types
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from farandole._native import engine
from farandole.common import basics
from farandole.common.util import env
from farandole.numpy.plain_value_exchange import broadcast_plain
from farandole.torch.distributed import _work

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["start_debug_server", "stop_debug_server"]

ENDPOINT_NAME: Final = "farandole"
"""Name of the page, and of the request that each rank answers for it."""

_ENABLED_DUMPS: Final = frozenset(
    {"stacks", "fr_trace", "torchcomms_health_check", "c10d_health_check", ENDPOINT_NAME}
)
_stores: list[Any] = []
"""The store of the server that runs, on rank 0."""


def start_debug_server(
    port: int = 25999,
    handlers: Sequence[Any] | None = None,
    *,
    open_to_the_network: bool = False,
    **options: Any,
) -> None:
    """Starts torch's debug server for the ranks of this world. All ranks call it.

    Args:
        port: Port of the pages, on the host of rank 0.
        handlers: Pages besides the one of Farandole; default: torch's pages.
        open_to_the_network: Consent to ports without a password on all addresses; see the module.
        **options: Other arguments of `torch.distributed.debug.start_debug_server`, such as
            `dump_dir`.

    Raises:
        ValueError: Without consent.
        ImportError: This torch has no such server, or a package that it needs is missing.
        AssertionError: The server runs.
    """
    if not open_to_the_network:
        raise ValueError(
            "torch's debug server opens ports on all addresses of each host, without a password: "
            "any process that can connect can read stacks and start profiles. If no one else can "
            "reach these ports, say so: open_to_the_network=True"
        )
    # on all ranks: otherwise, if rank 0 lacks a package, the others would wait for it
    pages = _server_pages(handlers)
    from torch._C._distributed_c10d import _register_handler  # noqa: PLC0415 - as in `_server_pages`
    from torch.distributed import debug as torchs  # noqa: PLC0415 - as above

    _register_handler(ENDPOINT_NAME, _answer_request)
    _work.set_operation_watch()
    # A fork would keep this process's connections open after its end, and peers would not notice.
    chosen = {"enabled_dumps": set(_ENABLED_DUMPS), "start_method": "spawn"} | options
    with _debug_store_in_environment(), _hide_main_module():
        torchs.start_debug_server(port, handlers=pages, **chosen)


def stop_debug_server() -> None:
    """Ends the server. All ranks call it, rank 0 last or after a barrier."""
    from torch.distributed import debug as torchs  # noqa: PLC0415 - as above

    _work.set_operation_watch(on=False)
    if basics.rank() == 0:
        torchs.stop_debug_server()
    elif torchs._WORKER_SERVER is not None:  # noqa: SLF001 - torch's own function is for rank 0 alone
        torchs._WORKER_SERVER.shutdown()  # noqa: SLF001
        torchs._WORKER_SERVER = None  # noqa: SLF001
    _stores.clear()


def rank_facts() -> dict[str, Any]:
    """Returns the facts of this rank for its page. It uses no collective, so a rank also answers
    when the job hangs.
    """
    world = engine.world()
    return {
        "rank": world.rank,
        "size": world.size,
        "local_rank": world.local_rank,
        "world": world.generation,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "gpu": torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        "process_sets": {str(number): ranks for number, ranks in engine.process_sets().items()},
        "under_way": _work.watched_operations(),
    }


def _answer_request(_: Any, response: Any) -> None:
    """Answers a request of rank 0's server, on a thread of torch."""
    try:
        text, status = json.dumps(rank_facts()), 200
    except Exception as error:  # noqa: BLE001 - such as a session that is shut down; C++ calls this
        text, status = json.dumps({"error": str(error)}), 500
    response.set_content(text, "application/json")
    response.set_status(status)


def _server_pages(handlers: Sequence[Any] | None) -> list[Any]:
    """Returns the pages of the server, Farandole's last.

    Raises:
        ImportError: As `start_debug_server`.
    """
    try:
        from torch.distributed.debug._debug_handlers import default_handlers  # noqa: PLC0415 - since torch 2.15

        from farandole.torch.distributed._debug_page import RanksHandler  # noqa: PLC0415 - as above
    except ImportError as error:
        name = error.name or ""
        if name.partition(".")[0] == "torch":
            raise ImportError("torch.distributed.debug needs torch 2.15 or newer") from error
        raise ImportError(
            f"torch.distributed.debug needs the package {name!r}: pip install {name}"
        ) from error
    return [*(default_handlers() if handlers is None else handlers), RanksHandler()]


@contextlib.contextmanager
def _hide_main_module() -> Iterator[None]:
    """Keeps a process that is spawned from running the script of this process once more."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _debug_store_in_environment() -> Iterator[None]:
    """Opens the store through which torch's server finds the ranks, and sets the variables that
    name it.
    """
    address_and_port: tuple[str, int] | None = None
    if basics.rank() == 0:
        torch_distributed: Any = dist  # its own type hints do not export TCPStore
        store = torch_distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        _stores.append(store)
        address_and_port = os.environ.get("MASTER_ADDR") or socket.gethostname(), store.port
    address, port = broadcast_plain(address_and_port, 0, "debug.store")
    variables = {
        "MASTER_ADDR": str(address),
        "MASTER_PORT": str(port),
        "RANK": str(basics.rank()),
        "WORLD_SIZE": str(basics.size()),
    }
    with env(**variables):
        yield
