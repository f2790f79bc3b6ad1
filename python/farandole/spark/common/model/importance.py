# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Permutation importance: the loss of quality if the values of one column are exchanged between
rows.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.data.lazy_pyarrow import pa

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from farandole.spark.common.model.evaluation import ClassificationSums, RegressionSums

MAX_BLOCK_ROWS = 65536
"""Rows of a task between which values are exchanged, at most."""
MAX_BLOCK_BYTES = 64 << 20
"""Bytes of these rows, at most one batch more."""
_LOWER_IS_BETTER_METRICS = ("log_loss", "mse", "rmse", "mae")


def sum_permuted_evaluations(
    batches: Iterator[pa.RecordBatch],
    predictor: Any,
    label: Any,
    start: ClassificationSums | RegressionSums,
    columns: Sequence[int],
    seeds: Sequence[int],
) -> dict[Any, ClassificationSums | RegressionSums]:
    """Predicts the rows of a task, and returns their sums, unchanged and with each column
    exchanged.

    Args:
        batches: the rows.
        predictor: of the framework.
        label: takes a batch and returns its labels.
        start: with nothing counted.
        columns: places of the columns.
        seeds: one of each repeat.
    """
    found: dict[Any, ClassificationSums | RegressionSums] = {
        key: deepcopy(start) for key in [None, *((one, seed) for one in columns for seed in seeds)]
    }
    for number, (block, rows) in enumerate(_group_batches_into_blocks(batches)):
        for key, counted in found.items():
            changed = block
            if key is not None:
                order = np.random.default_rng([key[1], number]).permutation(block.num_rows)
                field = block.schema.field(key[0])
                changed = block.set_column(key[0], field, block.column(key[0]).take(order))
            for batch in changed.combine_chunks().to_batches(max_chunksize=rows):
                counted.add(predictor.predict_outputs(batch)[0], label(batch))
    return found


def _group_batches_into_blocks(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[pa.Table, int]]:
    """Batches put together, with the rows of the largest."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        if batch.num_rows:
            held.append(batch)
        if (
            sum(one.num_rows for one in held) >= MAX_BLOCK_ROWS
            or sum(one.nbytes for one in held) >= MAX_BLOCK_BYTES
        ):
            yield pa.Table.from_batches(held), max(one.num_rows for one in held)
            held = []
    if held:
        yield pa.Table.from_batches(held), max(one.num_rows for one in held)


def column_importances(
    found: Mapping[Any, ClassificationSums | RegressionSums],
    names: Mapping[int, str],
    metric: str | None,
) -> dict[str, float]:
    """Returns how much worse the metric gets for each column, in descending order.

    Args:
        found: sums of all tasks, as in `sum_permuted_evaluations`.
        names: names of the columns, by position.
        metric: metric of `ModelEvaluation`; default: `log_loss` or `mse`.

    Raises:
        ValueError: there is no such metric.
    """
    metrics = {key: sums.to_evaluation(None).metrics for key, sums in found.items()}
    chosen = metric or next(name for name in _LOWER_IS_BETTER_METRICS if name in metrics[None])
    if chosen not in metrics[None]:
        raise ValueError(f"metric must be one of {', '.join(metrics[None])}: {chosen}")
    sign = 1.0 if chosen in _LOWER_IS_BETTER_METRICS else -1.0
    worse = {
        name: float(
            np.mean(
                [
                    sign * (metrics[key][chosen] - metrics[None][chosen])
                    for key in metrics
                    if key and key[0] == place
                ]
            )
        )
        for place, name in names.items()
    }
    return dict(sorted(worse.items(), key=lambda one: -one[1]))
