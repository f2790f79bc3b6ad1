# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The Spark plugin in real Sparks: the Training tab live and in the History Server, metrics,
what Spark knows.
"""

from __future__ import annotations

import contextlib
import html
import json
import re
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.programs import program_path, program_text
from tests.spark.deployments import (
    PATIENCE,
    STARTS,
    Service,
    connect_server,
    drive,
    driver,
    free_port,
)

from farandole.spark.shim import JAR_PATH, PLUGIN_CLASS

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTILE = "</script><img src=x onerror=alert(1)>"

BEGIN = program_text(__file__, "plugged_session")


def get(url: str) -> tuple[int, str, Any]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def rows(base: str) -> list[tuple[str, str, Any]]:
    told = json.loads(get(f"{base}/training/rows")[1])
    return [(run, key, json.loads(body)) for run, key, body in told["rows"]]


@contextlib.contextmanager
def history_server(directory: Path, **settings: str) -> Iterator[str]:
    """Spark's History Server over the events of a test's driver, with the plugin's jar on its
    class path.
    """
    options = (
        f"-Dspark.history.fs.logDirectory=file://{directory / 'events'} -Dspark.history.ui.port=0"
    )
    for name, value in settings.items():
        options += f" -Dspark.history.{name.replace('_', '.')}={value}"
    env = {
        "SPARK_DAEMON_CLASSPATH": str(JAR_PATH),
        "SPARK_HISTORY_OPTS": options,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    server = Service(
        ["spark-class", "org.apache.spark.deploy.history.HistoryServer"], directory / "history", env
    )
    try:
        yield f"http://127.0.0.1:{server.until(r'HistoryServer.* at https?://[^:]+:([0-9]+)')[1]}"
    finally:
        server.end()


def application(base: str) -> str:
    """The path of the only application that a History Server has, once it has read its log."""
    deadline = time.monotonic() + STARTS
    while True:
        listed = json.loads(get(f"{base}/api/v1/applications")[1])
        if listed:
            path = f"{base}/history/{listed[0]['id']}"
            get(f"{path}/training/")  # the server reads the whole log for its first page
            return path
        assert time.monotonic() < deadline, "the History Server lists no application"
        time.sleep(0.1)


def test_a_run_is_in_the_live_tab_in_the_metrics_and_in_the_history_server(tmp_path):
    body = program_path(__file__, "report_and_fail")
    told = drive(body, tmp_path, 120, HOSTILE).stdout.splitlines()[-1]
    pids, live, page, headers, jobs, raw, gauges, timelines = json.loads(told)
    assert 'href="/training/"' in re.sub(r"http://[^/\"]*", "", jobs), "no tab in Spark's own pages"
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert HOSTILE not in page
    assert "<" not in raw, "values must not look like HTML wherever they end up"

    live = [(run, key, row) for run, key, row in live]
    by_name = {row["name"]: (run, row) for run, key, row in live if key == "run"}
    run, row = by_name[HOSTILE]
    assert (row["what"], row["state"], row["size"]) == ("run", "ended", 2)
    epochs = [one for of, key, one in live if of == run and key.startswith("epoch/")]
    assert [one["values"]["loss"] for one in epochs] == [1.0, 0.5, 1.0 / 3]
    assert [one["values"]["accuracy"] for one in epochs] == [0.5, "nan", "nan"]
    (ranks,) = [one["ranks"] for of, key, one in live if of == run and key == "ranks"]
    assert [one["pid"] for one in ranks] == pids
    assert all(
        (one["step_seconds"], one["executor"]) == (0.25, "driver") and one["host"] for one in ranks
    ), ranks
    assert [one["state"] for one in ranks] == ["ended", "ended"]
    assert [status for status, _, _ in timelines] == [200, 404, 404], (
        "only files that the driver has named"
    )
    assert timelines[0][1] == "attachment; filename=timeline.json"
    assert timelines[0][2] == (tmp_path / "trace.json").read_text()
    assert row["timeline"] == str(tmp_path / "trace.json")
    assert any(key.startswith("stage/") and one["tag"] in row["tags"] for _, key, one in live)
    failed = next(row for name, (_, row) in by_name.items() if name.endswith("fail"))
    assert "no such layer" in failed["reason"]
    assert int(next(one["memory"].split()[0] for _, key, one in live if key == "host/driver")) > 0
    numbers = {
        name.rpartition(".")[2]: one["value"]
        for name, one in gauges.items()
        if PLUGIN_CLASS in name
    }
    wanted = {
        "rowsPerSecond": 1000.0,
        "stepSeconds": 0.25,
        "waitSeconds": 0.1,
        "reduceSeconds": 0.05,
        "restarts": 0.0,
    }
    assert numbers == wanted

    with history_server(tmp_path) as server:
        base = application(server)
        status, page, headers = get(f"{base}/training/")
        assert status == 200, page
        assert "script-src 'self'" in headers["Content-Security-Policy"]
        assert f"{base.removeprefix(server)}/training/" in get(f"{base}/jobs/")[1]
        past = rows(base)
        assert get(f"{base}/training/training.js")[0] == 200
        assert get(f"{base}/training/other")[0] == 404
        assert get(f"{base}/training/timeline?run={run}")[0] == 404, (
            "a server reads no file that a log names"
        )
        status, raw, _ = get(f"{base}/training/rows?since=many")
        assert status == 200
        assert json.loads(raw)["live"] is False
    kept = {(run, key): row for run, key, row in past}
    # What changes several times a second is shown live alone.
    assert kept == {(run, key): row for run, key, row in live if key != "step"}


@pytest.mark.slow
def test_executors_have_their_hosts_and_links_to_their_logs_also_in_the_history_server(tmp_path):
    body = program_path(__file__, "link_executors")
    logs, hosts, executors, shown = json.loads(drive(body, tmp_path, 180).stdout.splitlines()[-1])
    assert sorted(executors) == ["0", "1"]
    assert all("CoarseGrainedExecutorBackend" in one for one in shown), (
        "each link opens the log of that executor"
    )
    assert not any("WARN farandole" in one for one in shown), (
        "the plugin's part in an executor works"
    )
    for executor in executors:
        host = hosts[f"host/{executor}"]
        assert int(host["memory"].removesuffix(" kB")) > 0
        assert int(host["processors"]) > 0
        assert int(host["pid"]) > 0
    with history_server(tmp_path) as server:
        past = {
            key: row
            for _, key, row in rows(application(server))
            if key.startswith(("logs/", "host/"))
        }
    assert past == logs | hosts


@pytest.mark.slow
def test_links_to_logs_follow_sparks_patterns_live_and_in_the_history_server(tmp_path):
    body = """
