# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Gradients of several backward passes, summed on each rank and reduced once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.tensorflow.reducer import variable_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def apply_op_to_not_none_tensors(
    tensor_op: Callable[..., Any], tensors: Sequence[Any], *args: Any
) -> list[Any]:
    """Returns the results of an operation on tensors; `None` stays `None`."""
    return [None if tensor is None else tensor_op(tensor, *args) for tensor in tensors]


def get_not_none_from_list(tensor_list: Sequence[Any]) -> list[Any]:
    """Returns the tensors of a list that has `None` in it."""
    return [tensor for tensor in tensor_list if tensor is not None]


class LocalGradientAggregationHelper:
    """Sums the gradients of every variable and reduces them in every n-th pass, in graphs and in
    eager mode.

    In the other passes nothing is sent or applied. It belongs to one optimizer. Call
    `compute_gradients` and then `apply_gradients` once a pass.

    Args:
        backward_passes_per_step: n.
        allreduce_func: Takes gradients and variables, returns reduced gradients.
        sparse_as_dense: Must be true when gradients are `IndexedSlices`.
        average_aggregated_gradients: Whether sums are divided by n.
        rank: Accepted for compatibility with Horovod.
        optimizer_type: Accepted for compatibility with Horovod.
        process_set: The ranks that take part.
        scale_local_gradients: Whether gradients of local variables are divided by the number of
            ranks.
        name: Names the variables.

    Raises:
        ValueError: When n is not positive.
    """

    _OPTIMIZER_TYPE_KERAS = "optimizer_type_keras"
    _OPTIMIZER_TYPE_LEGACY = "optimizer_type_legacy"

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[list[Any], list[Any]], Sequence[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int = 0,
        optimizer_type: str = _OPTIMIZER_TYPE_LEGACY,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        del rank, optimizer_type
        if backward_passes_per_step <= 0:
            raise ValueError(
                f"backward_passes_per_step must be positive: {backward_passes_per_step}"
            )
        self.backward_passes_per_step = backward_passes_per_step
        self.allreduce_func = allreduce_func
        self.sparse_as_dense = sparse_as_dense
        self.average_aggregated_gradients = average_aggregated_gradients
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self.name = name
        self.counter: Any = None
        self.sums: dict[int, Any] = {}
        self._due_flag: Any = None
        self._local_keys: set[Any] = set()

    def register_local_var(self, var: Any) -> None:
        """Excludes the gradients of a variable from the reduction."""
        self._local_keys.add(variable_key(var))

    def _create_variable(self, initial: Any, name: str) -> Any:
        label = f"{self.name}_{name}" if self.name else name
        if tf.executing_eagerly() or tf.inside_function():
            with tf.init_scope():
                return tf.Variable(initial(), trainable=False, name=label)
        collections = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
        return tf.compat.v1.Variable(
            initial, trainable=False, collections=collections, name=label, use_resource=True
        )

    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:  # noqa: A002 - Horovod's
        """Adds gradients to the sums.

        Args:
            grads: Gradients of this pass; `None` stays `None`.
            vars: Their variables, the same on every call.

        Returns:
            In every n-th pass the gradients to apply; in others the sums so far.

        Raises:
            ValueError: For `IndexedSlices` without `sparse_as_dense`.
        """
        present = [index for index, grad in enumerate(grads) if grad is not None]
        dense = {index: self._to_dense(grads[index]) for index in present}
        if self.backward_passes_per_step == 1:
            return self._reduce_nonlocal_gradients(
                [dense.get(index) for index in range(len(grads))], list(vars)
            )
        if self.counter is None:
            self.counter = self._create_variable(lambda: tf.constant(0, tf.int64), "passes")
        for index in present:
            if index not in self.sums:
                like = vars[index]
                shape, dtype = like.shape, dense[index].dtype
                self.sums[index] = self._create_variable(
                    lambda shape=shape, dtype=dtype: tf.zeros(shape, dtype), f"gradient_{index}"
                )
        added = [self.sums[index].assign_add(dense[index], read_value=False) for index in present]
        with tf.control_dependencies([entry for entry in added if entry is not None]):
            count = self.counter.assign_add(1)
        with tf.control_dependencies([count]):
            values = [self.sums[index].read_value() for index in present]
        # Read once: in a graph without automatic control dependencies, a second read could run too
        # early.
        self._due_flag = due = tf.equal(count, self.backward_passes_per_step)

        def reduce_sums() -> list[Any]:
            scale = self.backward_passes_per_step if self.average_aggregated_gradients else 1
            scaled = [
                value / tf.cast(scale, value.dtype) if scale != 1 else tf.identity(value)
                for value in values
            ]
            return [
                tf.convert_to_tensor(grad)
                for grad in self._reduce_nonlocal_gradients(
                    scaled, [vars[index] for index in present]
                )
            ]

        chosen = tf.cond(due, reduce_sums, lambda: [tf.identity(value) for value in values])
        chosen = iter(chosen if isinstance(chosen, list | tuple) else [chosen])
        return [next(chosen) if index in dense else None for index in range(len(grads))]

    def _to_dense(self, grad: Any) -> Any:
        if not isinstance(grad, tf.IndexedSlices):
            return grad
        if self.backward_passes_per_step > 1 and not self.sparse_as_dense:
            raise ValueError(
                "IndexedSlices of several passes can be summed with sparse_as_dense=True only"
            )
        return tf.convert_to_tensor(grad) if self.sparse_as_dense else grad

    def _reduce_nonlocal_gradients(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        local = [variable_key(variable) in self._local_keys for variable in variables]
        shared = [index for index, is_local in enumerate(local) if not is_local]
        results = list(grads)
        reduced = self.allreduce_func(
            [grads[index] for index in shared], [variables[index] for index in shared]
        )
        for index, grad in zip(shared, reduced, strict=True):
            results[index] = grad
        if self.scale_local_gradients:
            size = self.process_set.size() or 1
            for index, is_local in enumerate(local):
                if is_local and results[index] is not None:
                    results[index] = results[index] / tf.cast(size, results[index].dtype)
        return results

    def apply_gradients(
        self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Applies and clears the sums in every n-th pass, and does nothing in others.

        Args:
            apply_grads_closure: Applies the gradients.
            optimizer: Accepted for compatibility with Horovod, like the following arguments.
            *args: Not used.
            **kwargs: Not used.

        Returns:
            The op to run in a graph.

        Raises:
            ValueError: When `compute_gradients` was not called before.
        """
        del optimizer, args, kwargs
        if self.backward_passes_per_step == 1:
            return apply_grads_closure()

        def apply_and_clear() -> Any:
            applied = apply_grads_closure()
            with tf.control_dependencies([applied] if applied is not None else []):
                cleared = [
                    entry.assign(tf.zeros_like(entry), read_value=False)
                    for entry in self.sums.values()
                ]
                cleared.append(self.counter.assign(0, read_value=False))
                with tf.control_dependencies([entry for entry in cleared if entry is not None]):
                    return tf.constant(True)

        if self._due_flag is None:
            raise ValueError("compute_gradients comes before apply_gradients")
        due, self._due_flag = self._due_flag, None
        return tf.cond(due, apply_and_clear, lambda: tf.constant(False))
