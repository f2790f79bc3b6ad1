# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Pairwise covers: every two values of two options meet in one cell at least."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Cell = dict[str, Any]


def cover_pairs(
    options: Mapping[str, Sequence[Any]], is_valid: Callable[[Cell], bool], at_least: int = 0
) -> list[Cell]:
    """Returns cells in which every valid pair of values occurs, and random ones up to a number.

    Args:
        options: values by option.
        is_valid: whether a cell makes sense.
        at_least: number of cells.
    """
    draw = random.Random(0)
    names = list(options)
    missing = {
        (one, first, other, second)
        for one, other in itertools.combinations(names, 2)
        for first in options[one]
        for second in options[other]
    }
    cells: list[Cell] = []
    seen: set[tuple[Any, ...]] = set()

    def pairs_of(cell: Cell) -> set[tuple[Any, ...]]:
        return {
            (one, cell[one], other, cell[other]) for one, other in itertools.combinations(names, 2)
        }

    def add(cell: Cell) -> None:
        key = tuple(cell.values())
        if key not in seen:
            seen.add(key)
            cells.append(cell)

    while missing:
        one, first, other, second = min(missing, key=str)
        tries = []
        for _ in range(60):
            cell = {name: draw.choice(options[name]) for name in names}
            cell |= {one: first, other: second}
            if is_valid(cell):
                tries.append(cell)
        if not tries:  # the two never go together
            missing.discard((one, first, other, second))
            continue
        best = max(tries, key=lambda cell: len(pairs_of(cell) & missing))
        missing -= pairs_of(best)
        add(best)
    while len(cells) < at_least:
        cell = {name: draw.choice(options[name]) for name in names}
        if is_valid(cell):
            add(cell)
    return cells


def spread_cells(cells: Sequence[Cell], count: int) -> list[Cell]:
    """Returns so many of the cells, at equal distances."""
    step = max(1, len(cells) // count)
    return list(cells[::step])[:count]
