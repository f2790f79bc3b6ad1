# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The files of a run for the run viewer, besides its history: `_record.json` and
`logs/steps.jsonl`.

    _record.json        state, parameters, data, environment, code, ranks, events; replaced as a
                        whole
    logs/steps.jsonl    loss and speed within epochs, a few thousand lines at most

A thread of the driver writes the files soon after a change, and every `HEARTBEAT_SECONDS` seconds
as a sign of life. So a slow store does not delay the training. An error is one line in the log and
never fails a fit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from farandole._native import store as native
from farandole.runner import timelines
from farandole.runner.rank_files import RankOutputFiles
from farandole.runner.show.history import flatten_history_entry
from farandole.runner.show.run_environment import describe_code, describe_environment
from farandole.runner.show.run_reporter import RunReportReceiver
from farandole.stores import small_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from farandole.spark.common.params import EstimatorParams
    from farandole.stores.remote_store import RemoteStore

RECORD_FILE: Final = "_record.json"
STEPS_FILE: Final = "steps.jsonl"
HISTORY_FILE: Final = "history.jsonl"
OUTPUT_DIRECTORY: Final = "output"
"""Directory of a run with the output of its ranks."""
HEARTBEAT_SECONDS: Final = 15.0

_WRITE_INTERVAL = 1.0
_REMOTE_WRITE_INTERVAL = 5.0
"""Least seconds between two writes."""
_MAX_STEPS = 4000
_MAX_EVENTS = 200
_TAB_ONLY_KEYS = frozenset({"tags", "timeline", "timeline_is_here"})
"""Keys of a run that only Spark's Training tab needs."""
_NON_SCORE_KEYS = frozenset({"epoch", "seconds", "rows", "rows_per_second"})

_LOG = logging.getLogger("farandole")


