# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Waits, in the driver, for the results of a function that runs on all workers."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Self

from farandole.common.exceptions import FarandoleInternalError
from farandole.ray.utils import import_ray
from farandole.runner.errors import FarandoleJobError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

_RESULT_POLL_INTERVAL = 0.1
_CAUSE_WAIT_SECONDS = 5.0
"""Seconds to wait after the first failure for another failure that may be its cause."""
_RECORD_DRAIN_TIMEOUT = 60.0
_LEAVE_TIMEOUT = 10.0


class ResultWaiter:
    """Passes records of workers to callbacks while it waits for results.

    Args:
        workers: The actors, by rank.
        nodes: The node of each actor, for messages.
        callbacks: Called with each record.
    """

    def __init__(
        self,
        workers: Sequence[Any],
        nodes: Sequence[str],
        callbacks: Sequence[Callable[..., Any]] | None,
    ) -> None:
        self._workers = workers
        self._nodes = nodes
        self._callbacks = list(callbacks or ())
        self._queue: Any = None

    def __enter__(self) -> Self:
        """Lets the workers send their records here, if they are wanted."""
        if self._callbacks:
            from ray.util.queue import Queue  # noqa: PLC0415 - Ray may be absent

            self._queue = Queue(actor_options={"num_cpus": 0})
            import_ray().get([worker.set_queue.remote(self._queue) for worker in self._workers])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the queue."""
        if self._queue is not None:
            for worker in self._workers:
                worker.set_queue.remote(None)
            self._queue.shutdown()

    def wait_for_results(self, references: Sequence[Any]) -> list[Any]:
        """Returns the results of the workers, by rank.

        Raises:
            FarandoleJobError: A worker died.
            RayTaskError: The function raised an exception on a worker: a failure that is no
                consequence of another one.
        """
        ray = import_ray()
        pending, failures = list(references), {}
        limit = float("inf")
        while pending and time.monotonic() < limit:
            ready, pending = ray.wait(pending, timeout=_RESULT_POLL_INTERVAL)
            self._drain_records()
            for reference in ready:
                try:
                    ray.get(reference)
                except Exception as error:  # noqa: BLE001 - which one is raised is chosen below
                    failures[references.index(reference)] = error
                    limit = min(limit, time.monotonic() + _CAUSE_WAIT_SECONDS)
                    if _is_root_cause(error):
                        limit = 0.0
        self._drain_records()
        if failures:
            self._leave_broken_world(pending)
            raise self._select_failure(failures)
        return ray.get(list(references))

    def _drain_records(self) -> None:
        if self._queue is not None:
            drain_records(self._queue, self._callbacks)

    def _leave_broken_world(self, pending: Sequence[Any]) -> None:
        """Makes the living workers leave the broken world, so that the next function forms a new
        world.

        The failures of `pending` are consequences. They are read, because Ray prints unread
        failures.
        """
        ray = import_ray()
        asked = [*(worker.leave.remote() for worker in self._workers), *pending]
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_LEAVE_TIMEOUT)
        for reference in ready:
            with contextlib.suppress(Exception):
                ray.get(reference)

    def _select_failure(self, failures: dict[int, Exception]) -> Exception:
        rank, error = min(
            failures.items(),
            key=lambda pair: (not _is_actor_death(pair[1]), not _is_root_cause(pair[1]), pair[0]),
        )
        if not _is_actor_death(error):
            return error
        where = self._nodes[rank] if rank < len(self._nodes) else "an unknown node"
        failure = FarandoleJobError(
            f"the process of rank {rank} on {where} died: {actor_death_summary(error)}", rank=rank
        )
        failure.__cause__ = error
        return failure


def drain_records(queue: Any, callbacks: Sequence[Callable[..., Any]]) -> None:
    """Passes the records that wait in a queue to callbacks.

    Args:
        queue: A `ray.util.queue.Queue`.
        callbacks: Called with each record.
    """
    deadline = time.monotonic() + _RECORD_DRAIN_TIMEOUT
    while not queue.empty() and time.monotonic() < deadline:
        record = queue.get()
        for callback in callbacks:
            callback(record)


def actor_death_summary(error: BaseException) -> str:
    """Returns Ray's message about a death, without its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause_lines = [line for line in lines[1:] if "died" in line or "killed" in line][:1] or lines[
        :1
    ]
    return (
        cause_lines[0].partition(" Some common causes")[0] if cause_lines else type(error).__name__
    )


def _is_actor_death(error: BaseException) -> bool:
    from ray.exceptions import ActorUnavailableError, RayActorError  # noqa: PLC0415 - Ray may be absent

    return isinstance(error, RayActorError | ActorUnavailableError)


def _is_root_cause(error: BaseException) -> bool:
    """Returns whether a failure is a cause, and not a consequence of another rank's failure."""
    return not isinstance(error, FarandoleInternalError)
