# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`farandole.spark.run`: a function on every process of a gang, its results by rank."""

from __future__ import annotations

import contextlib
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from farandole.common.check import at_least
from farandole.runner import outcome, timelines
from farandole.runner import warm as warm_workers
from farandole.runner.agent import Work
from farandole.runner.elastic import conduct as elastic
from farandole.runner.errors import FarandoleJobError
from farandole.runner.gang import Output, conduct, payload
from farandole.runner.limits import elastic_limit, elastic_sizes, start_limit
from farandole.runner.show.training import Training, telling
from farandole.runner.show.watched import watched
from farandole.spark.job import ahead
from farandole.spark.job.agents import LEFT_ALONE, SparkAgents
from farandole.spark.job.decommission import Decommissions
from farandole.spark.job.elastic import SparkCrew
from farandole.spark.job.meeting import Meeting
from farandole.spark.job.queue import queue
from farandole.spark.job.reasons import Word
from farandole.spark.job.session import Cluster
from farandole.spark.job.spill import Spill
from farandole.spark.shim import Shim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pyspark.resource import ResourceProfile

    from farandole._native.registrar import Registrar
    from farandole.stores.store import Store

DIAL_OUT = "FARANDOLE_DIAL_OUT"
"""Hosts open connections and accept none, so a gang can meet only at its driver."""
GRADIENTS = "FARANDOLE_GRADIENT_CONVENTION"


def run(  # noqa: D417 - the ignored ones are named in one line
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = {},
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str | None] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    *,
    resource_profile: ResourceProfile | None = None,
    store: Store | str | None = None,
    warm: bool | None = None,
    timeline: bool | str | os.PathLike[str] | None = None,
    ui: bool | str | os.PathLike[str] | Store = False,
) -> list[Any]:
    """Runs a function on `num_proc` Spark tasks that start together, and returns the result of each
    rank.

    Each task starts one worker process and passes it the function; inside, `farandole.torch.init()`
    and its siblings form the world. Works on classic Spark and on Spark Connect.

    A worker starts with the environment of its Spark task, not with the driver's, changed by `env`.
    Spark sets `OMP_NUM_THREADS` there to `spark.task.cpus`, the task's share of its executor's
    cores; set it in `env` to give workers more. A worker imports what its task can import.

    Args:
        fn: The function. It is pickled by cloudpickle once, on the driver.
        args: Its arguments.
        kwargs: Its keyword arguments.
        num_proc: Number of processes; default: Spark's default parallelism.
        start_timeout: Seconds within which all tasks must start, the wait for slots of other jobs
            of this process included;
            default: `FARANDOLE_SPARK_START_TIMEOUT`, or Horovod's name of it, else 600, without
            that wait.
        env: Variables to set in every worker; `None` as a value removes one.
        stdout: Text stream that gets the workers' stdout, each line as `[rank]<stdout>:line`; by
            default it stays in the logs of the Spark tasks.
        stderr: The same for stderr.
        verbose: 0 shows nothing, 1 what the job waits for, 2 also where each rank runs.
        prefix_output_with_timestamp: Whether those lines also start with the time.
        executable: Python interpreter of the workers; default: the one that runs the Spark task.
        use_mpi, use_gloo, extra_mpi_args, nics: Accepted for compatibility with Horovod. There is
            one transport, and its addresses are found by trying them; a value that asks for
            something else gets a warning.
        resource_profile: What each task needs, for Spark's stage-level scheduling; pyspark 4.0 and
            newer.
        store: Where results of more than 16 MiB travel, and a function with its arguments that is
            as large: a store or its URL, which every executor and this process must reach. Without
            it they travel in Spark's rows, which `spark.driver.maxResultSize` bounds, and its
            closure.
        warm: Whether workers start warm, from a fork server of their executor that has imported
            torch; by default they do in notebooks, inside Spark's `CrossValidator` and its like,
            and where `FARANDOLE_WARM_WORKERS` says `on`.
        timeline: File for one timeline of all ranks, with aligned clocks, that opens in Perfetto;
            `True` keeps it in the run of `ui`.
        ui: `True` opens the run viewer, prints its link and keeps the run in `farandole-runs` of
            the current directory; a store, or its path or URL, keeps it there. Shows ranks, their
            load, events and what `farandole.spark.task.report` says. Of what ranks print, a local
            store gets all lines that go to `stdout` and `stderr` of this call; without these, the
            last lines of stderr of each rank.

    Returns:
        The results by rank.

    Raises:
        FarandoleJobError: A worker failed; its rank, host, exit, traceback and last words are in
            the exception, which is raised from the worker's own exception where that can be
            unpickled here. Nothing is run again.
        ValueError: Spark has fewer slots than `num_proc`, or cannot fulfil the request.
        TimeoutError: Not all tasks started in time.
        Exception: There is no active Spark session.
    """
    with (
        timelines.gathered(timeline),
        watched(ui, fn, num_proc, "run", Shim.active(), writes_output=True),
    ):
        return run_with(
            fn,
            args,
            kwargs,
            None,
            num_proc=num_proc,
            start_timeout=start_timeout,
            use_mpi=use_mpi,
            use_gloo=use_gloo,
            extra_mpi_args=extra_mpi_args,
            env=env,
            stdout=stdout,
            stderr=stderr,
            verbose=verbose,
            nics=nics,
            prefix_output_with_timestamp=prefix_output_with_timestamp,
            executable=executable,
            resource_profile=resource_profile,
            store=store,
            warm=warm,
        )