class RunJournal(RunReportReceiver):
    """Writes the events and values that a fit's driver receives.

    Args:
        remote: The run's paths.
        facts: The facts about the run that are known at its start.
        clock: In seconds.
        output: Directory for the output of ranks; `None` if another process writes it, or if it is
            not on this host.
    """

    def __init__(
        self,
        remote: RemoteStore,
        facts: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
        output: Path | None = None,
    ) -> None:
        self._output = output
        self._files: RankOutputFiles | None = None
        self._remote = remote
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._stopping = False
        self._has_warned = False
        self._record: dict[str, Any] = {
            "format": 1,
            "heartbeat": HEARTBEAT_SECONDS,
            **facts,
            "events": [],
        }
        self._epochs: dict[int, dict[str, Any]] = {}
        self._steps: list[dict[str, Any]] = []
        self._has_earlier_entries = False
        try:
            self._load_earlier_entries()
        except OSError as error:
            self._log_failure("earlier entries of the run viewer", error, "read")
        self._stride = self._skipped = 1
        self._epoch_start: tuple[int, float] = (-1, 0.0)
        local = remote.run_path is not None and native.Store(remote.run_path).local_path is not None
        self._pause = _WRITE_INTERVAL if local else _REMOTE_WRITE_INTERVAL
        self._thread = threading.Thread(
            target=self._write_loop, name="farandole-journal", daemon=True
        )
        self._thread.start()

    def put_row(self, run: str, key: str, body: Mapping[str, Any], *, logged: bool = True) -> None:
        """Takes a row of a training, as the Spark plugin does.

        Args:
            run: The run; there is only this one.
            key: The row's name.
            body: Content of the row.
            logged: Not used here.
        """
        del run, logged
        with self._lock:
            if key == "run":
                self._record |= {
                    name: value for name, value in body.items() if name not in _TAB_ONLY_KEYS
                }
            elif key == "ranks":
                self._record["ranks"] = body["ranks"]
            elif key == "step":
                self._add_step(body)
            elif key.startswith("epoch/"):
                self._add_epoch(body)
            elif key.startswith("event/"):
                self._record["events"] = [*self._record["events"], dict(body)][-_MAX_EVENTS:]
        self._changed.set()

    def write_line(self, rank: int, stream: str, text: str) -> None:
        """Writes the line of a rank into the run's directory. A restarted job and a repeated fit
        append their lines.
        """
        if self._output is None:
            return
        try:
            if self._files is None:
                self._files = RankOutputFiles(
                    self._output,
                    max(int(self._record.get("size") or 0), rank + 1),
                    append=True,
                )
            self._files.write_line(rank, stream, text)
        except OSError as error:
            self._log_failure("what ranks print", error)
            self._output = None

    def close(self) -> None:
        """Writes the last entries and ends the thread."""
        self._stopping = True
        self._changed.set()
        self._thread.join()
        self._output = None
        if self._files is not None:
            self._files.close()

    def _add_step(self, body: Mapping[str, Any]) -> None:
        epoch = int(body["epoch"])
        position = epoch + body["step"] / max(body["steps"], 1)
        # After a restart an epoch comes again.
        again = bool(self._steps) and self._steps[-1]["epoch"] >= position
        if again or self._epoch_start[0] != epoch:
            self._epoch_start = (epoch, self._clock())
        before = sum(
            entry.get("seconds") or 0.0 for number, entry in self._epochs.items() if number < epoch
        )
        row = {"epoch": position, "seconds": before + self._clock() - self._epoch_start[1]}
        numbers = {
            name: body[name] for name in ("loss", "rows_per_second") if _is_number(body.get(name))
        }
        self._record["now"] = {
            "epoch": epoch,
            "step": body["step"],
            "steps": body["steps"],
            **numbers,
        }
        while self._steps and self._steps[-1]["epoch"] >= position:
            self._steps.pop()
        self._skipped += 1
        if self._skipped < self._stride:
            return
        self._skipped = 0
        self._steps.append(row | numbers)
        if len(self._steps) > _MAX_STEPS:
            self._steps = self._steps[::2]
            self._stride *= 2

    def _add_epoch(self, body: Mapping[str, Any]) -> None:
        epoch = int(body["epoch"])
        self._epochs = {number: entry for number, entry in self._epochs.items() if number < epoch}
        self._epochs[epoch] = {**body["values"], "epoch": epoch, "seconds": body.get("seconds")}

    def _score_summary(self) -> dict[str, Any]:
        """Returns the facts that the list of runs shows without reading the history."""
        if not self._epochs:
            return {}
        last = max(self._epochs)
        scores = {
            name: value
            for name, value in self._epochs[last].items()
            if name not in _NON_SCORE_KEYS and _is_number(value)
        }
        found: dict[str, Any] = {"done": last + 1, "last": scores}
        name = "val_loss" if "val_loss" in scores else "loss"
        known = [
            (entry[name], epoch)
            for epoch, entry in self._epochs.items()
            if _is_number(entry.get(name))
        ]
        if known:
            value, epoch = min(known)
            found["best"] = {"name": name, "value": value, "epoch": epoch + 1}
        return found

    def _write_loop(self) -> None:
        for name, found in (("environment", describe_environment), ("code", describe_code)):
            with contextlib.suppress(Exception):  # such as a SparkContext that has stopped
                facts = found()
                with self._lock:
                    self._record[name] = facts
        ends = False
        while not ends:
            self._changed.wait(HEARTBEAT_SECONDS)
            self._changed.clear()
            ends = self._stopping
            try:
                self._write_files()
            except Exception as error:  # noqa: BLE001 - the training continues without a page
                self._log_failure("what the run viewer shows", error)
            deadline = time.monotonic() + self._pause
            while not self._stopping and time.monotonic() < deadline:
                time.sleep(0.05)

    def _log_failure(self, subject: str, error: Exception, action: str = "written") -> None:
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        _LOG.log(level, "%s cannot be %s: %s: %s", subject, action, self._remote.run_path, error)

    def _load_earlier_entries(self) -> None:
        """Adds the entries of earlier fits of the run. The files are not written before, because
        they would lose these entries.

        Raises:
            OSError: The files cannot be read.
        """
        earlier = _EarlierEntries.read(self._remote)
        with self._lock:
            events = [*earlier.events, *self._record["events"]]
            self._record["events"] = events[-_MAX_EVENTS:]
            first_epoch = min(self._epochs, default=math.inf)
            self._epochs = {
                epoch: entry for epoch, entry in earlier.epochs.items() if epoch < first_epoch
            } | self._epochs
            first_place = self._steps[0]["epoch"] if self._steps else math.inf
            self._steps = [
                step for step in earlier.steps if step["epoch"] < first_place
            ] + self._steps
            self._has_earlier_entries = True

    def _write_files(self) -> None:
        if not self._has_earlier_entries:
            self._load_earlier_entries()
        with self._lock:
            self._record["updated"] = int(time.time() * 1000)
            record = json.dumps(self._record | self._score_summary(), default=str).encode()
            steps = "".join(json.dumps(step) + "\n" for step in self._steps).encode()
        if steps:
            self._remote.write(f"{self._remote.logs_subdir}/{STEPS_FILE}", steps)
        self._remote.write(RECORD_FILE, record)