spark = plugged("local-cluster[1,1,1024]",
    ui_custom_executor_log_url="http://live.example/{{POD}}?of={{FILE_NAME}}")
found = until_rows(spark, lambda run, key, body: key.startswith("logs/") and key != "logs/driver")
print(json.dumps({key: body for run, key,
    body in found if key.startswith("logs/") and key != "logs/driver"}))
spark.stop()
"""
    attributes = {
        "SPARK_EXECUTOR_ATTRIBUTE_POD": "a-pod",
        "SPARK_EXECUTOR_ATTRIBUTE_LOG_FILES": "stderr,stdout",
    }
    live = json.loads(drive(BEGIN + body, tmp_path, 120, **attributes).stdout.splitlines()[-1])
    links = {name: f"http://live.example/a-pod?of={name}" for name in ("stderr", "stdout")}
    assert live == {"logs/0": links}
    with history_server(
        tmp_path, custom_executor_log_url="http://archive.example/{{POD}}"
    ) as server:
        past = {key: row for _, key, row in rows(application(server)) if key == "logs/0"}
    assert past == {"logs/0": {"log": "http://archive.example/a-pod"}}


@pytest.mark.slow
def test_a_second_copy_of_the_jar_is_one_line_in_the_log(tmp_path):
    shutil.copy(JAR_PATH, tmp_path / "copy.jar")
    body = """
