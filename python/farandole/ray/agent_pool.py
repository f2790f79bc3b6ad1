# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Workers of an elastic job on Ray: an actor holds the agent of each worker, and a new actor
replaces one that died.

The smallest number of workers has a placement group, so Ray reserves resources for all of them or
for none. If two jobs do not fit at once, one waits. Further workers are placed one by one.

If Ray has no resources for an actor, the actor waits in Ray's queue, which makes an autoscaler add
nodes. The worker joins when its actor runs. The registrar decides which workers are in the world,
and when the job is done.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from farandole.ray.discovery import count_workers_as_free
from farandole.ray.results import actor_death_summary
from farandole.ray.strategy import current_placement_group, hold_placement_group
from farandole.ray.utils import import_ray
from farandole.runner.elastic.agent_pool import ElasticAgentPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from farandole._native.registrar import Registrar
    from farandole.runner.agent import WorkerSpec
    from farandole.runner.gang import JobOutput
    from farandole.runner.worker_task_outcome import TaskOutcome

DRIVER_ONLY_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS")
"""Variables of the driver that are not valid for workers: Ray sets the variables of each worker in
the actor's environment.
"""

_SlotKey = tuple[str | None, int]
"""A node's address, or `None` for anywhere, and the number of a slot there."""

ACTOR_RESTART_DELAYS: Final = (1.0, 30.0)
"""Seconds before another actor replaces a failed one, at first and at most."""

_SLOT_CHECK_INTERVAL = 1.0
_SHUTDOWN_TIMEOUT = 10.0


class AgentActor:
    """The actor that holds a worker's agent. The worker is a separate process, which ends with the
    actor.
    """

    def run_worker(self, work: WorkerSpec, task: int) -> TaskOutcome:
        """Runs the worker of one task to its end."""
        from farandole.runner.agent import run_worker  # noqa: PLC0415 - in the actor
        from farandole.runner.worker import EXECUTOR_VARIABLE  # noqa: PLC0415 - as above

        if work.elastic:  # the worker leaves when Ray drains the node
            work = replace(
                work,
                env={
                    **work.env,
                    EXECUTOR_VARIABLE: import_ray().get_runtime_context().get_node_id(),
                },
            )
        # Ray's daemon of the node started this process, and outlives it. So the fork server of the
        # daemon is available to the next job.
        return run_worker(work, task, owner=os.getppid())


@dataclass
class ActorResources:
    """The resources of each actor.

    Attributes:
        cpus: CPUs.
        gpus: GPUs; Ray chooses them and sets `CUDA_VISIBLE_DEVICES`.
        pauses: Seconds before another actor replaces a failed one, at first and at most.
        group: A placement group with bundles for the first workers.
        grouped: Number of the bundles.
    """

    cpus: float = 1
    gpus: float = 0
    pauses: tuple[float, float] = ACTOR_RESTART_DELAYS
    group: Any = None
    num_bundles: int = 0

    def actor_options(self, node: str | None, number: int) -> dict[str, Any]:
        """Returns the options of an actor.

        Args:
            node: The required node of the actor; `None` leaves the choice to Ray.
            number: Number of the actor's slot on the node.
        """
        options: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_restarts": 0}
        if node is not None:
            options["resources"] = {f"node:{node}": 0.001}
        elif number < self.num_bundles:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415 - Ray may be absent

            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self.group, placement_group_capture_child_tasks=False
            )
        return options

    def restart_delay(self, before: float | None, healthy: float) -> float:
        """Returns the seconds before the next actor of a slot: more after each failure, and few
        after a healthy actor.

        Args:
            before: The last delay of the slot; `None` before the first one.
            healthy: Seconds that the last actor of the slot has lived.
        """
        first, longest = self.pauses
        return first if before is None or healthy > longest else min(2 * before, longest)


@contextlib.contextmanager
def hold_minimum_resources(
    needs: ActorResources, min_workers: int, limit: float, report_wait: Callable[[str], None]
) -> Iterator[None]:
    """Reserves resources for the smallest number of workers of a job at once, and releases them
    afterwards.

    Inside another placement group, such as the group of a trial of Ray Tune, nothing is reserved:
    that group already holds the resources.

    Args:
        needs: Resources of each worker; receives the placement group.
        min_workers: Smallest number of workers; 0 reserves nothing.
        limit: Seconds that Ray may take.
        report_wait: Receives the reason for the wait.

    Raises:
        TimeoutError: Ray did not reserve the resources in time.
    """
    if not min_workers or not (needs.cpus or needs.gpus) or current_placement_group() is not None:
        yield
        return
    with hold_placement_group(needs.cpus, needs.gpus, min_workers, limit, report_wait) as group:
        needs.group, needs.num_bundles = group, min_workers
        yield


@dataclass
class _ActorSlot:
    """A slot for one worker: on a given node, or on any node that Ray chooses."""

    node: str | None
    number: int = 0
    given_up: threading.Event = field(default_factory=threading.Event)
    refusals_in_row: int = 0
    task: int | None = None
    actor: Any = None
    thread: threading.Thread | None = None


