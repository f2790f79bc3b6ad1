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

from farandole.runner.show.tensorboard_event_file import FILE_VERSION, encode_tensorboard_event
from farandole.spark.common.runs.tracking import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from farandole.spark.common.runs.tracking import ModelExample
    from farandole.stores.remote_store import RemoteStore

EVENTS_FILE: Final = "events.out.tfevents.details"

_WRITE_INTERVAL_SECONDS: Final = 10.0
_STEP_INTERVAL_SECONDS: Final = 0.5
_POINTS_PER_INTERVAL: Final = 2000
"""Points after which twice the time passes between two."""
_MAX_FINAL_ATTEMPTS: Final = 3
"""The number of attempts to write a file at the end of a fit."""
_RETRY_DELAY_SECONDS: Final = 1.0
_STEP_NUMBERS: Final = ("loss", "rows_per_second")
_LOG = logging.getLogger("farandole")


class TensorboardTracker(Tracker):
    """A tracker that logs for TensorBoard into the directory of the run.

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
            self._encode_parameters = _tensorboard_module("plugins.hparams.summary_v2").hparams_pb
            self._encode_scalar = _tensorboard_module("plugins.scalar.summary_v2").scalar_pb
            self._encode_text = _tensorboard_module("plugins.text.summary_v2").text_pb
        except ImportError as error:
            message = "tensorboard=True needs the package tensorboard: pip install tensorboard"
            raise ImportError(message, name="tensorboard") from error
        self._parameters = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in parameters.items()
        }
        self._clock = clock
        self._details = _TensorboardEventFile(store, f"{store.logs_subdir}/{EVENTS_FILE}")
        self._steps = _TensorboardEventFile(store, f"{store.logs_subdir}/steps/{EVENTS_FILE}")
        self._writer = _EventFileWriter((self._details, self._steps))
        self._points = 0
        self._last_step_time = self._last_write_time = float("-inf")

    def __enter__(self) -> Self:
        """Logs the parameters."""
        self._details.add_summary(self._encode_parameters(self._parameters), 0)
        self._writer.start_thread()
        self._writer.request_write()
        return self

    def log_report(self, record: dict[str, Any]) -> None:
        """Like `Tracker.log_report`."""
        now, is_step = self._clock(), record.get("kind") == "step"
        if is_step and now - self._last_step_time >= _STEP_INTERVAL_SECONDS * 2 ** (
            self._points // _POINTS_PER_INTERVAL
        ):
            self._last_step_time = now
            self._points += 1
            step = record["epoch"] * record["steps"] + record["step"]
            for name in _STEP_NUMBERS:
                if record.get(name) is not None:
                    self._steps.add_summary(
                        self._encode_scalar(f"step/{name}", float(record[name])), step
                    )
        if not is_step or now - self._last_write_time >= _WRITE_INTERVAL_SECONDS:
            self._last_write_time = now
            self._writer.request_write()

    def log_model(
        self,
        model: Any,
        flavor: str,
        example: ModelExample | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        """Like `Tracker.log_model`."""
        del example, params
        lines: list[str] = []
        if flavor == "keras":
            model.summary(print_fn=lambda line, **_: lines.append(line))
        else:
            lines.append(str(model))
        shown = "\n".join(lines)
        self._details.add_summary(self._encode_text("model", f"```\n{shown}\n```"), 0)

    def __exit__(self, kind: type[BaseException] | None, /, *_: object) -> None:
        """Like `Tracker.__exit__`; waits until all is written."""
        try:
            self._details.add_summary(_session_end_summary(failed=kind is not None), 0)
        finally:
            self._writer.close()


class _EventFileWriter:
    """A thread that writes files into the store.

    Args:
        files: Event files to write.
    """

    def __init__(self, files: tuple[_TensorboardEventFile, ...]) -> None:
        self._files = files
        self._write_requested = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._write_until_closed, name="farandole-tensorboard", daemon=True
        )

    def start_thread(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def request_write(self) -> None:
        """Lets the thread write new entries; does not wait for it."""
        self._write_requested.set()

    def close(self) -> None:
        """Writes new entries and ends the thread."""
        self._closing.set()
        self._write_requested.set()
        self._thread.join()

    def _write_until_closed(self) -> None:
        while not self._closing.is_set():
            self._write_requested.wait()
            self._write_requested.clear()
            for file in self._files:
                file.write_new_events()
        for file in self._files:
            file.write_last_events()


class _TensorboardEventFile:
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
        self._new_events = io.BytesIO()
        self._old_content: bytes | None = None
        self._changed = self._has_warned = False

    def add_summary(self, summary: Any, step: int) -> None:
        """Takes one event.

        Args:
            summary: TensorBoard's message.
            step: Its place on the axis of steps.
        """
        event = encode_tensorboard_event(time.time(), step, summary=summary.SerializeToString())
        with self._lock:
            self._new_events.write(event)
            self._changed = True

    def write_new_events(self) -> None:
        """Writes new entries into the store; the next call repeats failed writes."""
        failure = self._attempt_write()
        if failure is not None and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "%s for TensorBoard cannot be %s; the next write tries it again",
                self._name,
                failure,
            )

    def write_last_events(self) -> None:
        """Writes new entries for the last time."""
        failure = self._attempt_write()
        for _ in range(_MAX_FINAL_ATTEMPTS - 1):
            if failure is None:
                return
            time.sleep(_RETRY_DELAY_SECONDS)
            failure = self._attempt_write()
        if failure is not None:
            _LOG.warning(
                "%s for TensorBoard cannot be %s; it lacks events of this fit", self._name, failure
            )

    def _attempt_write(self) -> str | None:
        """Writes new entries, and returns the failures."""
        with self._lock:
            if not self._changed:
                return None
            self._changed = False
            new = self._new_events.getvalue()
        what = "read"
        try:
            if self._old_content is None:
                self._old_content = self._store.read(self._name) or encode_tensorboard_event(
                    time.time(), 0, version=FILE_VERSION
                )
            what = "written"
            self._store.write(self._name, self._old_content + new)
        except Exception as error:  # noqa: BLE001 - the training continues without TensorBoard
            with self._lock:
                self._changed = True
            return f"{what}: {error}"
        return None


def _tensorboard_module(name: str) -> Any:
    """Returns a module of TensorBoard. The modules that are used here do not load TensorFlow."""
    return import_module(f"tensorboard.{name}")


def _session_end_summary(*, failed: bool) -> Any:
    """Returns the end of a run, as the tab HParams shows it."""
    metadata, messages = (
        _tensorboard_module("plugins.hparams.metadata"),
        _tensorboard_module("plugins.hparams.plugin_data_pb2"),
    )
    statuses = _tensorboard_module("plugins.hparams.api_pb2")
    status = statuses.STATUS_FAILURE if failed else statuses.STATUS_SUCCESS
    info = messages.SessionEndInfo(status=status, end_time_secs=time.time())
    content = metadata.create_summary_metadata(messages.HParamsPluginData(session_end_info=info))
    summary = _tensorboard_module("compat.proto.summary_pb2").Summary()
    summary.value.add(
        tag=metadata.SESSION_END_INFO_TAG, metadata=content, tensor=metadata.NULL_TENSOR
    )
    return summary
