# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The GPU of a rank whose script has not chosen one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import torch

from farandole import _variables as variables
from farandole._native.settings import read_setting
from farandole.common import basics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farandole.common.process_sets import ProcessSet

"""Set if Spark has started this rank, and may have assigned it a GPU."""


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None,
) -> None:
    """Joins the world in which this process was launched, or a world of one if no launcher started
    it.

    Does nothing while a session runs; may be called again after `shutdown`. Leaves the world by
    itself when the interpreter exits.

    If several GPUs are visible and the script has not used one before, torch's current GPU becomes
    the one that Spark assigned to this rank, or else the one of its local rank. No memory is
    allocated on the GPU, and `torch.cuda.set_device` may choose another one afterwards.

    Args:
        comm: `None`, or the ranks of the launched world that form this one, numbered again in
            ascending order.
        process_sets: Sets to register, the same in the same order on all ranks; or `"dynamic"`, so
            that sets may be added and removed later.

    Raises:
        ValueError: When an argument is wrong, ranks ask for different sets, or this process was
            forked from an initialized one.
        FarandoleEnvironmentError: When the ticket, the registrar or a host refuses.
        FarandoleInternalError: When a peer failed while the world formed.
    """
    basics.init(comm, process_sets)
    select_gpu_of_rank()


def select_gpu_of_rank() -> None:
    """Makes this rank's GPU the current one as soon as CUDA is used, unless the script has used
    it already.
    """
    if basics.size() == 1 or torch.cuda.is_initialized():
        return
    count = torch.cuda.device_count()
    if count <= 1:
        return
    index = _choose_device_index(count)
    # CUDA is not initialized before its first use, because a process may fork before.
    torch.cuda._lazy_call(lambda: torch.cuda.set_device(index))  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def _choose_device_index(count: int) -> int:
    """Returns the number of this rank's GPU among so many."""
    if variables.TASK_RESOURCES in os.environ:
        from farandole.spark import task  # noqa: PLC0415 - only on Spark

        by_local_rank = read_setting(variables.SPARK_USE_LOCAL_RANK_GPU_INDEX)
        choice = task.choose_gpu(
            count,
            basics.local_rank(),
            basics.local_size(),
            task.get_available_devices(),
            os.environ.get("CUDA_VISIBLE_DEVICES"),
            by_local_rank,
        )
        if choice is not None:
            return choice.index
    return basics.local_rank() % count
