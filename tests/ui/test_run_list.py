# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The list of runs: its width, and its counts."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from tests.ui.conftest import write_run

if TYPE_CHECKING:
    from playwright.sync_api import Page

LONG = "a-very-long-word-of-a-user-" * 6
CELLS: dict[str, dict[str, Any]] = {
    "short": {},
    "usual": {
        "what": "LightningEstimator",
        "model": "TransformerClassifier(12 layers)",
        "user": "firstname.lastname",
        "data": {"told": "12,345,678 training rows, 1,234,567 for validation"},
        "done": 1000,
        "last": {f"val_metric_{index}": 0.123456 for index in range(4)},
        "best": {"name": "val_categorical_accuracy", "value": 0.987654, "epoch": 999},
    },
    "long": {
        "name": LONG, "what": LONG, "model": LONG, "user": LONG, "state": "interrupted",
        "data": {"told": LONG}, "done": 10**9,
        "last": {LONG + str(index): 1e-9 for index in range(4)},
        "best": {"name": LONG, "value": 1e-9, "epoch": 10**9},
    },
}  # fmt: skip


def ready(page: Page, link: str) -> None:
    """Opens the page and waits for its first answer."""
    page.goto(link)
    page.wait_for_selector("body[data-ready]")


def test_the_list_has_no_horizontal_scroll_bar_at_1300_pixels(page, shown, tmp_path):
    for run, record in CELLS.items():
        write_run(tmp_path, run, epochs=1, **record)
    # More rows than the window is high: a vertical scroll bar takes some of its width.
    for number in range(60):
        write_run(tmp_path, f"more-{number}", epochs=1, **CELLS["usual"])
    link = shown()
    for width in (1300, 1920):
        page.set_viewport_size({"width": width, "height": 800})
        ready(page, link)
        for element in ("document.documentElement", "document.querySelector('.wide')"):
            scrolled, visible = page.evaluate(f"[{element}.scrollWidth, {element}.clientWidth]")
            assert scrolled <= visible, f"{element} at {width} pixels"
        # No column has shrunk to nothing.
        widths = page.evaluate(
            "[...document.querySelectorAll('#rows tr:first-child td')].map(x => x.clientWidth)"
        )
        assert min(widths[1:]) >= 40, widths
    text = page.locator("#rows td.last").first
    assert text.get_attribute("title") == text.text_content()


@pytest.mark.parametrize(("count", "ending"), [(1, ""), (2, "s")])
def test_only_one_thing_is_singular(page, shown, tmp_path, count, ending):
    for number in range(count):
        write_run(
            tmp_path, f"run-{number}", epochs=count, size=count, restarts=count, started=number
        )
    record = write_run(tmp_path, "open", size=count, restarts=count, done=count) / "_record.json"
    told = json.loads(record.read_text())
    record.write_text(json.dumps({**told, "epochs": None}))
    link = shown()
    ready(page, link)
    assert page.locator("#count").inner_text() == f"{count + 1} runs"
    page.fill("#filter", "open")
    assert page.locator("#count").inner_text() == f"1 of {count + 1} runs"
    page.goto(f"{link}#/run/0%2Fopen")
    page.wait_for_selector("#headline")
    parts = re.split(r"\s+·\s+", page.locator("#headline").inner_text())
    for noun in ("rank", "epoch", "restart"):
        assert f"{count} {noun}{ending}" in parts, parts


def test_a_single_run_is_one_run(page, shown, tmp_path):
    write_run(tmp_path, "alone")
    ready(page, shown())
    assert page.locator("#count").inner_text() == "1 run"
