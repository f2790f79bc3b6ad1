# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The parameters of `KerasEstimator` that other estimators do not have, or not in this form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole.common import argument_checks
from farandole.spark.common.parameter import Parameter
from farandole.spark.common.params import EstimatorParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import keras

_DEFAULT_ENVIRONMENT = {"LIBHDFS_OPTS": "-Xms2048m -Xmx2048m"}


def _check_loss(name: str, value: Any) -> Any:
    """Returns a Keras loss: its name, an object, a function, or a list or dict of them, one per
    output.
    """
    parts = (
        value.values()
        if isinstance(value, dict)
        else (value if isinstance(value, list | tuple) else [value])
    )
    for part in parts:
        if part is not None and not isinstance(part, str) and not callable(part):
            raise TypeError(f"{name} must be a Keras loss, or a list or dict of them: {part!r}")
    return list(value) if isinstance(value, tuple) else value


def _check_metrics(_name: str, value: Any) -> Any:
    """Keras metrics, as `compile` takes them."""
    if isinstance(value, dict):
        return value
    return list(value) if isinstance(value, list | tuple) else [value]


def _check_custom_objects(name: str, value: Any) -> dict[str, Any]:
    """Classes and functions by name."""
    if not isinstance(value, dict) or not all(isinstance(part, str) for part in value):
        raise TypeError(f"{name} must be a dict of classes and functions by name: {value!r}")
    return dict(value)


def _check_environment(name: str, value: Any) -> dict[str, str]:
    """Variables by name."""
    if not isinstance(value, dict) or not all(
        isinstance(part, str) for pair in value.items() for part in pair
    ):
        raise TypeError(f"{name} must be a dict of strings: {value!r}")
    return dict(value)


def _check_checkpoint_callback(name: str, value: Any) -> Any:
    """Returns a callback that decides which model is kept."""
    import keras  # noqa: PLC0415 - a training process chooses its devices first

    if not isinstance(value, keras.callbacks.ModelCheckpoint):
        raise TypeError(f"{name} must be a ModelCheckpoint, such as BestModelCheckpoint: {value!r}")
    return value


def _check_compression(name: str, value: Any) -> Any:
    """Returns one of `Compression`: Keras passes gradients one by one, so a compressor of whole
    steps cannot work.
    """
    if not all(callable(getattr(value, method, None)) for method in ("compress", "decompress")):
        raise TypeError(
            f"{name} must be a member of farandole.keras.Compression, such as fp16: {value!r}"
        )
    return value


class KerasParams(EstimatorParams):
    """Additional parameters of the Keras estimator."""

    model: Parameter[keras.Model] = Parameter(
        "A `keras.Model`, compiled or not.", argument_checks.accept_any_value, default=None
    )
    optimizer: Parameter[keras.optimizers.Optimizer | str] = Parameter(
        "A Keras optimizer or its name; without it, that of the compiled model, with its state.",
        argument_checks.accept_any_value,
        default=None,
    )
    loss: Parameter[Any] = Parameter(
        "A Keras loss, or a list or dict with one per output; without it, that of the compiled "
        "model.",
        _check_loss,
        default=None,
    )
    loss_reduction: Parameter[str] = Parameter(
        "What the model's loss is for a batch, where it is not the mean of Keras's own losses: "
        '`"mean"` or `"sum"` over rows, or `"per_batch"`, a number of the batch as a whole. '
        "Without it, a loss of an unknown form is tried on parts of some rows, and refused "
        "if several processes cannot compute it.",
        argument_checks.make_choice_check("mean", "sum", "per_batch"),
        default=None,
    )
    metrics: Parameter[Any] = Parameter(
        "As `compile` takes them; without them, the compiled model's.", _check_metrics, default=[]
    )
    callbacks: Parameter[Sequence[keras.callbacks.Callback]] = Parameter(
        "Keras's; they run on every rank and see the scores of all rows. A `TensorBoard` runs on "
        "rank 0 and writes into the store.",
        argument_checks.check_value_list,
        default=[],
    )
    gradient_compression: Parameter[Any] = Parameter(
        "Compression of gradients between processes, such as `farandole.keras.Compression.fp16`.",
        _check_compression,
        default=None,
    )
    sync_every: Parameter[int] = Parameter(
        "Steps that each process takes on its own before all average their weights (local SGD); "
        "they also do at the end of each epoch. With more than 1, the learning rate is that of one "
        "process. Without it, or with 1, gradients are averaged in each step.",
        argument_checks.make_minimum_check(1),
        default=None,
    )
    custom_objects: Parameter[Mapping[str, Any]] = Parameter(
        "Classes and functions by name, where Keras asks for them; those that the model is seen "
        "to be made of need not be listed.",
        _check_custom_objects,
        default={},
    )
    checkpoint_callback: Parameter[keras.callbacks.ModelCheckpoint] = Parameter(
        "A `ModelCheckpoint` such as `farandole.keras.callbacks.BestModelCheckpoint`: `fit` "
        "returns the model that it kept, instead of the last one.",
        _check_checkpoint_callback,
        default=None,
    )
    data_module: Parameter[type] = Parameter(
        "A class that returns batches instead of the native reader, created with the arguments of "
        "Horovod's `DataModule`; its `train_data()` and `val_data()` return what `fit` takes.",
        argument_checks.accept_any_value,
        default=None,
    )
    backend_env: Parameter[Mapping[str, str]] = Parameter(
        "Variables to set in the training processes.",
        _check_environment,
        default=_DEFAULT_ENVIRONMENT,
    )
