# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The examples of TensorFlow and Keras, as a stranger runs them; each asserts its accuracy."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {
    "keras_digits.py": "tensorflow",
    "keras_torch_backend.py": "keras",
    "tensorflow2_digits.py": "tensorflow",
    "tensorflow_v1_digits.py": "tensorflow",
}
TWINS = ["keras_digits.py", "tensorflow2_digits.py", "tensorflow_v1_digits.py"]


def trains(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"test accuracy 0\.9\d+ with 2 processes", done.stdout), done.stdout


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_trains_on_two_processes(name):
    if find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    trains(
        [sys.executable, "-m", "farandole", "run", "-np", "2", sys.executable, str(EXAMPLES / name)]
    )


@pytest.mark.parametrize("name", TWINS)
def test_its_twin_trains_through_horovods_names(name, tmp_path):
    if find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    text = (EXAMPLES / name).read_text()
    twin = re.sub(
        r"^import farandole\.(\S+) as hvd$", r"import horovod.\1 as hvd", text, flags=re.MULTILINE
    )
    assert twin != text
    script = tmp_path / name
    script.write_text(twin)
    command = "import sys; from horovod._command import main; sys.exit(main())"
    trains([sys.executable, "-c", command, "-np", "2", sys.executable, str(script)])
