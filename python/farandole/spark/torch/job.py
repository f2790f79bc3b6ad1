# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What a training process is told: plain values and one pickle of the user's objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farandole.spark.common.columns import Column
    from farandole.spark.common.store import RemoteStore


@dataclass(frozen=True)
class Label:
    """A label column and the tensor made of it."""

    column: Column
    dtype: str
    """`int64` for class indices, else `float32`."""
    shape: tuple[int, ...] | None
    """Shape of one batch, -1 for its rows; `None`: as the column, or as the output where the sizes agree."""


@dataclass(frozen=True)
class Input:
    """A feature column and the tensor made of it."""

    column: Column
    shape: tuple[int, ...]
    """Shape of one batch, -1 for its rows."""


@dataclass(frozen=True)
class Job:
    """One run."""

    objects: bytes
    """Pickled `Objects`."""
    store: RemoteStore
    run_id: str
    train_url: str
    val_url: str | None
    inputs: tuple[Input, ...]
    labels: tuple[Label, ...]
    weight: str | None
    loss_weights: tuple[float, ...]
    batch_size: int
    val_batch_size: int
    epochs: int
    order_seed: int
    random_seed: int | None
    shuffle: bool
    train_steps: int | None
    val_steps: int | None
    backward_passes: int
    use_gpu: bool

    def paths(self) -> dict[str, str]:
        """Where the run's files are: those that it has."""
        run, name = self.store.checkpoint_path, self.store.checkpoint_filename
        named = {
            "training data": self.train_url,
            "validation data": self.val_url,
            "checkpoint": None if run is None else f"{run}/{name}",
            "logs": self.store.logs_path,
        }
        return {what: path for what, path in named.items() if path is not None}


@dataclass
class Objects:
    """The user's objects; they travel in one pickle, so that the optimizer still holds the model's parameters."""

    model: Any
    optimizer: Any
    losses: list[Any]
    metrics: list[list[Any]]
    compression: Any


@dataclass(frozen=True)
class Trained:
    """What rank 0 brings back."""

    checkpoint: bytes
    history: list[dict[str, Any]]
