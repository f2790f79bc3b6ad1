# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The parameters of the PyTorch estimator that other estimators do not have, or not in this
form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole.common import argument_checks
from farandole.spark.common import param_checks
from farandole.spark.common.parameter import Parameter
from farandole.spark.common.params import EstimatorParams
from farandole.spark.common.runs.monitored_stopping import EarlyStopping, MonitoredMetric
from farandole.spark.torch.columns.class_weights import check_class_weight
from farandole.spark.torch.columns.loss_terms import LOSS_REDUCTIONS
from farandole.spark.torch.columns.tensors import INPUT_DTYPES
from farandole.spark.torch.parameter_groups import check_parameter_groups
from farandole.spark.torch.rate_schedules import RATE_SCHEDULES, check_warmup_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch


def _check_dtypes(name: str, value: Any) -> list[str]:
    found = [
        str(dtype).removeprefix("torch.") for dtype in argument_checks.check_value_list(name, value)
    ]
    unknown = [one for one in found if one not in INPUT_DTYPES]
    if unknown:
        raise ValueError(f"{name} must be of {', '.join(INPUT_DTYPES)}: {', '.join(unknown)}")
    return found


def _check_precision(name: str, value: Any) -> str:
    known = {"32": "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "16": "fp16"}
    return argument_checks.make_choice_check("fp32", "bf16", "fp16")(
        name, known.get(str(value).removeprefix("torch."), value)
    )


def _check_scheduler(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return argument_checks.make_choice_check(*RATE_SCHEDULES)(name, value)
    if not callable(value) and not (hasattr(value, "step") and hasattr(value, "state_dict")):
        raise TypeError(
            f"{name} must be a scheduler of torch, a function of an optimizer, or one of "
            f"{', '.join(RATE_SCHEDULES)}: {value!r}"
        )
    return value


class TorchParams(EstimatorParams):
    """Additional parameters of the PyTorch estimator."""

    model: Parameter[torch.nn.Module] = Parameter(
        "A `torch.nn.Module`.", argument_checks.accept_any_value, default=None
    )
    optimizer: Parameter[torch.optim.Optimizer] = Parameter(
        "A torch optimizer over the model's parameters.",
        argument_checks.accept_any_value,
        default=None,
    )
    loss: Parameter[Callable[..., torch.Tensor] | Sequence[Callable[..., torch.Tensor]]] = (
        Parameter(
            "A loss of (output, label), or a list of one per label column.",
            argument_checks.accept_any_value,
            default=None,
        )
    )
    loss_constructors: Parameter[Callable[..., Any] | Sequence[Callable[..., Any]]] = Parameter(
        "Instead of `loss`: a function that creates it, or a list of one per label column, called "
        "in every training process with those of `model`, `optimizer`, `rank` and `size` that it "
        "takes by name.",
        argument_checks.check_callable_list,
        default=None,
    )
    loss_reduction: Parameter[str] = Parameter(
        "What a loss of your own returns for a batch, so that several processes, or several "
        'batches per step, train what one process trains: `"mean"` or `"sum"` over rows, or '
        '`"per_batch"`, a number of the batch as a whole. Without it, the loss is tried on parts '
        "of some rows and refused if it is no mean.",
        argument_checks.make_choice_check(*LOSS_REDUCTIONS),
        default=None,
    )
    class_weight: Parameter[str | Mapping[Any, float]] = Parameter(
        "Weight of each row in the loss by the class in its label: a dict by class, in which "
        'classes that are left out have the weight 1, or `"balanced"`, with which all classes '
        "count alike.",
        check_class_weight,
        default=None,
    )
    metrics: Parameter[Sequence[Any]] = Parameter(
        "Functions of (output, label), averaged over rows, or metrics of torchmetrics; a list "
        "inside the list gives one per label.",
        argument_checks.check_callable_list,
        default=[],
    )
    callbacks: Parameter[Sequence[Any]] = Parameter(
        "Called on every rank while the model trains: `farandole.spark.torch.callbacks.Callback`, "
        "or functions of a `TrainingState` for the end of epochs.",
        argument_checks.check_value_list,
        default=[],
    )
    input_shapes: Parameter[Sequence[Sequence[int]]] = Parameter(
        "Shape of each input's tensor, -1 for its rows.",
        argument_checks.check_shape_list,
        default=None,
    )
    input_dtypes: Parameter[Sequence[str]] = Parameter(
        'Type of each input\'s tensor, such as `"int64"`; without it, `"float32"`.',
        _check_dtypes,
        default=None,
    )
    output: Parameter[str | Sequence[str]] = Parameter(
        'Field of the model\'s result for each label, such as `"logits"`, of a model that returns '
        "a dict, a dataclass, a named tuple or a `ModelOutput`. Without it, the only tensor in the "
        "result, or the fields with the names of the labels.",
        param_checks.check_output_names,
        default=None,
    )
    train_minibatch_fn: Parameter[Callable[..., Any]] = Parameter(
        "Trains on one batch, with Horovod's arguments: (model, optimizer, transform_outputs, "
        "loss_fn, inputs, labels, sample_weights, backward_passes_per_step, batch_idx); it may "
        "leave out the last ones. It returns (outputs, loss).",
        argument_checks.check_callable_value,
        default=None,
    )
    data_module: Parameter[type] = Parameter(
        "A class that returns batches instead of the native reader, created with the arguments of "
        "Horovod's `DataModule`.",
        argument_checks.accept_any_value,
        default=None,
    )
    precision: Parameter[str] = Parameter(
        '`"fp32"`, or `"bf16"` or `"fp16"` for autocast, the latter with a GradScaler.',
        _check_precision,
        default="fp32",
    )
    gradient_clip_norm: Parameter[float] = Parameter(
        "Largest norm of all gradients together, after averaging.",
        argument_checks.check_positive_number,
        default=None,
    )
    sync_every: Parameter[int] = Parameter(
        "Steps that each process takes on its own before all average their parameters (local "
        "SGD); they also do at the end of each epoch. With more than 1, the learning rate is that "
        "of one process. With 1, gradients are averaged in each step.",
        argument_checks.make_minimum_check(1),
        default=1,
    )
    shard_optimizer: Parameter[bool] = Parameter(
        "Whether each process has a part of the optimizer's states, so they take 1 / `num_proc` of "
        "the memory. Needs an element-wise optimizer, such as AdamW.",
        argument_checks.check_boolean_flag,
        default=False,
    )
    strategy: Parameter[str] = Parameter(
        '`"ddp"`, with which each process has the whole model and gradients are averaged, or '
        '`"fsdp"`, which divides parameters, gradients and states of the optimizer among processes '
        "(FSDP2 of torch), for models larger than the memory of a process.",
        argument_checks.make_choice_check("ddp", "fsdp"),
        default="ddp",
    )
    fsdp_modules: Parameter[Sequence[str]] = Parameter(
        'With `strategy="fsdp"`: classes or paths of the modules whose parameters are gathered '
        'together, such as `["Block"]`. Without it, the blocks that a model of Hugging Face '
        "declares, or else the entries of its `ModuleList` and `Sequential`.",
        argument_checks.check_name_list,
        default=None,
    )
    ema_decay: Parameter[float] = Parameter(
        "Validates and returns weights that are averaged over the steps, with this share of the "
        "average kept in each step, such as 0.999.",
        argument_checks.check_open_share,
        default=None,
    )
    lr_scheduler: Parameter[Any] = Parameter(
        "A scheduler over the optimizer, or a function that creates one from an optimizer. It "
        'sees the learning rates of one process. Or the name of a schedule, `"constant"`, '
        '`"linear"` or `"cosine"`, which spans the run and changes the rates in each step.',
        _check_scheduler,
        default=None,
    )
    warmup_steps: Parameter[float] = Parameter(
        "Steps in which the rates of a named schedule rise from 0, or as a float below 1 the share "
        "of the run.",
        check_warmup_steps,
        default=None,
    )
    parameter_groups: Parameter[Mapping[str, Mapping[str, Any]]] = Parameter(
        "Options of the optimizer for the parameters whose names match a pattern, such as "
        '`{"bias|norm": {"weight_decay": 0.0}}`.',
        check_parameter_groups,
        default=None,
    )
    layer_decay: Parameter[float] = Parameter(
        "Share of a layer's learning rate that the layer below has, such as 0.75.",
        argument_checks.check_open_share,
        default=None,
    )
    lr_scheduler_interval: Parameter[str] = Parameter(
        'Interval of its steps: `"epoch"` or `"step"`.',
        argument_checks.make_choice_check("epoch", "step"),
        default="epoch",
    )
    early_stopping: Parameter[int | Mapping[str, Any]] = Parameter(
        "Epochs without an improvement after which the run ends, or a dict of `monitor`, "
        "`patience`, `min_delta` and `mode`.",
        argument_checks.make_conversion_check(EarlyStopping.from_value),
        default=None,
    )
    best_checkpoint: Parameter[str | Mapping[str, Any]] = Parameter(
        "Metric of the history that selects the best epoch, whose model is kept and returned "
        "instead of the last.",
        argument_checks.make_conversion_check(MonitoredMetric.from_value),
        default=None,
    )
    checkpoint_every: Parameter[int] = Parameter(
        "Interval in epochs at which a checkpoint is kept.",
        argument_checks.make_minimum_check(1),
        default=None,
    )
    compile: Parameter[bool] = Parameter(
        "Whether `torch.compile` compiles the model.",
        argument_checks.check_boolean_flag,
        default=False,
    )
    deterministic: Parameter[bool] = Parameter(
        "Whether equal seeds and sizes give equal bits.",
        argument_checks.check_boolean_flag,
        default=False,
    )
    max_steps: Parameter[int] = Parameter(
        "Steps of the optimizer after which the run ends.",
        argument_checks.make_minimum_check(1),
        default=None,
    )
    max_time: Parameter[float] = Parameter(
        "Seconds of training after which the run ends, within an epoch too.",
        argument_checks.check_positive_number,
        default=None,
    )
