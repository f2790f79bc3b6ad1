# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Tests whose result depends on the speed of the machine have the mark `timing`: they run alone.

The check reads the syntax trees of all tests, also of programs in strings. A test that measures how
much time has passed, itself or by a helper of its file, has the mark. A limit on that time of
`GENEROUS_SECONDS` or more needs none: it only ends a test that hangs. Nor does a wait for something
need one, if it may take `PATIENT_SECONDS` or more.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[1]
GENEROUS_SECONDS = 30.0
PATIENT_SECONDS = 20.0
CLOCKS = {
    f"{clock}{suffix}"
    for clock in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
    for suffix in ("", "_ns")
}
DATES = {"time", "time_ns"}
"""Clocks that tests use for dates of files."""
EXCEPTIONS = {
    "its program measures for another test": {
        "parallel/test_torch_devices.py": {
            "test_ranks_that_share_a_gpu_meet_in_host_memory_if_a_variable_says_so",
            "test_ranks_that_share_a_gpu_reduce_there_from_each_others_windows",
        },
    },
    "its limit is a minute, or grows with the time that it takes": {
        "single/test_store_faults.py": {
            "test_a_store_that_never_works_is_given_up_and_says_how_often_it_was_asked",
            "test_a_store_that_says_no_is_asked_once",
            "test_an_answer_that_breaks_off_is_an_error",
        },
        "storage/test_credentials.py": {"test_many_refusals_ask_for_few_keys"},
        "trust/test_trouble.py": {
            "test_a_short_trouble_loses_nothing",
            "test_no_trouble_loses_anything",
        },
    },
    "its times are only reported": {
        "chaos/test_chaos.py": {"test_a_job_survives_whatever_happens_to_it"},
    },
}
"""Tests that measure time without the mark: why they may, and where they are."""


def is_clock(node: ast.AST, names: Iterable[str] = CLOCKS) -> bool:
    """Returns whether an expression reads a clock of the module `time`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in names
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "time"
    )


def is_elapsed(node: ast.AST) -> bool:
    """Returns whether an expression is the time since an earlier reading of a clock. A date minus
    an age is none.
    """
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and is_clock(node.left, CLOCKS - DATES)
    )


def is_generous(node: ast.AST) -> bool:
    """Returns whether an expression only compares elapsed time with limits that a slow machine
    keeps, too: with lower ones, and with an upper one of `GENEROUS_SECONDS` or more.
    """
    if not isinstance(node, ast.Compare):
        return False
    parts = [node.left, *node.comparators]
    at = next((index for index, part in enumerate(parts) if is_elapsed(part)), None)
    if at is None:
        return False
    if any(isinstance(one, ast.Gt | ast.GtE) for one in node.ops):
        return len(node.ops) == 1 and at == 0
    return all(isinstance(one, ast.Lt | ast.LtE) for one in node.ops) and all(
        isinstance(part, ast.Constant) and part.value >= GENEROUS_SECONDS
        for part in parts[at + 1 :]
    )


def is_impatient(node: ast.AST) -> bool:
    """Returns whether an expression is a deadline that a slow machine may miss."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add)
        and is_clock(node.left, CLOCKS - DATES)
        and isinstance(node.right, ast.Constant)
        and node.right.value < PATIENT_SECONDS
    )


