# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Takes the memory that a new worker's first step needs from the system before it joins an elastic job.

The system provides memory when a process first writes to it. In a virtual machine, this can take two seconds per
gigabyte, because its host has to provide the memory, too. While a new worker is in its first step, all other workers
wait for it. Until it joins, nobody does. So it writes to such memory before it joins, and frees it when it has joined.
Blocks of up to 32 MiB then stay in the heap of a process that Farandole starts (`farandole.common.heap`), and the
virtual machine keeps larger ones for a while.
"""

from __future__ import annotations

import gc
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from farandole.common import basics, heap

_COPIES: Final = 3
"""Of the parameters: their gradients, the result of the reduction, and the optimizer's state."""
_LEAST: Final = 64 << 20
"""Bytes that are not worth the work."""
_SHARE: Final = 4
"""At most this part of the available memory is taken, for several workers of a host may start together."""

_SECONDS: Final = 10.0
"""How long it is kept for a world. A spare worker may wait for one as long as the job lasts."""

_is_done = False
_kept: list[torch.Tensor] = []
basics.on_init(_kept.clear)


def touch() -> int:
    """Writes to memory for the parameters that exist, once in a process.

    Returns:
        How many bytes it has written.
    """
    global _is_done  # noqa: PLW0603 - as the memory is the process's
    if _is_done:
        return 0
    _is_done = True
    # A model may be anywhere in the script. `isinstance` would call code of objects that stand for others.
    found = [each for each in gc.get_objects() if type(each) is torch.nn.Parameter]
    parameters = [parameter for parameter in found if parameter.is_cpu and parameter.requires_grad]
    size = _COPIES * sum(parameter.nbytes for parameter in parameters)
    if not _LEAST <= size <= available() // _SHARE:
        return 0
    for parameter in parameters:
        _kept.extend(torch.empty_like(parameter, requires_grad=False).zero_() for _ in range(_COPIES))
    heap.start()  # returns to the system what is not used after all
    timer = threading.Timer(_SECONDS, _kept.clear)
    timer.daemon = True
    timer.start()
    return size


def available() -> int:
    """Bytes that this process can still get, as far as the system tells."""
    free = 0
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError):  # without a limit, the file says "max"
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, max(limit - used, 0))
    return free
