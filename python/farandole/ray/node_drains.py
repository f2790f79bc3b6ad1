# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Nodes that Ray drains: their workers leave before the node is gone."""

from __future__ import annotations

import threading
import time

_DRAIN_POLL_INTERVAL = 1.0


class DrainedNodeDepartures:
    """Workers whose nodes Ray drains, such as for a spot instance that its cloud takes back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[int, str] = {}
        self._next = 0.0

    def record_location(self, task: int, where: str) -> None:
        """Takes note of the node of a worker.

        Args:
            task: Task number of the worker.
            where: Id of the node.
        """
        with self._lock:
            self._nodes[task] = where

    def forget_worker(self, task: int) -> None:
        """Forgets a worker."""
        with self._lock:
            self._nodes.pop(task, None)

    def poll_departures(self) -> list[tuple[int, str]]:
        """Returns the workers that must leave since the last call, with reasons. Asks Ray once a
        second.
        """
        with self._lock:
            now = time.monotonic()
            if not self._nodes or now < self._next:
                return []
            self._next = now + _DRAIN_POLL_INTERVAL
            nodes = _draining_nodes()
            leaving = [(task, node) for task, node in self._nodes.items() if node in nodes]
            for task, _ in leaving:
                del self._nodes[task]
        return [(task, f"Ray drains its node {node}") for task, node in leaving]


def _draining_nodes() -> set[str]:
    """Returns the ids of nodes that Ray is about to lose."""
    from ray._private.state import state  # noqa: PLC0415 - Ray Train's own watcher has no other API

    return set(state.get_draining_nodes() or {})
