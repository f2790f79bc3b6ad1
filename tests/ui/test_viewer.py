# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The run viewer in a real browser."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.ui.conftest import entry, write_history, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Page

HOSTILE = "<img src=x onerror=alert(1)>"


def ready(page: Page, link: str) -> None:
    """Opens the page and waits for its first answer."""
    page.goto(link)
    page.wait_for_selector("body[data-ready]")


def points(page: Page, chart: str) -> int:
    """Points of training that a run has by its page's data, as the server told the page last."""
    return page.evaluate(
        """async (chart) => {
            const run = decodeURIComponent(location.hash.replace("#/run/", ""));
            const told = await (await fetch("api/curves?run=" + encodeURIComponent(run))).json();
            return told.runs[0].curves.find((one) => one.name === chart).points;
        }""",
        chart,
    )


def test_the_list_leads_to_a_run_and_its_curves(page, shown, tmp_path):
    write_run(tmp_path, "first")
    write_run(tmp_path, "second", state="failed", reason="rank 1 on b was lost")
    link = shown()
    ready(page, link)
    assert page.locator("#rows tr").count() == 2
    assert page.locator("#count").inner_text() == "2 runs"
    page.fill("#filter", "state:failed")
    assert page.locator("#rows td.state").all_inner_texts() == ["failed"]
    assert page.locator("#count").inner_text() == "1 of 2 runs"
    page.click("#rows a")
    page.wait_for_selector("figure[data-chart=loss] canvas")
    assert page.locator("figure").count() == 4, (
        "loss, accuracy, seconds of an epoch, rows per second"
    )
    assert "rank 1 on b was lost" in page.locator("main").inner_text()
    assert "0123456789abcdef" in page.locator("[data-section=Code]").inner_text()
    assert page.locator("tr.slow td").all_inner_texts()[:2] == ["2", "c"]
    cells = page.locator("[data-section=Ranks] tbody tr").first.locator("td").all_inner_texts()
    assert cells[5:9] == ["200.0 ms", "80.0 ms (40 %)", "10 %", "50 %"], (
        "step, computes, waits for data, reduces"
    )
    assert "restart" in page.locator("[data-section=Events]").inner_text()
    page.goto(f"{link}#/run/0%2Ffirst")
    page.wait_for_selector("text=straggler: rank 2 on c computes 2.1 times as long as the median")


def test_times_of_runs_are_rounded_to_no_sixtieth_second_or_minute(page, shown, tmp_path):
    times = {
        9.94: "9.9 s", 59.6: "60 s", 99.4: "99 s", 119.6: "1 min 59 s", 119.999: "1 min 59 s",
        120: "2 min 00 s",
        3599.9: "59 min 59 s", 3600: "1 h 00 min", 7199.9: "1 h 59 min", 200_000: "2 d 7 h",
    }  # fmt: skip
    for at, took in enumerate(times):
        write_run(tmp_path, f"run-{at}", epochs=1, started=1000, ended=1000 + round(took * 1000))
    ready(page, shown())
    head = page.locator(".runs thead th").all_inner_texts().index("Time")
    names = page.locator("#rows a").all_inner_texts()
    cells = page.locator(f"#rows tr > :nth-child({head + 1})").all_inner_texts()
    told = dict(zip(names, cells, strict=True))
    assert [told[f"run-{at}"] for at in range(len(times))] == list(times.values())


def test_no_rank_is_marked_if_the_reduction_is_not_measured(page, shown, tmp_path):
    ranks = [
        {"rank": rank, "host": "a", "step_seconds": 0.1 * (1 + rank), "data_seconds": 0.01}
        for rank in range(3)
    ]
    write_run(tmp_path, "keras", ranks=ranks)
    ready(page, f"{shown()}#/run/0%2Fkeras")
    page.wait_for_selector("text=what waits for the reduction is not measured")
    assert page.locator("tr.slow").count() == 0
    cells = page.locator("[data-section=Ranks] tbody tr").first.locator("td").all_inner_texts()
    assert cells[5:9] == ["100.0 ms", "", "10 %", ""], "step, computes, waits for data, reduces"


