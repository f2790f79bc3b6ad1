# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`farandole.spark.run`: a function on every process of a gang, its results by rank."""

from __future__ import annotations

import contextlib
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from farandole import _variables as variables
from farandole._native.settings import read_setting
from farandole.common.argument_checks import make_minimum_check
from farandole.runner import timelines, warm_workers, worker_task_outcome
from farandole.runner.agent import WorkerSpec
from farandole.runner.elastic import driver_loop as elastic
from farandole.runner.errors import FarandoleJobError
from farandole.runner.gang import JobOutput, pickle_payload, run_gang
from farandole.runner.job_limits import (
    elastic_timeout_seconds,
    elastic_worker_counts,
    spark_start_timeout_seconds,
)
from farandole.runner.show.function_runs import record_run_for_viewer
from farandole.runner.show.training_run_reports import TrainingRun, report_run
from farandole.spark.job import connect_artifacts
from farandole.spark.job.agents import BARRIER_REJOIN_SECONDS, SparkAgents
from farandole.spark.job.application_slot_queues import slot_queue
from farandole.spark.job.decommission import ExecutorDecommissions
from farandole.spark.job.elastic_agents import SparkAgentPool
from farandole.spark.job.executor_loss import ExecutorLossReasons
from farandole.spark.job.session_adapter import SparkSessionAdapter
from farandole.spark.job.spill import JobSpillDirectory
from farandole.spark.job.task_rendezvous import TaskRendezvous
from farandole.spark.shim import SparkPlugin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pyspark.resource import ResourceProfile

    from farandole._native.registrar import Registrar
    from farandole.runner.backend import OnProgress
    from farandole.stores.store import Store

