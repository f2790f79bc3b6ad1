# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""All readers give the values that pyarrow gives, or refuse a column by its name and file.

The cells are generated: types x writers x shapes, each with all readers. `make test` tries each
hundredth cell, `make test-readers` all.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cells import READERS, all_cells, judge_cell
from writers import WRITERS

CELLS = all_cells()
SAMPLE_STEP = 97


def judge_cells(cells, home):
    return [fault for cell in cells for fault in judge_cell(cell, home)]


def test_the_matrix_has_at_least_3000_cells():
    assert len(CELLS) * len(READERS) >= 3000
    assert len({cell.name for cell in CELLS}) == len(CELLS)


def test_each_hundredth_cell_agrees_or_is_refused(tmp_path):
    faults = judge_cells(CELLS[::SAMPLE_STEP], tmp_path)
    assert not faults, "\n".join(faults)


@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS)
def test_all_cells_of_a_writer_agree_or_are_refused(writer, tmp_path):
    faults = judge_cells([cell for cell in CELLS if cell.writer == writer], tmp_path)
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:60])