def run_elastic(  # noqa: D417 - the ignored ones are named in one line
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = {},
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str | None] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    executable: str | None = None,
    resource_profile: ResourceProfile | None = None,
    store: Store | str | None = None,
    timeline: bool | str | os.PathLike[str] | None = None,
    ui: bool | str | os.PathLike[str] | Store = False,
) -> list[Any]:
    """Runs a function on Spark tasks whose number changes while it runs, and returns its results on
    the last ones.

    There is no barrier stage: each worker is a Spark job of one task. When an executor is lost, the
    other workers continue in a new world, and a new one joins as soon as Spark offers a slot; when
    Spark decommissions an executor its workers leave before that. `fn` keeps what it needs in a
    `State` and trains in a function of `farandole.torch.elastic.run` or its siblings, or uses an
    optimizer that is fault tolerant.

    Args:
        fn: The function. It is pickled by cloudpickle once, on the driver.
        args: Its arguments.
        kwargs: Its keyword arguments.
        num_proc: Workers that the first world waits for; default: Spark's default parallelism, or
            `max_num_proc`.
        min_num_proc: Smallest number of workers; default: `num_proc`.
        max_num_proc: Largest number of workers; default: `num_proc`.
        start_timeout: Seconds within which a worker must start; default as for `run`.
        elastic_timeout: Seconds the job may wait for `min_num_proc` workers; default:
            `FARANDOLE_ELASTIC_TIMEOUT`, or Horovod's name of it, else 600.
        reset_limit: Number of changes of the world after which the job fails; default: no limit.
        env: Variables to set in every worker; `None` as a value removes one.
        stdout: As for `run`.
        stderr: As for `run`.
        verbose: As for `run`; 1 also says when workers come and go.
        prefix_output_with_timestamp: As for `run`.
        executable: As for `run`.
        resource_profile: As for `run`.
        store: As for `run`.
        timeline: As for `run`: that of the last world.
        ui: As for `run`.
        nics: Accepted for compatibility with Horovod, with a warning.
        min_np, max_np: Horovod's old names of `min_num_proc` and `max_num_proc`.

    Returns:
        The results by rank of the last world.

    Raises:
        FarandoleJobError: The function failed on all workers by itself, or the job could not
            continue; as for `run`.
        ValueError: Numbers that contradict each other, or fewer slots than `min_num_proc`.
    """
    if nics:
        warnings.warn(
            f"nics={sorted(set(nics))} is ignored: addresses are found by trying them", stacklevel=2
        )
    shim = Shim.active()
    with (
        timelines.gathered(timeline),
        watched(ui, fn, num_proc, "run_elastic", shim, writes_output=True),
    ):
        return run_elastic_with(
            fn,
            args,
            kwargs,
            None,
            num_proc=num_proc,
            min_num_proc=_one_of("min_num_proc", min_num_proc, "min_np", min_np),
            max_num_proc=_one_of("max_num_proc", max_num_proc, "max_np", max_np),
            start_timeout=start_timeout,
            elastic_timeout=elastic_timeout,
            reset_limit=reset_limit,
            env=env,
            stdout=stdout,
            stderr=stderr,
            verbose=verbose,
            prefix_output_with_timestamp=prefix_output_with_timestamp,
            executable=executable,
            resource_profile=resource_profile,
            store=store,
        )


