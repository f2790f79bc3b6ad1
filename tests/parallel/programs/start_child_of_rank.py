# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Starts and forks processes of a rank, which are no ranks."""

import os
import subprocess
import sys
import time

import farandole.numpy as hvd

hvd.init()
rank = hvd.rank()
code = "import farandole.numpy as hvd; hvd.init(); print('size', hvd.size())"
began = time.monotonic()
heir = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
)
assert f"rank {rank} is already process {os.getpid()} " in heir.stderr, heir.stderr
assert "remove HOROVOD_RANK from its environment" in heir.stderr, heir.stderr
assert time.monotonic() - began < 30
alone = {name: value for name, value in os.environ.items() if name != "HOROVOD_RANK"}
free = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=alone, check=False
)
assert free.stdout == "size 1\n", free.stderr
child = os.fork()
if child == 0:
    hvd.shutdown()
    try:
        hvd.init()
    except ValueError as error:
        os._exit(0 if "is already process" in str(error) else 2)
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
hvd.barrier()
print("place", rank, flush=True)
