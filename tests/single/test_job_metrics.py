# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Metrics of runs: their samples, their text for Prometheus, the server, and OTLP, which a
collector of the test receives.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.collector import running_collector
from tests.pages import ROOT

from farandole import ui
from farandole._native import metrics
from farandole.common.rank_progress import RankProgress
from farandole.runner.show import metrics_export
from farandole.runner.show.job_metrics import JobMetrics
from farandole.runner.show.metrics_export import MetricsAddressError, export_run_metrics
from farandole.runner.show.training_run_reports import TrainingRun, report_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.collector import Collector

PAGE = ROOT / "docs" / "user-guide" / "metrics.md"
BOARD = ROOT / "docs" / "user-guide" / "metrics" / "grafana-board.json"
NOW = 1_000_000.0
COUNTERS = {
    "shared_memory_bytes": 3e9,
    "tcp_bytes": 7.0,
    "collective_wait_seconds": 1.5,
    "store_retries": 2.0,
}
LOAD = {"cpu": 0.5, "memory": 2e9, "process_memory": 1e8, "gpu": 0.9, "gpu_memory": 4e9}
RANK = {
    "rank": 0,
    "task": 0,
    "host": 'node"1"\n',
    "step_seconds": 0.2,
    "data_seconds": 0.05,
    "reduce_seconds": 0.02,
    "step_at": NOW - 3,
    "counters": COUNTERS,
    "checkpoint_at": NOW - 30,
    "load": LOAD,
}


def job_with_two_ranks() -> JobMetrics:
    """The metrics of a job after its reports."""
    job = JobMetrics("digits", lambda: NOW)
    job.put_row("", "run", {"restarts": 1, "losses": 3, "started": (NOW - 100) * 1000})
    job.put_row(
        "", "ranks", {"ranks": [RANK, {"rank": 1, "task": 1, "host": "b", "state": "lost"}]}
    )
    job.set_gauge("rowsPerSecond", 12.5)
    return job


