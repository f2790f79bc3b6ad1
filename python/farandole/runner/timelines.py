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

from farandole import _variables as variables

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from farandole.stores.remote_store import RemoteStore

TIMELINE_KIND: Final = "timeline"
"""Kind of the records that carry pieces of timelines."""

TRACE_FILE: Final = "timeline.json"
"""Name of the trace in the directory of a run, where the run viewer finds it."""

_EMPTY_PIECE: Final = b'{"offset":0,"size":0}\n'
"""A piece that replaces a timeline by none."""

_LOG = logging.getLogger("farandole")
_CURRENT_COLLECTOR: ContextVar[TimelineCollector | None] = ContextVar(
    "farandole_timeline", default=None
)


class TimelineCollector:
    """Takes the timelines of a job, piece by piece.

    Attributes:
        summary: Summary of the merged trace: ranks, straggler, clocks; empty before the merge.

    Args:
        path: File for the trace; `None` keeps it in the directory of the run.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        from farandole._native import ui  # noqa: PLC0415 - `import farandole` stays light

        self._created_file = False
        if path is not None:
            # An error now, and not after hours of training.
            try:
                path.touch(exist_ok=False)
                self._created_file = True
            except FileExistsError:
                path.touch()
        self._path = path
        self._new = ui.TimelineMerger
        self._pieces = ui.TimelineMerger()
        self._is_begun = False
        self._started: dict[tuple[int, int], tuple[int, int]] = {}
        """Start of each rank's timeline in a world, and its task."""
        self._has_pieces = False
        self._run_messages: list[str] | None = None
        self.summary: dict[str, Any] = {}
        self.on_written: Callable[[str], object] | None = None
        """Called with the path or URL of the trace once it is written."""

    def begin_job(self) -> None:
        """Begins the timeline of a job. The pieces of the job before are dropped, because they are
        of other ranks.
        """
        self._is_begun, self._pieces, self._has_pieces = True, self._new(), False
        self._started = {}

    def add_piece(self, task: int, piece: bytes) -> None:
        """Takes a piece; an error is one line in the log and never fails a job.

        Args:
            task: Task of the worker.
            piece: A piece as agents send it.
        """
        self._has_pieces = True
        try:
            left_out = self._drop_superseded_timeline(task, piece)
            if left_out != task:
                self._pieces.add_piece(task, piece)
            if left_out is not None:
                self._pieces.add_piece(left_out, _EMPTY_PIECE)
        except OSError as error:
            _LOG.warning("a piece of a timeline is lost: %s", error)

    def _drop_superseded_timeline(self, task: int, piece: bytes) -> int | None:
        """Returns the task whose timeline is dropped because another timeline of the same rank and
        world has started later.

        After Spark has lost an executor, it may start a stage again. Ranks then have other tasks,
        and a task of the old attempt may have sent its timeline.
        """
        title = _timeline_start(piece)
        if title is None:
            return None
        rank_and_world, start = title
        # The earlier file of the task is replaced, also if it was of another rank.
        self._started = {known: begun for known, begun in self._started.items() if begun[1] != task}
        if rank_and_world not in self._started:
            self._started[rank_and_world] = (start, task)
            return None
        (_, early), late = sorted((self._started[rank_and_world], (start, task)))
        self._started[rank_and_world] = late
        rank, world = rank_and_world
        _LOG.warning(
            "tasks %d and %d have sent timelines of rank %d in world %d: that of task %d began "
            "earlier and is left out",
            early, late[1], rank, world, early,
        )  # fmt: skip
        return early

    def write_trace_into(self, write: Callable[[str, bytes], object], directory: str) -> None:
        """Writes the trace into the directory of a run, if it belongs there.

        Args:
            write: Writes a file of the run.
            directory: The directory, as a path or URL.
        """
        if self._path is not None or not self._has_pieces:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / TRACE_FILE
            lines = self._merge_pieces_into(path)
            if self.summary:
                write(TRACE_FILE, path.read_bytes())
                lines.append(f"the timeline of all ranks is {TRACE_FILE} of the run")
                self._announce_trace(f"{directory}/{TRACE_FILE}")
        self._run_messages = lines

    def write_trace_file(self) -> list[str]:
        """Writes the trace to its file.

        Returns:
            Lines about the trace for the user.
        """
        if not self._has_pieces:
            if self._created_file and self._path is not None:
                self._path.unlink(missing_ok=True)  # it is empty
            if not self._is_begun:
                return []
            return ["no rank has sent a timeline: there is none unless the ranks call init()"]
        if self._path is None:
            return self._run_messages or [
                "the timeline is lost: no store keeps this run; give timeline= a path"
            ]
        lines = self._merge_pieces_into(self._path)
        if not self.summary:
            return lines
        self._announce_trace(str(self._path))
        return [*lines, f"the timeline of all ranks is in {self._path}"]

    def _announce_trace(self, location: str) -> None:
        if self.on_written is not None:
            self.on_written(location)

    def _merge_pieces_into(self, path: Path) -> list[str]:
        try:
            summary, lines = self._pieces.merge_pieces(path)
        except OSError as error:
            return [f"the timelines of the ranks could not be merged: {error}"]
        self.summary = json.loads(summary)
        return lines


