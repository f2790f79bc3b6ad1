# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The load of all hosts and the times of all ranks as metrics of one run of a tracking service.

Workers report to the driver, and only the driver calls the service: workers need neither its
address nor its token.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from farandole._native import ui as native_ui
from farandole.runner.show.run_reporter import RunReportReceiver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from farandole.spark.common.runs.tracking import Tracker

LOG_INTERVAL: Final = 10.0
"""Seconds between two samples that are logged."""

_MAX_FINAL_WAIT: Final = 10.0
"""Seconds that the end of a run waits for the service."""
_BYTES_PER_MEGABYTE: Final = 1e6


def rank_metrics(ranks: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns metrics by name: `rank/<number>/...`, and `system/<host>/...` with MLflow's names.

    Args:
        ranks: What is known of each rank. Times are seconds of a mean step, loads are shares from
            0 to 1, and sizes are bytes.
    """
    metrics: dict[str, float] = {}
    gpus: dict[str, int] = {}
    for rank in ranks:
        own, step = f"rank/{rank['rank']}", rank.get("step_seconds")
        if _is_number(step) and step > 0:
            metrics[f"{own}/step_seconds"] = step
            if _is_number(data := rank.get("data_seconds")):
                metrics[f"{own}/data_wait_seconds"] = data
            if _is_number(reduce := rank.get("reduce_seconds")):
                metrics[f"{own}/reduction_share"] = reduce / step
        load = rank.get("load")
        if not isinstance(load, dict):
            continue
        if _is_number(memory := load.get("process_memory")):
            metrics[f"{own}/process_memory_megabytes"] = memory / _BYTES_PER_MEGABYTE
        # MLflow takes no other characters in a name.
        host = f"system/{re.sub(r'[^A-Za-z0-9_.-]', '_', str(rank.get('host')))}"
        if _is_number(cpu := load.get("cpu")):
            metrics[f"{host}/cpu_utilization_percentage"] = 100 * cpu
        metrics |= _memory_metrics(f"{host}/system_memory", load, "memory")
        if _is_number(use := load.get("gpu")):
            gpu = gpus[host] = gpus.get(host, -1) + 1
            metrics[f"{host}/gpu_{gpu}_utilization_percentage"] = 100 * use
            metrics |= _memory_metrics(f"{host}/gpu_{gpu}_memory", load, "gpu_memory")
    return metrics


def _memory_metrics(prefix: str, load: Mapping[str, Any], name: str) -> dict[str, float]:
    used, total = load.get(name), load.get(f"{name}_total")
    if not (_is_number(used) and _is_number(total) and total > 0):
        return {}
    return {
        f"{prefix}_usage_megabytes": used / _BYTES_PER_MEGABYTE,
        f"{prefix}_usage_percentage": 100 * used / total,
    }


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class RankMetricsReporter(RunReportReceiver):
    """Logs the reports of ranks every few seconds, on a thread of its own.

    A service that does not answer delays neither the driver nor the training: a sample that comes
    while the one before is being sent replaces the one that waits.

    Args:
        log: Logs metrics by name, with the number of the sample.
        interval: Seconds between two samples.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        log: Callable[[dict[str, float], int], None],
        interval: float = LOG_INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._interval, self._clock = log, interval, clock
        self._latest: list[dict[str, Any]] = []
        self._logged_at = clock()
        self._changed = threading.Condition()
        self._waiting: list[dict[str, Any]] | None = None
        self._ended = False
        self._thread: threading.Thread | None = None

    def put_row(self, run: str, key: str, body: dict[str, Any], *, logged: bool = True) -> None:
        """Like `RunReportReceiver.put_row`."""
        del run, logged
        if key == "ranks":
            self._latest = body["ranks"]
            if self._clock() - self._logged_at >= self._interval:
                self._send()

    def close(self) -> None:
        """Logs the last report and ends the thread. Waits for the service at most 10 s."""
        if self._latest:
            self._send()
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_MAX_FINAL_WAIT)

    def _send(self) -> None:
        self._logged_at = self._clock()
        with self._changed:
            self._waiting, self._latest = self._latest, []
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._log_samples, name="farandole-rank-metrics", daemon=True
            )
            self._thread.start()

    def _log_samples(self) -> None:
        sample = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._ended)
                ranks, self._waiting = self._waiting, None
            if ranks is None:
                return
            if metrics := rank_metrics(ranks):
                # The log warns of an error itself.
                with contextlib.suppress(Exception):
                    self._log(metrics, sample)
                sample += 1


@contextlib.contextmanager
def log_rank_metrics(tracker: Tracker) -> Iterator[RankMetricsReporter | None]:
    """Logs the reports of ranks inside to a tracker; gives `None` if the tracker takes none.

    Args:
        tracker: gets them.
    """
    if not tracker.takes_ranks:
        yield None
        return
    with contextlib.closing(RankMetricsReporter(tracker.log_ranks)) as reporter:
        yield reporter


def run_verdict(job: Any) -> str | None:
    """Returns what limits the speed of a run, as `farandole explain` says it; `None` if the run is
    not saved, or its ranks have not measured it.

    Args:
        job: of the run.
    """
    if job.store.run_path is None:
        return None
    try:
        verdict = native_ui.explain_verdict(job.store.run_path)
    except (OSError, ValueError):  # the store is lost: the fit's own error names it
        return None
    return None if verdict.startswith("unknown") else verdict
