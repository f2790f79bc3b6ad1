# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Backends: where an estimator's training function runs."""

from __future__ import annotations

import inspect
import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from farandole.runner import warm as warm_workers
from farandole.runner.rank_files import RankFiles
from farandole.spark import outcome, runner
from farandole.spark.agent import Work
from farandole.spark.common import environment
from farandole.spark.common.check import at_least
from farandole.spark.gang import Output, conduct, payload
from farandole.spark.local import LocalAgents

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farandole._native.registrar import Registrar
    from farandole.spark.common.store import Store
    from farandole.spark.gang import Agents

    OnProgress = Callable[[int, dict[str, Any]], None]

_OF_RUN = {
    one.name
    for one in inspect.signature(runner.run_with).parameters.values()
    if one.kind is inspect.Parameter.KEYWORD_ONLY
} - {"num_proc", "env"}
_NOT_FOR_EXECUTORS = ("CUDA_VISIBLE_DEVICES", "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET", "SPARK_HOME")


def default_num_proc() -> int:
    """The number of processes where nobody says one: what the active Spark context calls its default parallelism.

    Raises:
        ValueError: There is no active context.
    """
    from pyspark import SparkContext  # noqa: PLC0415 - backends exist where Spark does not

    context = SparkContext._active_spark_context  # noqa: SLF001 - the way to it that makes none
    if context is None:
        raise ValueError("there is no active Spark context: pass num_proc")
    return context.defaultParallelism