def programs(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the syntax trees of the programs in strings below a node."""
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and "time." in one.value:
            try:
                yield ast.parse(one.value)
            except SyntaxError:
                continue  # other text, or a program with places to fill in


def measures_time(node: ast.AST) -> bool:
    """Returns whether code measures time, except for generous limits."""
    if is_elapsed(node) or is_impatient(node):
        return True
    if is_generous(node):
        return False
    return any(map(measures_time, ast.iter_child_nodes(node))) or any(
        map(measures_time, programs(node) if isinstance(node, ast.Constant) else ())
    )


def has_mark(nodes: Iterable[ast.AST]) -> bool:
    """Returns whether `pytest.mark.timing` is somewhere below these nodes."""
    return any(
        isinstance(one, ast.Attribute)
        and one.attr == "timing"
        and isinstance(one.value, ast.Attribute)
        and one.value.attr == "mark"
        for node in nodes
        for one in ast.walk(node)
    )


def unmarked_tests(source: str) -> list[str]:
    """Returns the tests in a file that measure time and lack the mark.

    Args:
        source: The file.
    """
    tree = ast.parse(source)
    named: dict[str, list[ast.AST]] = defaultdict(list)
    tests: dict[str, ast.FunctionDef] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            named[node.name].append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    named[target.id].append(node.value)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
            "test"
        ):
            tests[node.name] = node
    if has_mark(named.get("pytestmark", [])):
        return []

    def reaches(name: str, seen: set[str]) -> bool:
        seen.add(name)
        return any(
            measures_time(node)
            or any(
                reaches(other, seen)
                for other in sorted(names_in(node))
                if other in named and other not in seen and other not in tests
            )
            for node in named[name]
        )

    return [
        name
        for name, test in tests.items()
        if not has_mark(test.decorator_list) and reaches(name, set())
    ]


def names_in(node: ast.AST) -> set[str]:
    """Returns the names that code uses, also as arguments: fixtures are used so."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} | {
        one.arg for one in ast.walk(node) if isinstance(one, ast.arg)
    }


def test_tests_that_measure_time_have_the_mark() -> None:
    found = {
        (file.relative_to(ROOT).as_posix(), name)
        for file in ROOT.rglob("*.py")
        if file != Path(__file__) and "time." in (source := file.read_text())
        for name in unmarked_tests(source)
    }
    allowed = {
        (file, name)
        for places in EXCEPTIONS.values()
        for file, names in places.items()
        for name in names
    }
    missing = sorted(found - allowed)
    assert not missing, f"these tests need pytest.mark.timing, or no clock: {missing}"
    assert found == allowed, "these are no exceptions any more"


SAMPLES = {
    "a short limit": ("assert time.monotonic() - began < 5", True),
    "a ratio": ("assert time.perf_counter() - began < 2 * other", True),
    "a window": ("assert 1 < time.monotonic() - began < 5", True),
    "a window that is turned round": ("assert 5 > time.monotonic() - began > 1", True),
    "a value that is kept": ("took = time.process_time() - began", True),
    "a short deadline": ("deadline = time.monotonic() + 5", True),
    "a helper": ("assert helper() < 5", True),
    "a fixture": ("assert measured < 5", True),
    "a program": ("run(PROGRAM)", True),
    "a generous limit": ("assert time.monotonic() - began < 30", False),
    "a lower limit": ("assert time.monotonic() - began >= 1", False),
    "a window with a generous limit": ("assert 1 < time.monotonic() - began <= 60", False),
    "a generous deadline": ("deadline = time.monotonic() + 30", False),
    "the time that is left": ("wait(deadline - time.monotonic())", False),
    "an age": ("old = time.time() - 5", False),
    "another helper": ("assert other() < 5", False),
}
HELPERS = '''
import time
PROGRAM = """
import time
print(time.monotonic() - began)
"""
def inner():
    return time.monotonic() - began
def helper():
    return inner()
@pytest.fixture
def measured():
    return time.monotonic() - began
def other():
    return 4
'''


@pytest.mark.parametrize("kind", SAMPLES)
def test_what_measures_time_is_known(kind: str) -> None:
    line, needs_mark = SAMPLES[kind]
    test = f"def test_it(measured):\n    {line}\n"
    if kind != "a fixture":
        test = test.replace("measured", "")
    assert unmarked_tests(HELPERS + test) == (["test_it"] if needs_mark else [])
    assert unmarked_tests(f"{HELPERS}@pytest.mark.timing\n{test}") == []
    assert unmarked_tests(f"{HELPERS}pytestmark = [pytest.mark.timing]\n{test}") == []
