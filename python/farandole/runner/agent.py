# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A task's side of a job: runs one worker and reports how it ended.

A failure of the worker never becomes an exception here, because Spark would then run the whole
stage four times.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from farandole import _variables as variables
from farandole.common import scratch_directories
from farandole.runner import warm_workers
from farandole.runner.worker_task_outcome import TaskOutcome
from farandole.stores import checkpoint_signatures, run_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farandole.runner.warm_workers import WarmWorkerSettings

Environment = dict[str, str | None]

_MAX_REJOINS = 1 << 16

RESOURCES_VARIABLE: Final = variables.TASK_RESOURCES
"""Variable that hands a task's resource addresses to its worker, as JSON."""


class PrestagedPayload(Protocol):
    """A function and its arguments that reached the host before the task that needs them."""

    def read_payload(self) -> bytes:
        """The function and arguments that were sent; called in the task."""
        ...


@dataclass(frozen=True)
class WorkerSpec:
    """The description of a job for an agent, which is sent to its task.

    Attributes:
        ticket: Ticket of the registrar.
        payload: The pickled function and its arguments, or an object that reads them in the task.
        env: Variables to set or (`None`) remove.
        executable: Interpreter of the workers; `None` takes the agent's own.
        stream_output: Whether lines go to the driver.
        start_timeout: Seconds to wait for the other tasks.
        warm: Settings of warm workers, if workers start warm.
        rejoin_after: Seconds after which an agent whose gang was broken up, because another was
            lost or started again, registers once more; `None` if lost agents are not started again.
            In a gang of independent tasks, agents register again at once, because Spark starts only
            the lost task again. Spark starts a barrier stage again as a whole and ends the tasks of
            the old attempt: an agent that still runs after that belongs to the new attempt.
        elastic: Whether workers come and go while the job runs: each starts at once and asks for a
            rank by itself.
        keys: Whether the driver has the keys of runs in a store, so that workers ask it for them;
            `None` if it has them, and workers cannot reach it.
    """

    ticket: str
    payload: bytes | PrestagedPayload
    env: Mapping[str, str | None] = field(default_factory=dict)
    executable: str | None = None
    stream_output: bool = False
    start_timeout: float | None = None
    warm: WarmWorkerSettings | None = None
    rejoin_after: float | None = None
    elastic: bool = False
    keys: bool | None = field(default_factory=checkpoint_signatures.has_signing_secret)

    def __post_init__(self) -> None:
        """Refuses an environment that no process can have, before it is sent."""
        for name, value in self.env.items():
            if not isinstance(name, str) or not (value is None or isinstance(value, str)):
                raise TypeError(
                    f"env must hold strings, or None to remove a variable: {name!r} is {value!r}"
                )
            if not name or "=" in name or "\0" in name + (value or ""):
                raise ValueError(
                    f"env has a variable with an invalid name or value: {name!r} is {value!r}"
                )


def run_worker(
    work: WorkerSpec,
    task: int,
    attempt: int = 0,
    resources: Mapping[str, list[str]] | None = None,
    owner: int | None = None,
) -> TaskOutcome:
    """Runs the worker of one task to its end.

    Args:
        work: The description of the job.
        task: Number of this task.
        attempt: Fencing token: a later attempt at the same task has a higher one.
        resources: Addresses that were assigned to the task, by resource name.
        owner: Process that warm workers' fork server belongs to; default: none is used.

    Returns:
        How the worker ended, or why there was none.
    """
    host = socket.gethostname()
    asks = (
        None
        if work.keys is False
        else run_keys.driver_keys_variable_value(work.ticket, reachable=work.keys is True)
    )
    env = worker_environment_changes(work.env, resources or {}) | {
        run_keys.KEYS_AT_DRIVER_VARIABLE: asks
    }
    command = [work.executable or sys.executable, "-m", "farandole.runner.worker"]
    if work.warm is not None and owner is not None:
        command = warm_workers.warm_worker_command(work.warm, command, env, owner)
    with scratch_directories.hold_scratch_directory() as folder:
        return _run_agent_with_rejoins(
            work,
            task,
            attempt,
            command,
            env | {scratch_directories.SCRATCH_VARIABLE: str(folder)},
            host,
        )


def _run_agent_with_rejoins(
    work: WorkerSpec, task: int, attempt: int, command: list[str], env: Environment, host: str
) -> TaskOutcome:
    from farandole._native import launcher  # noqa: PLC0415 - starts no thread before a daemon of Spark forks

    for again in range(_MAX_REJOINS):
        try:
            outcome = launcher.run_agent(
                work.ticket,
                task,
                command,
                env=env,
                payload=work.payload
                if isinstance(work.payload, bytes)
                else work.payload.read_payload(),
                attempt=attempt * _MAX_REJOINS + again,
                stream_output=work.stream_output,
                start_timeout=work.start_timeout,
                together=work.rejoin_after is not None,
                elastic=work.elastic,
            )
        except Exception as error:  # noqa: BLE001 - every refusal goes to the driver as an ending
            return TaskOutcome(task, host, refused=f"{type(error).__name__}: {error}")
        if work.rejoin_after is None or not outcome.retry:
            return TaskOutcome.from_agent(task, host, outcome)
        time.sleep(work.rejoin_after)
    return TaskOutcome(task, host, refused=f"other tasks were lost {_MAX_REJOINS} times")


def worker_environment_changes(
    env: Mapping[str, str | None], resources: Mapping[str, list[str]]
) -> Environment:
    """Returns the differences of a worker's environment from this process's environment.

    The worker can import every module that this process can import: the `sys.path` of this process
    comes after the `PYTHONPATH` that the user gave. Output is unbuffered unless the user sets
    otherwise, so that a line is seen at once and is not lost if the worker is killed.

    Args:
        env: The variables that the user gave.
        resources: Addresses assigned to the task.
    """
    changed: Environment = dict(env)
    asked = [part for part in (changed.get("PYTHONPATH") or "").split(os.pathsep) if part]
    own = [os.path.realpath(part) if part == "" else part for part in sys.path]
    changed["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*asked, *own]))
    changed.setdefault("PYTHONUNBUFFERED", os.environ.get("PYTHONUNBUFFERED", "1"))
    if resources:
        changed[RESOURCES_VARIABLE] = json.dumps(
            {name: list(addresses) for name, addresses in resources.items()}
        )
    return changed
