# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Gradients of one step, reduced as one unit or in groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from farandole.common.gradient_grouping import (
    groups_by_variable_key,
    partition_gradients,
    predivide_factors,
)
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.util import Average, Min, Sum
from farandole.tensorflow._collectives import check_adasum, grouped_allreduce
from farandole.tensorflow._names import unique_operation_name
from farandole.tensorflow.compression import Compression, Compressor
from farandole.tensorflow.mpi_ops import grouped_reduce, size_op, unwrap_keras_variable

if TYPE_CHECKING:
    from collections.abc import Sequence


def variable_key(variable: Any) -> Any:
    """Returns a variable's identity, which is the same for a Keras variable and the TensorFlow
    variable in it.
    """
    inner = unwrap_keras_variable(variable)
    return inner.ref() if hasattr(inner, "ref") else id(inner)


class GradientReducer:
    """Reduces the gradients of a tape or an optimizer.

    Args:
        device_dense: Device of the ops for dense gradients.
        device_sparse: Device of the ops for slices.
        compression: Compresses the gradients for transport.
        sparse_as_dense: Whether slices become tensors first.
        op: The reduction.
        gradient_predivide_factor: For `Average`, gradients are divided by it before and multiplied
            after the sum.
        groups: `None` for one unit, a number of consecutive units, or lists of variables that form
            units; variables in no list form one more.
        process_set: The ranks that take part; others keep their gradients.
        scale_local_gradients: Whether gradients of local variables are divided by the number of
            ranks.
        name: Name of the reductions; reductions that run at the same time in several threads need
            one.

    Raises:
        ValueError: If arguments contradict each other.
        NotImplementedError: For Adasum in a process set.
    """

    def __init__(
        self,
        device_dense: str = "",
        device_sparse: str = "",
        compression: type[Compressor] = Compression.none,
        sparse_as_dense: bool = False,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        groups: int | Sequence[Sequence[Any]] | None = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str | None = None,
    ) -> None:
        check_adasum(op, process_set)
        self.devices = (device_dense, device_sparse)
        self.compression = compression
        self.sparse_as_dense = sparse_as_dense
        self.op = op
        self.factors = predivide_factors(gradient_predivide_factor, op)
        self.groups = groups_by_variable_key(groups, variable_key)
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self.local: set[Any] = set()
        self.name = "gradients" if name is None else f"gradients_{name}"
        self.is_named = name is not None

    def register_local(self, variable: Any) -> None:
        """Excludes the gradients of a variable from the reduction."""
        self.local.add(variable_key(variable))

    def is_local(self, variable: Any) -> bool:
        """Returns whether a variable's gradients are left to this rank."""
        return variable_key(variable) in self.local

    def __call__(
        self, grads: Sequence[Any], variables: Sequence[Any], name: str | None = None
    ) -> list[Any]:
        """Reduces gradients; `None` stays `None`, local ones stay this rank's."""
        results = list(grads)
        if not self.process_set.included():
            return results
        keys = [variable_key(variable) for variable in variables]
        shared = []
        for index, (grad, key) in enumerate(zip(results, keys, strict=True)):
            if grad is None:
                continue
            if key in self.local:
                results[index] = self._divide_by_size(grad) if self.scale_local_gradients else grad
            else:
                shared.append(index)
        # The last ones first: the backward pass comes to them first, and in functions TensorFlow
        # runs reductions in the order in which they were made, each as soon as it has its
        # gradients.
        for group in reversed(partition_gradients(shared, keys, self.groups)):
            reduced = self._reduce_group([self._to_dense(results[index]) for index in group], name)
            for index, grad in zip(group, reduced, strict=True):
                results[index] = grad
        return results

    def is_true_on_all_ranks(self, flag: Any) -> Any:
        """Returns whether a boolean is true on all ranks."""
        if not self.process_set.included():
            return flag
        name = self._operation_name(f"finite_{self.name}")
        number = tf.cast(flag, tf.int32)
        return tf.cast(
            grouped_reduce([number], Min, name=name, process_set=self.process_set)[0], tf.bool
        )

    def sum_over_ranks(self, value: Any, part: str) -> Any:
        """Returns the sum of a tensor of all ranks. No gradient goes through it."""
        if not self.process_set.included():
            return value
        name = self._operation_name(f"{part}_{self.name}")
        return grouped_reduce(
            [tf.stop_gradient(value)], Sum, name=name, process_set=self.process_set
        )[0]

    def _reduce_group(self, grads: list[Any], name: str | None) -> list[Any]:
        name = self._operation_name(name or self.name)
        pre, post = self.factors
        return grouped_allreduce(
            grads,
            device_dense=self.devices[0],
            device_sparse=self.devices[1],
            compression=self.compression,
            op=self.op,
            prescale_factor=pre,
            postscale_factor=post,
            process_set=self.process_set,
            name=name,
        )

    def _operation_name(self, name: str) -> str | None:
        """Returns an operation's name; in eager mode `None` if the reducer has no name: the
        engine then numbers it.
        """
        if tf.executing_eagerly():
            return name if self.is_named else None
        return unique_operation_name(name)

    def _to_dense(self, grad: Any) -> Any:
        return (
            tf.convert_to_tensor(grad)
            if self.sparse_as_dense and isinstance(grad, tf.IndexedSlices)
            else grad
        )

    def _divide_by_size(self, grad: Any) -> Any:
        size = size_op(self.process_set.process_set_id or 0)
        if isinstance(grad, tf.IndexedSlices):
            values = grad.values / tf.cast(size, grad.values.dtype)
            return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
        return grad / tf.cast(size, grad.dtype)