class RayAgentPool(ElasticAgentPool):
    """Keeps an actor for each worker that the job may have.

    Args:
        registrar: The job's meeting point, which dismisses workers of nodes that are taken away.
        work: The work of the workers.
        most: Largest number of workers.
        needs: Resources of each worker.
        output: Receives messages about workers.
        hosts: Finds nodes and their slots; `None` leaves the choice to Ray.
    """

    def __init__(
        self,
        registrar: Registrar,
        work: WorkerSpec,
        max_workers: int,
        needs: ActorResources,
        output: JobOutput,
        hosts: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        super().__init__()
        self._registrar = registrar
        self._work = work
        self._max_workers = max_workers
        self._needs = needs
        self._output = output
        self._hosts = hosts
        self._slots: dict[_SlotKey, _ActorSlot] = {}
        self._found: list[_SlotKey] = []
        self._watch: threading.Thread | None = None

    def start_workers(self) -> None:
        """Asks Ray for the first actors."""
        self._update_slots()
        self._watch = threading.Thread(
            target=self._watch_slots, name="farandole-ray-nodes", daemon=True
        )
        self._watch.start()

    def end_workers(self) -> None:
        """Requests no more actors, and ends all actors."""
        self._stopped.set()
        with self._lock:
            seats = list(self._slots.values())
        deadline = time.monotonic() + _SHUTDOWN_TIMEOUT
        for seat in seats:
            seat.given_up.set()
        for seat in seats:
            self._kill_actor(seat)
        for thread in (self._watch, *(seat.thread for seat in seats)):
            if thread is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def fewest_consecutive_refusals(self) -> int:
        """Returns how often in a row no worker could start, in the slot with the fewest."""
        with self._lock:
            return min((seat.refusals_in_row for seat in self._slots.values()), default=0)

    def _watch_slots(self) -> None:
        while not self._stopped.wait(_SLOT_CHECK_INTERVAL):
            self._update_slots()

    def _update_slots(self) -> None:
        """Adds the new slots, and gives up the slots on lost nodes."""
        wanted = self._find_slots()
        with self._lock:
            new = [slot_key for slot_key in wanted if slot_key not in self._slots]
            gone = [slot_key for slot_key in self._slots if slot_key not in wanted]
            removed_slots = [self._slots.pop(slot_key) for slot_key in gone]
            for slot_key in new:
                seat = self._slots[slot_key] = _ActorSlot(*slot_key)
                seat.thread = threading.Thread(
                    target=self._run_slot, args=(seat,), name="farandole-ray", daemon=True
                )
        for seat in removed_slots:
            seat.given_up.set()
            if seat.task is not None:
                self.dismissed.add(seat.task)
                self._registrar.dismiss_task(seat.task, f"its node {seat.node} was removed")
        for slot_key in new:
            thread = self._slots[slot_key].thread
            if thread is not None and not self._stopped.is_set():
                thread.start()

    def _find_slots(self) -> list[_SlotKey]:
        if self._hosts is None:
            return [(None, number) for number in range(self._max_workers)]
        with self._lock:
            own = Counter(seat.node for seat in self._slots.values() if seat.node is not None)
        try:
            with count_workers_as_free(own):
                hosts = self._hosts()
        except Exception as error:
            if not self._found:
                raise
            self._output.print_message(
                f"discovery failed, so the hosts that were found last are kept: {error}"
            )
            return self._found
        found: list[_SlotKey] = [
            (host, slot) for host, slots in hosts.items() for slot in range(slots)
        ]
        self._found = found[: self._max_workers]
        return self._found

    def _run_slot(self, seat: _ActorSlot) -> None:
        pause: float | None = None
        while not seat.given_up.is_set():
            began = time.monotonic()
            with self._hold_new_task_number() as task:
                self._run_actor(seat, task)
            if self._has_returned(task):
                return
            if task in self.dismissed:
                # its bundle in the group may be on a node that Ray drains
                seat.number = self._needs.num_bundles
            pause = self._needs.restart_delay(pause, time.monotonic() - began)
            seat.given_up.wait(pause)

    def _run_actor(self, seat: _ActorSlot, task: int) -> None:
        """Runs one actor from its start to its end, and notes the outcome of its worker, unless it
        had none or died with it.
        """
        ray = import_ray()
        remote = ray.remote(AgentActor)
        seat.task = task
        seat.actor = remote.options(**self._needs.actor_options(seat.node, seat.number)).remote()
        try:
            if seat.given_up.is_set():
                return
            outcome: TaskOutcome = ray.get(seat.actor.run_worker.remote(self._work, task))
        except Exception as error:  # noqa: BLE001 - the actor or its node died: the next one is another worker
            if not seat.given_up.is_set():
                self._output.print_message(
                    f"the actor of worker {task} died: {actor_death_summary(error)}"
                )
            return
        finally:
            self._kill_actor(seat)
        if outcome.refused is not None:
            self.refusals.append(f"{outcome.host}: {outcome.refused}")
            seat.refusals_in_row += 1
            return
        seat.refusals_in_row = 0
        self.endings[outcome.task] = outcome

    def _kill_actor(self, seat: _ActorSlot) -> None:
        actor, ray = seat.actor, import_ray()
        if actor is not None and ray.is_initialized():
            ray.kill(actor)
