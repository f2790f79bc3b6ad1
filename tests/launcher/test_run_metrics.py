# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The commands of the page metrics.md: a real Prometheus scrapes a job, and a collector of the test
gets its metrics.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.collector import running_collector
from tests.launcher.conftest import until
from tests.pages import ROOT, blocks_of
from tests.programs import program_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.launcher.conftest import Launch

PAGE = [block for block in blocks_of("docs/user-guide/metrics.md") if block.why_not is None]
COMMAND, OTLP_SCRIPT = [block.text for block in PAGE if block.kind == "sh"]
CONFIGURATION, _ = [block.text for block in PAGE if block.kind == "yaml"]
BOARD = ROOT / "docs" / "user-guide" / "metrics" / "grafana-board.json"
PROGRAM = program_path(__file__, "train_and_commit")
PORT = "9400"
LIMIT = 120.0


def free_port() -> int:
    """A port of this host on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Job:
    """A job of the page's program and command."""

    def __init__(self, launch: Callable[..., Launch], *flags: object) -> None:
        self.port = free_port()
        words = shlex.split(COMMAND)
        assert words[:2] + words[-2:] == ["farandole", "run", "python", "train.py"]
        given = [str(self.port) if word == PORT else word for word in words[2:-2]]
        self.run = launch(*flags, *given, sys.executable, PROGRAM, env={"OMP_NUM_THREADS": "1"})

    def values(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """Labels and values of each metric."""
        try:
            url = f"http://127.0.0.1:{self.port}/metrics"
            text = urllib.request.urlopen(url, timeout=20).read().decode()
        except OSError:
            assert self.run.process.poll() is None, self.run.err.read_text()
            return {}
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found

    def await_values(self, name: str, count: int) -> list[float]:
        """Waits until a metric has this many values."""
        until(lambda: len(self.values().get(name, ())) == count, f"{name}: {self.values()}", LIMIT)
        return [value for _, value in self.values()[name]]

    def end(self) -> None:
        """Ends the training."""
        (self.run.folder / "enough").touch()
        assert self.run.wait() == 0, self.run.err.read_text()


def test_a_job_of_the_page_serves_its_metrics(launch: Callable[..., Launch]) -> None:
    job = Job(launch)
    steps = job.await_values("farandole_step_duration_seconds", 2)
    assert all(0.005 < step < 10 for step in steps), steps
    assert 0 <= min(job.await_values("farandole_checkpoint_age_seconds", 1)) < 60
    assert job.await_values("farandole_job_ranks", 1) == [2]
    values = job.values()
    sent = {
        (label["rank"], label["link"]): bytes_sent
        for label, bytes_sent in values["farandole_link_sent_bytes_total"]
    }
    assert sent["0", "shared_memory"] > 0
    assert sent["1", "shared_memory"] > 0

    def has_grown() -> bool:
        now = job.values()["farandole_link_sent_bytes_total"]
        return all(
            bytes_sent > sent[label["rank"], label["link"]]
            for label, bytes_sent in now
            if label["link"] != "tcp"
        )

    until(has_grown, f"more bytes than {sent}", LIMIT)
    waits = values["farandole_rank_collective_wait_seconds_total"]
    assert all(wait > 0 for _, wait in waits), waits
    assert {label["run"] for label, _ in values["farandole_job_ranks"]} == {PROGRAM.stem}
    job.end()
    assert f"metrics are at http://127.0.0.1:{job.port}/metrics" in job.run.err.read_text()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", job.port)) != 0, "the port is closed with the job"


def test_a_lost_rank_is_a_loss_and_a_new_world(launch: Callable[..., Launch]) -> None:
    job = Job(launch, "--min-np", 1, "--blacklist-cooldown-range", 600, 600)
    job.await_values("farandole_step_duration_seconds", 2)
    lines = [line.split() for line in job.run.lines() if "rank 1 of 2 pid" in line]
    os.kill(int(lines[0][-1]), signal.SIGKILL)
    until(lambda: job.await_values("farandole_job_ranks", 1) == [1], f"{job.values()}", LIMIT)
    assert job.await_values("farandole_job_worlds_total", 1) == [2]
    assert job.await_values("farandole_job_losses_total", 1) == [1]
    job.end()


class Prometheus:
    """A real Prometheus with the page's configuration."""

    def __init__(self, folder: Path, scraped: int) -> None:
        program = shutil.which("prometheus")
        if program is None:
            pytest.skip("not installed (Debian: prometheus): prometheus")
        self.port, self.log = free_port(), folder / "log"
        path = folder / "prometheus.yml"
        assert f"localhost:{PORT}" in CONFIGURATION
        text = CONFIGURATION.replace(f"localhost:{PORT}", f"127.0.0.1:{scraped}")
        path.write_text(text.replace("5s", "1s"))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    program,
                    f"--config.file={path}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of a query; none before Prometheus is ready."""
        words = urllib.parse.urlencode({"query": expression})
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{words}"
        try:
            answer = json.load(urllib.request.urlopen(url, timeout=20))
        except urllib.error.URLError as error:
            # Its server does not listen yet, or has not read its data.
            is_starting = isinstance(error.reason, ConnectionError) or (
                isinstance(error, urllib.error.HTTPError) and error.code == 503
            )
            if self.process.poll() is None and is_starting:
                return []
            error.add_note(f"{expression}: {self.log.read_text()}")
            raise
        assert answer["status"] == "success", (expression, answer)
        return answer["data"]["result"]


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[[int], Prometheus]]:
    started: list[Prometheus] = []

    def start(scraped: int) -> Prometheus:
        folder = tmp_path / "prometheus"
        folder.mkdir()
        started.append(Prometheus(folder, scraped))
        return started[-1]

    yield start
    for one in started:
        one.process.terminate()
        one.process.wait(60)


