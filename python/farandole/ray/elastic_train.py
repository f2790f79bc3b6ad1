# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""An elastic job under Ray Train, in the process of Ray's controller.

Ray starts the workers and replaces failed ones. The registrar decides which workers are in the
world. This module gives each worker its ticket, makes workers leave nodes that Ray drains, and
releases workers that wait in `ray.train.report` for a worker that waits for them, or that has left.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from farandole.ray import membership
from farandole.ray.node_drains import DrainedNodeDepartures
from farandole.ray.utils import import_ray

if TYPE_CHECKING:
    from farandole._native.registrar import Event

logger = logging.getLogger(__name__)

_EVENT_WAIT_SECONDS = 0.25
_DRAIN_CHECK_INTERVAL = 1.0
_SHUTDOWN_TIMEOUT = 5.0


class WorkerRoster:
    """The workers in the job, the workers that must leave, and the ranks in Ray without a worker.

    Args:
        min_workers: Fewest workers that train.
    """

    def __init__(self, min_workers: int) -> None:
        self._min_workers = min_workers
        self._ranks: dict[int, int] = {}
        self._waiting: set[int] = set()
        self._leaving: dict[int, str] = {}
        self._dismissed: set[int] = set()
        self._vacant: set[int] = set()
        self._worlds = 0

    def add_worker(self, task: int, rank: int) -> None:
        """Adds a worker.

        Args:
            task: Task number of the worker, never used before.
            rank: Rank of the worker in Ray; its replacement gets the same rank.
        """
        self._ranks[task] = rank
        self._waiting.add(task)
        self._vacant.discard(rank)

    def mark_in_world(self, tasks: set[int]) -> None:
        """Takes note of the workers of a new world."""
        self._worlds += 1
        self._waiting -= tasks

    def remove_worker(self, task: int) -> None:
        """Forgets a worker. If it was dismissed, Ray replaces it only when its node is gone."""
        rank = self._ranks.pop(task, None)
        self._waiting.discard(task)
        self._leaving.pop(task, None)
        if rank is not None and task in self._dismissed and rank not in self._ranks.values():
            self._vacant.add(rank)
        self._dismissed.discard(task)

    def mark_leaving(self, task: int, reason: str) -> None:
        """Lets a worker leave as soon as enough others are there."""
        if task in self._ranks:
            self._leaving[task] = reason

    def choose_dismissals(self) -> list[tuple[int, str]]:
        """Returns the workers that leave now, with reasons. If too few workers would train without
        a worker, it stays and may leave later.
        """
        members = self._ranks.keys() - self._waiting - self._dismissed
        spare = len(members) - self._min_workers
        found = list(self._leaving.items())[: max(spare, 0)]
        for task, _ in found:
            self._dismissed.add(task)
            del self._leaving[task]
        return found

    def must_stay(self, task: int) -> bool:
        """Returns whether a worker must leave but stays, because too few would train without it."""
        return task in self._leaving

    def is_report_blocked(self) -> bool:
        """Returns whether a report waits for a rank whose worker has left or waits for the next
        world.
        """
        return self._worlds > 0 and bool(self._waiting or self._vacant)


class ElasticTrainController:
    """One attempt of a trainer.

    Args:
        worker_group: The worker group of Ray.
        least: Fewest ranks that train; `None` for all.
        timeout: Seconds for which there may be fewer ranks.
        reset_limit: Largest number of changes of the world.

    Raises:
        ValueError: The numbers contradict each other.
    """

    def __init__(
        self, worker_group: Any, *, min_workers: int | None, timeout: float, reset_limit: int | None
    ) -> None:
        from farandole._native.registrar import Registrar  # noqa: PLC0415 - starts its threads here

        size = len(worker_group)
        if min_workers is not None and min_workers > size:
            raise ValueError(
                f"min_workers must not be above the number of workers: {min_workers} is above "
                f"{size}"
            )
        self._barrier = worker_group.get_worker_group_state().sync_actor
        min_workers = min_workers or size
        self._registrar = Registrar.start_elastic(
            size, min_workers, size, timeout=timeout, reset_limit=reset_limit
        )
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._drains = DrainedNodeDepartures()
        self._roster = WorkerRoster(min_workers)
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._watch_events, name="farandole-ray-train", daemon=True
        )
        self._thread.start()

    def add_workers(self, group: Any) -> None:
        """Adds workers that Ray has started to the job; raises Ray's error if one has died."""
        asked = []
        for worker in group.get_workers():
            with self._lock:
                task = next(self._numbers)
                self._roster.add_worker(task, worker.distributed_context.world_rank)
            self._drains.record_location(task, worker.metadata.node_id)
            asked.append(
                worker.execute_async(membership.join_elastic_job, self._registrar.ticket, task)
            )
        import_ray().get(asked)

    def close(self) -> None:
        """Ends the job."""
        self._stopped.set()
        self._registrar.close()
        self._thread.join(_SHUTDOWN_TIMEOUT)

    def _watch_events(self) -> None:
        look_at = time.monotonic()
        while not self._stopped.is_set():
            for event in self._registrar.events(_EVENT_WAIT_SECONDS):
                self._handle_event(event)
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + _DRAIN_CHECK_INTERVAL
                self._release_blocked_reports()
                self._dismiss_drained()

    def _handle_event(self, event: Event) -> None:
        with self._lock:
            if event.kind == "assigned":
                seats = self._registrar.rank_assignment() or []
                self._roster.mark_in_world({seat["task"] for seat in seats})
                logger.info("a world of %d ranks has formed", len(seats))
            elif event.kind in ("exit", "lost", "dismissed") and event.task is not None:
                self._roster.remove_worker(event.task)
                self._drains.forget_worker(event.task)
                logger.info("worker %d: %s", event.task, event.text or event.kind)
            elif event.kind == "aborted":
                logger.warning("the job has ended: %s", event.text)

    def _dismiss_drained(self) -> None:
        """Lets workers leave nodes that Ray drains, as long as enough others train."""
        departures = self._drains.poll_departures()
        with self._lock:
            for task, reason in departures:
                self._roster.mark_leaving(task, reason)
            leaving = self._roster.choose_dismissals()
            staying = [
                (task, reason) for task, reason in departures if self._roster.must_stay(task)
            ]
        for task, reason in leaving:
            self._registrar.dismiss_task(task, reason)
        for task, reason in staying:
            logger.warning(
                "worker %d stays on its node for now, because too few would train without it: %s",
                task,
                reason,
            )

    def _release_blocked_reports(self) -> None:
        """Releases workers that wait in a report for a rank that will not report."""
        with self._lock:
            waits = self._roster.is_report_blocked()
        if waits:
            self._barrier.reset.remote()
