# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The timelines of all ranks of a job: agents send them to the driver, which merges them into
one trace.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import tempfile
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from farandole.stores.remote_store import RemoteStore

KIND: Final = "timeline"
"""Kind of the records that carry pieces of timelines."""

NAME: Final = "timeline.json"
"""Name of the trace in the directory of a run, where the run viewer finds it."""

_NOTHING: Final = b'{"offset":0,"size":0}\n'
"""A piece that replaces a timeline by none."""

_LOG = logging.getLogger("farandole")
_CURRENT: ContextVar[Gathering | None] = ContextVar("farandole_timeline", default=None)


class Gathering:
    """Takes the timelines of a job, piece by piece.

    Attributes:
        summary: What the merged trace says: ranks, straggler, clocks; empty before it was merged.

    Args:
        path: File for the trace; `None` keeps it in the directory of the run.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        from farandole._native import ui  # noqa: PLC0415 - `import farandole` stays light

        self._made = path is not None and not path.exists()
        if path is not None:
            path.touch()  # an error now, and not after hours of training
        self._path = path
        self._new = ui.Timelines
        self._pieces = ui.Timelines()
        self._is_begun = False
        self._started: dict[tuple[int, int], tuple[int, int]] = {}
        """Start of each rank's timeline in a world, and its task."""
        self._came = False
        self._kept: list[str] | None = None
        self.summary: dict[str, Any] = {}
        self.tell: Callable[[str], object] | None = None
        """Gets the place of the trace once it is written."""

    def begin(self) -> None:
        """Begins the timeline of a job. The pieces of the job before are dropped: its ranks are
        other ones.
        """
        self._is_begun, self._pieces, self._came = True, self._new(), False
        self._started = {}

    def take(self, task: int, piece: bytes) -> None:
        """Takes a piece; an error is one line in the log and never fails a job.

        Args:
            task: The worker's.
            piece: As agents send it.
        """
        self._came = True
        try:
            left_out = self._earlier(task, piece)
            if left_out != task:
                self._pieces.take(task, piece)
            if left_out is not None:
                self._pieces.take(left_out, _NOTHING)
        except OSError as error:
            _LOG.warning("a piece of a timeline is lost: %s", error)

    def _earlier(self, task: int, piece: bytes) -> int | None:
        """Returns the task whose timeline is left out because another one of its rank and world has
        started later.

        Spark may start a stage again after it has lost an executor. Ranks then have other tasks,
        and a task of before may have sent its timeline.
        """
        title = _title(piece)
        if title is None:
            return None
        place, start = title
        # Its file of before is replaced, whatever rank that was of.
        self._started = {known: begun for known, begun in self._started.items() if begun[1] != task}
        if place not in self._started:
            self._started[place] = (start, task)
            return None
        (_, early), late = sorted((self._started[place], (start, task)))
        self._started[place] = late
        rank, world = place
        _LOG.warning(
            "tasks %d and %d have sent timelines of rank %d in world %d: that of task %d began "
            "earlier and is left out",
            early, late[1], rank, world, early,
        )  # fmt: skip
        return early

    def keep(self, write: Callable[[str, bytes], object], place: str) -> None:
        """Writes the trace into the directory of a run, if it belongs there.

        Args:
            write: Writes a file of the run.
            place: The directory, as a path or URL.
        """
        if self._path is not None or not self._came:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / NAME
            lines = self._merged(path)
            if self.summary:
                write(NAME, path.read_bytes())
                lines.append(f"the timeline of all ranks is {NAME} of the run")
                self._tell(f"{place}/{NAME}")
        self._kept = lines

    def end(self) -> list[str]:
        """Writes the trace to its file.

        Returns:
            What to tell of it, in lines.
        """
        if not self._came:
            if self._made and self._path is not None:
                self._path.unlink(missing_ok=True)  # it is empty
            if not self._is_begun:
                return []
            return ["no rank has sent a timeline: there is none unless the ranks call init()"]
        if self._path is None:
            return self._kept or [
                "the timeline is lost: no store keeps this run; give timeline= a path"
            ]
        lines = self._merged(self._path)
        if not self.summary:
            return lines
        self._tell(str(self._path))
        return [*lines, f"the timeline of all ranks is in {self._path}"]

    def _tell(self, place: str) -> None:
        if self.tell is not None:
            self.tell(place)

    def _merged(self, path: Path) -> list[str]:
        try:
            summary, lines = self._pieces.merge(path)
        except OSError as error:
            return [f"the timelines of the ranks could not be merged: {error}"]
        self.summary = json.loads(summary)
        return lines


def _title(piece: bytes) -> tuple[tuple[int, int], int] | None:
    """Returns the rank and the world of a timeline, and when it started, if this is its first
    piece.
    """
    try:
        head, begin, record = piece.split(b"\n", 3)[:3]
        if json.loads(head)["offset"] != 0 or begin != b"[":
            return None
        told = json.loads(record.removesuffix(b","))["args"]
        return (int(told["rank"]), int(told["generation"])), int(
            told["start_time_since_epoch_in_micros"]
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None  # what it is, is for the merge to say


@contextlib.contextmanager
def gathered(path: str | os.PathLike[str] | bool | None) -> Iterator[Gathering | None]:
    """Gathers the timelines of the jobs that run inside, and merges them at the end, also after a
    failure.

    Args:
        path: File for the trace; `True` keeps it in the directory of the run; `None` gathers
            nothing.

    Yields:
        The receivers; `None` for no path.

    Raises:
        OSError: The file cannot be written.
    """
    if path is None or path is False:
        yield None
        return
    gathering = Gathering(None if isinstance(path, bool) else Path(path).absolute())
    token = _CURRENT.set(gathering)
    try:
        yield gathering
    finally:
        _CURRENT.reset(token)
        for line in gathering.end():
            sys.stderr.write(f"farandole: {line}\n")
        sys.stderr.flush()


def variables() -> dict[str, str | None]:
    """Returns variables for the workers of a new job, with which their agents send timelines."""
    gathering = _CURRENT.get()
    if gathering is None:
        return {}
    gathering.begin()
    return {"FARANDOLE_TIMELINE": "GATHER"}


def take(task: int, piece: bytes) -> None:
    """Takes a piece where timelines are gathered; else nothing.

    Args:
        task: The worker's.
        piece: As agents send it.
    """
    gathering = _CURRENT.get()
    if gathering is not None:
        gathering.take(task, piece)


def tell(told: Callable[[str], object]) -> None:
    """Calls a function with the path of the trace once it is written, if timelines are gathered.

    Args:
        told: Gets a path or URL.
    """
    gathering = _CURRENT.get()
    if gathering is not None:
        gathering.tell = told


def keep(remote: RemoteStore) -> None:
    """Writes the trace into the directory of a run that ends, where that was asked for.

    Args:
        remote: The run's paths.
    """
    gathering = _CURRENT.get()
    if gathering is not None and remote.run_path is not None:
        from farandole._native import store as native  # noqa: PLC0415 - `import farandole` stays light

        gathering.keep(remote.write, native.Store(remote.run_path).local_path or remote.run_path)
