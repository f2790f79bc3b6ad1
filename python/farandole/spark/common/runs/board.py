# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Logs a run for TensorBoard by its own library, in addition to the scalars of epochs that every
run writes.

    logs/events.out.tfevents.farandole        scalars of epochs, by the training processes
                                              (`events`)
    logs/events.out.tfevents.details          parameters, for the tab HParams; the model as text
    logs/steps/events.out.tfevents.details    loss and speed within epochs

TensorBoard reads the files of a directory in the order of their names, and reads on in the last
one. Files only grow. A thread reads and writes them, so a slow store does not delay the training.
"""

from __future__ import annotations

import io
import logging
import threading
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Self

from farandole.spark.common.runs.tracking import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from farandole.spark.common.runs.tracking import Example
    from farandole.stores.remote_store import RemoteStore

FILE: Final = "events.out.tfevents.details"

_WRITE_SECONDS: Final = 10.0
_STEP_SECONDS: Final = 0.5
_POINTS: Final = 2000
"""Points after which twice the time passes between two."""
_LAST_ATTEMPTS: Final = 3
"""The number of attempts to write a file at the end of a fit."""
_AGAIN_SECONDS: Final = 1.0
_NUMBERS: Final = ("loss", "rows_per_second")
_LOG = logging.getLogger("farandole")


class TensorboardTracker(Tracker):
    """Logs for TensorBoard into the directory of the run.

    A file that cannot be read or written is a warning in the log and never fails a fit.

    Args:
        store: Of the run.
        parameters: Plain values by name.
        clock: In seconds.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(
        self,
        store: RemoteStore,
        parameters: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            self._begin = _library("plugins.hparams.summary_v2").hparams_pb
            self._scalar = _library("plugins.scalar.summary_v2").scalar_pb
            self._text = _library("plugins.text.summary_v2").text_pb
        except ImportError as error:
            message = "tensorboard=True needs the package tensorboard: pip install tensorboard"
            raise ImportError(message, name="tensorboard") from error
        self._parameters = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in parameters.items()
        }
        self._clock = clock
        self._details = _File(store, f"{store.logs_subdir}/{FILE}")
        self._steps = _File(store, f"{store.logs_subdir}/steps/{FILE}")
        self._writer = _Writer((self._details, self._steps))
        self._points = 0
        self._taken = self._written = float("-inf")

    def __enter__(self) -> Self:
        """Logs the parameters."""
        self._details.add(self._begin(self._parameters), 0)
        self._writer.start()
        self._writer.write()
        return self

    def report(self, record: dict[str, Any]) -> None:
        """Like `Tracker.report`."""
        now, is_step = self._clock(), record.get("kind") == "step"
        if is_step and now - self._taken >= _STEP_SECONDS * 2 ** (self._points // _POINTS):
            self._taken = now
            self._points += 1
            step = record["epoch"] * record["steps"] + record["step"]
            for name in _NUMBERS:
                if record.get(name) is not None:
                    self._steps.add(self._scalar(f"step/{name}", float(record[name])), step)
        if not is_step or now - self._written >= _WRITE_SECONDS:
            self._written = now
            self._writer.write()

    def model(self, model: Any, flavor: str, example: Example | None = None) -> None:
        """Like `Tracker.model`."""
        del example
        lines: list[str] = []
        if flavor == "keras":
            model.summary(print_fn=lambda line, **_: lines.append(line))
        else:
            lines.append(str(model))
        shown = "\n".join(lines)
        self._details.add(self._text("model", f"```\n{shown}\n```"), 0)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Like `Tracker.__exit__`; waits until all is written."""
        try:
            self._details.add(_end(failed=kind is not None), 0)
        finally:
            self._writer.close()


class _Writer:
    """A thread that writes files into the store.

    Args:
        files: What it writes.
    """

    def __init__(self, files: tuple[_File, ...]) -> None:
        self._files = files
        self._asked = threading.Event()
        self._ends = threading.Event()
        self._thread = threading.Thread(
            target=self._work, name="farandole-tensorboard", daemon=True
        )

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def write(self) -> None:
        """Lets the thread write new entries; does not wait for it."""
        self._asked.set()

    def close(self) -> None:
        """Writes new entries and ends the thread."""
        self._ends.set()
        self._asked.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ends.is_set():
            self._asked.wait()
            self._asked.clear()
            for file in self._files:
                file.write()
        for file in self._files:
            file.finish()


class _File:
    """A file of events that grows, also from one fit of a run to the next.

    It is read before it is first written. While it cannot be read, it is left as it is and events
    are kept in memory.

    Args:
        store: Of the run.
        name: Its path below the directory of the run.
    """

    def __init__(self, store: RemoteStore, name: str) -> None:
        self._store = store
        self._name = name
        self._lock = threading.Lock()
        self._new = io.BytesIO()
        self._before: bytes | None = None
        self._changed = self._told = False

    def add(self, summary: Any, step: int) -> None:
        """Takes one event.

        Args:
            summary: TensorBoard's message.
            step: Its place on the axis of steps.
        """
        event = _record(summary=summary, step=step)
        with self._lock:
            self._new.write(event)
            self._changed = True

    def write(self) -> None:
        """Writes new entries into the store; the next call repeats failed writes."""
        failure = self._attempt()
        if failure is not None and not self._told:
            self._told = True
            _LOG.warning(
                "%s for TensorBoard cannot be %s; the next write tries it again",
                self._name,
                failure,
            )

    def finish(self) -> None:
        """Writes new entries for the last time."""
        failure = self._attempt()
        for _ in range(_LAST_ATTEMPTS - 1):
            if failure is None:
                return
            time.sleep(_AGAIN_SECONDS)
            failure = self._attempt()
        if failure is not None:
            _LOG.warning(
                "%s for TensorBoard cannot be %s; it lacks events of this fit", self._name, failure
            )

    def _attempt(self) -> str | None:
        """Writes new entries, and returns the failures."""
        with self._lock:
            if not self._changed:
                return None
            self._changed = False
            new = self._new.getvalue()
        what = "read"
        try:
            if self._before is None:
                self._before = self._store.read(self._name) or _record(file_version="brain.Event:2")
            what = "written"
            self._store.write(self._name, self._before + new)
        except Exception as error:  # noqa: BLE001 - the training continues without TensorBoard
            with self._lock:
                self._changed = True
            return f"{what}: {error}"
        return None


def _record(**fields: Any) -> bytes:
    """Returns an event, as a file has it."""
    data = io.BytesIO()
    event = _library("compat.proto.event_pb2").Event(wall_time=time.time(), **fields)
    _library("summary.writer.record_writer").RecordWriter(data).write(event.SerializeToString())
    return data.getvalue()


def _library(name: str) -> Any:
    """Returns a module of TensorBoard. None of those that are used here loads TensorFlow."""
    return import_module(f"tensorboard.{name}")


def _end(*, failed: bool) -> Any:
    """Returns the end of a run, as the tab HParams shows it."""
    metadata, messages = (
        _library("plugins.hparams.metadata"),
        _library("plugins.hparams.plugin_data_pb2"),
    )
    statuses = _library("plugins.hparams.api_pb2")
    status = statuses.STATUS_FAILURE if failed else statuses.STATUS_SUCCESS
    info = messages.SessionEndInfo(status=status, end_time_secs=time.time())
    content = metadata.create_summary_metadata(messages.HParamsPluginData(session_end_info=info))
    summary = _library("compat.proto.summary_pb2").Summary()
    summary.value.add(
        tag=metadata.SESSION_END_INFO_TAG, metadata=content, tensor=metadata.NULL_TENSOR
    )
    return summary
