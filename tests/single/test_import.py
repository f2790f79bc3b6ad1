# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`import farandole`: its time, and modules that it must not load."""

import ast
import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import farandole
from farandole import _native
from farandole.common import exceptions


def python(code: str, *options: str) -> str:
    command = [sys.executable, *options, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_loads_no_framework_and_starts_no_thread():
    code = """
import os, sys, threading
import farandole
print(sorted({"torch", "tensorflow", "pyspark", "numpy", "pyarrow", "pandas"} & set(sys.modules)))
print(len(os.listdir("/proc/self/task")), threading.active_count())
import farandole._native
print(len(os.listdir("/proc/self/task")), threading.active_count())
"""
    assert python(code).split("\n")[:3] == ["[]", "1 1", "1 1"]


@pytest.mark.timing
def test_import_takes_at_most_ten_milliseconds():
    code = "import time; t = time.process_time(); import farandole; print(time.process_time() - t)"
    assert min(float(python(code)) for _ in range(5)) <= 0.01


def test_import_loads_no_other_module_of_the_standard_library():
    code = """
import sys
before = {*sys.modules, "__future__"}
import farandole
print(sorted(name for name in sys.modules.keys() - before if not name.startswith("farandole")))
"""
    assert python(code) == "[]\n"


@pytest.mark.timing
def test_the_native_library_imports_under_sixty_milliseconds():
    code = (
        "import time; t = time.perf_counter(); import farandole._native; "
        "print(time.perf_counter() - t)"
    )
    assert min(float(python(code)) for _ in range(5)) < 0.06


def test_package_and_native_library_have_one_version():
    assert farandole.__version__ == _native.__version__


def test_missing_torch_names_the_extra_to_install():
    code = """
import sys
from importlib.machinery import PathFinder
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] == "torch" else PathFinder.find_spec(name, path, target)
sys.meta_path = [finder for finder in sys.meta_path if finder is not PathFinder] + [NoTorch()]
try:
    import farandole.torch
except ImportError as error:
    print(error)
"""
    assert "pip install farandole[torch]" in python(code)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize("order", [("torch", "farandole.torch"), ("farandole.torch", "torch")])
def test_torch_may_be_imported_before_and_after(order):
    code = f"import {order[0]}, {order[1]}; farandole.torch.init(); print(farandole.torch.size())"
    assert python(code) == "1\n"


@pytest.mark.parametrize(
    "name",
    [
        "FarandoleInternalError",
        "FarandoleUsageError",
        "FarandoleEnvironmentError",
        "FarandoleBugError",
    ],
)
def test_exceptions_survive_pickling(name):
    error = pickle.loads(pickle.dumps(getattr(exceptions, name)("rank 1 died")))
    assert type(error).__name__ == name
    assert str(error) == "rank 1 died"


def test_horovods_name_is_the_same_exception():
    assert exceptions.HorovodInternalError is farandole.FarandoleInternalError


def imported(module: str, is_package: bool, tree: ast.Module) -> list[str]:
    """Returns the full names that a module imports, also in functions and for type checks."""
    parent = module.split(".") if is_package else module.split(".")[:-1]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = parent[: len(parent) - node.level + 1] if node.level else []
            found += [
                ".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names
            ]
    return found


def test_no_package_imports_a_name_with_an_underscore_from_another_package():
    root = Path(__file__).parents[2] / "python"
    wrong, names = [], 0
    for file in sorted((root / "farandole").rglob("*.py")):
        path = file.relative_to(root).with_suffix("").parts
        is_package = path[-1] == "__init__"
        module = ".".join(path[:-1] if is_package else path)
        for name in imported(module, is_package, ast.parse(file.read_text())):
            parts = name.split(".")
            names += parts[0] == "farandole"
            hidden = [
                part for part in parts[2:] if part.startswith("_") and not part.startswith("__")
            ]
            if (
                parts[0] == "farandole"
                and hidden
                and parts[1] not in {"_native", "_keras", path[1]}
            ):
                wrong.append(f"{module} imports {name}")
    assert names > 1000
    assert wrong == []