def test_names_and_values_are_never_html(page, errors, shown, tmp_path):
    alerts = []
    page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
    parameters = {HOSTILE: HOSTILE, "a": [HOSTILE]}
    events = [{"time": 1, "what": HOSTILE, "reason": HOSTILE}]
    directory = write_run(
        tmp_path, "hostile", name=HOSTILE, model=HOSTILE, user=HOSTILE, state=HOSTILE,
        reason=HOSTILE,
        parameters=parameters, events=events, ranks=[{"rank": HOSTILE, "host": HOSTILE}],
        environment=parameters,
    )  # fmt: skip
    history = [entry(0) | {"train": {"loss": 1.0, "all_metrics": [{HOSTILE: 1.0}]}}]
    write_history(directory, history)
    (directory / f"{HOSTILE.replace('/', '')}.log").write_text(
        f"<script>alert(2)</script>{HOSTILE}"
    )
    link = shown()
    ready(page, link)
    assert page.locator("#rows a").inner_text() == HOSTILE
    page.click("#rows a")
    page.wait_for_selector(f'figure[data-chart="{HOSTILE}"] canvas')
    page.click("[data-section=Files] button")
    page.wait_for_selector("[data-section=Files] pre:not([hidden])")
    assert "<script>" in page.locator("[data-section=Files] pre").inner_text()
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1
    assert not alerts
    # A script that got into the page all the same would not run, and nothing could be sent
    # elsewhere.
    inline = "Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'})"
    page.evaluate(f"document.body.append({inline})")
    assert page.evaluate("window.ran") is None
    assert len(errors) == 1
    assert "Content Security Policy" in errors.pop()


def test_runs_are_compared_on_one_chart(page, shown, tmp_path):
    write_run(tmp_path, "fast", quality=0.5, parameters={"batch_size": 64, "random_seed": 1})
    write_run(tmp_path, "slow", quality=2.0)
    ready(page, shown())
    page.keyboard.press("j")
    page.keyboard.press("x")
    page.keyboard.press("j")
    page.keyboard.press("x")
    assert page.locator("#compare").inner_text() == "Compare 2"
    page.keyboard.press("c")
    page.wait_for_selector("figure[data-chart=loss] canvas")
    labels = page.locator("figure[data-chart=loss] .u-label").all_inner_texts()
    assert sorted(labels[1:]) == ["fast", "fast (val)", "slow", "slow (val)"]
    differing = page.locator('[data-section="Parameters that differ"]').inner_text()
    assert "batch_size" in differing
    assert "random_seed" not in differing


def test_a_live_run_grows_without_reloading(page, shown, tmp_path):
    now = int(time.time() * 1000)
    directory = write_run(
        tmp_path, "live", epochs=3, state="running", ended=None, updated=now, done=3
    )
    link = shown()
    ready(page, f"{link}#/run/0%2Flive")
    page.wait_for_selector("figure[data-chart=loss] canvas")
    page.evaluate("window.same = true")
    assert points(page, "loss") == 3
    before = page.locator("figure[data-chart=loss] canvas").screenshot()
    write_history(directory, [entry(epoch) for epoch in range(8)])
    page.wait_for_selector('figure[data-chart=loss][data-points="8"]', timeout=10_000)
    assert page.locator("figure[data-chart=loss] canvas").screenshot() != before
    assert page.evaluate("window.same")


