# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.util import Sum
from farandole.tensorflow._names import unique_operation_name
from farandole.tensorflow.mpi_ops import grouped_reduce

if TYPE_CHECKING:
    from collections.abc import Sequence


@keras.saving.register_keras_serializable(package="farandole")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Like the Keras layer, but in training with mean and variance over the rows of all ranks.

    Args:
        fused: Must be false: there is no fused kernel for it.
        process_set: The ranks that take part: a process set, or the ranks of one, as a saved layer
            has them.
        **kwargs: Keras's; the name is `sync_batch_normalization` by default, with a number from the
            second one on.

    Raises:
        ValueError: When `fused` is true.
    """

    def __init__(
        self,
        fused: bool | None = False,
        process_set: ProcessSet | Sequence[int] = global_process_set,
        **kwargs: Any,
    ) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization has no fused kernel: pass fused=False")
        super().__init__(**kwargs)
        self.process_set = (
            process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
        )
        self.supports_jit = False

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration of the Keras layer, and the ranks of a process set that is
        not global.
        """
        config: dict[str, Any] = super().get_config()
        if self.process_set is not global_process_set:
            config["process_set"] = self.process_set.ranks
        return config

    def _registered_process_set(self) -> ProcessSet:
        """Returns the process set; if the layer has only its ranks, returns the registered set of
        these ranks.
        """
        if self.process_set.process_set_id is None:
            self.process_set = copy.copy(self.process_set)
        return self.process_set

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Computes mean and variance from sums of values and squares over all ranks."""
        axes = self._reduction_axes
        if mask is None:
            weights = tf.ones_like(inputs)
        else:
            weights = tf.cast(
                tf.broadcast_to(tf.expand_dims(mask, -1), tf.shape(inputs)), inputs.dtype
            )
        values = inputs * weights
        sums = tf.stack(
            [
                tf.reduce_sum(values, axes),
                tf.reduce_sum(values * inputs, axes),
                tf.reduce_sum(weights, axes),
            ]
        )
        name = None if tf.executing_eagerly() else unique_operation_name("SyncBatchNormalization")
        total = grouped_reduce([sums], Sum, name=name, process_set=self._registered_process_set())[
            0
        ]
        count = tf.maximum(total[2], 1.0)
        mean = total[0] / count
        return mean, tf.maximum(total[1] / count - tf.square(mean), 0.0)
