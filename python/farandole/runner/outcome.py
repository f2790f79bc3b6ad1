# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The outcome of one task: the agent creates it, rows carry it to the driver, and the driver
evaluates it.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from farandole.runner.errors import FarandoleJobError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from farandole._native.launcher import Outcome

RESULT_CHUNK_BYTES = 8 << 20
"""Bytes of a result that one row carries."""

TASK_ROW_SCHEMA = "task int, kind string, chunk int, data binary"
"""The rows a task answers with: one of kind "ending" (JSON), then its result in chunks."""

_UNREACHABLE_MESSAGE = "cannot reach the registrar"
_REACHABILITY_ADVICE = (
    "Name an address of the driver that executors reach in FARANDOLE_DRIVER_HOST, and the ports "
    "that a firewall lets pass in FARANDOLE_PORT_RANGE"
)

Row = tuple[int, str, int, bytes]


@dataclass(frozen=True)
class TaskOutcome:
    """The end of a task's worker.

    Attributes:
        task: Number of the task.
        host: Host the agent ran on.
        rank: The worker's rank; `None` when no ranks were assigned.
        exit_code: Its exit code; `None` when a signal ended it, or when it never started.
        signal_name: The signal that ended it.
        stderr_tail: The last lines of its stderr.
        aborted: Whether something else ended it first: another rank's failure, or the driver.
        reason: Why the job ended, in a sentence; `None` after success.
        refused: Why the agent could not run a worker at all; `None` when it could.
        result: Result that the worker sent back.
    """

    task: int
    host: str
    rank: int | None = None
    exit_code: int | None = None
    signal_name: str | None = None
    stderr_tail: str = ""
    aborted: bool = False
    reason: str | None = None
    refused: str | None = None
    result: bytes | None = None

    @property
    def has_succeeded(self) -> bool:
        """Whether the worker ran to its end and sent a result."""
        return self.exit_code == 0 and not self.aborted and self.result is not None

    @classmethod
    def from_agent(cls, task: int, host: str, outcome: Outcome) -> TaskOutcome:
        """Returns the outcome of a task from the outcome of its agent."""
        return cls(
            task=task,
            host=host,
            rank=outcome.rank,
            exit_code=outcome.exit_code,
            signal_name=outcome.signal_name,
            stderr_tail=outcome.stderr_tail,
            aborted=outcome.aborted,
            reason=outcome.reason,
            result=outcome.result,
        )

    def to_rows(self) -> Iterator[Row]:
        """Returns the rows that carry the outcome."""
        told = asdict(replace(self, result=None))
        yield (self.task, "ending", 0, json.dumps(told).encode())
        result = memoryview(self.result or b"")
        for chunk, start in enumerate(range(0, len(result), RESULT_CHUNK_BYTES)):
            yield (self.task, "result", chunk, bytes(result[start : start + RESULT_CHUNK_BYTES]))

    @classmethod
    def from_rows(cls, rows: Iterable[Row]) -> list[TaskOutcome]:
        """Returns every task's ending, in the order of tasks, from rows in any order."""
        told: dict[int, dict[str, Any]] = {}
        chunks: dict[int, dict[int, bytes]] = {}
        for task, kind, chunk, data in rows:
            if kind == "ending":
                told[task] = json.loads(bytes(data))
            else:
                chunks.setdefault(task, {})[chunk] = data
        for task, parts in chunks.items():
            told[task]["result"] = b"".join(parts[chunk] for chunk in sorted(parts))
        return [cls(**told[task]) for task in sorted(told)]


def results_by_rank(endings: Iterable[TaskOutcome], size: int) -> list[Any]:
    """Returns the results by rank, or the first failure.

    Args:
        endings: How every task ended.
        size: Number of ranks.

    Returns:
        The result of the function on each rank, rank 0 first.

    Raises:
        FarandoleJobError: A task failed; raised from the worker's own exception where it could be
            brought along.
    """
    endings = list(endings)
    if len(endings) == size and all(ending.has_succeeded for ending in endings):
        values = {ending.rank: _unpickle_value(ending) for ending in endings}
        return [values[rank] for rank in range(size)]
    raise_first_failure(endings, size)
    raise AssertionError


def raise_first_failure(endings: list[TaskOutcome], size: int) -> None:
    """Raises the failure that came first.

    Raises:
        FarandoleJobError: Always.
    """
    failed = [ending for ending in endings if not ending.has_succeeded]
    if not failed:
        missing = sorted(set(range(size)) - {ending.task for ending in endings})
        raise FarandoleJobError(f"Spark returned no rows of these tasks: {missing}")
    # The worker that failed by itself is the cause; an agent's refusal comes before its
    # consequences.
    cause = min(
        failed, key=lambda ending: (ending.aborted, ending.refused is None, ending.rank or 0)
    )
    error, origin = task_failure(cause)
    raise error from origin


def task_failure(ending: TaskOutcome) -> tuple[FarandoleJobError, BaseException | None]:
    """Returns the exception for one task's failure, and the worker's own exception if it could
    be unpickled.
    """
    who = (
        f"task {ending.task} on {ending.host}"
        if ending.rank is None
        else f"rank {ending.rank} on {ending.host}"
    )
    remote: tuple[str, str, str, bytes | None] | None = None
    if ending.result is not None and ending.exit_code != 0:
        tag, *told = pickle.loads(ending.result)  # noqa: S301 - bytes of this job's own worker, from Spark or its own link
        remote = tuple(told) if tag == "error" else None  # pyright: ignore[reportAssignmentType]
    if ending.refused is not None:
        reason = f"{who} could not start its worker: {ending.refused}"
        if _UNREACHABLE_MESSAGE in ending.refused:
            reason += f". {_REACHABILITY_ADVICE}"
    elif remote is not None and remote[0] != "SystemExit":
        kind, message, *_ = remote
        reason = f"{who} failed: {kind}: {message}" if message else f"{who} failed: {kind}"
    elif ending.aborted:
        reason = ending.reason or f"{who} was ended by the driver"
    elif ending.signal_name is not None:
        reason = f"{who} was ended by signal {ending.signal_name}"
    elif ending.exit_code == 0:
        reason = (
            f"{who} left without a result: its function ended the process before it could return"
        )
    else:
        reason = f"{who} exited with code {ending.exit_code}"
    error = FarandoleJobError(
        reason,
        rank=ending.rank,
        host=ending.host,
        exit_code=ending.exit_code,
        signal_name=ending.signal_name,
        exception_type=remote[0] if remote else None,
        remote_traceback=remote[2] if remote else None,
        stderr_tail=ending.stderr_tail,
    )
    return error, _unpickle_exception(remote[3]) if remote else None


def _unpickle_exception(pickled: bytes | None) -> BaseException | None:
    if pickled is None:
        return None
    try:
        origin = pickle.loads(pickled)  # noqa: S301 - as in `task_failure`
    except Exception:  # noqa: BLE001 - the driver lacks its class; the text says it all
        return None
    return origin if isinstance(origin, BaseException) else None


def _unpickle_value(ending: TaskOutcome) -> Any:
    assert ending.result is not None  # noqa: S101 - `has_succeeded` said so
    try:
        _, value = pickle.loads(ending.result)  # noqa: S301 - as in `task_failure`
    except Exception as error:
        raise FarandoleJobError(
            f"rank {ending.rank} on {ending.host} returned a value that the driver cannot "
            f"unpickle: {error!r}",
            rank=ending.rank,
            host=ending.host,
            exit_code=0,
        ) from error
    return value