@pytest.mark.slow
def test_a_real_prometheus_scrapes_a_job_and_answers_the_queries_of_the_board(
    launch: Callable[..., Launch], prometheus: Callable[[int], Prometheus]
) -> None:
    job = Job(launch)
    job.await_values("farandole_step_duration_seconds", 2)
    server = prometheus(job.port)
    rates = "rate(farandole_rank_collective_wait_seconds_total[1m])"
    until(lambda: len(server.query(rates)) == 2, f"{server.log.read_text()}", LIMIT)
    assert all(0 < float(one["value"][1]) < 1.5 for one in server.query(rates)), server.query(rates)
    (target,) = server.query("up")
    assert target["value"][1] == "1"
    panels = json.loads(BOARD.read_text())["panels"]
    empty = {
        panel["title"]
        for panel in panels
        for target in panel["targets"]
        if not server.query(target["expr"].replace("$__rate_interval", "1m").replace("$run", ".*"))
    }
    assert empty <= {"Rows", "GPUs", "Memory of ranks", "Parts of a step that wait"}, empty
    job.end()


def test_a_collector_gets_the_metrics_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.read_text())
    with running_collector() as collector:
        assert "http://localhost:4318\n" in OTLP_SCRIPT
        script = OTLP_SCRIPT.replace("http://localhost:4318", collector.url)
        script = script.replace("INTERVAL=10000", "INTERVAL=500")
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        with (tmp_path / "err").open("wb") as err:
            job = subprocess.Popen(
                ["bash", "-e", "-c", script],
                cwd=tmp_path,
                env={**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
            )
        try:
            until(
                lambda: "farandole.step.duration" in collector.last_values(),
                (tmp_path / "err").read_text(),
                LIMIT,
            )
            (tmp_path / "enough").touch()
            assert job.wait(LIMIT) == 0, (tmp_path / "err").read_text()
        finally:
            job.kill()
            job.wait()
    values = collector.last_values()
    assert values["farandole.job.ranks"] == ("{rank}", False, 2)
    unit, is_sum, sent = values["farandole.link.sent"]
    assert (unit, is_sum) == ("By", True)
    assert sent > 0
    assert set(collector.authorizations) == {"Bearer secret"}
