# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Makes the pictures of the pages: `make screenshots`.

All of them show real fits of scikit-learn's digits: one on a Spark of two executors with the
plugin, three on this host, and one in a notebook. Needs Debian's Chromium and a Java.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import torch
from nbclient import NotebookClient
from playwright.sync_api import sync_playwright
from sklearn.datasets import load_digits

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from tests.spark.deployments import home  # noqa: E402 - of the checkout

import farandole.spark  # noqa: E402
from farandole.spark.common import LocalBackend, LocalStore  # noqa: E402
from farandole.spark.torch import TorchEstimator  # noqa: E402
from farandole.ui import Viewer  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Locator, Page

WIDTH = 1280
EPOCHS = 14
CELL = """
import pandas as pd, torch
from sklearn.datasets import load_digits
from farandole.spark.common import LocalBackend, LocalStore
from farandole.spark.torch import TorchEstimator

digits = load_digits()
rows = pd.DataFrame({"features": list((digits.data / 16).astype("float32")),
    "label": digits.target})
network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
TorchEstimator(
    backend=LocalBackend(2), model=network,
    optimizer=torch.optim.Adam(network.parameters(), lr=0.001),
    loss=torch.nn.CrossEntropyLoss(), feature_cols=["features"], label_cols=["label"],
    validation=0.1, batch_size=32,
    epochs=14, store=LocalStore("store"),
).fit(rows);
"""


def accuracy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """The share of rows whose largest output is the label's."""
    return (output.argmax(dim=1) == label).float().mean()


def estimator(store: str, run: str, width: int, rate: float, **more: Any) -> TorchEstimator:
    """An estimator of digits with one hidden layer."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    )
    return TorchEstimator(
        model=network, optimizer=torch.optim.Adam(network.parameters(), lr=rate),
        loss=torch.nn.CrossEntropyLoss(),
        metrics=[accuracy], feature_cols=["features"], label_cols=["label"],
        input_shapes=[[-1, 64]], validation=0.1,
        batch_size=32, epochs=EPOCHS, random_seed=1, store=LocalStore(store), run_id=run, verbose=0,
        **more,
    )  # fmt: skip


def fail(state: Any) -> None:
    """A callback that fails after a few epochs."""
    if state.epoch == EPOCHS // 4:
        raise RuntimeError("no space left on device")


def fits_of_this_host(store: str) -> None:
    """Two fits to compare, and one that fails."""
    import pandas as pd  # noqa: PLC0415 - after the environment is set

    digits = load_digits()
    rows = pd.DataFrame(
        {"features": list((digits.data / 16).astype("float32")), "label": digits.target}
    )
    backend = LocalBackend(2, verbose=0)
    estimator(store, "digits-narrow", 16, 0.001, backend=backend).fit(rows)
    estimator(store, "digits-fast", 64, 0.01, backend=backend).fit(rows)
    with suppress(farandole.spark.FarandoleJobError):
        estimator(store, "digits-broken", 64, 0.001, backend=backend, callbacks=[fail]).fit(rows)


@contextmanager
def fit_on_spark(store: str) -> Iterator[str]:
    """A fit on two executors; gives the address of Spark's pages while the application lives."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - after the environment is set

    builder = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .appName("digits")
        .config("spark.ui.port", "0")
    )
    for name, value in {
        "spark.ui.showConsoleProgress": "false", "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.driver.bindAddress": "127.0.0.1", "spark.sql.shuffle.partitions": "2",
    }.items():  # fmt: skip
        builder = builder.config(name, value)
    spark = farandole.spark.plugin(builder).getOrCreate()
    digits = load_digits()
    rows = [
        ((image / 16).tolist(), int(label))
        for image, label in zip(digits.data, digits.target, strict=True)
    ]
    frame = spark.createDataFrame(rows, "features array<float>, label int")
    estimator(store, "digits-mlp", 128, 0.001, num_proc=2).fit(frame, timeline=True)
    yield f"http://127.0.0.1:{spark.sparkContext.uiWebUrl.rpartition(':')[2]}"
    spark.stop()


