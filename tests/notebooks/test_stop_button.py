# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The output of a fit on a real Jupyter kernel: the button while a cell runs, and what stays in
the document.
"""

from __future__ import annotations

import html
import re
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jupyter_client.blocking.client import BlockingKernelClient

pytestmark = pytest.mark.timeout(180)
DOUBLE_CLICK = 2.1
"""Seconds after which a click is not the second of a double click."""

WAITS = """
import time
from farandole.spark.common.runs.stop_request import StopRequest
from farandole.spark.common.show.notebook import NotebookDisplay
from farandole.spark.common.store import LocalStore

stop = StopRequest(LocalStore({root!r}).to_remote("mine"))
with NotebookDisplay() as shown, shown.offer_stop(stop):
    deadline = time.monotonic() + 60
    while not stop.asked and time.monotonic() < deadline:
        time.sleep(0.02)
    print("asked", stop.asked)
    while time.monotonic() < deadline:
        time.sleep(0.02)
"""
"""A cell that waits as a fit does, in the main thread."""

FITS = """
import time
import pyarrow as pa
import torch
from farandole.spark.common import LocalBackend, LocalStore
from farandole.spark.torch import TorchEstimator

def slow(state):
    time.sleep(0.3)

network = torch.nn.Linear(1, 1)
model = TorchEstimator(
    backend=LocalBackend(2), model=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.01),
    loss=torch.nn.MSELoss(), feature_cols=["x"], label_cols=["y"], batch_size=8, epochs=1000, callbacks=[slow],
    store=LocalStore({root!r}),
).fit(pa.table({{"x": [float(number % 7) for number in range(64)], "y": [1.0] * 64}}))
print("epochs", len(model.getHistory()))
"""  # noqa: E501

REPORTS = """
from farandole.spark.common.runs.stop_request import StopRequest
from farandole.spark.common.show.notebook import NotebookDisplay
from farandole.spark.common.store import LocalStore

with NotebookDisplay() as shown, shown.offer_stop(StopRequest(LocalStore({root!r}).to_remote("mine"))):
    for epoch in range(300):
        scores = {{"loss": 1 / (epoch + 1), "all_metrics": [{{"accuracy": 0.9}}]}}
        entry = {{"epoch": epoch, "train": scores, "seconds": 1.0, "rows": 10}}
        shown.show_report({{"kind": "epoch", "entry": entry, "epochs": 300, "steps": 1, "rows_per_second": 10.0}})
"""  # noqa: E501


class Cell:
    """A cell that runs in a kernel; what it has sent so far is kept."""

    def __init__(self, client: BlockingKernelClient, code: str) -> None:
        self.client = client
        self.sent: list[Any] = []
        self._request = client.execute(code)

    def wait(self, found: Callable[[str, dict[str, Any]], Any], seconds: float = 60) -> Any:
        """The first thing that a function makes of a message, by its type and content."""
        deadline = time.monotonic() + seconds
        seen = 0
        while True:
            for message in self.sent[seen:]:
                if value := found(message["header"]["msg_type"], message["content"]):
                    return value
            seen = len(self.sent)
            assert time.monotonic() < deadline, [message["content"] for message in self.sent]
            message = self.client.get_iopub_msg(timeout=seconds)
            kind = message["header"]["msg_type"]
            if message["parent_header"].get("msg_id") == self._request or kind.startswith("comm_"):
                self.sent.append(message)

    def says(self, text: str) -> None:
        """Waits for a text of its output."""
        self.wait(lambda kind, content: kind == "stream" and text in content["text"])

    def link(self) -> str:
        """The link of the button."""

        def found(kind: str, content: dict[str, Any]) -> str | None:
            shown = content["data"].get("text/html", "") if kind == "display_data" else ""
            match = re.search(r'fetch\("([^"]+)"', html.unescape(shown))
            return match[1] if match and "farandole-stop" in shown else None

        return self.wait(found)

    def ends(self) -> str:
        """Waits for its end; the name of the error it ended with."""
        errors: list[str] = []

        def idle(kind: str, content: dict[str, Any]) -> bool:
            if kind == "error":
                errors.append(content["ename"])
            return kind == "status" and content["execution_state"] == "idle"

        self.wait(idle)
        return "".join(errors)


@pytest.fixture
def client(tmp_path, monkeypatch) -> Iterator[BlockingKernelClient]:
    """A kernel of its own."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    manager, client = start_new_kernel(kernel_name="python3")
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.fixture
def plain(client):
    """The same without ipywidgets."""
    client.execute("import sys; sys.modules['ipywidgets'] = None", reply=True, timeout=60)
    return client


