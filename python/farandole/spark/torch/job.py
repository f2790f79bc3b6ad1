# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The description of a job for a training process: plain values and one pickle of the user's
objects.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from farandole.spark.common.data.training_data import TrainingJob
from farandole.spark.common.model.signature import ModelInput

if TYPE_CHECKING:
    from farandole.data.columns import PreparedColumn
    from farandole.spark.common.runs.monitored_stopping import EarlyStopping, MonitoredMetric
    from farandole.spark.torch.columns.class_weights import ClassWeights
    from farandole.spark.torch.columns.model_calls import ModelCall
    from farandole.spark.torch.columns.model_losses import ModelLoss
    from farandole.spark.torch.params import TorchParams
    from farandole.spark.torch.sharding.driver_state import ShardedObjects


@dataclass(frozen=True)
class TorchLabel:
    """A label column and the tensor made of it."""

    column: PreparedColumn
    dtype: str
    """`int64` for class indices, else `float32`."""
    shape: tuple[int, ...] | None
    """Shape of one batch, -1 for its rows; `None`: as the column, or as the output where the
    sizes agree.
    """
    indexes: bool = False
    """Whether the label's loss takes it as the index of a class."""
    value_range: tuple[float, float] | None = None
    """Smallest and largest value of the column; `None` where they are unknown."""


@dataclass(frozen=True)
class TorchInput(ModelInput):
    """One argument of the model, as one tensor."""

    ragged: bool = False
    """Whether the length of batches may differ from the one in `shape`."""
    nested: bool = False
    """Whether a batch is a nested tensor, with rows of different lengths."""


@dataclass(frozen=True)
class TrainingLoopOptions:
    """The settings of the training loop, with the names of the estimator's parameters."""

    epochs: int
    backward_passes_per_step: int
    random_seed: int | None
    use_gpu: bool
    mp_start_method: str | None
    precision: str
    gradient_clip_norm: float | None
    sync_every: int
    shard_optimizer: bool
    strategy: str
    ema_decay: float | None
    lr_scheduler_interval: str
    early_stopping: EarlyStopping | None
    best_checkpoint: MonitoredMetric | None
    checkpoint_every: int | None
    compile: bool
    deterministic: bool
    max_steps: int | None
    max_time: float | None
    terminate_on_nan: bool

    @property
    def takes_local_steps(self) -> bool:
        """Whether each process steps on its own gradients, and parameters are averaged."""
        return self.sync_every > 1

    @property
    def shards_model(self) -> bool:
        """Whether parameters, gradients and states are divided among processes."""
        return self.strategy == "fsdp"

    @classmethod
    def from_estimator(cls, estimator: TorchParams) -> Self:
        """Returns the settings of an estimator.

        Args:
            estimator: of PyTorch or Lightning.
        """
        values = {one.name: estimator.getOrDefault(one.name) for one in fields(cls)}
        if isinstance(estimator.getLrScheduler(), str):  # a schedule by name changes rates in steps
            values["lr_scheduler_interval"] = "step"
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class TorchTrainingJob(TrainingJob):
    """One run, with `TorchUserObjects`."""

    loop: TrainingLoopOptions
    inputs: tuple[TorchInput, ...]
    labels: tuple[TorchLabel, ...]
    call: ModelCall
    loss_weights: tuple[float, ...] = ()
    own_loss: ModelLoss | None = None
    """The loss that the model returns, in place of the user's losses."""
    class_weights: ClassWeights | None = None
    loss_reduction: str | None = None
    """The user's word for losses of an unknown form, see `columns.loss_terms`."""
    sharded: ShardedObjects | None = None
    """The user's objects without weights, in place of `objects`, if the model is divided."""

    @property
    def has_weights(self) -> bool:
        """Whether rows have weights."""
        return self.weight is not None or self.class_weights is not None


@dataclass
class TorchUserObjects:
    """The user's objects; they travel in one pickle, so that the optimizer still holds the
    model's parameters.
    """

    model: Any
    optimizer: Any
    losses: list[Any]
    """Losses, or with `constructed` functions that make them."""
    constructed: bool
    metrics: list[list[Any]]
    compression: Any
    scheduler: Any = None
    train_minibatch: Any = None
    transformation: Any = None
    callbacks: tuple[Any, ...] = ()
    data_module: Any = None


@dataclass(frozen=True)
class TorchTrainingResult:
    """The result of rank 0."""

    checkpoint: bytes
    history: list[dict[str, Any]]
