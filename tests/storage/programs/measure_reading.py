# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Prints the rows and bytes that a loader reads, and the memory that it takes for them."""

import re
import sys
from pathlib import Path

from farandole.data import ParquetLoader


def memory_bytes(name):
    return int(re.search(name + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


before = memory_bytes("VmRSS")
rows, read = 0, 0
for batch in ParquetLoader(sys.argv[1], 256, byte_budget=int(sys.argv[2])):
    rows += len(batch["id"])
    read += sum(column.nbytes for column in batch.values())
print(rows, read, memory_bytes("VmHWM") - before)
