# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Time of the run viewer's page in Debian's Chromium: a list of 1,000 runs, and a run of 1,000,000
points.

    python bench/ui.py [--runs 1000] [--points 1000000] [--tries 5]

Prints seconds from the request of the page to its first answer drawn, and milliseconds of an answer
with the curves.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playwright.sync_api import sync_playwright
from saved import save

from farandole.ui import Viewer

if TYPE_CHECKING:
    from playwright.sync_api import Browser

EPOCHS = 30
CURVES = """async () => {
    const began = performance.now();
    const told = await (await fetch("api/curves?run=0%2Flong&pixels=600")).json();
    return [performance.now() - began, told.runs[0].curves[0].points, told.runs[0].curves[0].x.length];
}"""  # noqa: E501


def history(path: Path, epochs: int) -> None:
    """A history as estimators write it."""
    path.parent.mkdir(parents=True)
    line = '{"epoch": %d, "train": {"loss": %.6f, "all_metrics": []}, "seconds": 0.1, "rows": 10}\n'
    with path.open("w") as file:
        for epoch in range(epochs):
            file.write(line % (epoch, 1 / (1 + epoch / epochs)))


def run(store: Path, name: str, epochs: int) -> None:
    """A run as estimators leave it."""
    history(store / "runs" / name / "logs" / "history.jsonl", epochs)
    record: dict[str, Any] = {
        "format": 1, "name": name, "what": "TorchEstimator", "model": "Sequential",
        "state": "ended", "user": "ada",
        "started": 0, "ended": 60_000, "size": 2, "epochs": epochs, "done": epochs,
        "parameters": {"batch_size": 32},
        "data": {"told": "1,294 training rows"},
        "best": {"name": "loss", "value": 0.5, "epoch": epochs},
    }  # fmt: skip
    (store / "runs" / name / "_record.json").write_text(json.dumps(record))


def listed(browser: Browser, store: Path, tries: int) -> list[float]:
    """Seconds until the list is drawn, each time in a fresh profile; the first has a server that
    has read nothing.
    """
    times = []
    with Viewer((str(store),)) as viewer:
        for _ in range(tries):
            context = browser.new_context()
            page = context.new_page()
            began = time.perf_counter()
            page.goto(viewer.url)
            page.wait_for_selector("body[data-ready]")
            times.append(time.perf_counter() - began)
            context.close()
    return times


def curves(browser: Browser, store: Path, tries: int) -> tuple[float, list[float], int]:
    """Seconds of the first drawing, milliseconds of each answer, and points in it."""
    with Viewer((str(store),)) as viewer:
        page = browser.new_page()
        began = time.perf_counter()
        page.goto(f"{viewer.url}#/run/0%2Flong")
        page.wait_for_selector("figure[data-chart=loss] canvas")
        first = time.perf_counter() - began
        found = [page.evaluate(CURVES) for _ in range(tries)]
        page.close()
    return first, [one[0] for one in found], found[0][2]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--tries", type=int, default=5)
    given = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("without a browser (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        many, long = Path(folder, "many"), Path(folder, "long")
        for number in range(given.runs):
            run(many, f"run-{number:04d}", EPOCHS)
        run(long, "long", given.points)
        times = listed(browser, many, given.tries)
        first, answers, points = curves(browser, long, given.tries)
        browser.close()
    rows = {
        "list": {"runs": given.runs, "first_s": times[0], "median_s": statistics.median(times),
            "max_s": max(times)},
        "curves": {
            "points": given.points,
            "first_s": first,
            "median_ms": statistics.median(answers),
            "answered_points": points,
        },
    }  # fmt: skip
    for name, row in rows.items():
        print(name, ", ".join(f"{key} {value:,.3g}" for key, value in row.items()))
    save("ui", rows)


if __name__ == "__main__":
    main()
