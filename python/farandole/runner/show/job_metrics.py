# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The reports of a run as metrics. `crates/telemetry/src/metric_names.rs` has their
names.

ranks --reports--> TrainingRun --rows--> JobMetrics --samples--> MetricsExport: HTTP, OTLP
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeGuard

from farandole.runner.show.run_reporter import RunReportReceiver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_LINK_COUNTERS: Final = (("shared_memory", "shared_memory_bytes"), ("tcp", "tcp_bytes"))
"""Label of a link, and the counter of its bytes."""
_ROW_RATE_GAUGE: Final = "rowsPerSecond"
_MILLISECONDS_PER_SECOND: Final = 1e3
_REPORT_EXPIRY_SECONDS: Final = 30.0
"""Age of a rank's last report from which its values are old. A rank reports every two seconds."""
_MIN_STEP_EXPIRY_SECONDS: Final = 60.0
_STEP_EXPIRY_STEPS: Final = 10.0
"""Time without a step, in mean steps and at least a minute, after which that mean is old."""


class MetricSample(NamedTuple):
    """A value of a metric.

    Attributes:
        metric: Name of the metric in OpenTelemetry.
        labels: Values of its labels by name.
        value: The value.
    """

    metric: str
    labels: dict[str, str]
    value: float


class JobMetrics(RunReportReceiver):
    """The metrics of one run, from its last reports.

    Args:
        run: Name of the run, a label of all its metrics.
        clock: Returns the seconds since 1970.
    """

    def __init__(self, run: str, clock: Callable[[], float] = time.time) -> None:
        self.name, self._clock = run, clock
        self._lock = threading.Lock()
        self._run: Mapping[str, Any] = {}
        self._ranks: list[dict[str, Any]] = []
        self._row_rate: float | None = None
        self._counters = _RankCounters()
        self._checkpoint_at: float | None = None
        """Time by the clock of this host."""
        self._last_reports: dict[Any, tuple[float, float]] = {}
        """Times of each task's last report: by the clock of its host, and when it arrived."""

    def put_row(self, run: str, key: str, body: dict[str, Any], *, logged: bool = True) -> None:
        """Like `RunReportReceiver.put_row`."""
        del run, logged
        with self._lock:
            if key == "run":
                self._run = body
            elif key == "ranks":
                self._ranks = body["ranks"]
                for rank in self._ranks:
                    self._counters.add_report(rank)
                    self._note_report_time(rank)
                    # Remains when the rank that has saved is lost.
                    if _is_number(at := rank.get("checkpoint_at")):
                        at = self._clock() - self._age_on_host(rank, at)
                        self._checkpoint_at = max(at, self._checkpoint_at or at)

    def set_gauge(self, name: str, value: float) -> None:
        """Like `RunReportReceiver.set_gauge`."""
        if name == _ROW_RATE_GAUGE:
            self._row_rate = value

    def samples(self) -> list[MetricSample]:
        """Returns the present values."""
        with self._lock:
            run, ranks = self._run, self._ranks
        samples = [*self._job_samples(run, ranks)]
        hosts: set[str] = set()
        for rank in ranks:
            if "state" in rank:  # it has ended, or was lost
                continue
            samples += self._rank_samples(rank)
            host = str(rank.get("host"))
            if (
                host not in hosts
                and isinstance(rank.get("load"), dict)
                and self._has_reported_recently(rank)
            ):
                hosts.add(host)
                samples += self._host_samples(host, rank["load"])
        return samples

    def _job_samples(
        self, run: Mapping[str, Any], ranks: list[dict[str, Any]]
    ) -> Iterator[MetricSample]:
        labels = {"run": self.name}
        if ranks:
            yield MetricSample("farandole.job.ranks", labels, len(ranks))
            yield MetricSample("farandole.job.worlds", labels, 1 + run.get("restarts", 0))
        yield MetricSample("farandole.job.losses", labels, run.get("losses", 0))
        if _is_number(started := run.get("started")):
            age = self._age(started / _MILLISECONDS_PER_SECOND)
            yield MetricSample("farandole.job.age", labels, age)
        if self._checkpoint_at is not None:
            yield MetricSample("farandole.checkpoint.age", labels, self._age(self._checkpoint_at))
        if self._row_rate is not None:
            yield MetricSample("farandole.job.rows", labels, self._row_rate)

    def _rank_samples(self, rank: Mapping[str, Any]) -> Iterator[MetricSample]:
        labels = {"run": self.name, "rank": str(rank["rank"]), "host": str(rank.get("host"))}
        step = rank.get("step_seconds")
        if _is_number(step) and step > 0 and self._has_recent_step(rank, step):
            yield MetricSample("farandole.step.duration", labels, step)
            for part in ("data", "reduction"):
                seconds = rank.get("data_seconds" if part == "data" else "reduce_seconds")
                if _is_number(seconds):
                    yield MetricSample(f"farandole.step.{part}_wait", labels, seconds / step)
        if _is_number(step_at := rank.get("step_at")):
            yield MetricSample("farandole.step.age", labels, self._age_on_host(rank, step_at))
        with self._lock:
            counters = self._counters.sums(rank)
        yield from _counter_samples(labels, counters)
        load = rank.get("load")
        if isinstance(load, dict) and self._has_reported_recently(rank):
            for metric, name in (
                ("farandole.rank.memory", "process_memory"),
                ("farandole.gpu.utilization", "gpu"),
                ("farandole.gpu.memory", "gpu_memory"),
            ):
                if _is_number(value := load.get(name)):
                    yield MetricSample(metric, labels, value)

    def _age(self, at: float) -> float:
        """Returns the seconds since a time."""
        return max(self._clock() - at, 0.0)

    def _note_report_time(self, rank: Mapping[str, Any]) -> None:
        task, reported_at = rank.get("task"), rank.get("reported_at")
        if not _is_number(reported_at):
            self._last_reports.pop(task, None)
        elif task not in self._last_reports or self._last_reports[task][0] != reported_at:
            self._last_reports[task] = reported_at, self._clock()

    def _age_on_host(self, rank: Mapping[str, Any], at: float) -> float:
        """Returns the seconds since a time that the clock of a rank's host has given, which may be
        wrong: the time before the report by that clock, and since its arrival by this host's.
        """
        report = self._last_reports.get(rank.get("task"))
        if report is None:
            return self._age(at)
        reported_at, arrived_at = report
        return max(reported_at - at, 0.0) + self._age(arrived_at)

    def _has_reported_recently(self, rank: Mapping[str, Any]) -> bool:
        reported_at = rank.get("reported_at")
        if not _is_number(reported_at):
            return True
        return self._age_on_host(rank, reported_at) <= _REPORT_EXPIRY_SECONDS

    def _has_recent_step(self, rank: Mapping[str, Any], step: float) -> bool:
        """Returns whether a mean of steps is no old value: steps still end."""
        step_at = rank.get("step_at")
        expiry = max(_MIN_STEP_EXPIRY_SECONDS, _STEP_EXPIRY_STEPS * step)
        return not _is_number(step_at) or self._age_on_host(rank, step_at) <= expiry

    def _host_samples(self, host: str, load: Mapping[str, Any]) -> Iterator[MetricSample]:
        labels = {"run": self.name, "host": host}
        for metric, name in (("farandole.host.cpu", "cpu"), ("farandole.host.memory", "memory")):
            if _is_number(value := load.get(name)):
                yield MetricSample(metric, labels, value)