DIAL_OUT_VARIABLE = variables.DIAL_OUT
"""Variable which says that hosts open connections and accept none, so that a gang can use only the
registrar of its driver.
"""
GRADIENT_CONVENTION_VARIABLE = variables.GRADIENT_CONVENTION


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
    on_progress: OnProgress | None = None,
) -> list[Any]:
    """Runs a function on `num_proc` Spark tasks that start together, and returns the result of each
    rank.

    Each task starts one worker process and passes it the function; inside, `farandole.torch.init()`
    and its siblings form the world. Works on classic Spark and on Spark Connect.

    A worker starts with the environment of its Spark task, not with the driver's, changed by `env`.
    Spark sets `OMP_NUM_THREADS` there to `spark.task.cpus`, the task's share of its executor's
    cores; set it in `env` to give workers more. A worker can import the modules that its task can
    import.

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
        verbose: 0 shows nothing, 1 the reasons of waits, 2 also the host of each rank.
        prefix_output_with_timestamp: Whether those lines also start with the time.
        executable: Python interpreter of the workers; default: the one that runs the Spark task.
        use_mpi, use_gloo, extra_mpi_args, nics: Accepted for compatibility with Horovod. There is
            one transport, and its addresses are found by trying them; a value that asks for
            something else gets a warning.
        resource_profile: Resources of each task, for Spark's stage-level scheduling; pyspark 4.0
            and newer.
        store: Store for results of more than 16 MiB, and for a function with its arguments that is
            as large: a store or its URL, which every executor and this process must reach. Without
            it they travel in Spark's rows, which `spark.driver.maxResultSize` bounds, and its
            closure.
        warm: Whether workers start warm, from a fork server of their executor that has imported
            torch; by default they do in notebooks, inside Spark's `CrossValidator` and its like,
            and where `FARANDOLE_WARM_WORKERS` says `on`.
        timeline: File for one timeline of all ranks, with aligned clocks, that opens in Perfetto;
            `True` keeps it in the run of `ui`.
        ui: `True` opens the run viewer, prints its link and keeps the run in `farandole-runs` of
            the current directory; a store, or its path or URL, keeps the run there. The viewer
            shows ranks, their load, events and the reports of `farandole.spark.task.report`. With
            `stdout` and `stderr` of this call, a local store also gets all their lines; without
            them, it gets the last lines of stderr of each rank.
        on_progress: Called on this thread, while the job runs, with the rank and the record of
            every `farandole.spark.task.report`. An exception it raises ends the job.

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
    del use_gloo
    if use_mpi or extra_mpi_args:
        warnings.warn(
            "use_mpi and extra_mpi_args are ignored: Farandole has a transport of its own",
            stacklevel=2,
        )
    if nics:
        warnings.warn(
            f"nics={sorted(set(nics))} is ignored: addresses are found by trying them; "
            "FARANDOLE_DRIVER_HOST names the "
            "driver's",
            stacklevel=2,
        )
    with (
        timelines.collect_timelines(timeline),
        record_run_for_viewer(
            ui, fn, num_proc, "run", SparkPlugin.from_active_context(), writes_output=True
        ),
    ):
        cluster = SparkSessionAdapter.from_active_session()
        size = (
            cluster.default_parallelism()
            if num_proc is None
            else make_minimum_check(1)("num_proc", num_proc)
        )
        cluster.check_job_size(size)
        if resource_profile is not None:
            cluster.check_profile_support()
        spark_start_timeout_seconds(start_timeout)
        output = JobOutput(stdout, stderr, prefix_output_with_timestamp, verbose)
        warmth = warm_workers.resolve_warm_worker_settings(warm, by_default=False)
        spill = None if store is None else JobSpillDirectory.create_in_store(store)
        job = _SparkJob(cluster, output, pickle_payload(fn, args, kwargs), spill, env, executable)

        from farandole._native.registrar import Registrar  # noqa: PLC0415 - starts its threads here

        with job.hold_slots_and_spill(fn, "run", size, start_timeout, resource_profile) as (
            limit,
            training,
        ):
            # The tasks of a local master are threads of this process's JVM.
            has_local_tasks = cluster.context is not None and cluster.is_local
            where = {"host": "127.0.0.1", "bind": ""} if has_local_tasks else {}
            registrar = Registrar(size, start_timeout=limit, **where)
            rejoin_after = 0.0 if cluster.uses_dynamic_allocation else BARRIER_REJOIN_SECONDS
            work = job.make_worker_spec(
                registrar.ticket, training, limit, warm=warmth, rejoin_after=rejoin_after
            )
            rendezvous = _make_rendezvous_if_needed(cluster, registrar, size, spill)
            agents = SparkAgents(cluster, work, size, output, resource_profile, rendezvous)
            with job.explain_failures(agents.tag, size, training):
                endings = run_gang(
                    registrar,
                    agents,
                    size,
                    output,
                    on_progress,
                    limit,
                    "Spark tasks to start",
                    training,
                )
                found = worker_task_outcome.results_by_rank(endings, size)
            return job.load_results(found)


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
    on_progress: OnProgress | None = None,
    ends_on_error: bool = False,
) -> list[Any]:
    """Runs a function on Spark tasks whose number changes while it runs, and returns the results of
    the tasks of the last world.

    There is no barrier stage: each worker is a Spark job of one task. When an executor is lost, the
    other workers continue in a new world, and a new worker joins as soon as Spark offers a slot.
    When Spark decommissions an executor, its workers leave before the executor stops. `fn` keeps
    its state in a `State` and trains in a function of `farandole.torch.elastic.run` or its
    siblings, or uses an optimizer that is fault tolerant.

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
        timeline: As for `run`; the timeline of the last world.
        ui: As for `run`.
        on_progress: As for `run`.
        ends_on_error: Whether the job ends when the function raises an exception on one rank, and
            not only on all ranks of a world. An error of the network, such as a lost peer, does not
            count.
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
    shim = SparkPlugin.from_active_context()
    with (
        timelines.collect_timelines(timeline),
        record_run_for_viewer(ui, fn, num_proc, "run_elastic", shim, writes_output=True),
    ):
        cluster = SparkSessionAdapter.from_active_session()
        first, min_workers, max_workers = elastic_worker_counts(
            num_proc,
            _merge_aliases("min_num_proc", min_num_proc, "min_np", min_np),
            _merge_aliases("max_num_proc", max_num_proc, "max_np", max_np),
            cluster.default_parallelism,
        )
        cluster.check_job_size(min_workers)
        if resource_profile is not None:
            cluster.check_profile_support()
        spark_start_timeout_seconds(start_timeout)
        wait_seconds = elastic_timeout_seconds(elastic_timeout)
        output = JobOutput(stdout, stderr, prefix_output_with_timestamp, verbose)
        job = _SparkJob(
            cluster,
            output,
            pickle_payload(fn, args, kwargs),
            None if store is None else JobSpillDirectory.create_in_store(store),
            env,
            executable,
        )

        from farandole._native.registrar import Registrar  # noqa: PLC0415 - starts its threads here

        # Wait for slots for the maximum number of workers. Otherwise this job would later take
        # slots that the next gang in the queue needs.
        with job.hold_slots_and_spill(
            fn, "run_elastic", max_workers, start_timeout, resource_profile
        ) as (limit, training):
            registrar = Registrar.start_elastic(
                first,
                min_workers,
                max_workers,
                timeout=wait_seconds,
                reset_limit=reset_limit,
                start_timeout=limit,
            )
            work = job.make_worker_spec(registrar.ticket, training, limit, elastic=True)
            agent_pool = SparkAgentPool(cluster, work, max_workers, output, resource_profile)
            with job.explain_failures(agent_pool.tag, first, training):
                found = elastic.run_elastic_job(
                    registrar,
                    agent_pool,
                    output,
                    on_progress,
                    ExecutorDecommissions(cluster),
                    training,
                    ends_on_error=ends_on_error,
                )
            return job.load_results(found)


