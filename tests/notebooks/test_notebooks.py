# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The notebooks, each from top to bottom on a real Jupyter kernel."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import pytest
from nbclient import NotebookClient
from tests.pages import blocks_of

if TYPE_CHECKING:
    from collections.abc import Callable

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
ALL = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
DATABRICKS_CELL = """
from pathlib import Path
from types import SimpleNamespace
import shutil
from IPython.display import HTML
from IPython.display import display as _display
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()

def _remove(path, recurse):
    assert recurse
    shutil.rmtree(Path({root!r}, path.removeprefix("dbfs:/")))

def display(value, *others, **options):
    _display(value.toPandas() if hasattr(value, "toPandas") else value)

def displayHTML(html):
    _display(HTML(html))

dbutils = SimpleNamespace(fs=SimpleNamespace(rm=_remove))
sc, sql, table, udf = spark.sparkContext, spark.sql, spark.table, spark.udf
"""
"""Names that Databricks defines before the first cell: a session and what belongs to it,
`dbutils`, `display`.
"""


@pytest.fixture
def execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Executes a notebook in an empty directory; returns the text of all outputs. Failing cells
    fail the test.
    """
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "work").mkdir()

    def run(name: str, before: str | None = None, without: str | None = None) -> str:
        notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
        if without is not None:
            kept = [cell for cell in notebook.cells if without not in cell.source]
            assert len(kept) == len(notebook.cells) - 1
            notebook.cells = kept
        if before is not None:
            notebook.cells.insert(0, nbformat.v4.new_code_cell(before))
        resources = {"metadata": {"path": str(tmp_path / "work")}}
        NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
        assert list((tmp_path / "work").iterdir()) == [], "the notebook leaves nothing behind"
        # What the package keeps for warm workers is in a directory with the user's number.
        kept = {f"farandole-{os.getuid()}"}
        left = {
            path.name
            for path in (tmp_path / "tmp").glob("*")
            if path.name.startswith(("farandole-", "tmp"))
        }
        assert left <= kept, "the notebook removes its store"
        return "\n".join(
            text(output) for cell in notebook.cells for output in cell.get("outputs", [])
        )

    return run


def text(output: Any) -> str:
    """Returns the text of an output."""
    if output.output_type == "stream":
        return output.text
    return output.data.get("text/html", "") + output.data.get("text/plain", "")


@pytest.mark.slow
def test_the_cell_of_the_start_page_trains_with_two_processes(execute, tmp_path):
    """Runs the cell of docs/start/index.md."""
    cell = [block for block in blocks_of("docs/start/index.md") if block.kind == "python"][3].text
    page = tmp_path / "start.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)]), page)
    shown = execute(str(page))
    for rank in range(2):
        assert number(rf"rank {rank}: loss (\d+\.\d+)", shown) < 0.1
    assert "All keys matched" in shown


def number(pattern: str, shown: str) -> float:
    """The number that a pattern finds."""
    found = re.search(pattern, shown)
    assert found is not None, shown
    return float(found[1])


@pytest.mark.parametrize("name", ALL)
def test_a_notebook_is_small_says_what_it_needs_and_has_no_outputs(name):
    path = NOTEBOOKS / name
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    first = notebook.cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    assert re.search(r"^(Cluster|Machine): ", first.source, re.MULTILINE), (
        "it says which cluster it wants"
    )
    assert "Packages: " in first.source
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert path.stat().st_size < 20_000


def test_every_notebook_is_in_the_index_and_has_a_test():
    page = (Path(__file__).parents[2] / "docs" / "user-guide" / "notebooks.md").read_text()
    tests = Path(__file__).read_text()
    assert len(ALL) == 7
    for name in ALL:
        assert f"notebooks/{name})" in page
        assert f'execute("{name}"' in tests


@pytest.mark.slow
def test_a_dataframe_becomes_a_torch_model(execute):
    shown = execute("01_torch_on_spark.ipynb")
    assert number(r"test accuracy (\d\.\d+)", shown) >= 0.9
    assert "predictions identical after save/load" in shown
    assert "<svg" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("01_torch_on_spark.ipynb", r"test accuracy (0\.9|1\.0)"),
        ("02_keras_on_spark.ipynb", r"test accuracy (0\.9|1\.0)"),
        ("03_parquet_without_spark.ipynb", r"accuracy over all rows (0\.9|1\.0)"),
        ("04_horovod_script.ipynb", r"last loss 0\.[0-3]"),
        ("05_tuning.ipynb", r"best \{'lr': "),
        ("06_failures.ipynb", r"\['the next job runs', 'the next job runs'\]"),
        ("07_run_viewer.ipynb", r"runs: \['first'\]"),
    ],
)
def test_a_notebook_runs_with_what_databricks_defines(
    name, pattern, execute, tmp_path, monkeypatch
):
    """An imitation: the runtime's variable, its session, `dbutils`, `display`, and a directory in
    the place of `/dbfs`.

    The cell that saves a model is left out: Spark itself writes it, to `dbfs:/`, which only
    Databricks' Spark knows.
    """
    root = tmp_path / "dbfs"
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
    monkeypatch.setenv("FARANDOLE_DBFS_ROOT", str(root))
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    saves = "TorchModel.load" if name.startswith("01") else None
    assert re.search(pattern, execute(name, DATABRICKS_CELL.format(root=str(root)), without=saves))
    if name.startswith(("01", "02")):
        assert (root / "tmp").is_dir(), "the store was on DBFS"
        assert not (root / "tmp" / "farandole-notebook").exists(), "and was removed"


@pytest.mark.slow
def test_a_dataframe_becomes_a_keras_model(execute, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    shown = execute("02_keras_on_spark.ipynb")
    assert number(r"test accuracy (\d\.\d+)", shown) >= 0.9
    predicted, true = re.findall(r"(?:predicted|true) (\[[\d, ]+\])", shown)
    assert len(predicted) == len(true)


@pytest.mark.slow
def test_parquet_is_trained_on_without_spark(execute):
    shown = execute("03_parquet_without_spark.ipynb")
    assert number(r"accuracy over all rows (\d\.\d+)", shown) >= 0.9
    assert re.search(r"epoch +loss +accuracy +seconds", shown), "the history is a table"


@pytest.mark.slow
def test_a_horovod_loop_runs_on_spark(execute):
    shown = execute("04_horovod_script.ipynb")
    assert number(r"last loss (\d\.\d+)", shown) < 0.35


@pytest.mark.slow
def test_a_search_finds_the_best_rate(execute):
    shown = execute("05_tuning.ipynb")
    assert 1e-3 <= number(r"best \{'lr': ([\d.e-]+)\}", shown) <= 0.3
    assert "COMPLETE" in shown


@pytest.mark.slow
def test_failures_are_shown_with_their_reasons(execute):
    shown = execute("06_failures.ipynb")
    assert "the cause is ZeroDivisionError('division by zero')" in shown
    assert re.search(r"^rank 1 .*SIGKILL", shown, re.MULTILINE), shown
    for rank in (0, 1):
        assert re.search(rf"^{rank} .*rank {1 - rank}.*", shown, re.MULTILINE), shown
    assert "rank 1 submitted allreduce" in shown
    assert "['the next job runs', 'the next job runs']" in shown


@pytest.mark.slow
def test_the_viewer_is_opened_and_asked(execute):
    shown = execute("07_run_viewer.ipynb")
    assert 'target="_blank"' in shown
    assert "runs: ['first']" in shown
    verdicts = "straggler|slow data|input-bound|reduction-bound|compute-bound"
    assert re.search(rf"^verdict: ({verdicts}): ", shown, re.MULTILINE), (
        "its ranks report after each epoch"
    )