def post(url: str) -> int:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10) as answer:
        return answer.status


def test_the_button_in_html_is_heard_while_a_cell_runs_and_goes_with_it(plain, tmp_path):
    cell = Cell(plain, WAITS.format(root=str(tmp_path / "store")))
    link = cell.link()
    assert post(f"{link}stop") == 204
    cell.says("asked True")
    time.sleep(DOUBLE_CLICK)
    assert post(f"{link}end") == 204
    assert cell.ends() == "KeyboardInterrupt"
    updates = [
        one["content"]["data"]["text/html"]
        for one in cell.sent
        if one["msg_type"] == "update_display_data"
    ]
    assert "" in updates, "the button is removed"
    assert any("ended by KeyboardInterrupt" in page for page in updates)


def test_the_widget_is_heard_while_a_cell_runs(client, tmp_path):
    pytest.importorskip(
        "ipywidgets", reason="the widget needs ipywidgets, which the extra dev installs"
    )
    cell = Cell(client, WAITS.format(root=str(tmp_path / "store")))

    def opened(kind: str, content: dict[str, Any]) -> str | None:
        state = content.get("data", {}).get("state", {}) if kind == "comm_open" else {}
        return content["comm_id"] if state.get("_model_name") == "ButtonModel" else None

    button = cell.wait(opened)
    cell.wait(
        lambda kind, content: kind == "display_data" and "widget-view+json" in str(content["data"])
    )

    def click() -> None:
        data = {"method": "custom", "content": {"event": "click"}}
        client.shell_channel.send(client.session.msg("comm_msg", {"comm_id": button, "data": data}))

    click()
    cell.says("asked True")
    cell.wait(
        lambda kind, content: (
            kind == "comm_msg"
            and content["comm_id"] == button
            and content["data"].get("state", {}).get("description") == "End at once"
        )
    )
    time.sleep(DOUBLE_CLICK)
    click()
    assert cell.ends() == "KeyboardInterrupt"
    assert not any("farandole-stop" in str(one["content"]) for one in cell.sent), (
        "one button is enough"
    )


def test_the_chart_is_in_the_document_which_any_front_end_shows_again(tmp_path, monkeypatch):
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    code = "import sys; sys.modules['ipywidgets'] = None\n" + REPORTS.format(
        root=str(tmp_path / "store")
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    nbformat.write(notebook, tmp_path / "saved.ipynb")
    (cell,) = nbformat.read(tmp_path / "saved.ipynb", as_version=4).cells
    pages = [output.data["text/html"] for output in cell.outputs]
    assert [page for page in pages if page] == pages[:1], (
        "one output is updated, and the button is removed"
    )
    assert pages[0].count("<polyline") == 2, "the loss and the accuracy"
    assert "epoch 300/300" in pages[0]
    assert len(pages[0]) < 40_000
    assert not re.search(r"<script|onclick|https?://(?!www\.w3\.org/)", pages[0]), (
        "nothing that a front end removes"
    )


@pytest.mark.slow
def test_a_fit_in_a_cell_returns_its_model_when_it_is_stopped(plain, tmp_path):
    cell = Cell(plain, FITS.format(root=str(tmp_path / "store")))
    link = cell.link()
    cell.wait(
        lambda kind, content: (
            kind == "update_display_data" and "epoch 2/1000" in str(content["data"])
        )
    )
    assert post(f"{link}stop") == 204
    cell.says("epochs ")
    assert cell.ends() == ""
    updates = [
        str(one["content"]["data"]) for one in cell.sent if one["msg_type"] == "update_display_data"
    ]
    assert any("stopping, as asked for in the notebook" in page for page in updates)
