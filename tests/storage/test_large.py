# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Ten gigabytes on little disk: many names of one file."""

import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.programs import program_path

MIB = 1 << 20
BUDGET = 256 * MIB
BESIDES = 60 * MIB
"""Additional memory of the interpreter, thread stacks, buffers of files and the footers of
hundreds of files.
"""

MEASURE = program_path(__file__, "measure_reading")


@pytest.mark.slow
def test_a_budget_holds_for_ten_gigabytes(tmp_path):
    rows, width, files = 8_000, 784, 410
    values = pa.array(np.tile(np.arange(width, dtype=np.float32), rows))
    offsets = pa.array(np.arange(0, rows * width + 1, width, dtype=np.int32))
    columns = {"x": pa.ListArray.from_arrays(offsets, values), "id": np.arange(rows)}
    one = tmp_path / "one"
    pq.write_table(pa.table(columns), one, row_group_size=2000)
    for number in range(files):
        (tmp_path / f"{number:03}.parquet").hardlink_to(one)
    command = [sys.executable, MEASURE, str(tmp_path), str(BUDGET)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
    seen, read, grown = map(int, re.findall(r"\d+", result.stdout))
    assert seen == rows * files
    assert read > 10_000_000_000
    assert grown <= BUDGET + BESIDES, f"{grown / MIB:.0f} MiB with a budget of {BUDGET / MIB:.0f}"
