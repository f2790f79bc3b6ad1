# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The parameters of the Lightning estimator that the PyTorch estimator does not have."""

# ruff: noqa: N815 - names are Spark ML's

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from farandole.common import check
from farandole.spark.common.params import accessors, declare
from farandole.spark.torch.params import TorchParams


def _arguments(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"trainer_args must be a dict of arguments of Lightning's Trainer: {value!r}")
    return dict(value)


def _queue(name: str) -> Any:
    def convert(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number of batches, or a share of an epoch's: {value!r}")
        return int(value) if isinstance(value, Integral) else float(value)

    return convert


class LightningParams(TorchParams):
    """Additional parameters of the Lightning estimator."""

    num_gpus = declare("num_gpus", "GPUs per process: 0 or 1", check.at_least("num_gpus", 0))
    logger = declare("logger", "Lightning's logger, or a list of them", check.anything)
    log_every_n_steps = declare(
        "log_every_n_steps", "steps between rows of a log", check.at_least("log_every_n_steps", 1)
    )
    loader_num_epochs = declare(
        "loader_num_epochs", "not used: an epoch is one pass", check.at_least("loader_num_epochs", 1)
    )
    profiler = declare("profiler", "Lightning's profiler", check.anything)
    trainer_args = declare("trainer_args", "arguments of Lightning's Trainer, which override all others", _arguments)
    debug_data_loader = declare("debug_data_loader", "not used", check.flag("debug_data_loader"))
    train_async_data_loader_queue_size = declare(
        "train_async_data_loader_queue_size",
        "not used: batches are read ahead",
        _queue("train_async_data_loader_queue_size"),
    )
    val_async_data_loader_queue_size = declare(
        "val_async_data_loader_queue_size",
        "not used: batches are read ahead",
        _queue("val_async_data_loader_queue_size"),
    )

    setNumGpus, getNumGpus = accessors("num_gpus")
    setNumGPUs, getNumGPUs = setNumGpus, getNumGpus  # Horovod's spelling
    setLogger, getLogger = accessors("logger")
    setLogEveryNSteps, getLogEveryNSteps = accessors("log_every_n_steps")
    setLoaderNumEpochs, getLoaderNumEpochs = accessors("loader_num_epochs")
    setProfiler, getProfiler = accessors("profiler")
    setTrainerArgs, getTrainerArgs = accessors("trainer_args")
    setDebugDataLoader, getDebugDataLoader = accessors("debug_data_loader")
    setTrainAsyncDataLoaderQueueSize, getTrainAsyncDataLoaderQueueSize = accessors("train_async_data_loader_queue_size")
    setValAsyncDataLoaderQueueSize, getValAsyncDataLoaderQueueSize = accessors("val_async_data_loader_queue_size")

    def __init__(self) -> None:
        """Gives every parameter its default."""
        super().__init__()
        unset = (
            "num_gpus", "logger", "loader_num_epochs", "profiler", "trainer_args",
            "train_async_data_loader_queue_size", "val_async_data_loader_queue_size",
        )  # fmt: skip
        self._setDefault(**dict.fromkeys(unset), log_every_n_steps=50, debug_data_loader=False)
