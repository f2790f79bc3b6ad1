# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TorchDistributor`: pyspark's class of this name, with Farandole's workers instead of torchrun's.

Importing this module imports neither pyspark nor torch.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from farandole.common.argument_checks import make_minimum_check
from farandole.runner.backend import LocalBackend
from farandole.spark import gpus, runner, task
from farandole.spark.job.session_adapter import SparkSessionAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
_VISIBLE_DEVICE = re.compile(r"\d+|(GPU|MIG)-.+")
_TASK_GPUS: Final = "spark.task.resource.gpu.amount"
_LOG = logging.getLogger("farandole")


class TorchDistributor:
    """Runs a function or a script of PyTorch on several processes, with pyspark's arguments.

    Every process has the variables that torchrun sets (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
    `MASTER_ADDR` and so on), so `torch.distributed.init_process_group("gloo")` needs no argument,
    and Lightning's `Trainer` recognizes torchrun. `farandole.torch.init()` and
    `init_process_group("farandole")` work, too.

    On Spark, each process is alone in its task, as with pyspark: its local rank is 0, and it sees
    only the GPU that Spark assigned to the task.

    Args:
        num_processes: Number of processes.
        local_mode: Whether the processes run on the driver, where Spark is not needed; otherwise
            each runs in a Spark task.
        use_gpu: Whether each process has a GPU. Otherwise processes in Spark tasks see none.

    Attributes:
        num_processes: Number of processes. With `local_mode` and `use_gpu`, it is at most the
            number of GPUs of the driver; a larger argument is reduced with a warning.
        local_mode: The argument.
        use_gpu: The argument.

    Raises:
        ValueError: `num_processes` is not positive.
        RuntimeError: `use_gpu` is set, and the driver has no GPU, or Spark's tasks do not have one
            GPU each.
    """

    def __init__(
        self, num_processes: int = 1, local_mode: bool = True, use_gpu: bool = True
    ) -> None:
        self.num_processes = make_minimum_check(1)("num_processes", num_processes)
        self.local_mode = local_mode
        self.use_gpu = use_gpu
        self._driver_gpus: list[str] = []
        if use_gpu and local_mode:
            self._driver_gpus = _find_driver_gpus()
            if self.num_processes > len(self._driver_gpus):
                _LOG.warning(
                    "num_processes=%d is reduced to the number of GPUs of the driver, %d",
                    self.num_processes,
                    len(self._driver_gpus),
                )
                self.num_processes = len(self._driver_gpus)
        elif use_gpu:
            _check_task_gpus()

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Runs a function or a script on every process. Its output appears in this process's.

        Args:
            train_object: A function, which cloudpickle sends to the processes, or the path of a
                script, which every process must find there.
            *args: Arguments of the function, or the command-line arguments of the script.
            **kwargs: Keyword arguments of the function.

        Returns:
            The function's result on rank 0; `None` for a script.

        Raises:
            ValueError: Keyword arguments for a script.
            FarandoleJobError: A process has failed. The error has its traceback.
        """
        if isinstance(train_object, str) and kwargs:
            raise ValueError(
                f"{train_object} is a script, which takes no keyword arguments: {', '.join(kwargs)}"
            )
        call = (train_object, args, kwargs)
        if self.local_mode:
            visible = self._driver_gpus[: self.num_processes]
            env: dict[str, str | None] = {_VISIBLE_DEVICES: ",".join(visible)} if visible else {}
            return LocalBackend(self.num_processes, env).run(_train_on_driver, call)[0]
        return runner.run(
            _train_in_task,
            (self.use_gpu, *call),
            num_proc=self.num_processes,
            stdout=sys.stdout,
            stderr=sys.stderr,
        )[0]


def _find_driver_gpus() -> list[str]:
    """Returns the GPUs of this host that `CUDA_VISIBLE_DEVICES` does not hide.

    Raises:
        RuntimeError: There is none.
    """
    visible = os.environ.get(_VISIBLE_DEVICES)
    if visible is not None:
        listed = (address.strip() for address in visible.split(","))
        # As CUDA reads it: the first entry that names no device ends the list.
        addresses = list(itertools.takewhile(_VISIBLE_DEVICE.fullmatch, listed))
        reason = f"{_VISIBLE_DEVICES} is {visible!r}"
    else:
        try:
            addresses, reason = gpus.gpu_addresses(), "nvidia-smi lists none"
        except (OSError, subprocess.SubprocessError) as error:
            addresses, reason = [], str(error)
    if not addresses:
        raise RuntimeError(f"the driver has no GPU ({reason}): pass use_gpu=False to train on CPUs")
    return addresses


def _check_task_gpus() -> None:
    """Checks that each Spark task has one GPU.

    Raises:
        RuntimeError: It has none, or several.
    """
    amount = SparkSessionAdapter.from_active_session().get_setting(_TASK_GPUS, "0")
    if amount != "1":
        raise RuntimeError(
            f"use_gpu=True needs one GPU for each Spark task, but {_TASK_GPUS} is {amount}: set "
            "it to 1, or pass use_gpu=False to train on CPUs"
        )


def _train_on_driver(
    train_object: Callable[..., Any] | str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Trains in a process on the driver, which is one of several of one torchrun."""
    os.environ |= _torchrun_variables() | {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    return _train(train_object, args, kwargs)


def _train_in_task(
    use_gpu: bool,
    train_object: Callable[..., Any] | str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Trains in the process of a Spark task, which is the only one of its torchrun."""
    addresses = task.get_available_devices()
    alone = {
        "GROUP_RANK": os.environ["RANK"],
        "GROUP_WORLD_SIZE": os.environ["WORLD_SIZE"],
        "NODE_RANK": os.environ["RANK"],
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    if not use_gpu:
        alone[_VISIBLE_DEVICES] = ""
    elif addresses:
        alone[_VISIBLE_DEVICES] = _visible_device(addresses)
    else:
        # Tasks of a local master have no addresses, so the local rank selects the GPU.
        del alone["LOCAL_RANK"], alone["LOCAL_WORLD_SIZE"]
    os.environ |= _torchrun_variables() | alone
    return _train(train_object, args, kwargs)


def _visible_device(addresses: Sequence[str]) -> str:
    """Returns the GPU of the task, as `CUDA_VISIBLE_DEVICES` names it.

    Args:
        addresses: GPUs that Spark assigned to the task.
    """
    visible = os.environ.get(_VISIBLE_DEVICES)
    mask = [part.strip() for part in visible.split(",")] if visible else []
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    choice = task.choose_gpu(len(mask), local_rank, local_size, addresses, visible)
    return addresses[0] if choice is None else mask[choice.index]


def _torchrun_variables() -> dict[str, str]:
    """Returns the variables of torchrun that workers of Farandole do not have."""
    return {
        "ROLE_NAME": "default",
        "ROLE_RANK": os.environ["RANK"],
        "ROLE_WORLD_SIZE": os.environ["WORLD_SIZE"],
        "TORCHELASTIC_RUN_ID": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # Rank 0 opens the store of torch.distributed, because there is no agent of torchrun.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _train(
    train_object: Callable[..., Any] | str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    if not isinstance(train_object, str):
        return train_object(*args, **kwargs)
    sys.argv = [train_object, *map(str, args)]
    sys.path.insert(0, str(Path(train_object).resolve().parent))
    runpy.run_path(train_object, run_name="__main__")
    return None
