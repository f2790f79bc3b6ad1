# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Hugging Face's `Trainer` and Accelerate on Farandole's engine: once this is imported, they train
on all ranks of the job.

Accelerate counts ranks when `TrainingArguments`, `Accelerator` or `PartialState` is first used.
Before that, this module joins the world for which this process was started, by any launcher, and
makes the process group. On hosts without an accelerator, Accelerate by itself counts one process,
and every rank would train a separate model.

Example:
    import transformers
    import farandole.transformers

    arguments = transformers.TrainingArguments(output_dir="out")
    transformers.Trainer(model, arguments, train_dataset=rows).train()
"""

from __future__ import annotations

import functools
import os
import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("accelerate") is None:
    raise ImportError(
        "farandole.transformers needs Accelerate: pip install transformers accelerate",
        name="accelerate",
    )

import torch
import torch.distributed as dist
from accelerate.state import PartialState

import farandole.torch.distributed  # noqa: F401 - registers the backend
from farandole.common import basics
from farandole.common.counted_noun import format_counted_noun
from farandole.common.exceptions import FarandoleUsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole.transformers.progress import ReportProgress
    from farandole.transformers.trainer import Trainer

__all__ = ["ReportProgress", "Trainer", "register"]

_BACKEND = "farandole"
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables by which Accelerate counts the processes of the present world."""


def register() -> None:
    """Makes Accelerate count the ranks of this job. Importing this module calls it.

    Raises:
        FarandoleUsageError: Accelerate has counted one process already, and several ranks run.
    """
    initialize = PartialState.__init__
    if not hasattr(initialize, "farandole_replaces"):
        PartialState.__init__ = _join_ranks_before(initialize)
    if PartialState._shared_state != {}:  # noqa: SLF001 - Accelerate has no public name for it
        PartialState()


def _join_ranks_before(initialize: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(initialize)
    def join_ranks_and_initialize(self: PartialState, cpu: bool = False, **options: Any) -> None:
        if PartialState._shared_state == {}:  # noqa: SLF001 - as above
            cpu = _join_ranks(cpu, options)
        initialize(self, cpu, **options)
        _check_process_count(self.num_processes)

    join_ranks_and_initialize.farandole_replaces = initialize  # type: ignore[attr-defined] # marks it
    return join_ranks_and_initialize


def _count_ranks() -> int:
    """Returns the number of ranks of this job; joins its world if there is no process group."""
    if dist.is_initialized():
        return dist.get_world_size()
    basics.init(process_sets="dynamic")  # as the default group does
    return basics.size()


def _join_ranks(cpu: bool, options: dict[str, Any]) -> bool:
    """Makes the process group; returns whether Accelerate must use the CPU.

    Args:
        cpu: Whether the caller of Accelerate asks for the CPU.
        options: The other arguments of `PartialState`. The backend `"farandole"` is removed,
            because Accelerate refuses a name that it does not know.
    """
    if _count_ranks() == 1:
        if options.get("backend") == _BACKEND:
            del options["backend"]
        return cpu
    use_cpu = cpu or not torch.accelerator.is_available()
    backend = options.get("backend")
    if backend == _BACKEND:
        del options["backend"]
    if dist.is_initialized():
        return use_cpu
    ranks = (basics.rank(), basics.size(), basics.local_rank(), basics.local_size())
    os.environ.update(zip(RANK_VARIABLES, map(str, ranks), strict=True))
    # Accelerate asks for it on several hosts. torch reads it only if it makes the group.
    os.environ.setdefault("MASTER_ADDR", socket.gethostname())
    if backend == _BACKEND or (backend is None and use_cpu):
        limit = {"timeout": options["timeout"]} if "timeout" in options else {}
        dist.init_process_group(_BACKEND, init_method="farandole://", **limit)
    return use_cpu


def _check_process_count(count: int) -> None:
    """Raises an error if Accelerate counts other processes than there are ranks.

    Args:
        count: Number of processes that Accelerate counts.
    """
    ranks = _count_ranks()
    if count != ranks:
        raise FarandoleUsageError(
            f"{format_counted_noun(ranks, 'rank')} of this job, but Accelerate counts {count}: "
            "each would train a model of its own. Import farandole.transformers before "
            "TrainingArguments, Accelerator or PartialState is used, and leave the backend to it"
        )


def __getattr__(name: str) -> Any:
    """Imports transformers when its classes are first used: Accelerate works without it."""
    if name == "Trainer":
        from farandole.transformers.trainer import Trainer  # noqa: PLC0415 - see above

        return Trainer
    if name == "ReportProgress":
        from farandole.transformers.progress import ReportProgress  # noqa: PLC0415 - as above

        return ReportProgress
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
