# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The description of a job for a training process: plain values, a Keras file, and one pickle of
the user's objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farandole.spark.common.data.training_data import TrainingJob

if TYPE_CHECKING:
    from farandole.data.columns import PreparedColumn
    from farandole.spark.common.model.signature import ModelInput


@dataclass(frozen=True)
class KerasLabel:
    """A label column and the array made of it."""

    column: PreparedColumn
    dtype: str
    shape: tuple[int, ...]
    """Shape of one batch, -1 for its rows."""


@dataclass(frozen=True)
class KerasModelShape:
    """The inputs and outputs of a model."""

    inputs: tuple[ModelInput, ...]
    input_keys: tuple[str, ...] | None
    """Names of the inputs, for a model that takes a dict."""
    output_keys: tuple[str, ...] | None
    """Names of the outputs, in the order of the labels, for a model that returns a dict."""


@dataclass(frozen=True, kw_only=True)
class KerasTrainingJob(TrainingJob):
    """One run, with `KerasUserObjects`."""

    model: bytes
    """The compiled model, a `.keras` file."""
    shape: KerasModelShape
    labels: tuple[KerasLabel, ...]
    epochs: int
    random_seed: int | None
    use_gpu: bool
    mp_start_method: str | None
    floatx: str
    policy: str
    """Keras's dtype policy, by which it decides about loss scales."""
    verbose: int
    terminate_on_nan: bool
    prefetch: int
    """Batches that `tf.data` prepares ahead; 0 leaves it to Keras."""
    passes: int = 1
    """Batches whose gradients make one step of the optimizer."""
    sync_every: int = 1
    """Steps of a process between two averages of weights; with 1, gradients are averaged."""
    loss_reduction: str = "mean"
    """The reduction of the model's loss over the rows of a batch, see `loss_forms`."""
    counts_losses: bool = False
    """Whether losses divide by more than rows, so that processes add up their counts."""
    sums_outputs: bool = False
    """Whether counted losses of outputs are sums over rows, whatever they say."""
    added_losses: tuple[str, ...] = ()
    """Reductions of the losses that layers add and of regularizers, if losses are counted."""

    @property
    def takes_local_steps(self) -> bool:
        """Whether each process steps on its own gradients, and weights are averaged."""
        return self.sync_every > 1

    @property
    def step_rows(self) -> int:
        """Rows of a step of the optimizer: of a global batch, or of one process."""
        return (self.data.step_rows or self.data.batch_size) * self.passes

    def learning_rate_factor(self, size: int) -> int:
        """Returns the number by which the learning rate is multiplied.

        Args:
            size: number of processes.
        """
        has_own_rows = self.data.step_rows is None and not self.takes_local_steps
        return size if has_own_rows else 1


@dataclass
class KerasUserObjects:
    """The user's objects, in one pickle."""

    custom_objects: dict[str, Any]
    loss: Any
    callbacks: list[Any]
    checkpoint_callback: Any = None
    compression: Any = None
    transformation: Any = None
    data_module: Any = None


@dataclass(frozen=True)
class KerasTrainingResult:
    """The result of rank 0."""

    model: bytes
    history: dict[str, list[Any]]
