# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A job of functions in the run viewer, live: `farandole.run(ui=...)`; and the timeline of a
run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import types
from typing import TYPE_CHECKING

from tests.programs import program_path
from tests.ui.conftest import write_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Page

JOB = program_path(__file__, "report_until_death")


def ready(page: Page, link: str) -> None:
    """Opens the page and waits for its first answer."""
    page.goto(link)
    page.wait_for_selector("body[data-ready]")


@contextlib.contextmanager
def ended(job: subprocess.Popen[str]) -> Iterator[None]:
    """Ends a job that a failed test leaves."""
    try:
        yield
    except BaseException:
        job.terminate()
        raise


def grows(page: Page, beyond: int) -> int:
    """Waits until the curve of the loss has more points; how many it has then."""
    chart = page.locator("figure[data-chart=loss]")
    deadline = time.monotonic() + 30
    while (points := int(chart.get_attribute("data-points") or 0)) <= beyond:
        assert time.monotonic() < deadline, f"{points} points"
        page.wait_for_timeout(100)
    return points


def test_a_live_job_grows_and_a_killed_rank_appears(page, shown, tmp_path):
    command = [sys.executable, JOB, tmp_path]
    with (
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as job,
        ended(job),
    ):
        assert job.stderr is not None
        said = job.stderr.readline()
        assert re.search(
            r"the run is at http://127\.0\.0\.1:\d+/[0-9a-f]{32}/#/run/0%2Ftrain-", said
        ), said
        ready(page, shown())
        page.wait_for_selector("#rows td.state:has-text('running')", timeout=30_000)
        page.click("#rows a")
        page.wait_for_selector("figure[data-chart=loss] canvas", timeout=30_000)
        grows(page, beyond=grows(page, beyond=3))
        page.wait_for_selector("[data-section=Ranks] th:has-text('Host memory')", timeout=20_000)
        cells = page.locator("[data-section=Ranks] tbody tr").first.locator("td").all_inner_texts()
        assert any(re.fullmatch(r"\d+\.\d of \d+\.\d GiB", cell) for cell in cells), cells
        assert any(re.fullmatch(r"\d+ %", cell) for cell in cells), (
            "the load of the host's processors"
        )
        page.click("button.link:has-text('output/rank.1/stdout')")
        page.wait_for_selector("pre:has-text('rank 1 is here')")
        (tmp_path / "die").touch()
        page.wait_for_selector("#headline .badge:has-text('failed')", timeout=30_000)
        assert "SIGKILL" in page.locator("[data-section='Why it failed']").inner_text()
        page.wait_for_selector(
            "[data-section=Ranks] tbody tr:nth-child(2) td:nth-child(3):has-text('failed')"
        )
        rest = job.stderr.read()
        assert job.wait(30) != 0
    assert "the timeline of all ranks is timeline.json of the run" in rest, rest
    run = next((tmp_path / "runs").iterdir())
    trace = json.loads((run / "timeline.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} >= {0, 1}


PERFETTO = """
<body></body>
<script>
window.addEventListener("message", (event) => {
  if (event.data === "PING") event.source.postMessage("PONG", event.origin);
  else {
    const { title, buffer } = event.data.perfetto;
    document.body.textContent = `${title}: ${new TextDecoder().decode(buffer)}`;
  }
});
</script>
"""
TRACE = '{"traceEvents":[]}'


def traced(page: Page, link: str, store: Path) -> None:
    """Opens the page of a run with a timeline."""
    (write_run(store, "traced") / "timeline.json").write_text(TRACE)
    ready(page, f"{link}#/run/0%2Ftraced")
    page.wait_for_selector("[data-section=Timeline]")


def test_perfetto_shows_a_timeline_in_the_page_and_keeps_it_over_a_refresh(
    page, errors, shown, tmp_path
):
    page.context.route(
        "https://**", lambda route: route.fulfill(body=PERFETTO, content_type="text/html")
    )
    link = shown()
    for run in ("plain", "traced"):  # both before the viewer lists the store
        write_run(tmp_path, run)
    ready(page, f"{link}#/run/0%2Fplain")
    page.wait_for_selector("figure canvas")
    assert page.locator("[data-section=Timeline]").count() == 0
    traced(page, link, tmp_path)
    page.click("text=Open in Perfetto")
    frame = page.frame_locator("[data-section=Timeline] iframe")
    frame.locator(f"body:text-is('traced: {TRACE}')").wait_for()
    assert (
        page.locator("iframe").get_attribute("src") == "https://ui.perfetto.dev/#!/?mode=embedded"
    )
    page.evaluate("window.held = document.querySelector('iframe')")
    (
        write_run(tmp_path, "traced", reason="a section above", state="failed") / "timeline.json"
    ).write_text(TRACE + " ")
    page.wait_for_selector("[data-section='Why it failed']")
    page.wait_for_selector("text=Download (19 B)")
    assert page.evaluate("document.querySelector('iframe') === window.held")
    assert frame.locator("body").inner_text() == f"traced: {TRACE}", (
        "the frame was not loaded again"
    )
    page.click("text=Open in Perfetto")
    frame.locator("body:has-text('traced')").wait_for()
    assert page.locator("iframe").count() == 1
    assert not errors
    for other in ("https://perfetto.dev/", "https://ui.perfetto.dev.example/"):
        page.evaluate(
            f"document.body.append(Object.assign(document.createElement('iframe'), {{src: "
            f"{other!r}}}))"
        )
        page.wait_for_timeout(200)
        assert "Content Security Policy" in errors.pop()


def test_a_timeline_opens_in_a_window_of_perfetto_and_is_downloaded(page, shown, tmp_path):
    page.context.route(
        "https://ui.perfetto.dev/**",
        lambda route: route.fulfill(body=PERFETTO, content_type="text/html"),
    )
    traced(page, shown(), tmp_path)
    with page.expect_popup() as opened:
        page.click("text=Open in a window")
    opened.value.wait_for_selector(f"body:text-is('traced: {TRACE}')")
    with page.expect_download() as download:
        page.click("[data-section=Timeline] a")
    assert open(download.value.path()).read() == TRACE  # noqa: SIM115 - the browser's own copy
    assert download.value.suggested_filename == "timeline.json"


def test_without_perfetto_a_sentence_and_a_download_replace_the_frame(
    page, errors, shown, tmp_path
):
    page.context.route("https://ui.perfetto.dev/**", lambda route: route.abort())
    page.clock.install()
    traced(page, shown(), tmp_path)
    page.click("text=Open in Perfetto")
    page.wait_for_selector("iframe")
    page.clock.fast_forward(11_000)
    said = page.locator("[data-section=Timeline] [role=alert]")
    said.wait_for()
    assert "Perfetto does not answer" in said.inner_text()
    assert page.locator("iframe").count() == 0
    with page.expect_download() as download:
        said.locator("a").click()
    assert open(download.value.path()).read() == TRACE  # noqa: SIM115 - the browser's own copy
    errors.clear()  # the browser's own, about the page that it cannot load


def test_without_perfetto_the_page_says_to_download_the_timeline(page, errors, shown, tmp_path):
    page.context.route("https://ui.perfetto.dev/**", lambda route: route.abort())
    page.clock.install()
    traced(page, shown(), tmp_path)
    page.click("text=Open in a window")
    page.clock.fast_forward(11_000)
    page.wait_for_selector("#problem:has-text('Perfetto does not answer')")
    errors.clear()  # as above


def test_a_rank_has_columns_for_what_is_known_of_its_load(page, shown, tmp_path):
    gib = 2**30
    load = {"cpu": 0.42, "memory": 3 * gib, "memory_total": 8 * gib, "process_memory": gib,
        "gpu": 0.9,
            "gpu_memory": 10 * gib, "gpu_memory_total": 80 * gib}  # fmt: skip
    write_run(
        tmp_path, "gpu", ranks=[{"rank": 0, "host": "a", "load": load}, {"rank": 1, "host": "b"}]
    )
    ready(page, f"{shown()}#/run/0%2Fgpu")
    page.wait_for_selector("[data-section=Ranks]")
    heads = page.locator("[data-section=Ranks] th").all_inner_texts()
    assert heads[-6:-1] == ["Host CPU", "Process memory", "Host memory", "GPU load", "GPU memory"]
    assert "State" not in heads, "none has left"
    cells = page.locator("[data-section=Ranks] tbody tr").first.locator("td").all_inner_texts()
    assert cells[-6:-1] == ["42 %", "1.0 GiB", "3.0 of 8.0 GiB", "90 %", "10.0 of 80.0 GiB"]


def test_functions_run_as_before_without_a_viewer(tmp_path, monkeypatch):
    import farandole

    monkeypatch.chdir(tmp_path)
    assert farandole.run(os.getcwd, num_proc=1) == [str(tmp_path)]
    assert not list(tmp_path.iterdir())


def read_only_record(store: Path) -> dict[str, object]:
    """The record of the only run of a store."""
    (run,) = (store / "runs").iterdir()
    return json.loads((run / "_record.json").read_text())


def test_true_keeps_the_run_in_the_current_directory(tmp_path, monkeypatch, capfd):
    import farandole

    monkeypatch.chdir(tmp_path)
    assert farandole.run(os.getcwd, num_proc=1, ui=True) == [str(tmp_path)]
    record = read_only_record(tmp_path / "farandole-runs")
    assert (record["state"], record["what"], record["size"]) == ("ended", "run", 1)
    assert "the run is at http://127.0.0.1:" in capfd.readouterr().err


def test_a_notebook_gets_a_link_and_not_a_path_on_stderr(tmp_path, monkeypatch, capfd):
    import farandole
    from farandole.ui import Viewer

    display = types.ModuleType("IPython.display")
    shown: list[object] = []
    display.display = shown.append
    kernel = types.ModuleType("IPython")
    kernel.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/ada/")
    farandole.run(os.getcwd, num_proc=1, ui=str(tmp_path))
    (viewer,) = shown
    assert isinstance(viewer, Viewer)
    link = viewer._repr_html_()
    assert re.search(r'<a href="/user/ada/proxy/\d+/[0-9a-f]{32}/#/run/0%2Fgetcwd-', link), link
    assert f"{tmp_path}/runs</a>" in link
    assert "the run is at" not in capfd.readouterr().err


def test_a_stall_is_an_event_of_the_run(tmp_path):
    import farandole

    def late(runs):
        """Rank 1 comes when the run has the event."""
        import time

        import numpy as np

        import farandole.numpy as hvd

        hvd.init()
        hvd.barrier()
        end = time.monotonic() + 60
        while hvd.rank() and not any(
            "others wait for rank 1" in record.read_text() for record in runs.glob("*/_record.json")
        ):
            assert time.monotonic() < end
            time.sleep(0.05)
        hvd.allreduce(np.ones(2), name="late")

    farandole.run(
        late,
        (tmp_path / "runs",),
        num_proc=2,
        ui=tmp_path,
        env={"FARANDOLE_STALL_CHECK_TIME_SECONDS": "1"},
    )
    reasons = [
        event["reason"]
        for event in read_only_record(tmp_path)["events"]
        if event["what"] == "stall: others wait for rank 1"
    ]
    assert reasons
    assert "\nMissing ranks:\n1: [" in reasons[0]
