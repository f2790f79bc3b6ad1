# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Backends: where an estimator's training function runs."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TextIO

from farandole.runner import warm as warm_workers
from farandole.spark import environment, outcome, runner
from farandole.spark.agent import Work
from farandole.spark.common.check import at_least
from farandole.spark.gang import Output, conduct, payload
from farandole.spark.local import LocalAgents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from farandole.spark.common.store import Store

    OnProgress = Callable[[int, dict[str, Any]], None]

_OF_RUN = {
    one.name
    for one in inspect.signature(runner.run_with).parameters.values()
    if one.kind is inspect.Parameter.KEYWORD_ONLY
} - {"num_proc", "env"}
_BIND = "FARANDOLE_BIND_ADDRESS"
_LOOPBACK = "127.0.0.1"
_BINDING = threading.Lock()


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

    Unlike `farandole.spark.run` this hands variables of the driver to the workers: those of what trains, such as
    `OMP_*`, `NCCL_*`, `TF_*` and `PATH`, and none that looks as if it held a secret; `farandole.spark.environment` has
    the rule. With `verbose=2` the names of those that stay are said. A store's credentials travel with it, as its
    `storage_options`.

    Args:
        num_proc: Number of processes; default: Spark's default parallelism.
        env: Environment of the workers instead of the driver's.
        **kwargs: Further arguments of `farandole.spark.run`, such as `stdout`, `verbose` or `start_timeout`.
    """

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str | None] | None = None, **kwargs: Any) -> None:
        self._num_proc = None if num_proc is None else at_least("num_proc", 1)(num_proc)
        self._env = dict(env) if env is not None else None
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
        base: dict[str, str | None] = {}
        if self._env is not None:
            base.update(self._env)
        else:
            goes, stays = environment.handed_on(os.environ)
            base.update(goes)
            if self._kwargs.get("verbose", 1) > 1 and stays:
                stream = self._kwargs.get("stderr") or sys.stderr
                names = ", ".join(stays)
                print(
                    f"farandole: variables of the driver that stay there (env={{...}} gives others): {names}",
                    file=stream,
                )
        merged = {name: value for name, value in (base | dict(env or {})).items() if name not in environment.OWN}
        return runner.run_with(fn, args, kwargs, on_progress, num_proc=self.num_processes(), env=merged, **self._kwargs)

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
        return SparkBackend(self._num_proc, self._env, **self._kwargs | {"store": store})


class LocalBackend(Backend):
    """Workers as processes of this host, without Spark and without a JVM.

    They get this process's environment and modules, and listen on loopback alone unless `FARANDOLE_BIND_ADDRESS` says
    otherwise. Unless `OMP_NUM_THREADS` is set, each gets its fair share of
    the cores.

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

        from farandole._native.registrar import Registrar  # noqa: PLC0415 - starts its threads here

        with _on_loopback() as bound:
            registrar = Registrar(size, start_timeout=limit)
        if bound is not None:
            changes.setdefault(_BIND, bound)
        warmth = warm_workers.wanted(self._warm, by_default=True)
        work = Work(registrar.ticket, packed, changes, self._executable, output.streaming, limit, warmth)
        agents = LocalAgents(work, size)
        endings = conduct(registrar, agents, size, output, on_progress, limit, "workers to start")
        return outcome.results(endings, size)

    def num_processes(self) -> int:
        """Number of workers."""
        return self._num_proc


@contextlib.contextmanager
def _on_loopback() -> Iterator[str | None]:
    """Has the registrar that is made meanwhile listen on loopback alone, unless the user says where it should.

    Yields:
        The address, or `None` where the user has said another.
    """
    with _BINDING:
        if any(os.environ.get(name) for name in (_BIND, f"HOROVOD_{_BIND.partition('_')[2]}")):
            yield None
            return
        os.environ[_BIND] = _LOOPBACK
        try:
            yield _LOOPBACK
        finally:
            del os.environ[_BIND]


def _cores() -> int:
    return max(1, len(os.sched_getaffinity(0)))
