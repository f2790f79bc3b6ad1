# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""It never hangs: whatever happens to a rank or a link, every other rank hears of it in time.

`table.py` says what is broken, how, and what must follow. A short run takes cells that cover every
pair of factors; `make test-faults` takes all of them.
"""

from __future__ import annotations

import pytest
from tests.faults import experiment
from tests.faults.table import FAULTS, RANKS, TRANSPORTS, Cell, every_cell, pairwise

MOST = 60
"""Cells of a short run."""
GRID = every_cell()
FEW = pairwise(GRID)


def test_few_cells_cover_every_pair() -> None:
    assert len(FEW) <= MOST
    assert pairwise(GRID) == FEW, "another run would try other cells"
    assert {cell.operation for cell in GRID} == {cell.operation for cell in FEW}
    for fault in FAULTS:
        reached = {(cell.transport, cell.ranks) for cell in GRID if cell.fault == fault}
        tried = [cell for cell in FEW if cell.fault == fault]
        assert {cell.transport for cell in tried} == {transport for transport, _ in reached}
        assert {cell.ranks for cell in tried} == {ranks for _, ranks in reached} == set(RANKS)
    assert {(cell.transport, cell.ranks) for cell in FEW} == {
        (cell.transport, cell.ranks) for cell in GRID
    }


@pytest.mark.parametrize("cell", FEW, ids=str)
@pytest.mark.timing
def test_a_fault_is_survived_or_told_in_time(cell: Cell) -> None:
    experiment.run(cell)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("cell", GRID, ids=str)
@pytest.mark.timing
def test_every_fault_is_survived_or_told_in_time(cell: Cell) -> None:
    experiment.run(cell)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("fault", ["kill", "stop", "partition", "drop"])
@pytest.mark.timing
def test_on_16_hosts_ranks_hear_in_time_of_a_fault_that_only_7_of_them_see(fault: str) -> None:
    experiment.run(Cell("allreduce", fault, "tcp", 16))


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("operation", ["allreduce", "alltoall", "in a set"])
@pytest.mark.parametrize(
    "fault", ["kill", "stop", "partition", "drop", "reset", "shutdown", "mismatch", "slow"]
)
@pytest.mark.timing
def test_ranks_whose_links_open_at_their_first_use_survive_a_fault_or_hear_of_it_in_time(
    operation: str, fault: str
) -> None:
    if (operation, fault) == ("in a set", "mismatch"):
        operation = "broadcast"
    # With up to 8 ranks, the barrier at the end of `init` opens all links.
    experiment.run(Cell(operation, fault, "tcp", 12), env={"FARANDOLE_LINKS_AT_START": "0"})


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.timing
def test_a_rank_stopped_for_30_seconds_is_told_of_within_5_by_default(transport: str) -> None:
    experiment.run(Cell("allreduce", "stop", transport, 3), peer_timeout=5.0, stopped_for=30.0)
