# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The parameters of the PyTorch estimator that other estimators do not have."""

# ruff: noqa: N815 - names are Spark ML's

from __future__ import annotations

from typing import Any

from farandole.common import check
from farandole.runner.limits import positive
from farandole.spark.common.params import EstimatorParams, accessors, declare
from farandole.spark.common.runs.stopping import EarlyStopping, Monitor
from farandole.spark.torch.tensors import DTYPES


def _dtypes(value: Any) -> list[str]:
    names = [str(one).removeprefix("torch.") for one in check.listed("input_dtypes")(value)]
    unknown = [name for name in names if name not in DTYPES]
    if unknown:
        raise ValueError(f"input_dtypes must be of {', '.join(DTYPES)}: {', '.join(unknown)}")
    return names


def _precision(value: Any) -> str:
    names = {"32": "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "16": "fp16"}
    return check.choice("precision", "fp32", "bf16", "fp16")(names.get(str(value).removeprefix("torch."), value))


def _scheduler(value: Any) -> Any:
    if not callable(value) and not (hasattr(value, "step") and hasattr(value, "state_dict")):
        raise TypeError(f"lr_scheduler must be a scheduler of torch, or a function of an optimizer: {value!r}")
    return value


class TorchParams(EstimatorParams):
    """Additional parameters of the PyTorch estimator."""

    input_shapes = declare("input_shapes", "shape of each input's tensor", check.shapes("input_shapes"))
    input_dtypes = declare("input_dtypes", "type of each input's tensor; float32 by default", _dtypes)
    loss_constructors = declare(
        "loss_constructors", "functions that create the losses in the training processes",
        check.callables("loss_constructors"),
    )  # fmt: skip
    train_minibatch_fn = declare(
        "train_minibatch_fn", "trains on one batch, instead of the built-in way", check.function("train_minibatch_fn")
    )
    data_module = declare("data_module", "class that returns batches, instead of the native reader", check.anything)
    precision = declare("precision", "precision of the model's computation: fp32, bf16 or fp16", _precision)
    gradient_clip_norm = declare(
        "gradient_clip_norm", "largest norm of all gradients together", positive("gradient_clip_norm")
    )
    lr_scheduler = declare("lr_scheduler", "scheduler of learning rates over the optimizer", _scheduler)
    lr_scheduler_interval = declare(
        "lr_scheduler_interval", "interval of the scheduler's steps: epoch or step",
        check.choice("lr_scheduler_interval", "epoch", "step"),
    )  # fmt: skip
    early_stopping = declare(
        "early_stopping",
        "when a run without improvement ends",
        check.named("early_stopping", EarlyStopping.of),
    )
    best_checkpoint = declare(
        "best_checkpoint", "metric that selects the epoch whose model is kept and returned",
        check.named("best_checkpoint", Monitor.of),
    )  # fmt: skip
    checkpoint_every = declare(
        "checkpoint_every", "interval in epochs at which a checkpoint is kept", check.at_least("checkpoint_every", 1)
    )
    compile = declare("compile", "whether torch.compile compiles the model", check.flag("compile"))
    deterministic = declare(
        "deterministic", "whether equal seeds and sizes give equal bits", check.flag("deterministic")
    )
    max_steps = declare("max_steps", "steps of the optimizer after which the run ends", check.at_least("max_steps", 1))
    max_time = declare("max_time", "seconds of training after which the run ends", positive("max_time"))

    setInputShapes, getInputShapes = accessors("input_shapes")
    setInputDtypes, getInputDtypes = accessors("input_dtypes")
    setLossConstructors, getLossConstructors = accessors("loss_constructors")
    setTrainMinibatchFn, getTrainMinibatchFn = accessors("train_minibatch_fn")
    setDataModule, getDataModule = accessors("data_module")
    setPrecision, getPrecision = accessors("precision")
    setGradientClipNorm, getGradientClipNorm = accessors("gradient_clip_norm")
    setLrScheduler, getLrScheduler = accessors("lr_scheduler")
    setLrSchedulerInterval, getLrSchedulerInterval = accessors("lr_scheduler_interval")
    setEarlyStopping, getEarlyStopping = accessors("early_stopping")
    setBestCheckpoint, getBestCheckpoint = accessors("best_checkpoint")
    setCheckpointEvery, getCheckpointEvery = accessors("checkpoint_every")
    setCompile, getCompile = accessors("compile")
    setDeterministic, getDeterministic = accessors("deterministic")
    setMaxSteps, getMaxSteps = accessors("max_steps")
    setMaxTime, getMaxTime = accessors("max_time")

    def __init__(self) -> None:
        """Gives every parameter its default."""
        super().__init__()
        unset = (
            "input_shapes", "input_dtypes", "loss_constructors", "train_minibatch_fn", "data_module",
            "gradient_clip_norm", "lr_scheduler", "early_stopping", "best_checkpoint", "checkpoint_every",
            "max_steps", "max_time",
        )  # fmt: skip
        self._setDefault(
            **dict.fromkeys(unset),
            precision="fp32",
            lr_scheduler_interval="epoch",
            compile=False,
            deterministic=False,
        )
