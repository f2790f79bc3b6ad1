# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The page of Spark's Training tab in a real browser, with rows that no Spark has sent.

tests/spark/test_plugin.py has the tab of real Sparks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

FILES = Path(__file__).parents[2] / "jvm-shim/spark/src/main/resources/io/farandole/spark"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


def show(page: Page, rows: list[tuple[str, str, dict[str, object]]]) -> None:
    """Opens the tab with these rows, as the History Server would send them."""
    told = {
        "application": "an application", "live": False, "more": False, "seq": len(rows), "tabs": [],
        "rows": [[run, key, json.dumps(body)] for run, key, body in rows],
    }  # fmt: skip

    def answer(route: Route) -> None:
        name = route.request.url.partition("/training/")[2].partition("?")[0] or "training.html"
        if name == "rows":
            route.fulfill(json=told)
        else:
            route.fulfill(body=(FILES / name).read_bytes(), content_type=TYPES[Path(name).suffix])

    page.route("http://spark.test/**", answer)
    page.goto("http://spark.test/training/")
    page.wait_for_selector("#state:text-is('from the event log')")


def test_durations_are_rounded_to_no_sixtieth_second_or_minute(page):
    shown = {
        0.5: "500.0 ms", 0.99999: "1.0 s", 59.96: "60.0 s", 119.6: "1 min 59 s",
        119.999: "1 min 59 s",
        120: "2 min 0 s", 3599.9: "59 min 59 s", 5399.9: "89 min 59 s",
        5400: "1 h 30 min", 7199.9: "1 h 59 min", 7200: "2 h 0 min",
    }  # fmt: skip
    run = {"state": "ended", "what": "run", "size": 2, "started": 1000}
    rows = [
        (f"run-{at}", "run", run | {"ended": 1000 + took * 1000}) for at, took in enumerate(shown)
    ]
    show(page, rows)
    cells = page.locator("#runs td:nth-child(7)").all_inner_texts()
    assert cells[::-1] == list(shown.values()), "the latest run is the first"


def test_step_times_are_rounded_to_no_thousandth_of_the_smaller_unit(page):
    shown = {0.0005: "500 µs", 0.00099996: "1.0 ms", 0.25: "250.0 ms", 0.99996: "1.0 s"}
    ranks = [{"rank": rank, "host": "a", "step_seconds": took} for rank, took in enumerate(shown)]
    run = {"state": "ended", "what": "run", "size": 4, "started": 1000, "ended": 2000}
    show(page, [("one", "run", run), ("one", "ranks", {"ranks": ranks})])
    head = page.locator("#ranks th").all_inner_texts().index("Step")
    assert page.locator(f"#ranks td:nth-child({head + 1})").all_inner_texts() == list(
        shown.values()
    )
