# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Cells of a real Jupyter kernel: their effects and their output."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

EXAMPLE = Path(__file__).parents[2] / "examples" / "notebook_torch_digits.ipynb"


class Watched(NotebookClient):
    """A client that remembers every page a display showed, and interrupts a cell that has
    printed `interrupt_at`.
    """

    interrupt_at = None

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.pages = []

    def process_message(self, msg, cell, cell_index):
        if msg["msg_type"] in ("display_data", "update_display_data"):
            self.pages.append(msg["content"]["data"].get("text/html", ""))
        output = super().process_message(msg, cell, cell_index)
        if self.interrupt_at is not None and self.interrupt_at in printed(cell):
            self.interrupt_at = None
            self.km.provisioner.process.send_signal(signal.SIGINT)
        return output

    def cell(self, source):
        """Runs one cell more."""
        self.nb.cells.append(nbformat.v4.new_code_cell(source))
        return self.execute_cell(self.nb.cells[-1], len(self.nb.cells) - 1)


def printed(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Makes clients; nothing of Jupyter's goes to the home directory."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    here = {"metadata": {"path": str(tmp_path)}}
    return lambda notebook: Watched(notebook, timeout=200, kernel_name="python3", resources=here)


def test_the_example_trains_a_network_of_its_cells_and_draws_while_it_does(client):
    watched = client(nbformat.read(EXAMPLE, as_version=4))
    watched.execute()
    _, fit, history, share = [cell for cell in watched.nb.cells if cell.cell_type == "code"]
    pages = [page for page in watched.pages if "farandole-progress" in page]
    epochs = [int(found[1]) for page in pages if (found := re.search(r"epoch (\d+)/10: ", page))]
    assert sorted(set(epochs)) == list(range(1, 11)), "every epoch is shown"
    lines = [re.search(r'points="([^"]*)" fill="none" stroke="#3465a4"', page) for page in pages]
    points = [len(line[1].split()) for line in lines if line is not None]
    assert points == sorted(points), "the chart grows"
    assert points[-1] == 10
    displays = [output.output_type for output in fit.outputs if output.output_type != "stream"]
    assert displays == ["display_data"] * 2, "the chart, and the button that stops the fit"
    assert "<svg" in history.outputs[0].data["text/html"]
    assert {"rank 0 of 2", "rank 1 of 2"} <= {
        line.partition(":")[2] for line in printed(share).splitlines()
    }
    assert share.outputs[-1].data["text/plain"] == "[0.5, 0.5]"


def test_an_error_or_an_interrupt_ends_the_workers_and_not_the_kernel(client):
    watched = client(nbformat.v4.new_notebook())
    with watched.setup_kernel():
        watched.cell("""
            import os, time
            import farandole

            class Mistaken(Exception):
                pass

            def fail():
                raise Mistaken("of a cell")

            def wait():
                import farandole.numpy as hvd

                hvd.init()
                print("worker", os.getpid(), flush=True)
                hvd.barrier()
                print("all wait", flush=True)
                time.sleep(300)
            """)
        with pytest.raises(CellExecutionError, match=r"failed: __main__\.Mistaken: of a cell"):
            watched.cell("farandole.run(fail, num_proc=2)")
        watched.interrupt_at = "all wait"
        start = time.monotonic()
        with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
            watched.cell("farandole.run(wait, num_proc=2)")
        assert time.monotonic() - start < 100
        workers = [int(pid) for pid in re.findall(r"worker (\d+)", printed(watched.nb.cells[-1]))]
        assert len(workers) == 2
        assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
        cell = watched.cell("farandole.run(os.getpid, num_proc=2)")
        assert len(set(re.findall(r"\d+", cell.outputs[-1].data["text/plain"]))) == 2


def test_a_kernel_has_warm_workers_and_shows_progress_as_text_or_nothing(client):
    watched = client(nbformat.v4.new_notebook())
    with watched.setup_kernel():
        told = watched.cell("""
            from farandole.spark.common.show.progress import create_progress_display

            import torch
            from farandole.runner import warm_workers

            warm = warm_workers.resolve_warm_worker_settings(None, by_default=False)
            print("warm workers" if warm else "none")
            with create_progress_display(0) as silent:
                silent.show_message("never shown")
            with create_progress_display(1) as told:
                told.show_message("preparing <data>")
            """)
    assert printed(told) == "warm workers\n"
    assert "preparing &lt;data&gt;" in watched.pages[-1]
    assert not [page for page in watched.pages if "never shown" in page]
