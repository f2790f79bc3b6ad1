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
from tests.spark.deployments import (
    KILLS,
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

BEGIN = """
import json, time, urllib.error, urllib.request
from farandole.spark import task

def plugged(master="local[2]", **settings):
    builder = SparkSession.builder.master(master).appName("plugged").config("spark.ui.port", "0")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.local.dir",
        os.getcwd())
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress",
        "127.0.0.1")
    builder = builder.config("spark.executor.memory", "512m").config("spark.sql.shuffle.partitions",
        "2")
    builder = builder.config("spark.eventLog.enabled", "true").config("spark.eventLog.dir",
        f"file://{os.getcwd()}/events")
    builder = builder.config("spark.eventLog.compress",
        "false").config("spark.eventLog.rolling.enabled", "false")
    for name, value in settings.items():
        builder = builder.config("spark." + name.replace("_", "."), value)
    os.makedirs("events", exist_ok=True)
    spark = farandole.spark.plugin(builder).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark

def ui(spark):
    return "http://127.0.0.1:" + spark.sparkContext.uiWebUrl.rpartition(":")[2]

def rows(spark):
    told = json.loads(urllib.request.urlopen(ui(spark) + "/training/rows").read())
    return [(run, key, json.loads(body)) for run, key, body in told["rows"]]

def answer(url):
    try:
        with urllib.request.urlopen(url) as told:
            return told.status, told.headers["Content-Disposition"], told.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, None, error.read().decode()

def timed(found):
    return next(run for run, key, body in found if key == "run" and "timeline" in body)

def until_rows(spark, fits, limit=20):
    deadline = time.monotonic() + limit
    while True:
        found = rows(spark)
        if any(fits(*row) for row in found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
"""

TRAIN = """
def train(epochs):
    import os
    if os.environ["RANK"] == "0":
        for epoch in range(epochs):
            scores = {"loss": 1.0 / (epoch + 1),
                "all_metrics": [{"accuracy": float("nan") if epoch else 0.5}]}
            entry = {"epoch": epoch, "train": scores, "seconds": 0.1, "rows": 100}
            task.report({"kind": "epoch", "entry": entry, "epochs": epochs, "steps": 10,
                "rows_per_second": 1000.0})
    import farandole.numpy as hvd
    hvd.init()
    task.report_rank_state({"step_seconds": 0.25, "data_seconds": 0.1, "reduce_seconds": 0.05})
    return os.getpid()
"""


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
    body = f"""
spark = plugged()
assert not [row for row in rows(spark) if row[0]], rows(spark)
train.__qualname__ = {HOSTILE!r}
pids = farandole.spark.run(train, args=(3,), num_proc=2, timeline="trace.json")
def fail():
    raise KeyError("no such layer")
try:
    farandole.spark.run(fail, num_proc=2)
except farandole.spark.FarandoleJobError:
    pass
found = until_rows(spark, lambda run, key, body: key == "run" and body["state"] == "failed")
page = urllib.request.urlopen(ui(spark) + "/training/")
print(json.dumps([
    pids, found, page.read().decode(), dict(page.headers),
    urllib.request.urlopen(ui(spark) + "/jobs/").read().decode(),
    urllib.request.urlopen(ui(spark) + "/training/rows").read().decode(),
    json.loads(urllib.request.urlopen(ui(spark) + "/metrics/json/").read())["gauges"],
    [answer(ui(spark) + "/training/timeline?run=" + run) for run in (timed(found), "of-nobody", "../trace.json")],
]))
spark.stop()
"""  # noqa: E501
    told = drive(BEGIN + TRAIN + body, tmp_path, 120).stdout.splitlines()[-1]
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
    body = """
spark = plugged("local-cluster[2,1,1024]")
farandole.spark.run(train, args=(1,), num_proc=2)
found = until_rows(spark, lambda run, key, body: key == "run" and body["state"] == "ended")
logs = {key: body for run, key, body in found if key.startswith("logs/")}
(ranks,) = [body["ranks"] for run, key, body in found if key == "ranks"]
shown = [urllib.request.urlopen(logs["logs/" + one["executor"]]["stderr"]).read().decode() for one in ranks]
hosts = {key: body for run, key, body in found if key.startswith("host/")}
print(json.dumps([logs, hosts, [one["executor"] for one in ranks], shown]))
spark.stop()
"""  # noqa: E501
    logs, hosts, executors, shown = json.loads(
        drive(BEGIN + TRAIN + body, tmp_path, 180).stdout.splitlines()[-1]
    )
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
    body = f"""
import pathlib, cloudpickle
from tests.spark.test_warm_tasks import begun
import tests.spark.test_warm_tasks as module
cloudpickle.register_pickle_by_value(module)
spark = plugged({master!r}, farandole_warmWorkers="true")
def servers():
    locks = pathlib.Path(os.environ["TMPDIR"]).glob("farandole-*/warm-*.lock")
    return {{lock.stem: int(lock.read_text().split()[0]) for lock in locks if lock.read_text()}}
deadline = time.monotonic() + 60
while len(before := servers()) < {executors}:
    assert time.monotonic() < deadline, before
    time.sleep(0.1)
found = farandole.spark.run(begun, num_proc=2, warm=True)
print(json.dumps([before, servers(), found]))
spark.stop()
"""
    # a socket's path has at most about a hundred characters
    with tempfile.TemporaryDirectory() as short:
        env = {"TMPDIR": short, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = drive(BEGIN + body, tmp_path, 150, **env)
    before, after, found = json.loads(done.stdout.splitlines()[-1])
    assert len(before) == executors
    assert after == before, "the job has started no other server"
    assert [had for had, _, _ in found] == [True, True]
    assert sorted({owner for _, owner, _ in found}) == sorted(before.values())
    assert "WARN farandole" not in done.stderr


@pytest.mark.slow
def test_a_death_has_sparks_reason_and_the_tab_shows_it(tmp_path):
    body = """
spark = plugged("local-cluster[2,1,1024]", stage_maxConsecutiveAttempts="1")
def wait(folder):
    import os, time
    open(os.path.join(folder, "at-work-" + os.environ["RANK"]), "w").close()
    time.sleep(60)
def kill():
    deadline = time.monotonic() + 60
    while not all(os.path.exists(f"at-work-{rank}") for rank in "01") and time.monotonic() < deadline:
        time.sleep(0.05)
    kill_one()
threading.Thread(target=kill, daemon=True).start()
try:
    farandole.spark.run(wait, args=(os.getcwd(),), num_proc=2)
except farandole.spark.FarandoleJobError as error:
    reason = error.reason
found = until_rows(spark, lambda run, key,
    body: key.startswith("event/") and "removed executor" in body["what"])
print(json.dumps([reason,
    [body for run, key, body in found if key.startswith(("event/", "removed/"))]]))
"""  # noqa: E501
    reason, events = json.loads(drive(BEGIN + KILLS + body, tmp_path, 180).stdout.splitlines()[-1])
    # Either Spark fails the stage first, and says why, or the driver notices the lost worker and
    # asks Spark.
    assert "exited with code 137" in reason, reason
    assert any("137" in (one.get("reason") or "") for one in events), events


@pytest.mark.slow
def test_an_executor_that_ends_kills_workers_that_are_left_and_no_other_process(tmp_path):
    body = """
spark = plugged("local-cluster[1,1,1024]")
def start(_):
    import subprocess, sys
    wait = "import time; time.sleep(300)"
    # In sessions of their own: Spark ends the group of its Python workers by a signal.
    names = ["farandole.runner.stand-in", "another.program"]
    return [subprocess.Popen([sys.executable, "-c", wait, name],
        start_new_session=True).pid for name in names]
(pids,) = spark.sparkContext.parallelize([0], 1).map(start).collect()
def alive(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as command:
            # a process that has ended and has not been waited for has none
            return bool(command.read())
    except FileNotFoundError:
        return False
before = [alive(pid) for pid in pids]
spark.stop()
deadline = time.monotonic() + 30
while alive(pids[0]) and time.monotonic() < deadline:
    time.sleep(0.05)
after = [alive(pid) for pid in pids]
for pid in pids:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 9)
print(json.dumps([before, after]))
"""
    told = drive("import contextlib" + BEGIN + body, tmp_path, 150).stdout.splitlines()[-1]
    assert json.loads(told) == [[True, True], [False, True]]


@pytest.mark.slow
@pytest.mark.timing
def test_a_decommissioned_executor_is_an_event_of_the_run_within_a_second(tmp_path):
    body = """
spark = plugged("local-cluster[2,1,1024]", decommission_enabled="true")
def wait(folder):
    import os, time
    open(os.path.join(folder, "at-work-" + os.environ["RANK"]), "w").close()
    while not os.path.exists(os.path.join(folder, "over")):
        time.sleep(0.05)
times = []
def retire():
    deadline = time.monotonic() + 60
    while not all(os.path.exists(f"at-work-{rank}") for rank in "01") and time.monotonic() < deadline:
        time.sleep(0.05)
    scala = spark.sparkContext._jsc.sc()
    jvm = spark.sparkContext._jvm
    info = jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo("a test says so",
        jvm.scala.Option.apply(None))
    scala.schedulerBackend().decommissionExecutor("0", info, False, False)
    while not scala.taskScheduler().getExecutorDecommissionState("0").isDefined():
        time.sleep(0.01)
    times.append(time.time())
    # Both say themselves when they were written, so this waits without a hurry.
    until_rows(spark, lambda run, key, body: key == "decommissioning/0")
    decommissions = lambda key, body: key.startswith("event/") and "decommissions executor 0" in body["what"]
    found = until_rows(spark, lambda run, key, body: decommissions(key, body))
    times.extend(int(body["time"]) / 1000 for run, key, body in found if key == "decommissioning/0")
    times.extend(int(body["time"]) / 1000 for run, key, body in found if decommissions(key, body))
    open("over", "w").close()
thread = threading.Thread(target=retire, daemon=True)
thread.start()
farandole.spark.run(wait, args=(os.getcwd(),), num_proc=2)
thread.join(30)
print(json.dumps(times))
"""  # noqa: E501
    state, seen, event = json.loads(
        drive(BEGIN + KILLS + body, tmp_path, 180).stdout.splitlines()[-1]
    )
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
    body = f"""
spark = plugged()
train.__qualname__ = {HOSTILE!r}
farandole.spark.run(train, args=(3,), num_proc=2)
until_rows(spark, lambda run, key, body: key == "run" and body["state"] == "ended")
import subprocess
shown = subprocess.run(
    ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={{os.getcwd()}}/browser",
    "--virtual-time-budget=5000", "--dump-dom", ui(spark) + "/training/"],
    check=True, capture_output=True, text=True, timeout=60)
print(json.dumps(shown.stdout))
"""  # noqa: E501
    dom = json.loads(drive(BEGIN + TRAIN + body, tmp_path, 180).stdout.splitlines()[-1])
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


STEPS = """
spark = plugged("local-cluster[2,1,1024]")
def train(folder):
    import os, time
    import farandole.numpy as hvd
    hvd.init()
    for epoch in range(2):
        if hvd.rank() == 0:
            scores = {"loss": 1.0 / (epoch + 1), "all_metrics": []}
            entry = {"epoch": epoch, "train": scores, "seconds": 0.1, "rows": 100}
            task.report({"kind": "epoch", "entry": entry, "epochs": 2, "steps": 10,
                "rows_per_second": 1000.0})
        while not os.path.exists(os.path.join(folder, f"seen-{epoch}")):
            time.sleep(0.05)
print(ui(spark), flush=True)
farandole.spark.run(train, args=(os.getcwd(),), num_proc=2)
sys.stdin.readline()
spark.stop()
"""


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="without a browser (Debian: apt-get install chromium)"
)
def test_an_open_page_shows_epochs_ranks_and_links_as_they_come_without_reloading(tmp_path):
    from playwright.sync_api import expect, sync_playwright

    with driver(BEGIN + STEPS, tmp_path) as process, sync_playwright() as playwright:
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


FITS = {
    "torch": """
    import torch
    from farandole.spark.torch import TorchEstimator
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    more = {"optimizer": optimizer, "loss": torch.nn.MSELoss(), "input_shapes": [[-1, 1]]}
    kind = TorchEstimator
""",
    "keras": """
    import keras
    from farandole.spark.keras import KerasEstimator
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    more = {"optimizer": keras.optimizers.SGD(0.001), "loss": "mse"}
    kind = KerasEstimator
""",
    "lightning": """
    import lightning.pytorch as pl, torch
    from farandole.spark.lightning import LightningEstimator
    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
        def forward(self, x):
            return self.layer(x)
        def training_step(self, batch, index):
            x, y = (batch[name].float().reshape(-1, 1) for name in "xy")
            return torch.nn.functional.mse_loss(self(x), y)
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.001)
    model, more, kind = Net(), {"input_shapes": [[-1, 1]]}, LightningEstimator
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", FITS)
def test_a_fit_shows_its_epochs_and_where_each_ranks_time_goes(framework, tmp_path):
    body = f"""
def fit(spark):
    from farandole.spark.common import LocalStore
{FITS[framework]}
    frame = spark.createDataFrame([(float(i % 7), float(i % 7) * 2 + 1) for i in range(800)], ["x", "y"])
    estimator = kind(num_proc=2, model=model, feature_cols=["x"], label_cols=["y"], batch_size=10, epochs=3, verbose=0,
        run_id="the run", store=LocalStore(os.getcwd() + "/store"), **more)
    estimator.fit(frame)
spark = plugged()
fit(spark)
print(json.dumps(until_rows(spark, lambda run, key, body: key == "run" and body["state"] == "ended")))
"""  # noqa: E501
    found = json.loads(drive(BEGIN + body, tmp_path, 180).stdout.splitlines()[-1])
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
