# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The parameters of the Lightning estimator that the PyTorch estimator does not have, or not in
this form.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Self

from farandole.common import argument_checks
from farandole.spark.common.parameter import Parameter
from farandole.spark.torch.params import TorchParams
from farandole.stores.pickle_policy import ALLOW_PICKLE_PARAMETER

if TYPE_CHECKING:
    from pyspark.ml.param import Param


def _check_trainer_args(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value):
        raise TypeError(f"{name} must be a dict of arguments of Lightning's Trainer: {value!r}")
    return dict(value)


def _check_queue_size(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of batches, or a share of an epoch's: {value!r}")
    return int(value) if isinstance(value, Integral) else float(value)


class LightningParams(TorchParams):
    """Additional parameters of the Lightning estimator."""

    model: Parameter[Any] = Parameter(
        "A `LightningModule`, or a plain module.", argument_checks.accept_any_value, default=None
    )
    callbacks: Parameter[Any] = Parameter(
        "Lightning's. A `ModelCheckpoint` writes into the run's directory of the store, and the "
        "fitted model has the weights of its best checkpoint.",
        argument_checks.check_value_list,
        default=[],
    )
    train_minibatch_fn: Parameter[Any] = Parameter(
        "Accepted for compatibility with Horovod; the module's `training_step` trains.",
        argument_checks.check_callable_value,
        default=None,
    )
    data_module: Parameter[Any] = Parameter(
        "A `LightningDataModule`, or a class of them that is built with Horovod's arguments.",
        argument_checks.accept_any_value,
        default=None,
    )
    num_gpus: Parameter[int] = Parameter(
        "GPUs per process: 0 keeps to CPUs.",
        argument_checks.make_minimum_check(0),
        default=None,
        horovod_name="NumGPUs",
    )
    logger: Parameter[Any] = Parameter(
        "Lightning's logger, or a list of them; files go to the run's logs in the store.",
        argument_checks.accept_any_value,
        default=None,
    )
    log_every_n_steps: Parameter[int] = Parameter(
        "Steps between rows of a log.", argument_checks.make_minimum_check(1), default=50
    )
    loader_num_epochs: Parameter[int] = Parameter(
        "Accepted for compatibility with Horovod: an epoch is one pass.",
        argument_checks.make_minimum_check(1),
        default=None,
    )
    profiler: Parameter[Any] = Parameter(
        "Lightning's profiler.", argument_checks.accept_any_value, default=None
    )
    trainer_args: Parameter[dict[str, Any]] = Parameter(
        "Arguments of Lightning's `Trainer`, which override all others.",
        _check_trainer_args,
        default=None,
    )
    debug_data_loader: Parameter[bool] = Parameter(
        "Accepted for compatibility with Horovod.",
        argument_checks.check_boolean_flag,
        default=False,
    )
    train_async_data_loader_queue_size: Parameter[float] = Parameter(
        "Accepted for compatibility with Horovod: batches are read ahead.",
        _check_queue_size,
        default=None,
    )
    val_async_data_loader_queue_size: Parameter[float] = Parameter(
        "The same for validation.", _check_queue_size, default=None
    )

    allow_pickle: Parameter[bool] = Parameter(
        "Whether a run that continues may run the code that its checkpoint contains. If it is not "
        "set, the variable `FARANDOLE_ALLOW_PICKLE` decides, and without that it may not. It is "
        "not saved with the estimator, and a param map cannot set it.",
        argument_checks.check_boolean_flag,
        default=None,
    )

    def copy(self, extra: dict[Param[Any], Any] | None = None) -> Self:
        """Returns a copy with the same parameters.

        Args:
            extra: values that the copy has instead.

        Raises:
            ValueError: one of them is `allow_pickle`: `CrossValidator` saves its param maps, and
                the file of another user must not contain the consent to run code.
        """
        copied = super().copy(extra)  # a value of a wrong type is its own error
        if extra and self.getParam(ALLOW_PICKLE_PARAMETER) in extra:
            raise ValueError(
                f"a param map cannot set {ALLOW_PICKLE_PARAMETER}, since Spark saves param maps: "
                f"use "
                "setAllowPickle"
            )
        return copied