@contextlib.contextmanager
def keep_run_journal(estimator: EstimatorParams, job: Any) -> Iterator[RunJournal | None]:
    """Writes the journal of a fit while its job runs.

    Args:
        estimator: The estimator.
        job: The training job of PyTorch, Lightning or Keras.

    Yields:
        The journal; `None` if the store does not save runs.
    """
    if job.store.run_path is None:
        yield None
        return
    data = job.data
    sides = {"training rows": data.train_rows} | (
        {"validation rows": data.val_rows} if data.val_url else {}
    )
    facts = {
        "model": type(estimator.getModel()).__name__,
        "epochs": estimator.getEpochs(),
        "data": {
            "told": ", ".join(f"{rows:,} {side}" for side, rows in sides.items()),
            **sides,
            "features": estimator.getFeatureCols(),
            "labels": estimator.getLabelCols(),
            **job.file_paths(),
        },
    }
    folder = native.Store(job.store.run_path).local_path
    journal = RunJournal(
        job.store, facts, output=None if folder is None else Path(folder) / OUTPUT_DIRECTORY
    )
    try:
        yield journal
    finally:
        try:
            # The training is over. A message at the end reports missing timelines.
            with contextlib.suppress(OSError):
                timelines.write_trace_to_run(job.store)
        finally:
            journal.close()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0


@dataclass
class _EarlierEntries:
    """The entries that earlier fits of a run have written."""

    events: list[Any]
    epochs: dict[int, dict[str, Any]]
    steps: list[dict[str, Any]]

    @classmethod
    def read(cls, remote: RemoteStore) -> Self:
        """Reads the files of a run. Damaged files and lines are left out, with a warning.

        Raises:
            OSError: A file cannot be read.
        """
        if remote.run_path is None:
            return cls([], {}, [])
        run = native.Store(remote.run_path)
        events: list[Any] = []
        with _skip_damaged_content(), small_files.raise_as_damaged_file(f"{run.url}/{RECORD_FILE}"):
            record = small_files.read_json(run, RECORD_FILE) or {}
            events = list(record.get("events") or [])
        epochs: dict[int, dict[str, Any]] = {}
        for source_name, entry in _read_log_lines(run, f"{remote.logs_subdir}/{HISTORY_FILE}"):
            with _skip_damaged_content(), small_files.raise_as_damaged_file(source_name):
                epochs[int(entry["epoch"])] = flatten_history_entry(entry)
        steps: list[dict[str, Any]] = []
        for source_name, step in _read_log_lines(run, f"{remote.logs_subdir}/{STEPS_FILE}"):
            with _skip_damaged_content(), small_files.raise_as_damaged_file(source_name):
                if _is_number(step.get("epoch")):
                    steps.append(step)
        return cls(events, epochs, steps)


def _read_log_lines(run: native.Store, name: str) -> list[tuple[str, Any]]:
    with _skip_damaged_content():
        lines, faults = small_files.read_json_lines(run, name)
        if faults:
            _LOG.warning("%s (%d damaged lines)", faults[0], len(faults))
        return [(f"{run.url}/{name}", line) for line in lines]
    return []


@contextlib.contextmanager
def _skip_damaged_content() -> Iterator[None]:
    """Logs that a file is damaged, and leaves it out."""
    try:
        yield
    except small_files.DamagedFileError as error:
        _LOG.warning("%s", error)
