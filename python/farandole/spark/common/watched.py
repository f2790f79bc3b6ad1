# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A job of plain functions as a run of a store: what the run viewer shows of `farandole.run(ui=True)`."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from farandole._native import store as native
from farandole.runner import timelines
from farandole.spark.common.journal import HISTORY, Journal
from farandole.spark.common.store import Store
from farandole.spark.training import telling

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

HERE: Final = "farandole-runs"
"""The store where nobody names one: a directory of the current one."""

OUTPUT: Final = "output"
"""Directory of a run with what its ranks print."""


class _Journal(Journal):
    """Also writes the history, which estimators write by themselves."""

    def _write(self) -> None:
        with self._lock:
            lines = [json.dumps(_entry(self._epochs[epoch])) + "\n" for epoch in sorted(self._epochs)]
        if lines:
            self._remote.write(f"{self._remote.logs_subdir}/{HISTORY}", "".join(lines).encode())
        super()._write()


def _entry(values: dict[str, Any]) -> dict[str, Any]:
    """An epoch as a history has it."""
    parts: dict[str, dict[str, Any]] = {"train": {}, "validation": {}}
    for name, value in values.items():
        if name not in ("epoch", "seconds"):
            parts["validation" if name.startswith("val_") else "train"][name.removeprefix("val_")] = value
    told = {
        part: {"loss": scores.pop("loss", None), "all_metrics": [{name: value} for name, value in scores.items()]}
        for part, scores in parts.items()
        if scores
    }
    return {"epoch": values["epoch"], "seconds": values.get("seconds")} | told


@contextlib.contextmanager
def watched(ui: bool | str | os.PathLike[str] | Store, function: Callable[..., Any], size: int) -> Iterator[str | None]:
    """Opens the run viewer, and writes what it shows of the job that runs inside.

    The run stays in the store. Reports of the function (`farandole.spark.task.report`) become its curves.

    Args:
        ui: `True`, or the store that keeps the run; `False` shows nothing.
        function: What runs.
        size: Number of processes.

    Yields:
        The directory for what ranks print; `None` where nothing is shown, or the store is not of this host.
    """
    if ui is False:
        yield None
        return
    from farandole.ui import show  # noqa: PLC0415 - for those who look

    store = ui if isinstance(ui, Store) else Store.create(str(Path(HERE).absolute() if ui is True else ui))
    name = re.sub(r"[^A-Za-z0-9]+", "-", getattr(function, "__qualname__", "")).strip("-") or "run"
    run = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() // 1000 % 1000000:06d}"
    sys.stderr.write(f"farandole: the run is at {show(store, run=run).link}\n")
    sys.stderr.flush()
    remote = store.to_remote(run)
    local = native.Store(remote.run_path).local_path if remote.run_path is not None else None
    journal = _Journal(remote, {"size": size})
    try:
        with telling(None, run, "run", journal=journal):
            yield None if local is None else str(Path(local) / OUTPUT)
    finally:
        with contextlib.suppress(OSError):  # the job is over; what is missing is said at the end
            timelines.keep(remote.write)
        journal.close()
