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
import itertools
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from farandole.ray.discovery import asked_by
from farandole.ray.results import headline
from farandole.ray.strategy import current_placement_group, reserved
from farandole.ray.utils import needed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from farandole._native.registrar import Registrar
    from farandole.runner.agent import Work
    from farandole.runner.gang import Output
    from farandole.runner.outcome import Ending

NOT_FOR_WORKERS: Final = ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS")
"""Variables of the driver that do not hold for workers: what Ray says of each is in the actor's
environment.
"""

_Place = tuple[str | None, int]
"""A node's address, or `None` for anywhere, and the number of a slot there."""

PAUSES: Final = (1.0, 30.0)
"""Seconds before another actor follows one that failed, at first and at most."""

_EVERY = 1.0
_END_WITHIN = 10.0


class AgentHolder:
    """The actor that holds a worker's agent; the worker is a process of its own, which ends with
    the actor.
    """

    def serve(self, work: Work, task: int) -> Ending:
        """Runs the worker of one task to its end."""
        from farandole.runner.agent import serve  # noqa: PLC0415 - in the actor
        from farandole.runner.worker import EXECUTOR  # noqa: PLC0415 - as above

        if work.elastic:  # its worker leaves when Ray drains the node
            work = replace(
                work, env={**work.env, EXECUTOR: needed().get_runtime_context().get_node_id()}
            )
        # Ray's daemon of the node started this process, and outlives it: its fork server is there
        # for the next job.
        return serve(work, task, owner=os.getppid())


@dataclass
class Needs:
    """The resources of each actor.

    Attributes:
        cpus: CPUs.
        gpus: GPUs; Ray chooses them and sets `CUDA_VISIBLE_DEVICES`.
        pauses: Seconds before another actor follows one that failed, at first and at most.
        group: A placement group with bundles for the first workers.
        grouped: How many it has.
    """

    cpus: float = 1
    gpus: float = 0
    pauses: tuple[float, float] = PAUSES
    group: Any = None
    grouped: int = 0

    def options(self, node: str | None, number: int) -> dict[str, Any]:
        """Options of an actor.

        Args:
            node: The node it has to be on; `None` leaves it to Ray.
            number: Of its slot there.
        """
        options: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_restarts": 0}
        if node is not None:
            options["resources"] = {f"node:{node}": 0.001}
        elif number < self.grouped:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415 - Ray may be absent

            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self.group, placement_group_capture_child_tasks=False
            )
        return options

    def pause(self, before: float | None, healthy: float) -> float:
        """Returns the seconds before the next actor of a seat: more after each failure, and few
        after a healthy actor.

        Args:
            before: The last pause of the seat; `None` before its first.
            healthy: Seconds that its last actor has lived.
        """
        first, longest = self.pauses
        return first if before is None or healthy > longest else min(2 * before, longest)


@contextlib.contextmanager
def room(needs: Needs, least: int, limit: float, say: Callable[[str], None]) -> Iterator[None]:
    """Reserves room for the fewest workers of a job at once, and gives it back afterwards.

    Nothing is reserved inside of another placement group, such as a trial's of Ray Tune, which
    holds the room already.

    Args:
        needs: What each worker needs; gets the placement group.
        least: Fewest workers; 0 reserves nothing.
        limit: Seconds that Ray may take.
        say: Receives the reason for the wait.

    Raises:
        TimeoutError: Ray did not reserve it in time.
    """
    if not least or not (needs.cpus or needs.gpus) or current_placement_group() is not None:
        yield
        return
    with reserved(needs.cpus, needs.gpus, least, limit, say) as group:
        needs.group, needs.grouped = group, least
        yield


@dataclass
class _Seat:
    """Room for one worker: on a node, or wherever Ray finds it."""

    node: str | None
    number: int = 0
    given_up: threading.Event = field(default_factory=threading.Event)
    task: int | None = None
    actor: Any = None
    thread: threading.Thread | None = None