def test_a_refresh_keeps_the_focus_the_scrolled_places_and_an_opened_file(page, shown, tmp_path):
    def write(pid: int, *events: dict[str, object]) -> Path:
        ranks = [
            {"rank": rank, "host": "a-long-name-of-a-host" * 3, "pid": pid} for rank in range(2)
        ]
        return write_run(
            tmp_path, "live", state="running", ended=None, ranks=ranks, events=list(events)
        )

    directory = write(10)
    (directory / "timeline.json").write_text("{}")
    (directory / "out.txt").write_text("".join(f"line {number}\n" for number in range(500)))
    page.set_viewport_size({"width": 390, "height": 700})
    ready(page, f"{shown()}#/run/0%2Flive")
    page.click("[data-section=Files] button:has-text('out.txt')")
    page.wait_for_selector("pre:has-text('line 499')")
    places = (
        "['[data-section=Ranks] .wide', '[data-section=Files] pre'].map((one) => "
        "document.querySelector(one))"
    )
    page.evaluate(f"{places}.forEach((one) => one.scrollTo(40, 100))")
    scrolled = page.evaluate(f"{places}.map((one) => [one.scrollLeft, one.scrollTop])")
    assert scrolled[0][0] > 0
    page.focus("[data-section=Timeline] a")
    page.evaluate("window.held = document.activeElement")
    write(11, {"time": 1, "what": "restart", "reason": "a section above the files is new"})
    (directory / "another.txt").write_text("a file above the opened one is new")
    page.wait_for_selector("[data-section=Ranks] td:text-is('11')")
    page.wait_for_selector("[data-section=Events]")
    page.wait_for_selector("[data-section=Files] button:has-text('another.txt')")
    assert page.evaluate(f"{places}.map((one) => [one.scrollLeft, one.scrollTop])") == scrolled
    assert page.evaluate("document.activeElement === window.held")
    assert "line 499" in page.locator("[data-section=Files] pre").inner_text()
    page.click("[data-section=Files] button:has-text('another.txt')")
    page.wait_for_selector("pre:has-text('a file above')")


def test_a_click_that_lasts_over_a_refresh_opens_the_run(page, shown, tmp_path):
    write_run(tmp_path, "live", state="running", ended=None)
    ready(page, shown())
    box = page.locator("#rows a").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    page.mouse.down()
    write_run(tmp_path, "live", state="running", ended=None, done=7)
    page.wait_for_selector("#rows td:text-is('7/20')")
    page.mouse.up()
    page.wait_for_selector("h1:text-is('live')")


def test_zoom_smoothing_and_files_of_a_run(page, shown, tmp_path):
    write_run(tmp_path, "one", epochs=200)
    ready(page, f"{shown()}#/run/0%2Fone")
    over = page.locator("figure[data-chart=loss] .u-over")
    over.wait_for()
    box = over.bounding_box()
    assert box is not None
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.mouse.move(box["x"] + 100, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 60)
    page.mouse.up()
    page.wait_for_selector("button:has-text('Reset zoom'):not([disabled])")
    page.wait_for_timeout(100)
    assert any("from=" in one and "api/curves" in one for one in asked), asked
    page.dblclick("figure[data-chart=loss] .u-over")
    page.wait_for_selector("button:has-text('Reset zoom')[disabled]")
    page.locator("input[type=range]").fill("0.5")
    page.wait_for_timeout(300)
    assert any("smooth=0.5" in one for one in asked)
    with page.expect_download() as download:
        page.click("text=CSV")
    rows = list(csv.DictReader(open(download.value.path(), newline="")))  # noqa: SIM115 - the browser's own copy
    assert len(rows) == 200
    assert rows[0]["run"] == "one"
    assert float(rows[5]["val_loss"]) == pytest.approx(entry(5)["validation"]["loss"])
    with page.expect_download() as download:
        page.click("figure[data-chart=loss] button")
    picture = open(download.value.path(), "rb").read()  # noqa: SIM115 - as above
    assert picture.startswith(b"\x89PNG")
    assert download.value.suggested_filename == "loss.png"


