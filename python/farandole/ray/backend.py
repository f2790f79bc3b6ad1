# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The backend that trains estimators on Ray."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from farandole.common.argument_checks import make_minimum_check
from farandole.ray.adapter import resolve_gpu_count
from farandole.ray.agent_pool import (
    DRIVER_ONLY_VARIABLES,
    ActorResources,
    AgentActor,
    RayAgentPool,
    hold_minimum_resources,
)
from farandole.ray.node_drains import DrainedNodeDepartures
from farandole.ray.results import actor_death_summary
from farandole.ray.strategy import current_placement_group, hold_placement_group
from farandole.ray.utils import import_ray, is_ray_client
from farandole.runner import forwarded_variables, timelines, warm_workers, worker_task_outcome
from farandole.runner.agent import WorkerSpec
from farandole.runner.backend import (
    Backend,
    given_elastic_limits,
    given_size_bounds,
    make_registrar,
)
from farandole.runner.elastic.driver_loop import run_elastic_job as conduct_elastic
from farandole.runner.gang import GangAgents, pickle_payload, run_gang
from farandole.runner.job_limits import start_timeout_seconds
from farandole.runner.show import training_run_reports
from farandole.runner.streams import OutputStreams
from farandole.runner.worker_task_outcome import TaskOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farandole.runner.gang import JobOutput