def _timeline_start(piece: bytes) -> tuple[tuple[int, int], int] | None:
    """Returns the rank and the world of a timeline, and when it started, if this is its first
    piece.
    """
    try:
        head, begin, record = piece.split(b"\n", 3)[:3]
        if json.loads(head)["offset"] != 0 or begin != b"[":
            return None
        arguments = json.loads(record.removesuffix(b","))["args"]
        return (int(arguments["rank"]), int(arguments["generation"])), int(
            arguments["start_time_since_epoch_in_micros"]
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None  # the merge reports malformed pieces


@contextlib.contextmanager
def collect_timelines(
    path: str | os.PathLike[str] | bool | None,
) -> Iterator[TimelineCollector | None]:
    """Collects the timelines of the jobs that run inside, and merges them at the end, also after a
    failure.

    Args:
        path: File for the trace; `True` keeps it in the directory of the run; `None` collects
            nothing.

    Yields:
        The receivers; `None` for no path.

    Raises:
        OSError: The file cannot be written.
    """
    if path is None or path is False:
        yield None
        return
    gathering = TimelineCollector(None if isinstance(path, bool) else Path(path).absolute())
    token = _CURRENT_COLLECTOR.set(gathering)
    try:
        yield gathering
    finally:
        _CURRENT_COLLECTOR.reset(token)
        for line in gathering.write_trace_file():
            sys.stderr.write(f"farandole: {line}\n")
        sys.stderr.flush()


def begin_timeline_collection() -> dict[str, str | None]:
    """Returns variables for the workers of a new job, with which their agents send timelines."""
    gathering = _CURRENT_COLLECTOR.get()
    if gathering is None:
        return {}
    gathering.begin_job()
    return {variables.TIMELINE: "GATHER"}


def collect_timeline_piece(task: int, piece: bytes) -> None:
    """Takes a piece if timelines are collected; else does nothing.

    Args:
        task: Task of the worker.
        piece: A piece as agents send it.
    """
    gathering = _CURRENT_COLLECTOR.get()
    if gathering is not None:
        gathering.add_piece(task, piece)


def on_trace_written(callback: Callable[[str], object]) -> None:
    """Calls a function with the path of the trace once it is written, if timelines are collected.

    Args:
        callback: Called with a path or URL.
    """
    gathering = _CURRENT_COLLECTOR.get()
    if gathering is not None:
        gathering.on_written = callback


def write_trace_to_run(remote: RemoteStore) -> None:
    """Writes the trace into the directory of a run that ends, if it belongs there.

    Args:
        remote: The run's paths.
    """
    gathering = _CURRENT_COLLECTOR.get()
    if gathering is not None and remote.run_path is not None:
        from farandole._native import store as native  # noqa: PLC0415 - `import farandole` stays light

        gathering.write_trace_into(
            remote.write, native.Store(remote.run_path).local_path or remote.run_path
        )
