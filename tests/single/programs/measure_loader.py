# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Prints the rows that a loader reads, and the memory that it takes for them."""

import re
import sys
from pathlib import Path

from farandole.data import ParquetLoader


def memory_bytes(name):
    return int(re.search(name + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


loader = ParquetLoader(
    sys.argv[1], int(sys.argv[2]), byte_budget=int(sys.argv[3]), framework="numpy"
)
next(iter(ParquetLoader(sys.argv[1], 1, byte_budget=int(sys.argv[3]), shuffle=False)))
Path("/proc/self/clear_refs").write_text("5")
before = memory_bytes("VmRSS")
rows = sum(len(next(iter(batch.values()))) for batch in loader)
print(rows, memory_bytes("VmHWM") - before)