class RayBackend(Backend):
    """Workers beside Ray actors, one for each. Ray places the actors and assigns GPUs to them.

    `TorchEstimator(backend=RayBackend(num_workers=4), ...).fit(frame)` trains there. The store has
    to be one that all nodes reach. `ray.init` has been called, or is called with its defaults.

    With `min_num_proc` or `max_num_proc` the job is elastic: when a worker is lost, the others
    continue, and another one replaces it when Ray has the resources. The resources of the
    smallest number of workers are reserved at once. If the cluster has no room for further workers,
    they wait in Ray's queue, which makes an autoscaler add nodes.

    Args:
        num_workers: Number of ranks; of an elastic job, the number at its beginning.
        use_gpu: Whether each rank gets GPUs.
        gpus_per_worker: GPUs of a rank; 1 by default with `use_gpu`.
        cpus_per_worker: CPUs that Ray reserves for a rank.
        env: Variables to set in the workers; `None` as a value removes one.
        pass_env: Names of further variables of the driver that are forwarded, or patterns such as
            `"WANDB_*"`.
        placement_group_timeout: Seconds within which Ray must reserve the resources; in an elastic
            job, the resources of `min_num_proc` workers.
        start_timeout: Seconds within which all workers must then start; default as in
            `farandole.spark.run`.
        stdout: Receiver of their stdout, each line as `[rank]<stdout>:line`; default: `sys.stdout`.
        stderr: The same for stderr; default: `sys.stderr`.
        verbose: 0 shows only the workers' output, 1 also the reason why the job waits, 2 also the
            host of each rank.
        warm: Whether workers start warm, from a fork server of their node that has imported torch;
            by default they do where this process has imported it, unless `FARANDOLE_WARM_WORKERS`
            says `off`.
        min_num_proc: Smallest number of ranks; default: `num_workers`.
        max_num_proc: Largest number of ranks; default: `num_workers`.
        elastic_timeout: Seconds an elastic job may wait for `min_num_proc` ranks; default as in
            `farandole.spark.run_elastic`.
        reset_limit: Number of changes of the world after which an elastic job fails; default: no
            limit.

    Raises:
        ValueError: A number is out of range or contradicts another one, `gpus_per_worker`
            contradicts `use_gpu`, or `elastic_timeout` or `reset_limit` is given for a job that is
            not elastic.
        ImportError: Ray is not installed.
    """

    def __init__(
        self,
        num_workers: int,
        use_gpu: bool = False,
        *,
        gpus_per_worker: int | None = None,
        cpus_per_worker: float = 1,
        env: Mapping[str, str | None] | None = None,
        pass_env: Sequence[str] = (),
        placement_group_timeout: float = 100,
        start_timeout: float | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        verbose: int = 1,
        warm: bool | None = None,
        min_num_proc: int | None = None,
        max_num_proc: int | None = None,
        elastic_timeout: float | None = None,
        reset_limit: int | None = None,
    ) -> None:
        import_ray()
        self._num_workers = make_minimum_check(1)("num_workers", num_workers)
        self._bounds = given_size_bounds(num_workers, min_num_proc, max_num_proc)
        self._limits = given_elastic_limits(self._bounds, elastic_timeout, reset_limit)
        self._use_gpu = use_gpu
        self._gpus = resolve_gpu_count(gpus_per_worker, use_gpu, "gpus_per_worker")
        self._cpus = cpus_per_worker
        self._env = dict(env or {})
        self._pass_env = tuple(pass_env)
        self._placed_within = placement_group_timeout
        self._start_timeout = start_timeout
        self._streams = OutputStreams(stdout, stderr, verbose=verbose)
        self._warm = warm
        self._spare: SpareActors | None = None

    def with_spare(self, spare: SpareActors) -> RayBackend:
        """Lets jobs in one placement group use the same actors, one job after the other.

        Args:
            spare: Holds the actors between the jobs.
        """
        self._spare = spare
        return self

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = {},
        env: Mapping[str, str | None] | None = None,
        on_progress: Callable[[int, dict[str, Any]], None] | None = None,
    ) -> list[Any]:
        """Like `Backend.run`; an elastic job returns the results of its last world.

        Raises:
            FarandoleJobError: As `Backend.run`.
            TimeoutError: Ray does not reserve the resources in time.
            RuntimeError: This process is a client of Ray Client, which the workers cannot reach.
        """
        size, limit = self._num_workers, start_timeout_seconds(self._start_timeout)
        packed = pickle_payload(fn, args, kwargs)
        output = self._streams.make_job_output(size)
        taken, _ = forwarded_variables.split_forwarded_variables(
            os.environ, self._pass_env, DRIVER_ONLY_VARIABLES
        )
        training_run = training_run_reports.current_run()
        changes: dict[str, str | None] = {**taken, **self._env, **(env or {})}
        changes |= training_run.worker_variables() | timelines.begin_timeline_collection()
        ray = import_ray()
        self.check()
        if not ray.is_initialized():
            ray.init()
        warmth = warm_workers.resolve_warm_worker_settings(self._warm, by_default=True)
        needs, group = ActorResources(self._cpus, self._gpus), None
        with contextlib.ExitStack() as held:
            if self._bounds:
                held.enter_context(
                    hold_minimum_resources(
                        needs,
                        self._bounds.get("min_num_proc", size),
                        self._placed_within,
                        output.print_message,
                    )
                )
            else:
                group = held.enter_context(self._current_or_new_placement_group(output))
            registrar, max_workers = make_registrar(size, self._bounds, self._limits, limit)
            work = WorkerSpec(
                registrar.ticket,
                packed,
                changes,
                None,
                output.streams_worker_lines,
                limit,
                warmth,
                elastic=bool(self._bounds),
            )
            if self._bounds:
                return conduct_elastic(
                    registrar,
                    RayAgentPool(registrar, work, max_workers, needs, output),
                    output,
                    on_progress,
                    DrainedNodeDepartures(),
                    training_run,
                    ends_on_error=True,
                )
            agents = RayAgents(work, size, self._cpus, self._gpus, group, self._spare)
            endings = run_gang(
                registrar,
                agents,
                size,
                output,
                on_progress,
                limit,
                "Ray actors to start",
                training_run,
            )
        return worker_task_outcome.results_by_rank(endings, size)

    def _current_or_new_placement_group(
        self, output: JobOutput
    ) -> contextlib.AbstractContextManager[Any]:
        """Returns the placement group of a job of fixed size: the current one, or a new one."""
        group = current_placement_group()
        if group is not None:
            return contextlib.nullcontext(group)
        return hold_placement_group(
            self._cpus, self._gpus, self._num_workers, self._placed_within, output.print_message
        )

    def plain(self) -> dict[str, Any]:
        """Returns the arguments that make a backend of the same kind and numbers: no
        environment, no stream.
        """
        return {
            "num_workers": self._num_workers,
            "use_gpu": self._use_gpu,
            "gpus_per_worker": self._gpus if self._use_gpu else None,
            "cpus_per_worker": self._cpus,
            "placement_group_timeout": self._placed_within,
            "start_timeout": self._start_timeout,
            "verbose": self._streams.verbose,
            "warm": self._warm,
            **self._bounds,
            **self._limits,
        }

    def num_processes(self) -> int:
        """Returns the number of ranks; of an elastic job, the number at its beginning."""
        return self._num_workers

    def max_processes(self) -> int:
        """Returns the largest number of ranks that a job may have at a time."""
        return max(self._num_workers, self._bounds.get("max_num_proc", 0))

    def min_processes(self) -> int:
        """Returns the smallest number of workers with which an elastic job continues."""
        return self._bounds.get("min_num_proc", self._num_workers)

    def check(self) -> None:
        """Like `Backend.check`.

        Raises:
            RuntimeError: This process is a client of Ray Client.
        """
        if is_ray_client():
            raise RuntimeError(
                "RayBackend does not work with Ray Client, because workers connect to this "
                "process: run the script in the cluster, for example by `ray job submit`"
            )