class Backend(ABC):
    """Runs a function on every process of a gang."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = {},
        env: Mapping[str, str | None] | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[Any]:
        """Runs the function on `num_processes()` workers.

        Args:
            fn: The function; pickled by cloudpickle.
            args: Its arguments.
            kwargs: Its keyword arguments.
            env: Variables to set in the workers; `None` as a value removes one.
            on_progress: Called on this thread, while the job runs, with the rank and the record of every
                `farandole.spark.task.report`. An exception it raises ends the job.

        Returns:
            The results by rank.

        Raises:
            FarandoleJobError: A worker failed.
            TimeoutError: Not all workers started in time.
        """

    @abstractmethod
    def num_processes(self) -> int:
        """Number of workers."""

    def check(self) -> None:
        """Refuses what `run` would refuse before it starts anything; estimators ask before they prepare data.

        Raises:
            ValueError: There are fewer slots than processes, or a setting forbids the job.
        """
        return

    def through(self, store: Store) -> Backend:
        """A backend like this one that carries by the store what is too large for its own ways, where that is needed.

        Args:
            store: What every worker and this process reach; an estimator's.
        """
        del store
        return self


class SparkBackend(Backend):
    """Workers in the tasks of the active Spark session.

    Unlike `farandole.spark.run` this hands variables of the driver to the workers: settings of Farandole, of frameworks
    and of numerical libraries, as `farandole.spark.common.environment` lists them, and never
    `CUDA_VISIBLE_DEVICES` or what looks like a secret. `verbose=2` names what was left out.

    Args:
        num_proc: Number of processes; default: Spark's default parallelism.
        env: Environment of the workers instead of the driver's; all of it travels.
        pass_env: Names of further variables of the driver that travel, or patterns such as `"WANDB_*"`.
        **kwargs: Further arguments of `farandole.spark.run`, such as `stdout`, `verbose` or `start_timeout`.
    """

    def __init__(
        self,
        num_proc: int | None = None,
        env: Mapping[str, str | None] | None = None,
        *,
        pass_env: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        self._num_proc = None if num_proc is None else at_least("num_proc", 1)(num_proc)
        self._env = dict(env) if env is not None else None
        if isinstance(pass_env, str) or not all(isinstance(one, str) for one in pass_env):
            raise TypeError(f"pass_env is a list of names and patterns of variables: {pass_env!r}")
        self._pass_env = tuple(pass_env)
        unknown = sorted(set(kwargs) - _OF_RUN)
        if unknown:
            raise TypeError(
                f"SparkBackend takes what farandole.spark.run takes, and not {', '.join(unknown)}: "
                f"{', '.join(sorted(_OF_RUN))}"
            )
        self._kwargs = kwargs

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = {},
        env: Mapping[str, str | None] | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[Any]:
        """As `Backend.run`; also raises what `farandole.spark.run` raises."""
        base: dict[str, str | None] = dict(self._env or {})
        if self._env is None:
            taken, left = environment.chosen(os.environ, self._pass_env, _NOT_FOR_EXECUTORS)
            base |= taken
            self._tell_of(left)
        merged = {name: value for name, value in (base | dict(env or {})).items() if name not in _NOT_FOR_EXECUTORS}
        return runner.run_with(fn, args, kwargs, on_progress, num_proc=self.num_processes(), env=merged, **self._kwargs)

    def _tell_of(self, left: Sequence[str]) -> None:
        if left:
            output = Output(
                self._kwargs.get("stdout"), self._kwargs.get("stderr"), verbose=self._kwargs.get("verbose", 1)
            )
            names = ", ".join(left)
            output.say(
                f"variables of the driver that do not reach the workers (pass_env names those that must): {names}", 2
            )

    def num_processes(self) -> int:
        """Number of workers; needs an active Spark session when none was given."""
        if self._num_proc is None:
            from farandole.spark.session import Cluster  # noqa: PLC0415 - LocalBackend does without

            return Cluster.active().default_parallelism()
        return self._num_proc

    def check(self) -> None:
        """As `Backend.check`."""
        from farandole.spark.session import Cluster  # noqa: PLC0415 - as above

        Cluster.active().check(self.num_processes())
        runner.start_limit(self._kwargs.get("start_timeout"))
        Output(self._kwargs.get("stdout"), self._kwargs.get("stderr"))

    def through(self, store: Store) -> Backend:
        """As `Backend.through`: Spark bounds what its rows bring back by `spark.driver.maxResultSize`."""
        if type(self) is not SparkBackend or self._kwargs.get("store") is not None:
            return self  # somebody else's class may keep something of its own, which a copy would not
        return SparkBackend(self._num_proc, self._env, pass_env=self._pass_env, **self._kwargs | {"store": store})


class LocalBackend(Backend):
    """Workers as processes of this host, without Spark and without a JVM.

    They get this process's environment and modules, and listen on loopback alone, as this process does. Unless
    `OMP_NUM_THREADS` is set, each gets its fair share of the cores.

    Args:
        num_proc: Number of processes; default: the number of cores.
        env: Variables to set in the workers; `None` as a value removes one.
        start_timeout: Seconds all workers may take to start; default as in `farandole.spark.run`.
        stdout: Where their stdout goes, each line as `[rank]<stdout>:line`; default: `sys.stdout`.
        stderr: The same for stderr; default: `sys.stderr`.
        verbose: 0 is silent but for the workers, 1 says what is waited for, 2 also says where each rank runs.
        prefix_output_with_timestamp: Whether those lines also start with the time.
        executable: Python interpreter of the workers; default: this one.
        warm: Whether workers start warm, from a fork server of this process that has imported torch; by default they do
            where this process has imported it, unless `FARANDOLE_WARM_WORKERS` says `off`.
        output_folder: Where each rank's output is also written, to `rank.<N>/stdout` and `rank.<N>/stderr`.
    """

    def __init__(
        self,
        num_proc: int | None = None,
        env: Mapping[str, str | None] | None = None,
        *,
        start_timeout: float | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        verbose: int = 1,
        prefix_output_with_timestamp: bool = False,
        executable: str | None = None,
        warm: bool | None = None,
        output_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self._num_proc = _cores() if num_proc is None else at_least("num_proc", 1)(num_proc)
        self._env = dict(env or {})
        self._start_timeout = start_timeout
        self._stdout = stdout
        self._stderr = stderr
        self._verbose = verbose
        self._timestamp = prefix_output_with_timestamp
        self._executable = executable
        self._warm = warm
        self._folder = output_folder

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = {},
        env: Mapping[str, str | None] | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[Any]:
        """As `Backend.run`."""
        size = self._num_proc
        limit = runner.start_limit(self._start_timeout)
        changes: dict[str, str | None] = {**self._env, **(env or {})}
        if "OMP_NUM_THREADS" not in os.environ:
            changes.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // size)))
        # The streams are looked up at the call: notebooks and progress bars put their own in place of sys.stdout.
        output = Output(self._stdout or sys.stdout, self._stderr or sys.stderr, self._timestamp, self._verbose)
        packed = payload(fn, args, kwargs)
        if self._folder is not None:
            output.files = RankFiles(Path(self._folder), size)

        registrar = self._registrar(size, limit)
        warmth = warm_workers.wanted(self._warm, by_default=True)
        work = Work(registrar.ticket, packed, changes, self._executable, output.streaming, limit, warmth)
        endings = conduct(registrar, self._agents(work, size), size, output, on_progress, limit, "workers to start")
        return outcome.results(endings, size)

    def _registrar(self, size: int, limit: float) -> Registrar:
        from farandole._native.registrar import Registrar  # noqa: PLC0415 - starts its threads here
        from farandole.common import logs  # noqa: PLC0415

        logs.start()
        # Nobody elsewhere needs to reach it, whatever the variables say of other jobs.
        return Registrar(size, start_timeout=limit, host="127.0.0.1", bind="")

    def _agents(self, work: Work, size: int) -> Agents:
        return LocalAgents(work, range(size))

    def num_processes(self) -> int:
        """Number of workers."""
        return self._num_proc


def _cores() -> int:
    return max(1, len(os.sched_getaffinity(0)))
