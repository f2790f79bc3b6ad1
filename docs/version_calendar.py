# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The tables of docs/versions.md that say which versions of each package are tested, and when.

They are made of what the tests run: `make -n` shows the command of each target with its
environment, and the imports of these tests show the packages. The workflows say when a target runs.

    python docs/version_calendar.py                   writes the tables into the page
    python docs/version_calendar.py tests ray         prints the files of tests that import ray
    python docs/version_calendar.py requirement ray   prints its requirement for pip
"""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "versions.md"
BEGIN: Final = "<!-- begin of the table that docs/version_calendar.py makes -->"
END: Final = "<!-- end of the table -->"

PACKAGES: Final = {
    "PyTorch": "torch",
    "Lightning": "lightning",
    "TensorFlow": "tensorflow",
    "Keras": "keras",
    "JAX": "jax",
    "NumPy": "numpy",
    "PySpark": "pyspark",
    "Ray": "ray",
    "Optuna": "optuna",
    "Hugging Face Transformers": "transformers",
}
"""Names on the page, and the modules that tests import, which are also names of requirements."""
REQUIREMENTS: Final = {"ray": "ray[train,tune]", "tensorflow": "tensorflow-cpu"}
"""Requirements that differ from the module."""
DATABRICKS_RUNTIMES: Final = {
    "15.4 LTS": ("3.5", "3.11"),
    "16.4 LTS": ("3.5", "3.12"),
    "17.3 LTS": ("4.0", "3.12"),
}
"""Versions of Spark and Python in the runtimes that Databricks supports for long."""
OWN_MODULES: Final = {
    "torch": "torch",
    "lightning": "lightning",
    "tensorflow": "tensorflow",
    "keras": "keras",
    "jax": "jax",
    "numpy": "numpy",
    "spark": "pyspark",
    "ray": "ray",
    "tuning": "optuna",
    "transformers": "transformers",
}
"""Subpackages of `farandole`, and the packages that they need."""
NEWEST: Final = "newest"
_WORKFLOWS: Final = ROOT / ".github" / "workflows"


def write_calendar() -> None:
    """Writes the table into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{version_tables()}\n{END}{after}")


def version_tables() -> str:
    """Returns both tables."""
    return f"{calendar_table()}\n{databricks_table()}"


def databricks_table() -> str:
    """Returns the table of Databricks runtimes, with the targets that test their versions of
    Spark.
    """
    lines = [
        "| Databricks runtime | Spark | Python | Apache's Spark of this version is tested by |",
        "| --- | --- | --- | --- |",
    ]
    for runtime, (spark, python) in DATABRICKS_RUNTIMES.items():
        targets = [
            f"`{target}`"
            for target in sorted(test_targets())
            if spark in tested_versions(target).get("pyspark", ())
        ]
        lines.append(f"| {runtime} | {spark} | {python} | {', '.join(targets)} |")
    return "".join(f"{line}\n" for line in lines)


