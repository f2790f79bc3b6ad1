# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Horovod's name for gradient aggregation in eager mode and functions; see
`gradient_aggregation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.tensorflow.gradient_aggregation import LocalGradientAggregationHelper

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class LocalGradientAggregationHelperEager(LocalGradientAggregationHelper):
    """Like `LocalGradientAggregationHelper`; gradients may be `None` here, too.

    Args:
        backward_passes_per_step: As there, like all.
        allreduce_func: As there.
        sparse_as_dense: As there.
        average_aggregated_gradients: As there.
        process_set: As there.
        scale_local_gradients: As there.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[list[Any], list[Any]], Sequence[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        super().__init__(
            backward_passes_per_step,
            allreduce_func,
            sparse_as_dense,
            average_aggregated_gradients,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
