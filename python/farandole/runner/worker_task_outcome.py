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
        fields = asdict(replace(self, result=None))
        yield (self.task, "ending", 0, json.dumps(fields).encode())
        result = memoryview(self.result or b"")
        for chunk, start in enumerate(range(0, len(result), RESULT_CHUNK_BYTES)):
            yield (self.task, "result", chunk, bytes(result[start : start + RESULT_CHUNK_BYTES]))

    @classmethod
    def from_rows(cls, rows: Iterable[Row]) -> list[TaskOutcome]:
        """Returns every task's ending, in the order of tasks, from rows in any order."""
        fields: dict[int, dict[str, Any]] = {}
        chunks: dict[int, dict[int, bytes]] = {}
        for task, kind, chunk, data in rows:
            if kind == "ending":
                fields[task] = json.loads(bytes(data))
            else:
                chunks.setdefault(task, {})[chunk] = data
        for task, parts in chunks.items():
            fields[task]["result"] = b"".join(parts[chunk] for chunk in sorted(parts))
        return [cls(**fields[task]) for task in sorted(fields)]


def results_by_rank(endings: Iterable[TaskOutcome], size: int) -> list[Any]:
    """Returns the results by rank, or the first failure.

    Args:
        endings: Outcome of every task.
        size: Number of ranks.

    Returns:
        The result of the function on each rank, rank 0 first.

    Raises:
        FarandoleJobError: A task failed; raised from the worker's own exception where it could be
            brought along.
    """
    endings = list(endings)
    if len(endings) == size and all(outcome.has_succeeded for outcome in endings):
        values = {outcome.rank: _unpickle_value(outcome) for outcome in endings}
        return [values[rank] for rank in range(size)]
    raise_first_failure(endings, size)
    raise AssertionError


def raise_first_failure(endings: list[TaskOutcome], size: int) -> None:
    """Raises the first failure.

    Raises:
        FarandoleJobError: Always.
    """
    failed = [outcome for outcome in endings if not outcome.has_succeeded]
    if not failed:
        missing = sorted(set(range(size)) - {outcome.task for outcome in endings})
        raise FarandoleJobError(f"Spark returned no rows of these tasks: {missing}")
    # The worker that failed by itself is the cause; an agent's refusal comes before its
    # consequences.
    cause = min(
        failed, key=lambda outcome: (outcome.aborted, outcome.refused is None, outcome.rank or 0)
    )
    error, origin = task_failure(cause)
    raise error from origin


def task_failure(outcome: TaskOutcome) -> tuple[FarandoleJobError, BaseException | None]:
    """Returns the exception for one task's failure, and the worker's own exception if it could
    be unpickled.
    """
    who = (
        f"task {outcome.task} on {outcome.host}"
        if outcome.rank is None
        else f"rank {outcome.rank} on {outcome.host}"
    )
    remote: tuple[str, str, str, bytes | None] | None = None
    if outcome.result is not None and outcome.exit_code != 0:
        tag, *details = pickle.loads(outcome.result)  # noqa: S301 - bytes of this job's own worker, from Spark or its own link
        remote = tuple(details) if tag == "error" else None  # pyright: ignore[reportAssignmentType]
    if outcome.refused is not None:
        reason = f"{who} could not start its worker: {outcome.refused}"
        if _UNREACHABLE_MESSAGE in outcome.refused:
            reason += f". {_REACHABILITY_ADVICE}"
    elif remote is not None and remote[0] != "SystemExit":
        kind, message, *_ = remote
        reason = f"{who} failed: {kind}: {message}" if message else f"{who} failed: {kind}"
    elif outcome.aborted:
        reason = outcome.reason or f"{who} was ended by the driver"
    elif outcome.signal_name is not None:
        reason = f"{who} was ended by signal {outcome.signal_name}"
    elif outcome.exit_code == 0:
        reason = (
            f"{who} left without a result: its function ended the process before it could return"
        )
    else:
        reason = f"{who} exited with code {outcome.exit_code}"
    error = FarandoleJobError(
        reason,
        rank=outcome.rank,
        host=outcome.host,
        exit_code=outcome.exit_code,
        signal_name=outcome.signal_name,
        exception_type=remote[0] if remote else None,
        remote_traceback=remote[2] if remote else None,
        stderr_tail=outcome.stderr_tail,
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


def _unpickle_value(outcome: TaskOutcome) -> Any:
    assert outcome.result is not None  # noqa: S101 - `has_succeeded` is true
    try:
        _, value = pickle.loads(outcome.result)  # noqa: S301 - as in `task_failure`
    except Exception as error:
        raise FarandoleJobError(
            f"rank {outcome.rank} on {outcome.host} returned a value that the driver cannot "
            f"unpickle: {error!r}",
            rank=outcome.rank,
            host=outcome.host,
            exit_code=0,
        ) from error
    return value
