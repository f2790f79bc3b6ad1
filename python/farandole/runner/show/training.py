# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reports a run to Spark's Training tab and the run viewer: its state, epochs, ranks and events.

The reports go to the Spark plugin and to the run's journal. Without both, the functions here do
nothing. They never raise an exception.
"""

from __future__ import annotations

import contextlib
import getpass
import math
import secrets
import time
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from farandole.runner import timelines
from farandole.runner.show.history import flat
from farandole.runner.watcher import TOLD, Watcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from farandole.runner.show.told import Told

_STEP_EVERY = 0.5
_RANKS_EVERY = 1.0
_LOGGED_EVERY = 30.0
"""Seconds between the rows of ranks that the event log keeps."""
_TIMES: Final = (
    ("stepSeconds", "step_seconds"),
    ("reduceSeconds", "reduce_seconds"),
    ("waitSeconds", "data_seconds"),
)
_HIDDEN: Final = ("epoch", "seconds", "rows", "steps")
_LONGEST = 2000
_CURRENT: ContextVar[Training | None] = ContextVar("farandole_training", default=None)


class Training(Watcher):
    """One run.

    Args:
        shim: The plugin; `None` where there is none.
        name: What the user calls the run.
        what: The estimator's class, or `run`.
        parameters: Plain values by name.
        others: Other receivers.
    """

    def __init__(
        self,
        shim: Told | None,
        name: str = "",
        what: str = "",
        parameters: Mapping[str, Any] = {},
        others: Iterable[Told | None] = (),
    ) -> None:
        self._shim = shim
        self._all: list[Told] = [one for one in (shim, *others) if one is not None]
        self._id = f"{int(time.time() * 1000):x}-{secrets.token_hex(3)}"
        self._run: dict[str, Any] = {
            "name": name,
            "what": what,
            "state": "running",
            "started": _now(),
            "restarts": 0,
            "tags": [],
            "parameters": {key: finite(value) for key, value in parameters.items()},
        }
        with contextlib.suppress(Exception):  # a process whose user has no name
            self._run["user"] = getpass.getuser()
        self._seats: list[dict[str, Any]] = []
        self._said: dict[int, dict[str, Any]] = {}
        self._places: dict[int, str] = {}
        self._left: dict[int, str] = {}
        self._ask: Callable[[], None] | None = None
        self._events = 0
        self._step_at = self._ranks_at = self._logged_at = -math.inf
        self._told()

    def look(self) -> None:
        """Like `Watcher.look`."""
        if self._ask is not None:
            self._ask()

    def asking(self, ask: Callable[[], None]) -> None:
        """Calls a function in every `look`, if there is a plugin.

        Args:
            ask: Asks the plugin for news of the job.
        """
        if self._shim is not None:
            self._ask = ask

    def variables(self) -> dict[str, str | None]:
        """Returns variables that make workers report their progress."""
        return {TOLD: "1"} if self._all else {}

    def tagged(self, tag: str, size: int) -> None:
        """The tag of the Spark jobs that run it, by which the tab finds their stages.

        Args:
            tag: A job's tag.
            size: Number of ranks.
        """
        self._run["tags"].append(tag)
        self._run["size"] = size
        self._told()

    def seats(self, seats: Iterable[Mapping[str, Any]]) -> None:
        """The places of the ranks, when they are known or have changed.

        Args:
            seats: One for each rank.
        """
        if not self._all:
            return
        self._left.clear()
        self._seats = [
            {"rank": seat["rank"], "task": seat["task"], "host": seat["host"]} for seat in seats
        ]
        self._seats.sort(key=lambda seat: seat["rank"])
        self._run["size"] = len(self._seats)
        self._told()
        self._tell_ranks(logged=True)

    def located(self, task: int, where: str) -> None:
        """In which executor a task is.

        Args:
            task: Its number.
            where: The executor's.
        """
        if self._all:
            self._places[task] = where

    def holds(self, executor: str) -> bool:
        """Returns whether a task of the run is, or was, in an executor.

        Args:
            executor: The executor's number.
        """
        return executor in self._places.values()

    def executor_of(self, rank: int | None) -> str | None:
        """Returns the executor of a rank; `None` where it is not known.

        Args:
            rank: Which; `None` is nowhere.
        """
        return next(
            (self._places.get(seat["task"]) for seat in self._seats if seat["rank"] == rank), None
        )

    def said(self, task: int, record: Mapping[str, Any]) -> None:
        """A worker's report about itself, possibly before it has a rank.

        Args:
            task: Number of its task.
            record: Its process, GPU, and where its time goes.
        """
        if not self._all:
            return
        self._said.setdefault(task, {}).update(
            {name: finite(value) for name, value in record.items()}
        )
        now = time.monotonic()
        if now - self._ranks_at >= _RANKS_EVERY:
            self._tell_ranks(logged=now - self._logged_at >= _LOGGED_EVERY)

    def left(self, task: int, how: str) -> None:
        """Like `Watcher.left`."""
        if not self._all:
            return
        self._left[task] = how
        # All ranks of a gang may leave in one moment. The last report of the ranks is at the end of
        # the run.
        if time.monotonic() - self._ranks_at >= _RANKS_EVERY:
            self._tell_ranks(logged=False)

    def line(self, rank: int, stream: str, text: str) -> None:
        """Like `Watcher.line`."""
        for one in self._all:
            one.line(rank, stream, text)

    def timeline(self, place: str) -> None:
        """The timeline of all ranks is written.

        Args:
            place: Path or URL of its file.
        """
        is_here = Path(place).is_file()
        self._run |= {"timeline": place, "timeline_is_here": is_here}
        for one in self._all if is_here else ():
            one.timeline(self._id, place)
        self._told()

    def record(self, record: Mapping[str, Any]) -> None:
        """A report of an estimator's training function.

        Args:
            record: As `farandole.runner.reports` describes it, and has checked it.
        """
        if not self._all:
            return
        kind = record.get("kind")
        if kind == "step":
            now = time.monotonic()
            if now - self._step_at >= _STEP_EVERY:
                self._step_at = now
                self._put("step", record, logged=False)
                self._rate(record)
        elif kind == "epoch":
            entry = record["entry"]
            numbers = {name: value for name, value in flat(entry).items() if name not in _HIDDEN}
            body = {"epoch": entry["epoch"], "loss": numbers.get("loss"), "values": numbers}
            more = {name: entry.get(name) for name in ("seconds", "rows")}
            self._put(
                f"epoch/{entry['epoch']:08d}",
                body | more | {"rows_per_second": record.get("rows_per_second")},
            )
            self._rate(record)

    def event(self, what: str, reason: str | None) -> None:
        """Shows an event: a rank was lost, an executor was removed, or the job started again.

        Args:
            what: In a few words.
            reason: Why, where known.
        """
        self._events += 1
        body = {"time": _now(), "what": what[:_LONGEST], "reason": (reason or "")[:_LONGEST]}
        self._put(f"event/{self._events:06d}", body)

    def restarted(self, reason: str) -> None:
        """The job starts again after a failure.

        Args:
            reason: Of the failure.
        """
        self._run["restarts"] += 1
        self.event("restart", reason)
        self._told()
        self._gauge("restarts", self._run["restarts"])

    def ended(self, error: BaseException | None) -> None:
        """The run is over.

        Args:
            error: Why it failed; `None` if it did not.
        """
        stopped = isinstance(error, KeyboardInterrupt)
        self._run |= {
            "state": "ended" if error is None else "interrupted" if stopped else "failed",
            "ended": _now(),
        }
        if error is not None:
            self._run["reason"] = (
                str(getattr(error, "reason", "") or error) or type(error).__name__
            )[:_LONGEST]
        if self._seats:
            self._tell_ranks(logged=True)
        self._told()

    def _rate(self, record: Mapping[str, Any]) -> None:
        speed = record.get("rows_per_second")
        if isinstance(speed, int | float) and math.isfinite(speed):
            self._gauge("rowsPerSecond", speed)

    def _gauge(self, name: str, value: float) -> None:
        for one in self._all:
            one.gauge(name, value)

    def _tell_ranks(self, *, logged: bool) -> None:
        self._ranks_at = time.monotonic()
        self._logged_at = self._ranks_at if logged else self._logged_at
        ranks = [
            seat
            | {"executor": self._places.get(seat["task"])}
            | self._said.get(seat["task"], {})
            | self._state_of(seat)
            for seat in self._seats
        ]
        self._put("ranks", {"ranks": ranks}, logged=logged)
        for gauge, name in _TIMES:
            known = [value for one in ranks if isinstance(value := one.get(name), int | float)]
            if known:
                self._gauge(gauge, sum(known) / len(known))

    def _state_of(self, seat: Mapping[str, Any]) -> dict[str, str]:
        how = self._left.get(seat["task"])
        return {} if how is None else {"state": how}

    def _told(self) -> None:
        self._put("run", self._run)

    def _put(self, key: str, body: Mapping[str, Any], *, logged: bool = True) -> None:
        for one in self._all:
            # a record that JSON cannot hold: the training continues without it
            with contextlib.suppress(Exception):
                one.put(self._id, key, finite(dict(body)), logged=logged)


@contextlib.contextmanager
def telling(
    shim: Told | None,
    name: str,
    what: str,
    parameters: Mapping[str, Any] = {},
    *others: Told | None,
) -> Iterator[Training]:
    """Tells the plugin and others of what runs inside.

    Inside a run that is in progress in this context already, that run receives the events.

    Args:
        shim: The plugin; `None` where there is none.
        name: What the user calls the run.
        what: The estimator's class, or `run`.
        parameters: Plain values by name.
        *others: Other receivers.
    """
    outer = _CURRENT.get()
    if outer is not None:
        yield outer
        return
    if shim is None and all(one is None for one in others):
        yield SILENT
        return
    run = Training(shim, name, what, parameters, others)
    timelines.tell(run.timeline)
    token = _CURRENT.set(run)
    try:
        yield run
    except BaseException as error:
        run.ended(error)
        raise
    else:
        run.ended(None)
    finally:
        _CURRENT.reset(token)


def current() -> Training:
    """Returns the run that is in progress in this context; without one, a run that reports
    nothing.
    """
    return _CURRENT.get() or SILENT


def finite(value: Any) -> Any:
    """Returns a value without numbers that JSON does not have: they become text.

    Args:
        value: Anything that JSON can write otherwise.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _now() -> int:
    return int(time.time() * 1000)


SILENT: Final = Training(None)
"""For a job that reports nothing."""
