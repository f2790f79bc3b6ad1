# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The rows that a process has in a step, in parts of limited size: a global batch is divided among
fewer processes when some are lost, and each of the others has more rows than fit into its memory at
once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole.spark.common.data.batch_source import PaddedRankBatch
    from farandole.spark.common.data.training_data import TrainingDataSpec


def micro_batch_count(data: TrainingDataSpec, size: int) -> int:
    """Returns the parts of a batch of a process, the same on all of them.

    Args:
        data: the rows; without a global batch, a batch has one part.
        size: number of processes.
    """
    if data.step_rows is None:
        return 1
    own = -(-data.step_rows // size)
    return -(-own // data.batch_size)


def split_into_micro_batches(
    rows: PaddedRankBatch, parts: int, min_rows: int
) -> Iterator[PaddedRankBatch]:
    """Yields the parts of a batch, whose numbers of rows differ by at most one.

    Args:
        rows: the batch, of tensors.
        parts: number of parts; those without rows repeat a row that does not count.
        min_rows: rows of a part at least, by repeats that do not count.
    """
    if parts == 1:
        yield rows
        return
    for number in range(parts):
        first, end = (rows.valid * edge // parts for edge in (number, number + 1))
        valid = end - first
        count = max(valid, min_rows)
        last = min(max(first, end - 1), rows.count - 1)
        chosen = torch.arange(first, first + count).clamp(max=last)
        yield replace(
            rows,
            columns={
                name: values[first:end] if count == valid else values[chosen]
                for name, values in rows.columns.items()
            },
            count=count,
            valid=valid,
        )
