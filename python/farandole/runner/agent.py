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

from farandole.common import scratch
from farandole.runner import warm as warm_workers
from farandole.runner.outcome import Ending
from farandole.stores import keys, seals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farandole.runner.warm import Warm

Environment = dict[str, str | None]

_MOST_ROUNDS = 1 << 16

RESOURCES: Final = "FARANDOLE_TASK_RESOURCES"
"""Variable that hands a task's resource addresses to its worker, as JSON."""


class Carried(Protocol):
    """A function and its arguments that reached the host before the task that needs them."""

    def read(self) -> bytes:
        """The function and arguments that were sent; called in the task."""
        ...


@dataclass(frozen=True)
class Work:
    """The description of a job for an agent, which is sent to its task.

    Attributes:
        ticket: The registrar's.
        payload: The pickled function and its arguments, or what reads them in the task.
        env: Variables to set or (`None`) remove.
        executable: Interpreter of the workers; `None` takes the agent's own.
        stream_output: Whether lines go to the driver.
        start_timeout: Seconds to wait for the other tasks.
        warm: How workers start warm, if they do.
        rejoin_after: Seconds after which an agent whose gang was broken up, because another was
            lost or started again, registers once more; `None` if lost agents are not started again.
            At once in a gang of independent tasks, of which Spark starts that one alone. Spark
            starts a barrier stage again as a whole, and ends the rest of the old one: an agent that
            still runs after that belongs to the new one.
        elastic: Whether workers come and go while the job runs: each starts at once and asks for a
            rank by itself.
        keys: Whether the driver has the keys of runs in a store, so that workers ask it for them;
            `None` if it has them, and workers cannot reach it.
    """

    ticket: str
    payload: bytes | Carried
    env: Mapping[str, str | None] = field(default_factory=dict)
    executable: str | None = None
    stream_output: bool = False
    start_timeout: float | None = None
    warm: Warm | None = None
    rejoin_after: float | None = None
    elastic: bool = False
    keys: bool | None = field(default_factory=seals.is_given)

    def __post_init__(self) -> None:
        """Refuses an environment that no process can have, before it travels."""
        for name, value in self.env.items():
            if not isinstance(name, str) or not (value is None or isinstance(value, str)):
                raise TypeError(
                    f"env must hold strings, or None to remove a variable: {name!r} is {value!r}"
                )
            if not name or "=" in name or "\0" in name + (value or ""):
                raise ValueError(
                    f"env has a variable with an invalid name or value: {name!r} is {value!r}"
                )


def serve(
    work: Work,
    task: int,
    attempt: int = 0,
    resources: Mapping[str, list[str]] | None = None,
    owner: int | None = None,
) -> Ending:
    """Runs the worker of one task to its end.

    Args:
        work: What to run.
        task: Number of this task.
        attempt: Fencing token: a later attempt at the same task has a higher one.
        resources: Addresses that were assigned to the task, by resource name.
        owner: Process that warm workers' fork server belongs to; default: none is used.

    Returns:
        How the worker ended, or why there was none.
    """
    host = socket.gethostname()
    asks = None if work.keys is False else keys.told(work.ticket, reachable=work.keys is True)
    env = environment(work.env, resources or {}) | {keys.AT_DRIVER: asks}
    command = [work.executable or sys.executable, "-m", "farandole.runner.worker"]
    if work.warm is not None and owner is not None:
        command = warm_workers.command(work.warm, command, env, owner)
    with scratch.opened() as folder:
        return _serve(work, task, attempt, command, env | {scratch.VARIABLE: str(folder)}, host)


def _serve(
    work: Work, task: int, attempt: int, command: list[str], env: Environment, host: str
) -> Ending:
    from farandole._native import launcher  # noqa: PLC0415 - starts no thread before a daemon of Spark forks

    for again in range(_MOST_ROUNDS):
        try:
            outcome = launcher.run_agent(
                work.ticket,
                task,
                command,
                env=env,
                payload=work.payload if isinstance(work.payload, bytes) else work.payload.read(),
                attempt=attempt * _MOST_ROUNDS + again,
                stream_output=work.stream_output,
                start_timeout=work.start_timeout,
                together=work.rejoin_after is not None,
                elastic=work.elastic,
            )
        except Exception as error:  # noqa: BLE001 - every refusal goes to the driver as an ending
            return Ending(task, host, refused=f"{type(error).__name__}: {error}")
        if work.rejoin_after is None or not outcome.retry:
            return Ending.of(task, host, outcome)
        time.sleep(work.rejoin_after)
    return Ending(task, host, refused=f"other tasks were lost {_MOST_ROUNDS} times")


def environment(env: Mapping[str, str | None], resources: Mapping[str, list[str]]) -> Environment:
    """Returns the changes that make a worker's environment out of this process's.

    The worker imports what this process can import: its `sys.path` follows whatever `PYTHONPATH`
    was asked for. Output is unbuffered unless asked otherwise, so that a line is seen when it is
    printed and is not lost with a killed worker.

    Args:
        env: What the user asked for.
        resources: Addresses assigned to the task.
    """
    changed: Environment = dict(env)
    asked = [part for part in (changed.get("PYTHONPATH") or "").split(os.pathsep) if part]
    own = [os.path.realpath(part) if part == "" else part for part in sys.path]
    changed["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*asked, *own]))
    changed.setdefault("PYTHONUNBUFFERED", os.environ.get("PYTHONUNBUFFERED", "1"))
    if resources:
        changed[RESOURCES] = json.dumps(
            {name: list(addresses) for name, addresses in resources.items()}
        )
    return changed
