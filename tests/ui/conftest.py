# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Stores with runs, and the browser that looks at them: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import json
import math
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium")


def entry(epoch: int, quality: float = 1.0) -> dict[str, Any]:
    """An epoch of a history."""
    loss = quality * math.exp(-epoch / 10) + 0.05
    return {
        "epoch": epoch,
        "train": {"loss": loss, "all_metrics": [{"accuracy": 1 - loss / 2}]},
        "validation": {"loss": loss * 1.1, "all_metrics": [{"accuracy": 1 - loss / 1.8}]},
        "seconds": 1.5,
        "rows": 1294,
    }


def write_history(directory: Path, entries: list[dict[str, Any]]) -> None:
    """A history in the place of the one before, as estimators write it."""
    logs = directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    fresh = logs / "history.jsonl#1"
    fresh.write_text("".join(json.dumps(one) + "\n" for one in entries))
    fresh.replace(logs / "history.jsonl")


def write_run(store: Path, run: str, epochs: int = 20, quality: float = 1.0, **record: Any) -> Path:
    """A run as estimators leave it."""
    directory = store / "runs" / run
    write_history(directory, [entry(epoch, quality) for epoch in range(epochs)])
    now = int(time.time() * 1000)
    told = {
        "format": 1, "heartbeat": 15.0, "name": run, "what": "TorchEstimator",
        "model": "Sequential", "state": "ended",
        "started": now - 60_000, "ended": now, "updated": now, "user": "ada", "size": 2,
        "restarts": 0,
        "epochs": epochs, "done": epochs,
        "data": {"told": "1,294 training rows", "training rows": 1294},
        "parameters": {"batch_size": 32, "random_seed": 1},
        "environment": {"python": "3.13.5", "torch": "2.9"},
        "code": {"commit": "0123456789abcdef"}, "last": {"loss": 0.1},
        "best": {"name": "val_loss", "value": 0.1, "epoch": 7},
        "ranks": [
            {"rank": 0, "host": "a", "pid": 10, "step_seconds": 0.2, "data_seconds": 0.02,
                "reduce_seconds": 0.1},
            {"rank": 1, "host": "b", "pid": 11, "step_seconds": 0.2, "data_seconds": 0.02,
                "reduce_seconds": 0.1},
            {"rank": 2, "host": "c", "pid": 12, "step_seconds": 0.2, "data_seconds": 0.02,
                "reduce_seconds": 0.01},
        ],
        "events": [{"time": now - 30_000, "what": "restart", "reason": "rank 1 was lost"}],
        **record,
    }  # fmt: skip
    (directory / "_record.json").write_text(json.dumps(told))
    return directory


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Opens a viewer on the store of this test and returns its link."""
    from farandole.ui import Viewer

    viewers: list[Viewer] = []

    def show() -> str:
        viewers.append(Viewer((str(tmp_path),)))
        return viewers[-1].url

    yield show
    for viewer in viewers:
        viewer.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium, for all tests."""
    if CHROMIUM is None:
        pytest.skip("without a browser (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture
def errors() -> list[str]:
    """The error lines of the page's console; a line that is left at the end fails the test."""
    return []


@pytest.fixture
def page(browser: Browser, errors: list[str], shown: Callable[[], str]) -> Iterator[Page]:
    """A page of a fresh profile; it is closed before the viewer, which it asks every two
    seconds.
    """
    del shown
    context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )
    yield page
    context.close()
    assert not errors, errors
