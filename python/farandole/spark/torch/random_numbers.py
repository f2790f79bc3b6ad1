# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The random numbers of torch, which all threads of a process share."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RANDOM_NUMBERS_LOCK = threading.RLock()
"""Guards the random numbers of torch, and the functions in `torch.nn.init`, which transformers
replaces while it loads a network.
"""


@contextlib.contextmanager
def hold_random_numbers(
    seed: int | None = None, *, gpus: Sequence[torch.device] = ()
) -> Iterator[None]:
    """Holds the random numbers for one thread at a time. They are afterwards as before.

    Args:
        seed: seed of the numbers that the context draws; `None`: they continue.
        gpus: the GPUs whose numbers are held too.
    """
    with RANDOM_NUMBERS_LOCK, torch.random.fork_rng(devices=list(gpus)):
        if seed is not None:
            torch.manual_seed(seed)
        yield
