# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Gradient tapes that reduce gradients over all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from farandole.common.gradient_grouping import resolve_groups_argument
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.util import Average
from farandole.tensorflow.compression import Compression, Compressor
from farandole.tensorflow.reducer import GradientReducer


class _DistributedTape(tf.GradientTape):
    """A distributed tape. It shares its recording with the tape that it was made from."""

    _reducer: GradientReducer

    def gradient(  # pyright: ignore[reportIncompatibleMethodOverride] - Horovod's order
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Gradients of `target`, reduced over all ranks.

        Args:
            target: The value to differentiate.
            sources: One variable or tensor, or any nested structure of them.
            output_gradients: As in `tf.GradientTape.gradient`.
            use_generic_names: Accepted for compatibility with Horovod: names never depend on the
                variables.
            unconnected_gradients: As in `tf.GradientTape.gradient`.

        Returns:
            Gradients in the structure of `sources`; `None` where there is none.
        """
        del use_generic_names
        grads = super().gradient(target, sources, output_gradients, unconnected_gradients)
        flat = tf.nest.flatten(grads, expand_composites=False)
        return tf.nest.pack_sequence_as(sources, self._reducer(flat, tf.nest.flatten(sources)))

    def register_local_source(self, source: Any) -> None:
        """Leaves the gradient of a variable to this rank."""
        self._reducer.register_local(source)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Like `gradient`, but separates the gradients of local sources from the reduced gradients.

        Args:
            target: As in `gradient`.
            sources: As in `gradient`; nested structures are flattened in their order.
            output_gradients: As in `gradient`.
            use_generic_names: As in `gradient`.

        Returns:
            Pairs of local sources and their gradients, and pairs of the other sources and theirs.
        """
        grads = self.gradient(
            target, sources, output_gradients, use_generic_names=use_generic_names
        )
        pairs = list(
            zip(
                tf.nest.flatten(sources),
                tf.nest.flatten(grads, expand_composites=False),
                strict=True,
            )
        )
        local = [pair for pair in pairs if self._reducer.is_local(pair[0])]
        return local, [pair for pair in pairs if not self._reducer.is_local(pair[0])]


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    name: str | None = None,
) -> Any:
    """Wraps a tape so that its gradients are reduced over all ranks, as one unit unless `groups`
    says otherwise.

    Args:
        gradtape: A `tf.GradientTape` that has recorded or still records.
        device_dense: Device of the ops for dense gradients.
        device_sparse: Device of the ops for slices.
        compression: Compresses the gradients for transport.
        sparse_as_dense: Whether `IndexedSlices` become tensors first; else they are gathered.
        op: The reduction, `Average` by default.
        gradient_predivide_factor: For `Average`, gradients are divided by it before and multiplied
            after the sum.
        num_groups: Deprecated; use `groups`.
        groups: A number of consecutive units, or lists of variables that form units.
        process_set: The ranks that take part; others keep their gradients.
        scale_local_gradients: Whether gradients of local sources are divided by the number of
            ranks, so that they weigh as averaged ones do.
        name: Names the reductions, which tapes that are used at the same time in several threads
            need.

    Returns:
        A tape of the same kind, an instance of a subclass of its class.

    Raises:
        ValueError: If arguments contradict each other, or the tape is already distributed.
        NotImplementedError: For Adasum in a process set.
    """
    reducer = GradientReducer(
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        resolve_groups_argument(groups, num_groups),
        process_set,
        scale_local_gradients,
        name=name,
    )
    kind = type(gradtape)
    if issubclass(kind, _DistributedTape):
        raise ValueError("the tape is distributed already")
    tape = object.__new__(type(kind.__name__, (_DistributedTape, kind), {"_reducer": reducer}))
    # One state of both: the given tape may still record, and whichever ends that first ends it for
    # the other, too.
    tape.__dict__ = gradtape.__dict__
    return tape


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    *,
    name: str | None = None,
) -> Any:
    """Like `DistributedGradientTape`, but each rank keeps the gradients of some layers.

    Args:
        gradtape: As there, like all that are not named here.
        device_dense: As there.
        device_sparse: As there.
        compression: As there.
        sparse_as_dense: As there.
        op: As there.
        gradient_predivide_factor: As there.
        num_groups: As there.
        groups: As there.
        process_set: As there.
        local_layers: A layer or a list of layers, built, whose trainable weights belong to each
            rank.
        scale_local_gradients: As there.
        name: As there.

    Returns:
        As there.

    Raises:
        ValueError: If arguments contradict each other, or a layer is not a layer or has not been
            built.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
        name=name,
    )
    for weight in trainable_weights(local_layers):
        tape.register_local_source(weight)
    return tape


def trainable_weights(layers: Any) -> list[Any]:
    """Returns the trainable weights of a layer or a list of them.

    Raises:
        ValueError: When something is no layer, or has not been built.
    """
    if layers is None:
        return []
    listed = list(layers) if isinstance(layers, list | tuple) else [layers]
    for layer in listed:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(f"local_layers must hold layers: {type(layer).__name__}")
        if not getattr(layer, "built", True):
            raise ValueError(
                f"the local layer {layer.name!r} must be built first, because it has no weights yet"
            )
    return [weight for layer in listed for weight in layer.trainable_weights]