def test_a_small_screen_shows_everything_without_moving_the_page_sideways(page, shown, tmp_path):
    load = {"cpu": 0.42, "memory": 2**33, "memory_total": 2**34, "process_memory": 2**30}
    ranks = [
        {"rank": rank, "host": "a-host-with-a-long-name.example", "load": load, "state": "ended"}
        for rank in range(2)
    ]
    event = {
        "time": 1,
        "what": "Spark has removed executor 5",
        "reason": "Container killed by YARN " * 5,
    }
    for name in ("first", "second"):
        write_run(
            tmp_path,
            f"{name}-{'long' * 15}",
            ranks=ranks,
            events=[event],
            data={"path": "s3://bucket/" + "x" * 90},
        )
    page.set_viewport_size({"width": 390, "height": 700})
    ready(page, shown())
    sideways = "document.documentElement.scrollWidth - innerWidth"
    assert page.evaluate(sideways) <= 0, "the list"
    for row in page.locator("#rows input").all():
        row.check()
    page.click("#compare")
    page.wait_for_selector("figure[data-chart=loss] canvas")
    assert page.evaluate(sideways) <= 0, "the comparison"
    page.click("text=All runs")
    page.click("#rows a >> nth=0")
    page.wait_for_selector("[data-section=Ranks]")
    page.wait_for_selector("figure[data-chart=loss] canvas")
    assert page.evaluate(sideways) <= 0, "a run"


def test_keys_and_themes(page, shown, tmp_path):
    write_run(tmp_path, "one")
    ready(page, shown())
    page.keyboard.press("/")
    page.keyboard.type("nothing like this")
    assert page.locator("#rows tr").count() == 0
    assert page.locator("#nothing").is_visible()
    page.fill("#filter", "")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("figure canvas")
    page.keyboard.press("u")
    page.wait_for_selector("#rows tr")
    page.keyboard.press("?")
    assert page.locator("dialog[open]").is_visible()
    page.keyboard.press("Escape")
    paper = "getComputedStyle(document.body).backgroundColor"
    page.keyboard.press("t")
    light = page.evaluate(paper)
    page.keyboard.press("t")
    assert page.evaluate(paper) != light


def test_a_page_behind_a_proxy_with_a_prefix_works(page, shown, tmp_path):
    write_run(tmp_path, "one")
    link = shown()
    port, token = link.split("/")[2].rpartition(":")[2], link.split("/")[3]
    # Proxies that keep their prefix ask the server for it, too.
    ready(page, f"http://127.0.0.1:{port}/user/ada/proxy/absolute/{port}/{token}/")
    page.click("#rows a")
    page.wait_for_selector("figure canvas")


@pytest.mark.slow
@pytest.mark.timing
def test_a_thousand_runs_load_within_a_second(page, shown, tmp_path):
    for number in range(1000):
        write_run(tmp_path, f"run-{number:04d}", epochs=30, quality=1 + number % 7, started=number)
    link = shown()
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def processor_time() -> float:
        """Seconds of this process, which has the server, and of the page's."""
        found = session.send("Performance.getMetrics")["metrics"]
        return time.process_time() + next(
            one["value"] for one in found if one["name"] == "ProcessTime"
        )

    times, costs = [], []
    for _ in range(3):
        began, spent = time.monotonic(), processor_time()
        ready(page, link)
        times.append(time.monotonic() - began)
        costs.append(processor_time() - spent)
    print(f"1,000 runs: {times} s, of processors {costs} s")
    assert page.locator("#count").inner_text() == "1000 runs"
    drawn = page.locator("#rows tr").count()
    assert 100 <= drawn < 1000
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    page.wait_for_function(f"document.querySelectorAll('#rows tr').length > {drawn}")
    page.fill("#filter", "run-0123")
    assert page.locator("#rows tr").count() == 1
    # Where other programs use the cores, the processors' time says how long it takes without them.
    assert min(times) < 1 or max(costs) < 1, (times, costs)


