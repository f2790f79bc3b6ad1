# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Functions for a training function in a worker: queries and reports."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farandole import _variables as variables
from farandole._native.settings import read_setting
from farandole.common.counted_noun import format_counted_noun
from farandole.runner import load_reports
from farandole.runner.agent import RESOURCES_VARIABLE
from farandole.runner.job_observer import RANK_KIND, REPORTS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def get_available_devices() -> list[str]:
    """Addresses of the GPUs that Spark assigned to this worker's task.

    Returns:
        The addresses of resource `gpu`, such as `["0"]`; empty when Spark assigned none, or outside
        Spark. `CUDA_VISIBLE_DEVICES` is left as it is.
    """
    resources = os.environ.get(RESOURCES_VARIABLE)
    if resources is not None:
        return [str(address) for address in json.loads(resources).get("gpu", [])]
    return task_resources().get("gpu", [])


@dataclass(frozen=True)
class GpuChoice:
    """The GPU of one rank.

    Attributes:
        index: Its number among the GPUs that this process sees, as `torch.device("cuda", index)`
            counts.
        reason: Reason of the choice.
    """

    index: int
    reason: str


def choose_gpu(
    count: int,
    local_rank: int,
    local_size: int,
    addresses: Sequence[str],
    visible: str | None = None,
    by_local_rank: bool = False,
) -> GpuChoice | None:
    """Chooses the GPU of a rank.

    Spark's address has priority. It counts the host's GPUs. If `CUDA_VISIBLE_DEVICES` hides some of
    them, the address is looked up in that list. If the list lacks it, the cluster manager has
    hidden the rest of the host, and it counts the visible GPUs. Without an address, the local rank
    decides.

    Args:
        count: GPUs that this process sees.
        local_rank: Number of this rank on its host.
        local_size: Ranks on its host.
        addresses: Addresses of the GPUs that Spark assigned to the task.
        visible: `CUDA_VISIBLE_DEVICES`, if it is set.
        by_local_rank: Whether Spark's addresses are not to be used.

    Returns:
        The choice; `None` where there is no GPU.
    """
    if count < 1:
        return None
    if addresses and not by_local_rank:
        address = str(addresses[0])
        mask = [part.strip() for part in visible.split(",")] if visible else []
        if address in mask[:count]:
            return GpuChoice(
                mask.index(address),
                f"Spark assigned {address}, which CUDA_VISIBLE_DEVICES={visible} lists",
            )
        if address.isdigit() and int(address) < count:
            within = f" within CUDA_VISIBLE_DEVICES={visible}" if mask else ""
            return GpuChoice(int(address), f"Spark assigned {address}{within}")
        if count == 1:
            return GpuChoice(0, f"Spark assigned {address}, and it is the only one here")
        reason = (
            f"Spark assigned {address}, which is not among the {count} here, so local rank "
            f"{local_rank} decides"
        )
    else:
        reason = f"local rank {local_rank}" + ("" if addresses else ", Spark assigned none")
    shared = (
        f", {format_counted_noun(local_size, 'rank')} share {count}" if local_size > count else ""
    )
    return GpuChoice(local_rank % count, f"{reason}{shared}")


def choose_own_gpu(count: int, local_rank: int, local_size: int) -> GpuChoice | None:
    """Chooses this rank's GPU by `choose_gpu`, and prints the choice in one line on stderr.

    Args:
        count: GPUs that this process sees, as `torch.cuda.device_count()`.
        local_rank: Number of this rank on its host.
        local_size: Ranks on its host.

    Returns:
        The choice; `None` where there is no GPU.
    """
    by_local_rank = read_setting(variables.SPARK_USE_LOCAL_RANK_GPU_INDEX)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    choice = choose_gpu(
        count, local_rank, local_size, get_available_devices(), visible, by_local_rank
    )
    if choice is not None:
        rank = os.environ.get("RANK", str(local_rank))
        load_reports.set_reported_gpu(choice.index)
        if has_rank_display():
            report_rank_state({"gpu": choice.index})
        sys.stderr.write(
            f"farandole: rank {rank} takes GPU {choice.index} of {count}: {choice.reason}\n"
        )
    return choice


def check_gpu_agreement(has_gpu: bool) -> None:
    """Checks that all ranks have a GPU, or none; a collective call.

    Args:
        has_gpu: Whether this rank has one.

    Raises:
        RuntimeError: Some ranks have a GPU and some do not.
    """
    import numpy as np  # noqa: PLC0415 - only workers need it

    import farandole.numpy as arrays  # noqa: PLC0415 - as above

    mine = np.array([int(has_gpu)], np.int32)
    ranks = int(arrays.allreduce(mine, op=arrays.Sum, name="farandole.gpus")[0])
    if ranks not in (0, arrays.size()):
        raise RuntimeError(
            f"only some ranks have a GPU: {ranks} of {arrays.size()}; set use_gpu=False to train "
            "on CPUs"
        )


def task_resources() -> dict[str, list[str]]:
    """Addresses by resource name of the Spark task this process runs; empty when it runs none."""
    pyspark = sys.modules.get("pyspark")
    context = pyspark.TaskContext.get() if pyspark is not None else None
    if context is None:
        return {}
    return {name: list(resource.addresses) for name, resource in context.resources().items()}


def has_rank_display() -> bool:
    """Returns whether this worker's driver shows the reports of its ranks."""
    return REPORTS_VARIABLE in os.environ


def report_rank_state(record: Mapping[str, Any]) -> bool:
    """Says something of this rank that the driver shows: its process, its GPU, where its time goes.

    Args:
        record: By name; later values replace earlier ones.

    Returns:
        Whether there is a driver to say it to.
    """
    from farandole._native import launcher  # noqa: PLC0415 - only workers need it

    return launcher.report_record(RANK_KIND, json.dumps(record).encode())


def report(record: Mapping[str, Any]) -> bool:
    """Sends a record to the driver, where the callback `on_progress` of `Backend.run` gets it.

    It never blocks training: when the connection is slow the oldest waiting records are dropped.

    Args:
        record: An object that `json` can write, at most 1 MiB. Curves are drawn of the kinds `step`
            and `epoch`, so the driver leaves out such a record with a warning if it has another
            form than `farandole.runner.report_validation` says.

    Returns:
        Whether there is a driver to report to.
    """
    from farandole._native import launcher  # noqa: PLC0415 - only workers need it
    from farandole.runner.event_handler import PROGRESS_KIND  # noqa: PLC0415 - as above

    return launcher.report_record(PROGRESS_KIND, json.dumps(record).encode())
