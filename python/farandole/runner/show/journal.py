# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The files of a run for the run viewer, besides its history: `_record.json` and
`logs/steps.jsonl`.

    _record.json        state, parameters, data, environment, code, ranks, events; replaced as a
                        whole
    logs/steps.jsonl    loss and speed within epochs, a few thousand lines at most

A thread of the driver writes them soon after a change, and every `HEARTBEAT` seconds as a sign of
life, so a slow store does not delay the training. An error is one line in the log and never fails a
fit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from farandole._native import store as native
from farandole.runner import timelines
from farandole.runner.rank_files import RankFiles
from farandole.runner.show.history import flat
from farandole.runner.show.surroundings import code, environment
from farandole.runner.show.told import Told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from farandole.spark.common.params import EstimatorParams
    from farandole.stores.remote_store import RemoteStore

RECORD: Final = "_record.json"
STEPS: Final = "steps.jsonl"
HISTORY: Final = "history.jsonl"
OUTPUT: Final = "output"
"""Directory of a run with what its ranks print."""
HEARTBEAT: Final = 15.0

_PAUSE = 1.0
_PAUSE_REMOTE = 5.0
"""Least seconds between two writes."""
_MOST_STEPS = 4000
_MOST_EVENTS = 200
_OF_THE_TAB = frozenset({"tags", "timeline", "timeline_is_here"})
"""Keys of a run that only Spark's Training tab needs."""
_NOT_SCORES = frozenset({"epoch", "seconds", "rows", "rows_per_second"})

_LOG = logging.getLogger("farandole")


class Journal(Told):
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
        self._files: RankFiles | None = None
        self._remote = remote
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._ends = False
        self._told = False
        before = _read(remote)
        self._record: dict[str, Any] = {
            "format": 1,
            "heartbeat": HEARTBEAT,
            **facts,
            "events": list(before.get("events") or [])[-_MOST_EVENTS:],
        }
        self._epochs: dict[int, dict[str, Any]] = {
            int(one["epoch"]): one for one in _history(remote)
        }
        self._steps = _steps(remote)
        self._stride = self._skipped = 1
        self._begun: tuple[int, float] = (-1, 0.0)
        local = remote.run_path is not None and native.Store(remote.run_path).local_path is not None
        self._pause = _PAUSE if local else _PAUSE_REMOTE
        self._thread = threading.Thread(
            target=self._write_on, name="farandole-journal", daemon=True
        )
        self._thread.start()

    def put(self, run: str, key: str, body: Mapping[str, Any], *, logged: bool = True) -> None:
        """Takes a row of a training, as the Spark plugin does.

        Args:
            run: The run; there is only this one.
            key: The row's name.
            body: What it holds.
            logged: Nothing here.
        """
        del run, logged
        with self._lock:
            if key == "run":
                self._record |= {
                    name: value for name, value in body.items() if name not in _OF_THE_TAB
                }
            elif key == "ranks":
                self._record["ranks"] = body["ranks"]
            elif key == "step":
                self._step(body)
            elif key.startswith("epoch/"):
                self._epoch(body)
            elif key.startswith("event/"):
                self._record["events"] = [*self._record["events"], dict(body)][-_MOST_EVENTS:]
        self._changed.set()

    def line(self, rank: int, stream: str, text: str) -> None:
        """Like `Told.line`: writes it into the run's directory. A restarted job appends its
        lines.
        """
        if self._output is None:
            return
        try:
            if self._files is None:
                self._files = RankFiles(
                    self._output, max(int(self._record.get("size") or 0), rank + 1)
                )
            self._files.write(rank, stream, text)
        except OSError as error:
            self._warn("what ranks print", error)
            self._output = None

    def close(self) -> None:
        """Writes the last entries and ends the thread."""
        self._ends = True
        self._changed.set()
        self._thread.join()
        self._output = None
        if self._files is not None:
            self._files.close()

    def _step(self, body: Mapping[str, Any]) -> None:
        epoch = int(body["epoch"])
        place = epoch + body["step"] / max(body["steps"], 1)
        # After a restart an epoch comes again.
        again = bool(self._steps) and self._steps[-1]["epoch"] >= place
        if again or self._begun[0] != epoch:
            self._begun = (epoch, self._clock())
        before = sum(
            one.get("seconds") or 0.0 for number, one in self._epochs.items() if number < epoch
        )
        row = {"epoch": place, "seconds": before + self._clock() - self._begun[1]}
        numbers = {
            name: body[name] for name in ("loss", "rows_per_second") if _is_number(body.get(name))
        }
        self._record["now"] = {
            "epoch": epoch,
            "step": body["step"],
            "steps": body["steps"],
            **numbers,
        }
        while self._steps and self._steps[-1]["epoch"] >= place:
            self._steps.pop()
        self._skipped += 1
        if self._skipped < self._stride:
            return
        self._skipped = 0
        self._steps.append(row | numbers)
        if len(self._steps) > _MOST_STEPS:
            self._steps = self._steps[::2]
            self._stride *= 2

    def _epoch(self, body: Mapping[str, Any]) -> None:
        epoch = int(body["epoch"])
        self._epochs = {number: one for number, one in self._epochs.items() if number < epoch}
        self._epochs[epoch] = {**body["values"], "epoch": epoch, "seconds": body.get("seconds")}

    def _scores(self) -> dict[str, Any]:
        """Returns the facts that the list of runs shows without reading the history."""
        if not self._epochs:
            return {}
        last = max(self._epochs)
        scores = {
            name: value
            for name, value in self._epochs[last].items()
            if name not in _NOT_SCORES and _is_number(value)
        }
        found: dict[str, Any] = {"done": last + 1, "last": scores}
        name = "val_loss" if "val_loss" in scores else "loss"
        known = [
            (one[name], epoch) for epoch, one in self._epochs.items() if _is_number(one.get(name))
        ]
        if known:
            value, epoch = min(known)
            found["best"] = {"name": name, "value": value, "epoch": epoch + 1}
        return found

    def _write_on(self) -> None:
        for name, found in (("environment", environment), ("code", code)):
            with contextlib.suppress(Exception):  # such as a SparkContext that has stopped
                facts = found()
                with self._lock:
                    self._record[name] = facts
        ends = False
        while not ends:
            self._changed.wait(HEARTBEAT)
            self._changed.clear()
            ends = self._ends
            try:
                self._write()
            except Exception as error:  # noqa: BLE001 - the training continues without a page
                self._warn("what the run viewer shows", error)
            deadline = time.monotonic() + self._pause
            while not self._ends and time.monotonic() < deadline:
                time.sleep(0.05)

    def _warn(self, what: str, error: Exception) -> None:
        level = logging.DEBUG if self._told else logging.WARNING
        self._told = True
        _LOG.log(level, "%s cannot be written: %s: %s", what, self._remote.run_path, error)

    def _write(self) -> None:
        with self._lock:
            self._record["updated"] = int(time.time() * 1000)
            record = json.dumps(self._record | self._scores(), default=str).encode()
            steps = "".join(json.dumps(one) + "\n" for one in self._steps).encode()
        if steps:
            self._remote.write(f"{self._remote.logs_subdir}/{STEPS}", steps)
        self._remote.write(RECORD, record)