class RayCrew:
    """Keeps an actor for each worker that the job may have.

    Args:
        registrar: The job's meeting point, which dismisses workers of nodes that are taken away.
        work: What the workers run.
        most: Most workers.
        needs: What each needs.
        output: Where news go.
        hosts: Finds nodes and their slots; `None` leaves it to Ray.
    """

    def __init__(
        self,
        registrar: Registrar,
        work: Work,
        most: int,
        needs: Needs,
        output: Output,
        hosts: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        self._registrar = registrar
        self._work = work
        self._most = most
        self._needs = needs
        self._output = output
        self._hosts = hosts
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._seats: dict[_Place, _Seat] = {}
        self._found: list[_Place] = []
        self._watch: threading.Thread | None = None
        self.endings: dict[int, Ending] = {}
        self.refusals: list[str] = []
        self.dismissed: set[int] = set()

    def start(self) -> None:
        """Asks Ray for the first actors."""
        self._look()
        self._watch = threading.Thread(
            target=self._watch_on, name="farandole-ray-nodes", daemon=True
        )
        self._watch.start()

    def end(self) -> None:
        """Asks for nothing any more, and ends the actors."""
        self._over.set()
        with self._lock:
            seats = list(self._seats.values())
        deadline = time.monotonic() + _END_WITHIN
        for seat in seats:
            seat.given_up.set()
        for seat in seats:
            self._kill(seat)
        for thread in (self._watch, *(seat.thread for seat in seats)):
            if thread is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _watch_on(self) -> None:
        while not self._over.wait(_EVERY):
            self._look()

    def _look(self) -> None:
        """Makes a seat for each present slot, and gives up those on lost nodes."""
        wanted = self._wanted()
        with self._lock:
            new = [place for place in wanted if place not in self._seats]
            gone = [place for place in self._seats if place not in wanted]
            left = [self._seats.pop(place) for place in gone]
            for place in new:
                seat = self._seats[place] = _Seat(*place)
                seat.thread = threading.Thread(
                    target=self._work_on, args=(seat,), name="farandole-ray", daemon=True
                )
        for seat in left:
            seat.given_up.set()
            if seat.task is not None:
                self.dismissed.add(seat.task)
                self._registrar.dismiss(seat.task, f"its node {seat.node} was removed")
        for place in new:
            thread = self._seats[place].thread
            if thread is not None and not self._over.is_set():
                thread.start()

    def _wanted(self) -> list[_Place]:
        if self._hosts is None:
            return [(None, number) for number in range(self._most)]
        with self._lock:
            own = Counter(seat.node for seat in self._seats.values() if seat.node is not None)
        try:
            with asked_by(own):
                hosts = self._hosts()
        except Exception as error:
            if not self._found:
                raise
            self._output.say(
                f"discovery failed, so the hosts that were found last are kept: {error}"
            )
            return self._found
        found: list[_Place] = [
            (host, slot) for host, slots in hosts.items() for slot in range(slots)
        ]
        self._found = found[: self._most]
        return self._found

    def _work_on(self, seat: _Seat) -> None:
        pause: float | None = None
        while not seat.given_up.is_set():
            task, began = next(self._numbers), time.monotonic()
            ending = self._one(seat, task)
            if ending is not None and ending.succeeded and task not in self.dismissed:
                return  # its function has returned
            if task in self.dismissed:
                # its place in the group may be on a node that Ray drains
                seat.number = self._needs.grouped
            pause = self._needs.pause(pause, time.monotonic() - began)
            seat.given_up.wait(pause)

    def _one(self, seat: _Seat, task: int) -> Ending | None:
        """Returns one actor from its start to its end; `None` where it had no worker, or died
        with it.
        """
        ray = needed()
        remote = ray.remote(AgentHolder)
        seat.task = task
        seat.actor = remote.options(**self._needs.options(seat.node, seat.number)).remote()
        try:
            if seat.given_up.is_set():
                return None
            ending: Ending = ray.get(seat.actor.serve.remote(self._work, task))
        except Exception as error:  # noqa: BLE001 - the actor or its node died: the next one is another worker
            if not seat.given_up.is_set():
                self._output.say(f"the actor of worker {task} died: {headline(error)}")
            return None
        finally:
            self._kill(seat)
        if ending.refused is not None:
            self.refusals.append(f"{ending.host}: {ending.refused}")
            return None
        self.endings[ending.task] = ending
        return ending

    def _kill(self, seat: _Seat) -> None:
        actor, ray = seat.actor, needed()
        if actor is not None and ray.is_initialized():
            ray.kill(actor)