spark = plugged(jars=os.getcwd() + "/copy.jar")
print(rows(spark))
spark.stop()
"""
    done = drive(BEGIN + body, tmp_path, 120)
    (line,) = [
        line for line in done.stderr.splitlines() if "on the class path more than once" in line
    ]
    assert "copy.jar" in line
    assert JAR_PATH.name in line


@pytest.mark.slow
# the environment of Python workers depends on the version, and older ones were not tried
@pytest.mark.newest
@pytest.mark.parametrize(("master", "executors"), [("local[2]", 1), ("local-cluster[2,1,1024]", 2)])
def test_executors_start_the_fork_servers_from_which_the_first_job_forks(
    master, executors, tmp_path
):
    body = program_path(__file__, "fork_from_plugin")
    # a socket's path has at most about a hundred characters
    with tempfile.TemporaryDirectory() as short:
        env = {"TMPDIR": short, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = drive(body, tmp_path, 150, master, str(executors), **env)
    before, after, found = json.loads(done.stdout.splitlines()[-1])
    assert len(before) == executors
    assert after == before, "the job has started no other server"
    assert [had for had, _, _ in found] == [True, True]
    assert sorted({owner for _, owner, _ in found}) == sorted(before.values())
    assert "WARN farandole" not in done.stderr


@pytest.mark.slow
def test_a_death_has_sparks_reason_and_the_tab_shows_it(tmp_path):
    body = program_path(__file__, "explain_death")
    reason, events = json.loads(drive(body, tmp_path, 180).stdout.splitlines()[-1])
    # Either Spark fails the stage first, and says why, or the driver notices the lost worker and
    # asks Spark.
    assert "exited with code 137" in reason, reason
    assert any("137" in (one.get("reason") or "") for one in events), events


@pytest.mark.slow
def test_an_executor_that_ends_kills_workers_that_are_left_and_no_other_process(tmp_path):
    body = program_path(__file__, "leave_processes")
    told = drive(body, tmp_path, 150).stdout.splitlines()[-1]
    assert json.loads(told) == [[True, True], [False, True]]


@pytest.mark.slow
@pytest.mark.timing
def test_a_decommissioned_executor_is_an_event_of_the_run_within_a_second(tmp_path):
    body = program_path(__file__, "decommission_in_tab")
    state, seen, event = json.loads(drive(body, tmp_path, 180).stdout.splitlines()[-1])
    print(
        f"the plugin sees it after {seen - state:.3f} s, and the run has the event after "
        f"{event - state:.3f} s"
    )
    assert event - state < PATIENCE, (seen - state, event - state)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="without a browser (Debian: apt-get install chromium)"
)
def test_a_browser_shows_runs_and_takes_no_name_for_html(tmp_path):
    body = program_path(__file__, "browse_training")
    dom = json.loads(drive(body, tmp_path, 180, HOSTILE).stdout.splitlines()[-1])
    assert html.escape(HOSTILE, quote=False) in dom
    assert "<img" not in dom
    assert len(re.findall("<script", dom)) == 1
    losses = re.search(
        r'<strong>Loss</strong>.*?<polyline class="line c0" points="([^"]*)"', dom, re.DOTALL
    )
    assert len(losses[1].split()) == 3, losses[1]
    assert re.search(
        r'<td class="number">250.0 ms</td><td class="number">40 %</td><td class="number">20 %</td>',
        dom,
    ), dom


STEPS = program_path(__file__, "report_in_steps")


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="without a browser (Debian: apt-get install chromium)"
)
def test_an_open_page_shows_epochs_ranks_and_links_as_they_come_without_reloading(tmp_path):
    from playwright.sync_api import expect, sync_playwright

    with driver(STEPS, tmp_path) as process, sync_playwright() as playwright:
        assert process.stdout is not None
        link = process.stdout.readline().strip()
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page()
        page.set_default_timeout(1000 * STARTS)
        expect.set_options(timeout=1000 * STARTS)
        page.goto(f"{link}/training/")
        page.evaluate("window.same = true")
        losses = page.locator("figure:has(strong:text-is('Loss')) circle")
        for epoch in range(2):
            expect(losses).to_have_count(epoch + 1)
            expect(page.locator("#facts .running")).to_have_count(1)
            if epoch == 0:
                page.focus("#facts a[href*=stage]")
                page.evaluate("window.held = document.activeElement")
            else:
                assert page.evaluate("document.activeElement === window.held"), (
                    "an update keeps the focus"
                )
            (tmp_path / f"seen-{epoch}").touch()
        ranks = page.locator("#ranks tr:has(td)")
        expect(ranks.locator("td:nth-child(2)")).to_have_text(["ended", "ended"])
        expect(page.locator("#facts .ended")).to_have_count(1)
        heads = page.locator("#ranks th").all_inner_texts()
        assert heads[:6] == ["Rank", "State", "Host", "Process", "Executor", "Logs"]
        for table, executors in (("#ranks", 2), ("#executors", 2)):
            logs = page.locator(f"{table} td:nth-child({6 if table == '#ranks' else 7}) a")
            assert logs.all_inner_texts() == ["stderr", "stdout"] * executors
        assert all(
            "GiB" in cell for cell in page.locator("#executors td:nth-child(4)").all_inner_texts()
        )
        expect(page.locator("#facts a").first).to_have_attribute(
            "href", re.compile("stages/stage/")
        )
        assert page.evaluate("window.same"), "the page was not loaded again"
        page.locator("#ranks td:nth-child(6) a").first.click()
        page.wait_for_selector("text=CoarseGrainedExecutorBackend")
        browser.close()


@pytest.mark.slow
def test_an_elastic_run_shows_its_worlds_and_where_its_workers_are(tmp_path):
    body = """