def calendar_table() -> str:
    """Returns the table, one package a line."""
    tiers = {
        "each change": workflow_targets("ci.yml"),
        "nightly": workflow_targets("nightly.yml"),
    }
    known = {target for targets in tiers.values() for target in targets}
    tiers["by hand"] = [target for target in test_targets() if target not in known]
    header = ["package", "from", *tiers, "release"]
    rows = [header, ["---"] * len(header)]
    pythons = [", ".join(workflow_pythons(name)) for name in ("ci.yml", "nightly.yml")]
    rows.append(["Python", oldest_python(), *pythons, "", "oldest and newest of the machine"])
    for title, package in PACKAGES.items():
        cells = [tier_cell(package, targets) for targets in tiers.values()]
        rows.append([title, oldest_version(package), *cells, release_cell(package)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def tier_cell(package: str, targets: list[str]) -> str:
    """Returns the versions of a package that targets test, with the targets."""
    by_versions: dict[tuple[str, ...], list[str]] = {}
    for target in sorted(targets):
        versions = tested_versions(target).get(package)
        if versions:
            by_versions.setdefault(tuple(sorted(versions)), []).append(f"`{target}`")
    parts = [f"{', '.join(versions)}: {', '.join(who)}" for versions, who in by_versions.items()]
    return "; ".join(sorted(parts))


def release_cell(package: str) -> str:
    """Returns the versions of a package that the trials of a release install."""
    versions: set[str] = set()
    for trial in release_trials().values():
        names = re.findall(r"\w+", trial.extras.replace("spark", "pyspark"))
        pinned = dict(one.split("==") for one in trial.packages if "==" in one)
        if package in pinned:
            versions.add(pinned[package].removesuffix(".*"))
        elif package in names:
            versions.add(NEWEST)
    return ", ".join(sorted(versions))


@cache
def release_trials() -> dict[str, Any]:
    """Returns the trials of `release/smoke.py`."""
    return dict(runpy.run_path(str(ROOT / "release" / "smoke.py"))["TRIALS"])


def oldest_version(package: str) -> str:
    """Returns the lower bound of a package in `pyproject.toml`."""
    found = re.findall(
        rf'"{package}(?:\[[\w,]+\])?>=([\d.]+)', (ROOT / "pyproject.toml").read_text()
    )
    return str(found[0])


def oldest_python() -> str:
    """Returns the lower bound of Python in `pyproject.toml`."""
    found = re.findall(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    return str(found[0])


def workflow_pythons(name: str) -> list[str]:
    """Returns the versions of Python on which a workflow runs."""
    text = (_WORKFLOWS / name).read_text()
    return sorted(set(re.findall(r'python-version: "([\d.]+)"', text)))


def workflow_targets(name: str) -> list[str]:
    """Returns the targets of tests that a workflow makes."""
    words = set(re.findall(r"[\w-]+", (_WORKFLOWS / name).read_text()))
    return [target for target in test_targets() if target in words]


@cache
def test_targets() -> tuple[str, ...]:
    """Returns the targets of the Makefile that run tests in Python."""
    rules = re.findall(r"^([\w-]+):(?![=])", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return tuple(
        target
        for target in dict.fromkeys(rules)
        if re.fullmatch(r"test(-\w+)?|chaos|fuzz", target) and target not in OTHER_TARGETS
    )


OTHER_TARGETS: Final = ("test-jobs", "test-rest", "test-timing", "test-newest")
"""Targets that only others make, and the one that takes the package as its argument."""


@cache
def tested_versions(target: str) -> dict[str, set[str]]:
    """Returns the packages whose tests a target runs, and their versions: a number for an
    environment of its own, or `newest`.
    """
    commands = subprocess.run(  # noqa: S603 - targets of this Makefile
        ["make", "-n", target],  # noqa: S607 - make of the path
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found: dict[str, set[str]] = {}
    # Tests may start processes in further environments, which the target needs.
    makefile = (ROOT / "Makefile").read_text()
    needed = " ".join(re.findall(rf"^{target}:(?!=)(.*)$", makefile, re.MULTILINE))
    for package, version in re.findall(r"\.tools/(\w+)-([\d.]+)/ready", needed):
        found.setdefault(package, set()).add(version)
    for interpreter, words in re.findall(r"(\S+)/bin/python -m pytest ([^\n]*)", commands):
        own = re.search(r"/(\w+)-([\d.]+)$", interpreter)
        if own is None and not interpreter.endswith(".venv"):
            continue  # an environment of a package that is not in the table
        for package in imported_packages(tuple(re.findall(r"(?<![\w=])tests[\w/.*\[\]-]*", words))):
            is_own = own is not None and own[1] == package
            version = own[2] if own is not None and is_own else NEWEST
            if own is None or is_own:  # the other packages are tested by the main environment
                found.setdefault(package, set()).add(version)
    return found


def imported_packages(patterns: tuple[str, ...]) -> set[str]:
    """Returns the packages that tests import, by themselves or through a subpackage of
    `farandole`.

    Args:
        patterns: Files and directories of tests, as pytest gets them.
    """
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else (path,))]
    return {package for file in files for package in packages_of_file(file)}


@cache
def packages_of_file(file: Path) -> frozenset[str]:
    """Returns the packages that a file imports."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    found: set[str] = set()
    for module in modules:
        first, *rest = module.split(".")
        if first in PACKAGES.values():
            found.add(first)
        elif first == "farandole" and rest and rest[0] in OWN_MODULES:
            found.add(OWN_MODULES[rest[0]])
    return frozenset(found)


def main(words: list[str]) -> None:
    """Runs the command.

    Args:
        words: Arguments of the command line.
    """
    match words:
        case []:
            write_calendar()
        case ["tests", package]:
            files = sorted(ROOT.glob("tests/**/test_*.py"))
            chosen = [file for file in files if package in packages_of_file(file)]
            print(*(file.relative_to(ROOT) for file in chosen))  # noqa: T201 - its result
        case ["requirement", package]:
            print(REQUIREMENTS.get(package, package))  # noqa: T201 - as above
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
