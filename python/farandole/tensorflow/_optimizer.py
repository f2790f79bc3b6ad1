# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Optimizers of `tf.compat.v1.train` that reduce gradients over all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from farandole.common.gradient_grouping import resolve_groups_argument
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.util import Adasum, Average
from farandole.tensorflow.compression import Compression, Compressor
from farandole.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from farandole.tensorflow.mpi_ops import rank, size
from farandole.tensorflow.reducer import GradientReducer

_Base: Any = tf.compat.v1.train.Optimizer


class _WrappingOptimizer(_Base):
    """Hands everything but gradients to the wrapped optimizer."""

    def __init__(self, optimizer: Any, name: str | None, use_locking: bool) -> None:
        super().__init__(
            name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking
        )
        self._optimizer = optimizer

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the method of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the method of the wrapped optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the method of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)


class _DistributedOptimizer(_WrappingOptimizer):
    """Reduces gradients where they are computed, before any clipping."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        reducer: GradientReducer,
        passes: int,
        average_aggregated_gradients: bool,
    ) -> None:
        super().__init__(optimizer, name, use_locking)
        self._reducer = reducer
        self._aggregation = None
        if passes > 1:
            if tf.executing_eagerly():
                raise ValueError(
                    "backward_passes_per_step > 1 needs a graph with optimizers of "
                    "tf.compat.v1.train: use a Keras optimizer in eager mode"
                )
            self._aggregation = LocalGradientAggregationHelper(
                passes,
                reducer,
                reducer.sparse_as_dense,
                average_aggregated_gradients,
                rank(),
                name=self._name,
            )

    def register_local_var(self, var: Any) -> None:
        """Excludes the gradients of a variable from the reduction."""
        self._reducer.register_local(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Gradients and variables, reduced over all ranks; arguments are the wrapped
        optimizer's.
        """
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        if self._aggregation is None:
            reduced = self._reducer(grads, variables)
        else:
            reduced = self._aggregation.compute_gradients(grads, variables)
        return list(zip(reduced, variables, strict=True))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the method of the wrapped optimizer; with several passes, on every n-th one."""
        if self._aggregation is None:
            return self._optimizer.apply_gradients(*args, **kwargs)
        return self._aggregation.apply_gradients(
            lambda: self._optimizer.apply_gradients(*args, **kwargs), self._optimizer
        )


class _AdasumOptimizer(_WrappingOptimizer):
    """Takes each rank's own step, then adds the Adasum of the steps to where all started.

    Steps are dense, and no rank's step is scaled: `sparse_as_dense` and `scale_local_gradients`
    change nothing.
    """

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        reducer: GradientReducer,
        passes: int,
    ) -> None:
        super().__init__(optimizer, name, use_locking)
        self._reducer = reducer
        self._reducer.scale_local_gradients = False
        self._passes_per_step = passes
        self._start_variables: list[Any] = []
        self._call_counter: Any = None

    def register_local_var(self, var: Any) -> None:
        """Leaves a variable to this rank, which takes its own steps."""
        self._reducer.register_local(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the method of the wrapped optimizer: gradients are not reduced."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Applies them here; on every n-th call the steps of all ranks are combined.

        Args:
            grads_and_vars: Gradients and variables of this rank.
            global_step: Counts calls.
            name: Names the op.

        Returns:
            The op to run in a graph.
        """
        pairs = [(grad, variable) for grad, variable in grads_and_vars if grad is not None]
        variables = [variable for _, variable in pairs]
        self._create_counter_and_start_variables(variables)
        count = self._call_counter.assign_add(1)
        is_first, is_due = (
            tf.equal((count - 1) % self._passes_per_step, 0),
            tf.equal(count % self._passes_per_step, 0),
        )
        stored = [
            start.assign(tf.where(is_first, variable, start))
            for start, variable in zip(self._start_variables, variables, strict=True)
        ]
        with tf.control_dependencies(stored):
            applied = self._optimizer.apply_gradients(pairs, global_step)
        with tf.control_dependencies([applied] if applied is not None else []):
            merged = tf.cond(
                is_due, lambda: self._apply_combined_steps(variables), lambda: tf.constant(False)
            )
        return tf.group(merged, name=name or self._name)

    def _create_counter_and_start_variables(self, variables: list[Any]) -> None:
        if self._call_counter is not None:
            return
        make: Any = (
            tf.Variable if tf.executing_eagerly() or tf.inside_function() else tf.compat.v1.Variable
        )
        with tf.init_scope() if tf.inside_function() else tf.name_scope(self._name):
            self._call_counter = make(0, trainable=False, dtype=tf.int64, name="calls")
            self._start_variables = [
                make(
                    tf.zeros(variable.shape, variable.dtype.base_dtype),
                    trainable=False,
                    name="start",
                )
                for variable in variables
            ]

    def _apply_combined_steps(self, variables: list[Any]) -> Any:
        deltas = [
            variable - start
            for variable, start in zip(variables, self._start_variables, strict=True)
        ]
        merged = self._reducer(deltas, variables) if size() > 1 else deltas
        done = [
            tf.compat.v1.assign(variable, start + delta)
            for variable, start, delta in zip(variables, self._start_variables, merged, strict=True)
        ]
        with tf.control_dependencies([entry for entry in done if entry is not None]):
            return tf.constant(True)


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Wraps an optimizer so that its gradients are reduced over all ranks.

    Args:
        optimizer: Optimizer of `tf.compat.v1.train`, or Keras's.
        name: Names the wrapper; the wrapped class's name after `Distributed` by default.
        use_locking: For optimizers of `tf.compat.v1.train`.
        device_dense: Device of the ops for dense gradients.
        device_sparse: Device of the ops for slices.
        compression: Compresses the gradients for transport.
        sparse_as_dense: Whether `IndexedSlices` become tensors first; else they are gathered.
        backward_passes_per_step: Gradients of this many steps are summed, then reduced and applied
            once.
        op: `Average`, `Sum`, or `Adasum`, which combines the steps that the ranks take
            (`tf.compat.v1.train` only).
        gradient_predivide_factor: For `Average`, gradients are divided by it before and multiplied
            after the sum.
        average_aggregated_gradients: Whether such sums are divided by their number.
        num_groups: Deprecated; use `groups`.
        groups: A number of consecutive units, or lists of variables that form units; one unit by
            default.
        process_set: The ranks that take part; others keep their gradients.
        scale_local_gradients: Whether gradients of variables given to `register_local_var` are
            divided by the number of ranks.

    Returns:
        An optimizer of the same kind.

    Raises:
        ValueError: If arguments contradict each other, or `optimizer` is not an optimizer.
    """
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step must be positive: {backward_passes_per_step}")
    if op == Adasum and average_aggregated_gradients:
        raise ValueError("average_aggregated_gradients cannot be combined with op=Adasum")
    groups = resolve_groups_argument(groups, num_groups)
    if isinstance(optimizer, _Base):
        reducer = GradientReducer(
            device_dense,
            device_sparse,
            compression,
            sparse_as_dense,
            op,
            gradient_predivide_factor,
            groups,
            process_set,
            scale_local_gradients,
            name=name,
        )
        if op == Adasum:
            return _AdasumOptimizer(optimizer, name, use_locking, reducer, backward_passes_per_step)
        return _DistributedOptimizer(
            optimizer,
            name,
            use_locking,
            reducer,
            backward_passes_per_step,
            average_aggregated_gradients,
        )
    from farandole import _keras  # noqa: PLC0415 - graphs of tf.compat.v1 need no Keras

    if not _keras.is_optimizer(optimizer):
        raise ValueError(
            f"optimizer must be Keras's or one of tf.compat.v1.train: {type(optimizer).__name__}"
        )
    settings = _keras.GradientReductionSettings(
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        groups,
        process_set,
        scale_local_gradients,
    )
    return _keras.distribute_optimizer(optimizer, settings)