spark = plugged("local-cluster[2,1,1024]")
def work():
    import farandole.numpy as hvd
    hvd.init()
    return hvd.size()
print(farandole.spark.run_elastic(work, num_proc=2))
print(json.dumps(until_rows(spark, lambda run, key,
    body: key == "run" and body["state"] == "ended")))
"""
    lines = drive(BEGIN + body, tmp_path, 120).stdout.splitlines()
    assert lines[-2] == "[2, 2]"
    found = {key: row for run, key, row in json.loads(lines[-1]) if run}
    assert (found["run"]["what"], found["run"]["size"], found["run"]["restarts"]) == (
        "run_elastic",
        2,
        0,
    )
    ranks = found["ranks"]["ranks"]
    assert sorted(one["executor"] for one in ranks) == ["0", "1"]
    assert all(one["pid"] > 0 for one in ranks)


@pytest.mark.slow
@pytest.mark.newest  # tests/spark/test_deployments.py has Connect on older versions
def test_the_server_of_connect_has_the_tab_and_a_client_runs_as_without_it(tmp_path):
    port = free_port()
    settings = {
        "spark.jars": str(JAR_PATH),
        "spark.plugins": PLUGIN_CLASS,
        "spark.ui.enabled": "true",
        "spark.ui.port": str(port),
    }
    client = """
import farandole.spark
from pyspark.sql import SparkSession
spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
print(sorted(farandole.spark.run(lambda: 7, num_proc=2)))
"""
    with connect_server(tmp_path, **settings) as url:
        done = drive(f"sys.argv[1:] = [{url!r}]" + client, tmp_path, 120)
        assert done.stdout.splitlines()[-1] == "[7, 7]"
        told = {key for _, key, _ in rows(f"http://127.0.0.1:{port}")}
    assert "host/driver" in told, "the executors' hosts"
    assert "run" not in told, "docs/spark/plugin.md says so: a client cannot report its runs"


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "keras", "lightning"])
def test_a_fit_shows_its_epochs_and_where_each_ranks_time_goes(framework, tmp_path):
    body = program_path(__file__, "fit_in_tab")
    found = json.loads(drive(body, tmp_path, 180, framework).stdout.splitlines()[-1])
    (run,) = {of for of, _, _ in found if of}
    of_run = {key: row for of, key, row in found if of == run}
    assert of_run["run"]["name"] == "the run"
    assert of_run["run"]["what"].lower() == f"{framework}estimator"
    assert of_run["run"]["parameters"]["batch_size"] == 10
    assert len([key for key in of_run if key.startswith("epoch/")]) == 3
    ranks = of_run["ranks"]["ranks"]
    assert [one["rank"] for one in ranks] == [0, 1]
    for one in ranks:
        assert 0 < one["data_seconds"] < one["step_seconds"] < 10, one
        assert ("reduce_seconds" in one) == (framework == "torch"), one
        assert one["pid"] > 0
        assert one["host"]
        assert one["executor"] == "driver"
