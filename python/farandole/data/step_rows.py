# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The rows of a rank in steps of a fixed number of rows on all ranks together.

Rank `r` of `n` has the rows `r, r + n, r + 2n, ...` of a pass, and step `k` has the rows
`k * step_rows` up to `(k + 1) * step_rows`. If `n` does not divide `step_rows`, a rank has
different numbers of rows in two steps, but the reader's batches all have equally many: they are cut
again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


def own_row_count(rows: int, rank: int, size: int) -> int:
    """Returns how many of the first rows of a pass a rank has.

    Args:
        rows: Number of rows.
        rank: The rank.
        size: Number of ranks.
    """
    return max(0, -(-(rows - rank) // size))


def step_row_counts(rows: int, step_rows: int, rank: int, size: int) -> Iterator[int]:
    """Yields the number of rows of a rank in each step of a pass.

    Args:
        rows: Rows of the pass.
        step_rows: Rows of a step on all ranks together; the last step may have fewer.
        rank: The rank.
        size: Number of ranks.
    """
    for begin in range(0, rows, step_rows):
        end = min(begin + step_rows, rows)
        yield own_row_count(end, rank, size) - own_row_count(begin, rank, size)


def recut_batches(
    batches: Iterable[tuple[Mapping[str, Any], int]],
    counts: Iterable[int],
    concatenate: Callable[[list[Any]], Any],
) -> Iterator[dict[str, Any]]:
    """Yields batches of given numbers of rows, in order. Rows are copied only where a new batch has
    rows of several old ones.

    Args:
        batches: Columns by name, rows first, and the number of rows that count; later rows are
            dropped. They must have as many rows as the new batches, or more.
        counts: Rows of each new batch.
        concatenate: Joins parts of a column.
    """
    source = iter(batches)
    columns, held = next(source, ({}, 0))
    first = 0
    """Row of `columns` with which the next batch begins."""
    for count in counts:
        while held - first < count:
            more, valid = next(source)
            if first < held:
                columns = {
                    name: concatenate([values[first:held], more[name]])
                    for name, values in columns.items()
                }
            else:
                columns = more
            first, held = 0, valid + max(0, held - first)
        yield {name: values[first : first + count] for name, values in columns.items()}
        first += count
