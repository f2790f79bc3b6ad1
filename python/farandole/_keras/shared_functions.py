# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Functions that both public namespaces share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from farandole._keras import value_collectives
from farandole._keras.optimizer import distribute_optimizer, is_distributed
from farandole._keras.settings import GradientReductionSettings
from farandole.common.util import Average

if TYPE_CHECKING:
    from collections.abc import Sequence


def broadcast_global_variables(root_rank: int) -> None:
    """Refuses: Keras 3 has no global variables.

    Args:
        root_rank: The rank whose values would count.

    Raises:
        RuntimeError: Always: use `callbacks.BroadcastGlobalVariablesCallback`.
    """
    raise RuntimeError(
        f"Keras 3 has no global variables to take from rank {root_rank}: use "
        "callbacks.BroadcastGlobalVariablesCallback"
    )


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    """Loads a model and makes its optimizer distributed, with the state it was saved with.

    Args:
        filepath: File that `model.save` wrote.
        custom_optimizers: Classes of optimizers that are not Keras's.
        custom_objects: Other classes and functions by name.
        compression: Compresses the gradients for transport.
        legacy_opts: Accepted for compatibility with Horovod: Keras 3 has no legacy optimizers.

    Returns:
        A compiled model, if it was saved as one.
    """
    del legacy_opts
    objects = {kind.__name__: kind for kind in custom_optimizers or []}
    model: Any = keras.saving.load_model(
        filepath, custom_objects={**objects, **(custom_objects or {})}
    )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not is_distributed(optimizer):
        model.optimizer = distribute_optimizer(
            optimizer, GradientReductionSettings(compression=compression)
        )
        # This lets Keras decide again for the distributed optimizer.
        model.jit_compile = model.jit_compile
    return model


def allgather(value: Any, name: str | None = None) -> Any:
    """Returns the values of all ranks, concatenated along the first dimension, as a NumPy array."""
    return value_collectives.allgather_value(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the value of one rank on all ranks, as a NumPy array."""
    return value_collectives.broadcast_value(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Returns this rank's rows of the reduced value, as a NumPy array."""
    return value_collectives.reducescatter_value(value, name, op)
