# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Logs a run for TensorBoard by its own library, in addition to the scalars of epochs that every run writes.

    logs/events.out.tfevents.farandole        scalars of epochs, by the training processes (`events`)
    logs/events.out.tfevents.details          parameters, for the tab HParams; the model as text
    logs/steps/events.out.tfevents.details    loss and speed within epochs

TensorBoard reads the files of a directory in the order of their names, and reads on in the last one. Files only grow.
"""

from __future__ import annotations

import io
import logging
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
_NUMBERS: Final = ("loss", "rows_per_second")
_LOG = logging.getLogger("farandole")


class TensorboardTracker(Tracker):
    """Logs for TensorBoard into the directory of the run.

    A file that cannot be written is one line in the log and never fails a fit.

    Args:
        store: Of the run.
        parameters: Plain values by name.
        clock: In seconds.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(
        self, store: RemoteStore, parameters: dict[str, Any], clock: Callable[[], float] = time.monotonic
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
        self._points = 0
        self._taken = self._written = float("-inf")

    def __enter__(self) -> Self:
        """Logs the parameters."""
        self._details.add(self._begin(self._parameters), 0)
        self._details.write()
        return self

    def report(self, record: dict[str, Any]) -> None:
        """As `Tracker.report`."""
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
            self._steps.write()

    def model(self, model: Any, flavor: str, example: Example | None = None) -> None:
        """As `Tracker.model`."""
        del example
        lines: list[str] = []
        if flavor == "keras":
            model.summary(print_fn=lambda line, **_: lines.append(line))
        else:
            lines.append(str(model))
        shown = "\n".join(lines)
        self._details.add(self._text("model", f"```\n{shown}\n```"), 0)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """As `Tracker.__exit__`."""
        self._details.add(_end(failed=kind is not None), 0)
        self._details.write()
        self._steps.write()


class _File:
    """A file of events that grows, also from one fit of a run to the next.

    Args:
        store: Of the run.
        name: Its path below the directory of the run.
    """

    def __init__(self, store: RemoteStore, name: str) -> None:
        self._store = store
        self._name = name
        self._data = io.BytesIO()
        self._begun = self._changed = False

    def add(self, summary: Any, step: int) -> None:
        """Takes one event.

        Args:
            summary: TensorBoard's message.
            step: Its place on the axis of steps.
        """
        if not self._begun:
            self._begin()
        self._put(summary=summary, step=step)

    def write(self) -> None:
        """Writes what is new into the store."""
        if not self._changed:
            return
        self._changed = False
        try:
            self._store.write(self._name, self._data.getvalue())
        except OSError as error:
            self._changed = True
            _LOG.warning("%s for TensorBoard cannot be written: %s", self._name, error)

    def _begin(self) -> None:
        self._begun = True
        try:
            before = self._store.read(self._name)
        except OSError:
            before = None
        if before:
            self._data.write(before)
        else:
            self._put(file_version="brain.Event:2")

    def _put(self, **fields: Any) -> None:
        event = _library("compat.proto.event_pb2").Event(wall_time=time.time(), **fields)
        _library("summary.writer.record_writer").RecordWriter(self._data).write(event.SerializeToString())
        self._changed = True


def _library(name: str) -> Any:
    """A module of TensorBoard. None of those that are used here loads TensorFlow."""
    return import_module(f"tensorboard.{name}")


def _end(*, failed: bool) -> Any:
    """The end of a run, as the tab HParams shows it."""
    metadata, messages = _library("plugins.hparams.metadata"), _library("plugins.hparams.plugin_data_pb2")
    statuses = _library("plugins.hparams.api_pb2")
    status = statuses.STATUS_FAILURE if failed else statuses.STATUS_SUCCESS
    info = messages.SessionEndInfo(status=status, end_time_secs=time.time())
    content = metadata.create_summary_metadata(messages.HParamsPluginData(session_end_info=info))
    summary = _library("compat.proto.summary_pb2").Summary()
    summary.value.add(tag=metadata.SESSION_END_INFO_TAG, metadata=content, tensor=metadata.NULL_TENSOR)
    return summary