@dataclass(frozen=True)
class _SparkJob:
    """The base of jobs of fixed size and elastic jobs.

    Attributes:
        cluster: Cluster that runs the job.
        output: Receiver of the output lines.
        packed: The pickled function.
        spill: The directory by which large objects travel.
        env: Variables of the workers.
        executable: Their interpreter.
    """

    cluster: SparkSessionAdapter
    output: JobOutput
    packed: bytes
    spill: JobSpillDirectory | None
    env: Mapping[str, str | None] | None
    executable: str | None

    @contextlib.contextmanager
    def hold_slots_and_spill(
        self,
        fn: Callable[..., Any],
        kind: str,
        number: int,
        start_timeout: float | None,
        profile: ResourceProfile | None,
    ) -> Iterator[tuple[float, TrainingRun]]:
        """Holds the slots and the spill of the job; yields the seconds that are left for its start,
        and the run that reports to the plugin.
        """
        from farandole.common import logs  # noqa: PLC0415 - starts its threads here

        logs.start_logging()
        with contextlib.ExitStack() as held:
            if self.spill is not None:
                held.callback(self.spill.delete_directory)
            limit = held.enter_context(
                _hold_slots(self.cluster, number, self.output, start_timeout, profile)
            )
            shim = SparkPlugin.from_context(self.cluster.context)
            yield (
                limit,
                held.enter_context(report_run(shim, getattr(fn, "__qualname__", "run"), kind)),
            )

    def make_worker_spec(
        self, ticket: str, training: TrainingRun, limit: float, **more: Any
    ) -> WorkerSpec:
        """Returns the description of the job for its agents."""
        packed = (
            connect_artifacts.prestage_if_large(self.cluster.session, self.packed)
            if self.spill is None
            else self.spill.pack_call(self.packed)
        )
        changes = (
            _inherited_variables()
            | training.worker_variables()
            | dict(self.env or {})
            | timelines.begin_timeline_collection()
        )
        return WorkerSpec(
            ticket,
            packed,
            changes,
            self.executable,
            self.output.streams_worker_lines,
            limit,
            **more,
        )

    @contextlib.contextmanager
    def explain_failures(self, tag: str, number: int, training: TrainingRun) -> Iterator[None]:
        """Polls Spark's messages about the job, and adds the reason of a loss to its failure."""
        training.set_job_tag(tag, number)
        word = ExecutorLossReasons(
            SparkPlugin.from_context(self.cluster.context), tag, training, self.output
        )
        training.set_poll_callback(word.poll_messages)
        try:
            yield
        except FarandoleJobError as error:
            word.add_loss_reason(error)
            raise

    def load_results(self, found: list[Any]) -> list[Any]:
        """Returns the results, including the results that were passed through the store."""
        return found if self.spill is None else [self.spill.load_result(value) for value in found]


@contextlib.contextmanager
def _hold_slots(
    cluster: SparkSessionAdapter,
    number: int,
    output: JobOutput,
    start_timeout: float | None,
    profile: ResourceProfile | None,
) -> Iterator[float]:
    """Waits for a job's slots and holds them; the seconds that are left for its start."""
    limit = spark_start_timeout_seconds(start_timeout)
    if profile is not None:
        yield limit  # the slots of another profile are unknown
        return
    with slot_queue(cluster).hold_slots_within_start_timeout(
        number, output.print_message, start_timeout, limit
    ) as start_seconds:
        yield start_seconds


def _merge_aliases(name: str, value: int | None, old: str, given: int | None) -> int | None:
    if value is not None and given is not None and value != given:
        raise ValueError(f"{name} and {old} are two names of one argument: {value} and {given}")
    return value if value is not None else given


def _inherited_variables() -> dict[str, str | None]:
    """Returns the settings of the driver on which driver and ranks must agree."""
    return {
        name: os.environ[name]
        for name in (DIAL_OUT_VARIABLE, GRADIENT_CONVENTION_VARIABLE)
        if name in os.environ
    }


def _make_rendezvous_if_needed(
    cluster: SparkSessionAdapter, registrar: Registrar, size: int, spill: JobSpillDirectory | None
) -> TaskRendezvous | None:
    """Executors of classic Spark reach the driver, or there would be no job; a Connect client
    may be anywhere.
    """
    if (
        cluster.context is not None
        or cluster.uses_dynamic_allocation
        or read_setting(DIAL_OUT_VARIABLE)
    ):
        return None
    return TaskRendezvous(tuple(registrar.addresses), size, spill)