def run_elastic_with(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    on_progress: Callable[[int, dict[str, Any]], None] | None,
    *,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str | None] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    resource_profile: ResourceProfile | None = None,
    store: Store | str | None = None,
    ends_on_error: bool = False,
) -> list[Any]:
    """Like `run_elastic`, with a callback for the records of workers; raises as `run_elastic`.

    With `ends_on_error` an exception of the function on one rank ends the job.
    """
    cluster = Cluster.active()
    first, least, most = elastic_sizes(
        num_proc, min_num_proc, max_num_proc, cluster.default_parallelism
    )
    cluster.check(least)
    if resource_profile is not None:
        cluster.check_profiles()
    start_limit(start_timeout)
    patience = elastic_limit(elastic_timeout)
    output = Output(stdout, stderr, prefix_output_with_timestamp, verbose)
    job = _Job(
        cluster,
        output,
        payload(fn, args, kwargs),
        None if store is None else Spill.below(store),
        env,
        executable,
    )

    from farandole._native.registrar import Registrar  # noqa: PLC0415 - starts its threads here

    # With fewer slots than it may have workers it would hold some that the next gang in the queue
    # counts on.
    with job.begun(fn, "run_elastic", most, start_timeout, resource_profile) as (limit, training):
        registrar = Registrar.elastic(
            first, least, most, timeout=patience, reset_limit=reset_limit, start_timeout=limit
        )
        work = job.work(registrar.ticket, training, limit, elastic=True)
        crew = SparkCrew(cluster, work, most, output, resource_profile)
        with job.heard(crew.tag, first, training):
            found = elastic.conduct(
                registrar,
                crew,
                output,
                on_progress,
                Decommissions(cluster),
                training,
                ends_on_error=ends_on_error,
            )
        return job.fetched(found)


@dataclass(frozen=True)
class _Job:
    """The base of jobs of fixed size and elastic jobs.

    Attributes:
        cluster: Where it runs.
        output: Where lines go.
        packed: The pickled function.
        spill: The directory by which large objects travel.
        env: Variables of the workers.
        executable: Their interpreter.
    """

    cluster: Cluster
    output: Output
    packed: bytes
    spill: Spill | None
    env: Mapping[str, str | None] | None
    executable: str | None

    @contextlib.contextmanager
    def begun(
        self,
        fn: Callable[..., Any],
        kind: str,
        number: int,
        start_timeout: float | None,
        profile: ResourceProfile | None,
    ) -> Iterator[tuple[float, Training]]:
        """Holds what the job needs: the seconds that are left for its start, and what tells the
        plugin of it.
        """
        from farandole.common import logs  # noqa: PLC0415 - starts its threads here

        logs.start()
        with contextlib.ExitStack() as held:
            if self.spill is not None:
                held.callback(self.spill.clear)
            limit = held.enter_context(
                _turn(self.cluster, number, self.output, start_timeout, profile)
            )
            shim = Shim.of(self.cluster.context)
            yield limit, held.enter_context(telling(shim, getattr(fn, "__qualname__", "run"), kind))

    def work(self, ticket: str, training: Training, limit: float, **more: Any) -> Work:
        """Returns the description of the job for its agents."""
        packed = (
            ahead.sent(self.cluster.session, self.packed)
            if self.spill is None
            else self.spill.carried(self.packed)
        )
        changes = _handed_on() | training.variables() | dict(self.env or {}) | timelines.variables()
        return Work(ticket, packed, changes, self.executable, self.output.streaming, limit, **more)

    @contextlib.contextmanager
    def heard(self, tag: str, number: int, training: Training) -> Iterator[None]:
        """Hears what Spark says of the job while it runs, and explains its failure by that."""
        training.tagged(tag, number)
        word = Word(Shim.of(self.cluster.context), tag, training, self.output)
        training.asking(word.look)
        try:
            yield
        except FarandoleJobError as error:
            word.explain(error)
            raise

    def fetched(self, found: list[Any]) -> list[Any]:
        """Returns the results, those that travelled by the store too."""
        return found if self.spill is None else [self.spill.fetched(value) for value in found]


