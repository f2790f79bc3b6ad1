# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Steps that have the same rows on any number of processes: `global_batch_size` of estimators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farandole.common.counted_noun import format_counted_noun

if TYPE_CHECKING:
    from farandole.spark.common.params import EstimatorParams


def refuse_options_of_global_batch(estimator: EstimatorParams) -> None:
    """Refuses options that do not go with `global_batch_size`.

    Args:
        estimator: the estimator, for its parameters.

    Raises:
        ValueError: naming both options.
    """
    rows, passes = estimator.getGlobalBatchSize(), estimator.getBackwardPassesPerStep()
    if rows is None:
        return
    if estimator.getOrDefault("data_module") is not None:
        raise ValueError(
            f"global_batch_size={rows} cannot be combined with data_module, which decides the rows "
            "of its batches"
        )
    if estimator.getOrDefault("loss_reduction") == "per_batch":
        raise ValueError(
            f'global_batch_size={rows} cannot be combined with loss_reduction="per_batch": such a '
            "loss depends on the number of processes among which a batch is divided"
        )
    if estimator.getOrDefault("inmemory_cache_all") and estimator.getOrDefault("shuffle"):
        raise ValueError(
            f"global_batch_size={rows} cannot be combined with inmemory_cache_all=True and "
            "shuffle=True: each process would shuffle only the rows that it has in memory"
        )
    if rows % passes:
        raise ValueError(
            f"global_batch_size={rows} must be a multiple of backward_passes_per_step={passes}, "
            "which divides the rows of a step"
        )


def refuse_row_limit(estimator: EstimatorParams) -> None:
    """Refuses a limit of the rows of a backward pass, in an estimator whose framework takes them in
    one pass.

    Args:
        estimator: the estimator, for its parameters.

    Raises:
        ValueError: naming both options.
    """
    if estimator.getGlobalBatchSize() is not None and estimator.isSet("batch_size"):
        raise ValueError(
            f"global_batch_size={estimator.getGlobalBatchSize()} cannot be combined with "
            f"batch_size={estimator.getBatchSize()}: each process takes its part of the global "
            "batch at once, and backward_passes_per_step divides it"
        )


def require_row_for_each_process(estimator: EstimatorParams, processes: int) -> None:
    """Refuses a global batch that leaves processes without rows in every step.

    Args:
        estimator: the estimator, for its parameters.
        processes: number of processes, at most.

    Raises:
        ValueError: naming the numbers.
    """
    rows, passes = batch_rows_of_all(estimator), estimator.getBackwardPassesPerStep()
    if rows is not None and rows < processes:
        divided = "" if passes == 1 else f" in backward_passes_per_step={passes} parts"
        raise ValueError(
            f"global_batch_size={estimator.getGlobalBatchSize()}{divided} has fewer rows than "
            f"there are processes: {format_counted_noun(processes, 'process')}"
        )


def batch_rows_of_all(estimator: EstimatorParams) -> int | None:
    """Returns the rows of one batch on all processes together; `None` without a global batch.

    Args:
        estimator: the estimator, for its parameters.
    """
    rows = estimator.getGlobalBatchSize()
    return None if rows is None else rows // estimator.getBackwardPassesPerStep()


def step_rows_of_all(estimator: EstimatorParams, processes: int) -> int:
    """Returns the rows of a step of the optimizer on all processes together.

    Args:
        estimator: the estimator, for its parameters.
        processes: number of processes.
    """
    own = estimator.getBatchSize() * estimator.getBackwardPassesPerStep()
    return estimator.getGlobalBatchSize() or own * processes


def learning_rate_factor(estimator: EstimatorParams, processes: int) -> int:
    """Returns the number by which the learning rate of a fit is multiplied.

    Args:
        estimator: the estimator, for its parameters.
        processes: number of processes.
    """
    return processes if estimator.getGlobalBatchSize() is None else 1
