# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The drop-in `petastorm` next to the real one, which `.tools/petastorm` has: the same program
reads the same data sets with both, and each row and batch is compared.
"""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.programs import program_path

pytestmark = pytest.mark.timeout(1200)
REAL = Path(__file__).parents[3] / ".tools" / "petastorm" / "bin" / "python"
MAX_SECONDS = 500
"""Deadline of a program, which imports torch and TensorFlow."""


def run_program(python, name, *arguments):
    """Returns the output of a program that imports the petastorm of an interpreter."""
    words = [str(python), str(program_path(__file__, name)), *map(str, arguments)]
    variables = os.environ | {"PYSPARK_PYTHON": str(python)}
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=MAX_SECONDS, env=variables
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A directory with data sets that the real petastorm wrote."""
    assert REAL.exists(), "make .tools/petastorm/ready creates the environment of petastorm"
    folder = tmp_path_factory.mktemp("written")
    run_program(REAL, "write_data_sets", folder)
    return folder


def read_with_both(folder, *cases):
    """Returns the results of each case, by the real petastorm and by ours."""
    found = []
    for python in (REAL, sys.executable):
        output = run_program(python, "read_data_sets", folder, *cases)
        lines = [line for line in output.splitlines() if line.startswith("{")]
        found.append({case.pop("case"): case for case in map(json.loads, lines)})
    return found


@pytest.fixture(scope="module")
def results(written):
    """The results of all cases."""
    return read_with_both(written)


PROGRAM = program_path(__file__, "read_data_sets").read_text()
CASES = re.findall(r"^@case\ndef (\w+)", PROGRAM, re.MULTILINE)


@pytest.mark.parametrize("case", CASES)
def test_both_packages_read_the_same(results, case):
    real, own = (each[case] for each in results)
    assert own == real


def test_functions_have_the_arguments_and_defaults_of_petastorm(written):
    signatures = [
        json.loads(run_program(python, "print_signatures").splitlines()[-1])
        for python in (REAL, sys.executable)
    ]
    real, own = signatures
    assert set(own) == set(real)
    for name, described in own.items():
        expected = real[name]["arguments"]
        if described == real[name]:
            continue
        assert described["takes_more"], name
        number = len(described["arguments"])
        assert described["arguments"] == expected[:number], name
        # All others by name, with petastorm's defaults.
        options = {option: ast.literal_eval(default) for option, default in expected[number:]}
        module, _, function = name.rpartition(".")
        url = (written / "codecs").as_uri()
        result = getattr(importlib.import_module(module), function)(url, **options)
        if hasattr(result, "stop"):
            result.stop()
            result.join()


def test_petastorm_reads_what_its_drop_in_wrote(tmp_path):
    run_program(sys.executable, "write_data_sets", tmp_path)
    real, own = read_with_both(tmp_path, "all_rows_of_every_codec")
    assert len(real["all_rows_of_every_codec"]["result"]) == 60
    assert own == real