@contextlib.contextmanager
def _turn(
    cluster: Cluster,
    number: int,
    output: Output,
    start_timeout: float | None,
    profile: ResourceProfile | None,
) -> Iterator[float]:
    """Waits for a job's slots and holds them; the seconds that are left for its start."""
    if profile is not None:
        yield start_limit(start_timeout)  # the slots of another profile are unknown
        return
    with queue(cluster).started(number, output.say, start_timeout) as left:
        yield left


def _one_of(name: str, value: int | None, old: str, given: int | None) -> int | None:
    if value is not None and given is not None and value != given:
        raise ValueError(f"{name} and {old} are two names of one argument: {value} and {given}")
    return value if value is not None else given


def run_with(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    on_progress: Callable[[int, dict[str, Any]], None] | None,
    *,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str | None] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    resource_profile: ResourceProfile | None = None,
    store: Store | str | None = None,
    warm: bool | None = None,
) -> list[Any]:
    """Like `run`, with a callback for the records of workers; raises as `run`."""
    del use_gloo
    if use_mpi or extra_mpi_args:
        warnings.warn(
            "use_mpi and extra_mpi_args are ignored: Farandole has a transport of its own",
            stacklevel=3,
        )
    if nics:
        warnings.warn(
            f"nics={sorted(set(nics))} is ignored: addresses are found by trying them; "
            "FARANDOLE_DRIVER_HOST names the "
            "driver's",
            stacklevel=3,
        )
    cluster = Cluster.active()
    size = cluster.default_parallelism() if num_proc is None else at_least(1)("num_proc", num_proc)
    cluster.check(size)
    if resource_profile is not None:
        cluster.check_profiles()
    start_limit(start_timeout)
    output = Output(stdout, stderr, prefix_output_with_timestamp, verbose)
    warmth = warm_workers.wanted(warm, by_default=False)
    spill = None if store is None else Spill.below(store)
    job = _Job(cluster, output, payload(fn, args, kwargs), spill, env, executable)

    from farandole._native.registrar import Registrar  # noqa: PLC0415 - starts its threads here

    with job.begun(fn, "run", size, start_timeout, resource_profile) as (limit, training):
        # The tasks of a local master are threads of this process's JVM.
        here = cluster.context is not None and cluster.is_local
        where = {"host": "127.0.0.1", "bind": ""} if here else {}
        registrar = Registrar(size, start_timeout=limit, **where)
        rejoin_after = 0.0 if cluster.is_dynamic else LEFT_ALONE
        work = job.work(registrar.ticket, training, limit, warm=warmth, rejoin_after=rejoin_after)
        meeting = _meeting(cluster, registrar, size, spill)
        agents = SparkAgents(cluster, work, size, output, resource_profile, meeting)
        with job.heard(agents.tag, size, training):
            endings = conduct(
                registrar,
                agents,
                size,
                output,
                on_progress,
                limit,
                "Spark tasks to start",
                training,
            )
            found = outcome.results(endings, size)
        return job.fetched(found)


def _handed_on() -> dict[str, str | None]:
    """Returns the settings of the driver on which driver and ranks must agree."""
    return {name: os.environ[name] for name in (DIAL_OUT, GRADIENTS) if name in os.environ}


def _meeting(
    cluster: Cluster, registrar: Registrar, size: int, spill: Spill | None
) -> Meeting | None:
    """Executors of classic Spark reach the driver, or there would be no job; a Connect client
    may be anywhere.
    """
    if (
        cluster.context is not None
        or cluster.is_dynamic
        or os.environ.get(DIAL_OUT, "0") not in ("", "0")
    ):
        return None
    return Meeting(tuple(registrar.addresses), size, spill)