@pytest.mark.slow
@pytest.mark.timing
def test_a_million_points_are_drawn(page, shown, tmp_path):
    directory = write_run(tmp_path, "long", epochs=1)
    line = '{"epoch": %d, "train": {"loss": %.6f, "all_metrics": []}, "seconds": 0.1, "rows": 10}\n'
    with (directory / "logs" / "history.jsonl").open("w") as file:
        for epoch in range(1_000_000):
            file.write(line % (epoch, 50.0 if epoch == 777_777 else 1 / (1 + epoch / 1e5)))
    link = f"{shown()}#/run/0%2Flong"
    began = time.monotonic()
    ready(page, link)
    page.wait_for_selector("figure[data-chart=loss] canvas")
    first = time.monotonic() - began
    tries = [
        page.evaluate(
            """async () => {
                const began = performance.now();
                const told = await (await fetch("api/curves?run=0%2Flong&pixels=600")).json();
                return [performance.now() - began, told.runs[0].curves.find((one) => one.name === "loss")];
            }"""  # noqa: E501
        )
        for _ in range(5)
    ]
    took, told = min(tries, key=lambda one: one[0])
    print(
        f"1 M points: first shown after {first:.2f} s, then {took:.0f} ms for {len(told['x'])} "
        "points of each curve"
    )
    assert told["points"] == 1_000_000
    assert len(told["x"]) <= 2400
    assert max(told["y"]) == 50.0
    assert took < 500, "four curves, by HTTP and JSON"
    assert first < 60, "90 MB of JSON are read once"


def test_the_command_prints_the_link_and_ends_by_ctrl_c(tmp_path):
    import signal

    write_run(tmp_path, "one")
    program = [sys.executable, "-m", "farandole", "ui", str(tmp_path)]
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None
        link = command.stdout.readline().split()[4]
        with urllib.request.urlopen(f"{link}api/runs", timeout=10) as answer:
            assert [run["name"] for run in json.load(answer)["runs"]] == ["one"]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{link.split('/')[2]}/api/runs", timeout=10)
        command.send_signal(signal.SIGINT)
        command.wait(20)


def test_the_command_explains_recorded_runs(tmp_path):
    ranks = [
        {
            "rank": rank,
            "host": "a",
            "step_seconds": 0.1,
            "data_seconds": data,
            "reduce_seconds": 0.01,
        }
        for rank, data in enumerate((0.07, 0.058))
    ]
    directory = write_run(tmp_path, "mine", ranks=ranks, parameters={"train_reader_num_workers": 2})
    program = [sys.executable, "-m", "farandole", "explain"]
    told = subprocess.run(
        [*program, str(directory)], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    page = (Path(__file__).parents[2] / "docs/user-guide/runs.md").read_text()
    assert f"$ farandole explain /data/farandole/runs/mine\n{told}```" in page
    live = write_run(
        tmp_path,
        "live",
        ranks=ranks,
        parameters={"train_reader_num_workers": 2},
        state="running",
        ended=None,
    )
    while_it_trains = subprocess.run(
        [*program, str(live)], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert while_it_trains == told
    failed = write_run(
        tmp_path,
        "failed",
        what="run",
        state="failed",
        reason="rank 1 on b was ended by signal SIGKILL",
    )
    (failed / "output/rank.1").mkdir(parents=True)
    (failed / "output/rank.1/stderr").write_text("the last words")
    told = subprocess.run(
        [*program, "--json", str(failed)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "output/rank.1/stderr" in json.loads(told.stdout)["next"]


def test_the_command_explains_the_newest_run_of_a_store_and_lists_the_others(tmp_path):
    write_run(tmp_path, "older", started=1000, ended=2000)
    newest = write_run(tmp_path, "newest", state="failed", reason="rank 1 on b was lost")
    program = [sys.executable, "-m", "farandole", "explain"]

    def told(*arguments: str) -> str:
        return subprocess.run(
            [*program, *arguments], capture_output=True, text=True, timeout=60, check=True
        ).stdout

    lines = told(str(tmp_path)).splitlines()
    assert lines[0].startswith(f"run:     {newest} (failed, started ")
    assert lines[0].endswith(", the newest of 2 runs")
    assert lines[1] == "verdict: failed: rank 1 on b was lost"
    assert lines[4].startswith(f"others:  {tmp_path}/runs/older (ended, started 1970-01-0")
    assert len(lines) == 5
    found = json.loads(told("--json", str(tmp_path)))
    assert [one["directory"] for one in found["others"]] == [f"{tmp_path}/runs/older"]
    assert found["run"]["directory"] == str(newest)
    assert found["verdict"] == "failed: rank 1 on b was lost"


def test_a_store_without_runs_is_named(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "farandole", "explain", str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode != 0
    assert f"a run in {tmp_path}" in ended.stderr
