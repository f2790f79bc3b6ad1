# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Starts processes of a rank, with its variables and without."""

import os
import subprocess
import sys

from farandole._native import engine
from farandole.common import basics

rank = int(os.environ["RANK"])


def child(env):
    code = "from farandole.common import basics; basics.init(); print(basics.size())"
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
        check=False,
    )


basics.init()
heir = child(None)
told = heir.stderr.splitlines()[-1]
expected = ["FarandoleUsageError", f"rank {rank} ", f"process {os.getpid()}", "FARANDOLE_JOB"]
print("heir", heir.returncode, *[text for text in expected if text not in told])
alone = child({name: value for name, value in os.environ.items() if name != "FARANDOLE_JOB"})
print("alone", alone.returncode, alone.stdout.strip())
engine.wait(engine.barrier("on", 0))
print("on")