class _RankCounters:
    """Sums of the counters of each rank on each host, whichever processes have been this rank.

    The counters of a process go on when an elastic job gives it another rank. A sum gets only what
    its process has added since the last report, so it never falls.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[Any, Any], dict[str, float]] = {}
        self._last_values: dict[Any, dict[str, float]] = {}
        """Counters in the last report of each task's process."""
        self._pids: dict[Any, Any] = {}

    def add_report(self, rank: Mapping[str, Any]) -> None:
        """Adds the present counters of a rank's process."""
        task, pid = rank.get("task"), rank.get("pid")
        if self._pids.setdefault(task, pid) != pid:
            self._pids[task] = pid
            self._last_values.pop(task, None)
        counters = rank.get("counters")
        if not isinstance(counters, dict):
            return
        sums, last = self.sums(rank), self._last_values.setdefault(task, {})
        for name, value in counters.items():
            if _is_number(value):
                before = last.get(name, 0.0)
                sums[name] = sums.get(name, 0.0) + (value - before if value >= before else value)
                last[name] = value

    def sums(self, rank: Mapping[str, Any]) -> dict[str, float]:
        """Returns the sums of a rank."""
        return self._sums.setdefault((rank.get("rank"), rank.get("host")), {})


def _counter_samples(labels: dict[str, str], counters: Mapping[str, Any]) -> Iterator[MetricSample]:
    for link, name in _LINK_COUNTERS:
        if _is_number(value := counters.get(name)):
            yield MetricSample("farandole.link.sent", labels | {"link": link}, value)
    for metric, name in (
        ("farandole.rank.collective_wait", "collective_wait_seconds"),
        ("farandole.store.retries", "store_retries"),
    ):
        if _is_number(value := counters.get(name)):
            yield MetricSample(metric, labels, value)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