def opened(browser: Browser, height: int = 760) -> Page:
    """A page of a fresh profile."""
    return browser.new_context(
        viewport={"width": WIDTH, "height": height}, color_scheme="light"
    ).new_page()


def pictures_of_the_tab(browser: Browser, spark: str) -> None:
    """Makes the picture of the Training tab: a run from its charts to the executors."""
    page = opened(browser)
    page.goto(f"{spark}/training/")
    page.wait_for_selector("#facts .ended")
    page.wait_for_selector("#executors tr:nth-child(3) td:has-text('GiB')")
    rename_host(page)
    page.screenshot(path=DOCS / "spark/images/training-tab.png", full_page=True)


def pictures_of_the_viewer(browser: Browser, store: str) -> None:
    """Makes the pictures of the run viewer: the list, a run, and a comparison."""
    images = DOCS / "user-guide/images"
    with Viewer((store,)) as viewer:
        for address, name, shown in (
            ("", "runs-list", "#rows tr"),
            ("#/run/0%2Fdigits-mlp", "runs-run", "figure canvas"),
            (
                "#/compare/0%2Fdigits-narrow,0%2Fdigits-fast",
                "runs-compare",
                "[data-section='Parameters that differ']",
            ),
        ):
            page = opened(browser, 460 if name == "runs-list" else 760)
            page.goto(viewer.url + address)
            page.wait_for_selector("body[data-ready]")
            page.wait_for_selector(shown)
            page.wait_for_timeout(500)  # the charts are drawn in the next frames
            rename_host(page)
            # what follows are long lists of names and values
            last = page.locator("[data-section=Timeline]")
            clip = (
                {"x": 0, "y": 0, "width": WIDTH, "height": bottom(last)} if last.count() else None
            )
            page.screenshot(path=images / f"{name}.png", full_page=name != "runs-list", clip=clip)
            page.close()


def rename_host(page: Page) -> None:
    """Writes `this-host` for the name of this host, which says nothing to readers."""
    page.evaluate(
        """(pattern) => {
            const host = new RegExp(pattern, "g");
            const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
            while (texts.nextNode()) {
                const text = texts.currentNode;
                text.data = text.data.replace(host, "this-host");
            }
        }""",
        rf"\b{re.escape(socket.gethostname())}[-\w]*",
    )


def bottom(part: Locator) -> float:
    """The lower edge of a part of a page, in pixels from the top of the page."""
    return part.evaluate("(one) => one.getBoundingClientRect().bottom + scrollY + 16")


def picture_of_a_notebook(browser: Browser, folder: Path) -> None:
    """Makes the picture of a fit's output, which a real kernel has left in its document."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    texts = [output.get("data", {}).get("text/html", "") for output in notebook.cells[0].outputs]
    (text,) = [one for one in texts if "farandole-progress" in one]
    page = opened(browser)
    page.set_content(f"<body style='font: 14px system-ui, sans-serif; width: 760px'>{text}")
    rename_host(page)
    page.locator(".farandole-progress").screenshot(path=DOCS / "user-guide/images/notebook-fit.png")


def main() -> None:
    """Makes all pictures."""
    folder = Path(tempfile.gettempdir()) / "digits"
    folder.mkdir()  # its name is in the pictures
    store = str(folder / "store")
    os.environ.update(
        SPARK_HOME=str(home(folder)), PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1"
    )
    os.environ.update(LOGNAME="ada", TZ="UTC")
    try:
        fits_of_this_host(store)
        with fit_on_spark(store) as spark, sync_playwright() as playwright:
            chromium = shutil.which("chromium")
            browser = playwright.chromium.launch(
                executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
            )
            pictures_of_the_tab(browser, spark)
            pictures_of_the_viewer(browser, store)
            picture_of_a_notebook(browser, folder)
            browser.close()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