@contextlib.contextmanager
def recorded(estimator: EstimatorParams, job: Any) -> Iterator[Journal | None]:
    """Writes the journal of a fit while its job runs.

    Args:
        estimator: The estimator.
        job: What it trains: of PyTorch, Lightning or Keras.

    Yields:
        The journal; `None` if the store does not save runs.
    """
    base = getattr(job, "base", job)
    if base.store.run_path is None:
        yield None
        return
    data = base.data
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
            **base.paths(),
        },
    }
    folder = native.Store(base.store.run_path).local_path
    journal = Journal(base.store, facts, output=None if folder is None else Path(folder) / OUTPUT)
    try:
        yield journal
    finally:
        try:
            # the training is over; what is missing is said at the end
            with contextlib.suppress(OSError):
                timelines.keep(base.store)
        finally:
            journal.close()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0


def _read(remote: RemoteStore) -> dict[str, Any]:
    """Returns the record of the fit before, if the run continues."""
    try:
        record = json.loads(remote.read(RECORD) or b"{}")
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _history(remote: RemoteStore) -> list[dict[str, Any]]:
    return [flat(one) for one in _lines(remote, HISTORY)]


def _steps(remote: RemoteStore) -> list[dict[str, Any]]:
    return [one for one in _lines(remote, STEPS) if _is_number(one.get("epoch"))]


def _lines(remote: RemoteStore, name: str) -> list[dict[str, Any]]:
    try:
        text = remote.read(f"{remote.logs_subdir}/{name}") or b""
        return [json.loads(line) for line in text.splitlines() if line]
    except (OSError, ValueError):
        return []