def parsed(text: str) -> dict[tuple[str, str], float]:
    """The values of a text by metric and rank, as Prometheus's own parser reads them."""
    return {
        (sample.name, sample.labels.get("link") or sample.labels.get("rank", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_reports_become_samples_that_prometheus_reads() -> None:
    values = parsed(metrics.format_exposition(job_with_two_ranks().samples()))
    assert values == {
        ("farandole_job_ranks", ""): 2,
        ("farandole_job_worlds_total", ""): 2,
        ("farandole_job_losses_total", ""): 3,
        ("farandole_job_age_seconds", ""): 100,
        ("farandole_job_rows_per_second", ""): 12.5,
        ("farandole_step_duration_seconds", "0"): 0.2,
        ("farandole_step_data_wait_ratio", "0"): 0.25,
        ("farandole_step_reduction_wait_ratio", "0"): pytest.approx(0.1),
        ("farandole_step_age_seconds", "0"): 3,
        ("farandole_rank_collective_wait_seconds_total", "0"): 1.5,
        ("farandole_link_sent_bytes_total", "shared_memory"): 3e9,
        ("farandole_link_sent_bytes_total", "tcp"): 7,
        ("farandole_store_retries_total", "0"): 2,
        ("farandole_checkpoint_age_seconds", ""): 30,
        ("farandole_rank_memory_bytes", "0"): 1e8,
        ("farandole_host_cpu_ratio", ""): 0.5,
        ("farandole_host_memory_bytes", ""): 2e9,
        ("farandole_gpu_utilization_ratio", "0"): 0.9,
        ("farandole_gpu_memory_bytes", "0"): 4e9,
    }, "a rank that was lost has no values"


class ReportedJob:
    """A job whose ranks report at times of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = NOW
        monkeypatch.setattr(time, "time", lambda: self.now)
        self.metrics = JobMetrics("digits", lambda: self.now)
        self.run = TrainingRun(None, others=[self.metrics])

    def place(self, *tasks: int) -> None:
        """Gives the ranks to these tasks of one host."""
        seats = [{"rank": rank, "task": task, "host": "a"} for rank, task in enumerate(tasks)]
        self.run.set_placements(seats)

    def report(self, task: int, **facts: Any) -> None:
        """Takes a report of a task, and shows it."""
        self.run.update_rank_facts(task, {"reported_at": self.now} | facts)
        self.run._put_ranks(logged=False)

    def values(self, metric: str) -> dict[str, float]:
        """The values of a metric by rank."""
        return {
            sample.labels.get("rank", ""): sample.value
            for sample in self.metrics.samples()
            if sample.metric == metric
        }


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> ReportedJob:
    return ReportedJob(monkeypatch)


def test_the_time_of_a_step_disappears_when_steps_no_longer_end(job: ReportedJob) -> None:
    job.place(0, 1)
    for task in (0, 1):
        job.report(task, step_seconds=0.2, reduce_seconds=0.1, step_at=NOW)
    assert job.values("farandole.step.duration") == {"0": 0.2, "1": 0.2}
    # Rank 1 hangs: its thread of reports still sends the load.
    for _ in range(40):
        job.now += 2
        job.report(0, step_seconds=0.3, step_at=job.now)
        job.report(1, load=LOAD, step_at=NOW)
    assert job.values("farandole.step.age") == {"0": 0, "1": 80}
    assert job.values("farandole.step.duration") == {"0": 0.3}
    assert job.values("farandole.step.reduction_wait").keys() == {"0"}
    assert job.values("farandole.rank.memory") == {"1": 1e8}


def test_a_long_step_is_no_old_value(job: ReportedJob) -> None:
    job.place(0)
    job.report(0, step_seconds=50.0, step_at=NOW)
    job.now += 200
    job.report(0, load=LOAD)
    assert job.values("farandole.step.duration") == {"0": 50}
    job.now += 400
    job.report(0, load=LOAD)
    assert job.values("farandole.step.duration") == {}


def test_the_load_of_a_rank_that_no_longer_reports_disappears(job: ReportedJob) -> None:
    job.place(0, 1)
    for task in (0, 1):
        job.report(task, load=LOAD, step_seconds=0.2, step_at=NOW)
    job.now += 50
    job.report(0, load=LOAD, step_at=job.now)
    assert job.values("farandole.rank.memory") == {"0": 1e8}
    assert job.values("farandole.step.age") == {"0": 0, "1": 50}
    assert job.values("farandole.host.cpu") == {"": 0.5}


@pytest.mark.parametrize("ahead", [-40.0, 500.0])
def test_the_clock_of_a_ranks_host_may_be_wrong(job: ReportedJob, ahead: float) -> None:
    job.place(0)
    facts = {"step_seconds": 0.2, "step_at": NOW + ahead - 3, "checkpoint_at": NOW + ahead - 20}
    job.report(0, load=LOAD, **{**facts, "reported_at": NOW + ahead})
    job.now += 2
    job.run._put_ranks(logged=False)  # the same report again
    assert job.values("farandole.rank.memory") == {"0": 1e8}
    assert job.values("farandole.host.cpu") == {"": 0.5}
    assert job.values("farandole.step.age") == {"0": 5}
    assert job.values("farandole.checkpoint.age") == {"": 22}
    job.now += 98
    job.report(0, **{**facts, "reported_at": NOW + ahead + 100})
    assert job.values("farandole.step.age") == {"0": 103}
    assert job.values("farandole.step.duration") == {}
    job.now += 40
    assert job.values("farandole.rank.memory") == {}


def test_counters_of_a_rank_never_fall_when_ranks_are_renumbered(job: ReportedJob) -> None:
    job.place(4, 5)
    job.report(4, pid=40, counters=COUNTERS | {"store_retries": 1000.0})
    job.report(5, pid=50, counters=COUNTERS)
    # The process of rank 0 is lost, and the other one has its number.
    job.place(5)
    assert job.values("farandole.store.retries") == {"0": 1000}
    job.report(5, counters=COUNTERS | {"store_retries": 7.0})
    assert job.values("farandole.store.retries") == {"0": 1005}
    # A new process has the place of the lost one, and its report about itself precedes its sums.
    job.place(5, 4)
    job.report(4, pid=41)
    assert job.values("farandole.store.retries") == {"0": 1005, "1": 2}
    job.report(4, counters=COUNTERS | {"store_retries": 3.0})
    assert job.values("farandole.store.retries") == {"0": 1005, "1": 5}


def test_a_new_process_of_a_task_has_no_values_of_the_old_one(job: ReportedJob) -> None:
    job.place(0)
    job.report(0, pid=1, step_seconds=0.2, step_at=NOW, checkpoint_at=NOW, load=LOAD)
    job.report(0, pid=2)
    for metric in ("farandole.step.duration", "farandole.step.age", "farandole.rank.memory"):
        assert job.values(metric) == {}, metric


def test_the_age_of_the_last_checkpoint_survives_the_rank_that_has_written_it(
    job: ReportedJob,
) -> None:
    job.place(0, 1)
    job.report(0, pid=1, checkpoint_at=NOW - 30)
    job.report(1, pid=2, checkpoint_at=NOW - 50)
    assert job.values("farandole.checkpoint.age") == {"": 30}
    job.now += 10
    job.place(1)
    job.report(1, load=LOAD)
    assert job.values("farandole.checkpoint.age") == {"": 40}
    assert job.values("farandole.job.age") == {"": 10}


def test_the_alarms_of_the_page_fire_also_for_a_job_that_has_saved_nothing(tmp_path: Any) -> None:
    (rules,) = re.findall(r"^```yaml\n(groups:.+?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "rules.yml").write_text(rules)
    # Values of each minute.
    series = {
        'farandole_job_age_seconds{run="saves"}': "0+60x120",
        'farandole_checkpoint_age_seconds{run="saves"}': "5+0x120",
        'farandole_step_age_seconds{run="saves",rank="0"}': "1+0x120",
        'farandole_job_age_seconds{run="never"}': "0+60x120",
        'farandole_job_age_seconds{run="no longer"}': "0+60x120",
        'farandole_checkpoint_age_seconds{run="no longer"}': "0+60x120",
        'farandole_job_age_seconds{run="young"}': "0+1x120",
        'farandole_step_age_seconds{run="young",rank="0"}': "1+0x120",
        'farandole_step_age_seconds{run="young",rank="1"}': "0+60x120",
    }

    def alarms(minutes: int, name: str, *runs: str) -> dict[str, Any]:
        fired = [{"exp_labels": {"run": run}} for run in runs]
        return {"eval_time": f"{minutes}m", "alertname": name, "exp_alerts": fired}

    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": text} for name, text in series.items()],
        "alert_rule_test": [
            alarms(30, "FarandoleDoesNotSave"),
            alarms(90, "FarandoleDoesNotSave", "never", "no longer"),
            alarms(5, "FarandoleHangs"),
            alarms(90, "FarandoleHangs", "young"),
        ],
    }
    path = tmp_path / "tests.yml"
    path.write_text(json.dumps({"rule_files": ["rules.yml"], "tests": [test]}))
    assert "SUCCESS" in promtool("test", "rules", str(path))


def promtool(*words: str, text: str = "") -> str:
    """Runs Prometheus's own checker; its output."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("not installed (Debian: prometheus): promtool")
    done = subprocess.run(
        [program, *words], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_prometheuss_own_checker_finds_no_fault_in_the_text() -> None:
    job = JobMetrics("digits", lambda: NOW)
    job.put_row("", "ranks", {"ranks": [RANK]})
    samples = [(sample.metric, sample.labels, sample.value) for sample in job.samples()]
    known = {name for name, _, _ in samples}
    others = [name for name, *_ in metrics.definitions() if name not in known]
    text = metrics.format_exposition([*samples, *((name, {"run": "a"}, 1.0) for name in others)])
    assert promtool("check", "metrics", text=text).strip() == ""


def test_the_page_lists_all_metrics_with_their_labels() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| `([\w.]+)` \| (\w+) \| ([^|]+) \| ([^|]+) \|$",
        PAGE.read_text(),
        re.MULTILINE,
    )
    said = [(name, kind, prometheus, text) for prometheus, name, kind, _, text in rows]
    assert said == [
        (name, kind, prometheus, text) for name, kind, _, text, prometheus in metrics.definitions()
    ]
    labels = {name: set(re.findall(r"`(\w+)`", cell)) for _, name, _, cell, _ in rows}
    for sample in job_with_two_ranks().samples():
        assert set(sample.labels) == labels[sample.metric], sample


def board_expressions() -> list[str]:
    """The queries of the board."""
    panels = json.loads(BOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def test_the_board_has_valid_queries_of_metrics_that_exist(tmp_path: Any) -> None:
    names = {prometheus for *_, prometheus in metrics.definitions()}
    used = {name for query in board_expressions() for name in re.findall(r"farandole_\w+", query)}
    assert used <= names
    assert {
        "farandole_step_duration_seconds",
        "farandole_rank_collective_wait_seconds_total",
        "farandole_link_sent_bytes_total",
        "farandole_job_worlds_total",
        "farandole_store_retries_total",
        "farandole_checkpoint_age_seconds",
        "farandole_job_age_seconds",
    } <= used
    queries = [
        query.replace("$__rate_interval", "1m").replace("$run", ".*")
        for query in board_expressions()
    ]
    rules = [{"record": f"board:{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", str(path))


def test_a_wait_within_a_wait_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    timer = RankProgress().measure_reduction()
    with timer:
        now[0] += 1.0
        with timer:
            now[0] += 2.0
        now[0] += 4.0
    assert timer.seconds == 7.0


def test_steps_and_checkpoints_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    progress = RankProgress()
    progress.end_step()
    assert set(progress.take_report()) == {"reported_at", "counters"}, "steps are not measured"
    progress.measures_steps = True
    for waited, seconds in ((9.0, 9.0), (0.1, 0.5), (0.3, 1.0)):
        with progress.measure_reduction():
            now[0] += waited
        now[0] += seconds - waited
        progress.end_step()
    progress.note_checkpoint()
    report = progress.take_report()
    # The first step has no begin.
    assert report["step_seconds"] == pytest.approx(0.75)
    assert report["reduce_seconds"] == pytest.approx(0.2)
    assert report["checkpoint_at"] == pytest.approx(time.time(), abs=60)
    assert set(report["counters"]) == set(COUNTERS)
    assert "step_seconds" not in progress.take_report()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9400", ("127.0.0.1", 9400)),
        ("0.0.0.0:9400", ("0.0.0.0", 9400)),
        ("[::]:0", ("::", 0)),
        ("node1:1", ("node1", 1)),
    ],
)
def test_an_address_is_a_port_or_a_host_and_a_port(text: str, expected: tuple[str, int]) -> None:
    assert metrics_export.parse_address(text) == expected


@pytest.mark.parametrize("text", ["", "x", "-1", "65536", ":9400", "host:", "host:x"])
def test_another_address_is_named(text: str) -> None:
    with pytest.raises(MetricsAddressError, match=re.escape(f"0.0.0.0:9400: {text}")):
        metrics_export.parse_address(text)


def scraped(port: int, path: str = "/metrics") -> str:
    """The answer of the server."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
        assert answer.headers["Content-Type"] == metrics.CONTENT_TYPE
        return answer.read().decode()


def announced_port(capfd: pytest.CaptureFixture[str]) -> int:
    """The port in the line that the driver has printed."""
    (port,) = re.findall(
        r"metrics are at http://127\.0\.0\.1:(\d+)/metrics", capfd.readouterr().err
    )
    return int(port)


def is_open(port: int) -> bool:
    """Returns whether something listens there."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
        return True
    return False


def test_one_server_has_all_runs_of_the_process_and_ends_with_the_last(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARANDOLE_METRICS", "0")
    with report_run(None, "first", "fit") as run:
        port = announced_port(capfd)
        run.set_placements([{"rank": 0, "task": 0, "host": "a"}])
        run.update_rank_facts(0, {"step_seconds": 0.5})
        run.record_loss("a worker is gone", None)
        run.record_restart("a new world")
        with export_run_metrics("second"):
            text = scraped(port)
            for line in (
                'farandole_job_worlds_total{run="first"} 2',
                'farandole_job_losses_total{run="first"} 1',
                'farandole_job_losses_total{run="second"} 0',
            ):
                assert line in text.splitlines()
        assert 'run="second"' not in scraped(port)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            scraped(port, "/")
    assert not is_open(port)
    assert not [one for one in threading.enumerate() if one.name == "farandole-metrics"]


def test_a_port_that_is_taken_is_named_before_the_run_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = str(taken.getsockname()[1])
        with (
            pytest.raises(OSError, match=f"cannot be served on {address}"),
            report_run(None, "run", "fit", metrics_address=address),
        ):
            pytest.fail("the run has started")
    with report_run(None, "run", "fit", metrics_address=address):
        assert is_open(int(address)), "the next run is not affected"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with running_collector() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        yield running


def test_a_collector_gets_the_last_values_of_a_run_by_otlp(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret")
    with export_run_metrics("digits", "") as run:
        assert run is not None
        run.put_row("", "run", {"restarts": 1, "losses": 3})
        run.put_row("", "ranks", {"ranks": [RANK | {"step_at": time.time()}]})
    values = collector.last_values()
    assert values["farandole.step.duration"] == ("s", False, 0.2)
    assert values["farandole.link.sent"] == ("By", True, 3e9)
    assert values["farandole.job.losses"] == ("{loss}", True, 3)
    assert set(collector.authorizations) == {"Bearer secret"}
    attributes = collector.requests[0].resource_metrics[0].resource.attributes
    names = {one.key: one.value.string_value for one in attributes}
    assert names["service.name"] == "farandole"


def test_a_collector_that_does_not_answer_does_not_hold_up_the_end_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_export, "_LAST_EXPORT_TIMEOUT", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
        began = time.monotonic()
        with export_run_metrics("digits", ""):
            pass
    assert time.monotonic() - began < 30


def test_a_protocol_that_is_not_spoken_is_named_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with export_run_metrics("digits", "") as run:
        assert run is not None
    assert "set OTEL_EXPORTER_OTLP_PROTOCOL to http/protobuf: grpc" in caplog.text


def test_the_run_viewer_has_the_runs_of_its_store_as_metrics(tmp_path: Any) -> None:
    run = tmp_path / "runs" / "digits"
    run.mkdir(parents=True)
    record = {"name": "digits", "state": "running", "done": 3, "last": {"loss": 0.5}}
    (run / "_record.json").write_text(json.dumps(record))
    (run / "checkpoint").write_bytes(b"bytes")
    with ui.show(str(tmp_path)) as viewer:
        text = urllib.request.urlopen(f"{viewer.url}metrics", timeout=20).read().decode()
    values = {name: value for (name, _), value in parsed(text).items()}
    assert (values["farandole_run_state"], values["farandole_run_epochs"]) == (1, 3)
    assert values["farandole_run_score"] == 0.5
    assert 0 <= values["farandole_checkpoint_age_seconds"] < 600
    assert promtool("check", "metrics", text=text).strip() == ""


def test_without_settings_nothing_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FARANDOLE_METRICS", *metrics_export.OTLP_ENDPOINT_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    with export_run_metrics("digits") as run:
        assert run is None


def served_port(printed: str) -> int:
    (port,) = re.findall(r"http://127\.0\.0\.1:(\d+)/metrics", printed)
    return int(port)


def test_runs_of_one_name_have_different_labels():
    export = metrics_export.MetricsExport()
    with (
        export.export_run("trial", "", uses_otlp=False) as first,
        export.export_run("trial", "", uses_otlp=False) as second,
        export.export_run("trial", "", uses_otlp=False) as third,
    ):
        assert [run.name for run in (first, second, third)] == ["trial", "trial (2)", "trial (3)"]
    with export.export_run("trial", "", uses_otlp=False) as again:
        assert again.name == "trial"


@pytest.mark.timing
def test_a_client_that_sends_slowly_keeps_no_run_from_its_end(capsys):
    export = metrics_export.MetricsExport()
    with export.export_run("slow", "0", uses_otlp=False):
        port = served_port(capsys.readouterr().err)
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        for client in clients:
            client.send(b"GET /met")
        started = time.monotonic()
    assert time.monotonic() - started < 2.0
    for client in clients:
        client.close()


def test_a_run_that_begins_while_the_server_ends_finds_the_port(capsys):
    export = metrics_export.MetricsExport()
    with export.export_run("first", "0", uses_otlp=False):
        port = served_port(capsys.readouterr().err)
    failures = []

    def run_often() -> None:
        for _ in range(20):
            try:
                with export.export_run("often", str(port), uses_otlp=False):
                    pass
            except OSError as error:
                failures.append(error)

    threads = [threading.Thread(target=run_often) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
