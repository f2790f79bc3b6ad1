# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Scripts in the manner of Horovod's guides to Ray run with the drop-in, unchanged, and check
themselves.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "horovod_scripts"
LIMIT = 240


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ray_executor", "ray_elastic", "ray_tune"])
def test_a_script_of_horovods_runs_on_ray(script, tmp_path):
    ended = subprocess.run(
        [sys.executable, SCRIPTS / f"{script}.py", tmp_path],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert "done" in ended.stdout.splitlines()
