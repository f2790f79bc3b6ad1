# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A job of plain functions as a run of a store, for the run viewer of `run(ui=True)`, also on
Spark.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from farandole._native import store as native
from farandole.common.counted_noun import format_counted_noun
from farandole.runner import timelines
from farandole.runner.errors import FarandoleJobError
from farandole.runner.event_handler import dispatch_worker_record
from farandole.runner.show.journal import HISTORY_FILE, OUTPUT_DIRECTORY, RunJournal
from farandole.runner.show.training_run_reports import current_run, report_run
from farandole.stores.store import Store

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from farandole.runner.show.run_reporter import RunReportReceiver

DEFAULT_STORE: Final = "farandole-runs"
"""The store if none is named: a directory in the current one."""


class _FunctionRunJournal(RunJournal):
    """Also writes the history, which estimators write by themselves."""

    def _write_files(self) -> None:
        super()._write_files()
        with self._lock:
            lines = [
                json.dumps(_history_entry(self._epochs[epoch])) + "\n"
                for epoch in sorted(self._epochs)
            ]
        if lines:
            self._remote.write(
                f"{self._remote.logs_subdir}/{HISTORY_FILE}", "".join(lines).encode()
            )


def _history_entry(values: dict[str, Any]) -> dict[str, Any]:
    """Returns an epoch in the form of a history entry."""
    parts: dict[str, dict[str, Any]] = {"train": {}, "validation": {}}
    for name, value in values.items():
        if name not in ("epoch", "seconds"):
            parts["validation" if name.startswith("val_") else "train"][
                name.removeprefix("val_")
            ] = value
    entry_parts = {
        part: {
            "loss": scores.pop("loss", None),
            "all_metrics": [{name: value} for name, value in scores.items()],
        }
        for part, scores in parts.items()
        if scores
    }
    return {"epoch": values["epoch"], "seconds": values.get("seconds")} | entry_parts


@contextlib.contextmanager
def record_run_for_viewer(
    ui: bool | str | os.PathLike[str] | Store,
    function: Callable[..., Any] | str,
    size: int | None,
    kind: str = "run",
    shim: RunReportReceiver | None = None,
    *,
    writes_output: bool = False,
    metrics_address: str | None = None,
) -> Iterator[str | None]:
    """Opens the run viewer, and writes the run of the job inside for the viewer.

    The run stays in the store. Reports of the function (`farandole.spark.task.report`) become its
    curves.

    Args:
        ui: `True`, or the store that keeps the run; `False` shows nothing.
        function: The function that runs, or its name.
        size: Number of processes; `None` until the ranks have hosts.
        kind: Name of the public function that runs the job.
        shim: The Spark plugin, which receives the same events.
        writes_output: Whether the lines of ranks that reach the driver are written here; otherwise
            the caller does it.
        metrics_address: Address that serves the metrics; default: `FARANDOLE_METRICS`.

    Yields:
        The directory for the output of ranks; `None` where nothing is shown, or the store is not of
            this host.
    """
    called = function if isinstance(function, str) else getattr(function, "__qualname__", "")
    if ui is False:
        # A job with the plugin reports itself.
        with contextlib.ExitStack() as reports:
            if shim is None:
                run = report_run(None, called, kind, metrics_address=metrics_address)
                reports.enter_context(run)
            yield None
        return
    from farandole.ui import announce, show  # noqa: PLC0415 - for those who look

    store = (
        ui
        if isinstance(ui, Store)
        else Store.create(str(Path(DEFAULT_STORE).absolute() if ui is True else ui))
    )
    name = re.sub(r"[^A-Za-z0-9]+", "-", called).strip("-") or "run"
    run = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() // 1000 % 1000000:06d}"
    announce(show(store, run=run), "the run is at")
    remote = store.to_remote(run)
    local = native.Store(remote.run_path).local_path if remote.run_path is not None else None
    folder = None if local is None else Path(local) / OUTPUT_DIRECTORY
    journal = _FunctionRunJournal(
        remote, {} if size is None else {"size": size}, output=folder if writes_output else None
    )
    try:
        with report_run(shim, run, kind, {}, journal, metrics_address=metrics_address):
            yield None if folder is None else str(folder)
    finally:
        try:
            # The job is over. A message at the end reports missing timelines.
            with contextlib.suppress(OSError):
                timelines.write_trace_to_run(remote)
        finally:
            journal.close()


class JobRunReporter:
    """Reports a job of `farandole run` to the run viewer, and as metrics. Its methods never raise
    because of their arguments.

    Attributes:
        folder: The directory for the output of ranks; `None` where the store is not of this host.

    Args:
        store: Store that keeps the run; default: `farandole-runs` of the current directory.
        name: Name of the program or function that runs.
        size: Number of processes.
        shows_run: Whether the run viewer shows the job.
        metrics_address: Address that serves the metrics; empty for none.

    Raises:
        ValueError: The address is wrong.
        OSError: Its port is taken, or the store or the page cannot be used.
    """

    def __init__(
        self, store: str | None, name: str, size: int, shows_run: bool, metrics_address: str
    ) -> None:
        self._run = contextlib.ExitStack()
        self._store = (store or str(Path(DEFAULT_STORE))) if shows_run else None
        self.folder: str | None = None
        if self._store is None:
            run = report_run(None, name, "run", metrics_address=metrics_address)
            self._run.enter_context(run)
        else:
            self.folder = self._run.enter_context(
                record_run_for_viewer(self._store, name, size, metrics_address=metrics_address)
            )
        self._training = current_run()

    def world(self, generation: int, places: list[tuple[int, str]]) -> None:
        """Reports the members of a world.

        Args:
            generation: Number of the world in an elastic job.
            places: Task and host of each rank.
        """
        self._training.set_placements(
            [{"rank": rank, "task": task, "host": host} for rank, (task, host) in enumerate(places)]
        )
        if generation > 1:
            self._training.record_restart(
                f"world {generation} has {format_counted_noun(len(places), 'rank')}"
            )

    def metric(self, task: int, rank: int | None, kind: str, data: bytes) -> None:
        """Takes a record of a worker.

        Args:
            task: Task of the worker.
            rank: Rank of the worker.
            kind: Kind of the record.
            data: Content of the record.
        """
        dispatch_worker_record((task, rank), kind, data, self._training)

    def loss(self, description: str) -> None:
        """Reports the loss of a worker or a host.

        Args:
            description: The worker or host, and the reason.
        """
        self._training.record_loss("a worker or a host is out", description)

    def ended(self, reason: str | None, interrupted: bool) -> None:
        """Reports the end of the job.

        Args:
            reason: Reason of the failure; `None` after success.
            interrupted: Whether the user ended it.
        """
        error = (
            KeyboardInterrupt()
            if interrupted
            else FarandoleJobError(reason)
            if reason is not None
            else None
        )
        with contextlib.suppress(KeyboardInterrupt, FarandoleJobError):
            self._run.__exit__(None if error is None else type(error), error, None)
        if self._store is None:
            return
        sys.stderr.write(
            f"farandole: the run stays in {self._store}: farandole ui {shlex.quote(self._store)}\n"
        )
        sys.stderr.flush()