class SpareActors:
    """Actors that wait for the next job of their placement group. An actor starts in a second,
    and a job takes less.
    """

    _process_instance: ClassVar[SpareActors | None] = None

    def __init__(self) -> None:
        self._reuse_key: Any = None
        self._actors: list[Any] = []

    @classmethod
    def spare_actors_of_process(cls) -> SpareActors:
        """Returns the spare actors of this process, in which Ray Tune runs several trials with
        `reuse_actors=True`.
        """
        if cls._process_instance is None:
            cls._process_instance = cls()
        return cls._process_instance

    def take_matching_actors(self, purpose: Any) -> list[Any]:
        """Returns the waiting actors if they are for the same purpose; other actors are killed.

        Args:
            purpose: Placement group, number and resources.
        """
        actors, self._actors = self._actors, []
        if purpose == self._reuse_key:
            return actors
        for actor in actors:
            import_ray().kill(actor)
        return []

    def keep_spare_actors(self, purpose: Any, actors: list[Any]) -> None:
        """Keeps actors that have ended their job."""
        self._reuse_key, self._actors = purpose, actors


class RayAgents(GangAgents):
    """One actor for each worker, which holds its agent.

    Args:
        work: The work of the workers.
        size: Number of workers.
        cpus: CPUs of each.
        gpus: GPUs of each.
        group: The placement group.
        spare: Provides the actors, and gets them back if they survive the job; `None` uses each
            actor once.
    """

    def __init__(
        self,
        work: WorkerSpec,
        size: int,
        cpus: float,
        gpus: float,
        group: Any,
        spare: SpareActors | None = None,
    ) -> None:
        self._work = work
        self._size = size
        self._needs = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0}
        self._group = group
        self._spare = spare
        self._actors: list[Any] = []
        self._agent_results: list[Any] = []

    def start_agents(self) -> None:
        """Asks Ray for the actors."""
        self._actors = (
            self._spare.take_matching_actors(self._reuse_key()) if self._spare is not None else []
        ) or self._create_actors()
        self._agent_results = [
            actor.run_worker.remote(self._work, task) for task, actor in enumerate(self._actors)
        ]

    def _create_actors(self) -> list[Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415 - Ray may be absent

        remote = import_ray().remote(AgentActor)
        placed = PlacementGroupSchedulingStrategy(
            self._group, placement_group_capture_child_tasks=False
        )
        return [
            remote.options(scheduling_strategy=placed, **self._needs).remote()
            for _ in range(self._size)
        ]

    def _reuse_key(self) -> Any:
        return self._group.id, self._size, self._needs

    def all_ended(self) -> bool:
        """Returns whether all agents have returned, or died."""
        return not self._agent_results or len(self._finished_agents()) == self._size

    def has_ended_before_registering(self) -> bool:
        """Returns whether an agent has ended; called while the gang forms."""
        return bool(self._finished_agents())

    def cancel_agents(self) -> None:
        """Kills the actors."""
        actors, self._actors = self._actors, []
        for actor in actors:
            import_ray().kill(actor)

    def task_outcomes(self) -> list[TaskOutcome]:
        """Returns how each task ended. The death of an actor counts as an end."""
        found = []
        survived = True
        for task, reference in enumerate(self._agent_results):
            try:
                found.append(import_ray().get(reference))
            except Exception as error:  # noqa: BLE001 - Ray's, for an actor or a node that died
                found.append(
                    TaskOutcome(
                        task, "", refused=f"its Ray actor died: {actor_death_summary(error)}"
                    )
                )
                survived = False
        if survived and self._spare is not None and self._actors:
            self._spare.keep_spare_actors(self._reuse_key(), self._actors)
            self._actors = []
        self.cancel_agents()
        return found

    def _finished_agents(self) -> list[Any]:
        ready, _ = import_ray().wait(self._agent_results, num_returns=self._size, timeout=0)
        return ready
