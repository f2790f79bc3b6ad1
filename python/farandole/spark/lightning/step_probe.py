# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Tries the `training_step` of a module on parts of real rows, before workers start."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from farandole.spark.torch.columns.model_calls import inputs_by_key
from farandole.spark.torch.columns.tensors import input_tensor
from farandole.spark.torch.loss_probe import PartLoss, check_whole_against_parts
from farandole.spark.torch.random_numbers import hold_random_numbers
from farandole.spark.torch.training.tensor_source import to_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farandole.spark.lightning.job import LightningTrainingJob


def refuse_non_mean_training_step(
    job: LightningTrainingJob,
    module: Any,
    transformation: Any,
    *,
    processes: int,
) -> None:
    """Refuses a module whose loss of all rows is not the mean of its losses of parts, if several
    processes or passes make one step.

    A module is not tried if it steps its optimizers by itself. If its `training_step` needs the
    trainer, a warning says that it cannot be tried.

    Args:
        job: the run.
        module: a copy of the user's.
        transformation: the user's transformation of rows, or `None`.
        processes: number of processes of the job.

    Raises:
        ValueError: the loss is no mean over rows; the message names the options.
    """
    alone = processes == 1 and job.loop.backward_passes_per_step == 1
    if alone or job.loss_reduction is not None or not module.automatic_optimization:
        return
    tried = job.data.read_probe_parts(transformation, to_tensors)
    losses = [_step_loss(job, module, columns, rows) for columns, rows in tried]
    if any(one is None for one in losses):
        warnings.warn(
            f"training_step of {type(module).__name__} cannot be tried without a trainer, so its "
            "loss is taken for a mean over rows. With class weights, ignored labels or a sum, "
            "several processes or passes would train something else than one process. "
            "loss_reduction='mean' says that it is a mean",
            stacklevel=2,
        )
        return
    whole, *parts = [
        PartLoss(loss * rows, float(rows))
        for loss, (_, rows) in zip(losses, tried, strict=True)
        if loss is not None
    ]
    check_whole_against_parts(whole, parts, f"the loss of training_step of {type(module).__name__}")


def _step_loss(
    job: LightningTrainingJob, module: Any, part: Mapping[str, torch.Tensor], rows: int
) -> float | None:
    """Returns the loss of some rows; `None` if the step does not work without a trainer."""
    host = torch.device("cpu")
    tensors = [input_tensor(part, one, rows, host) for one in job.inputs]
    batch: dict[str, Any] = inputs_by_key(job.inputs, tensors)
    for spec in job.labels:
        label = part[spec.column.name].to(getattr(torch, spec.dtype))
        batch[spec.column.name] = label if spec.shape is None else label.reshape(spec.shape)
    if job.weight is not None:
        batch[job.weight] = part[job.weight].float().reshape(-1)
    batch |= {name: part[name] for name in job.more_columns}
    training = module.training
    module.eval()
    try:
        with torch.no_grad(), hold_random_numbers(0), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `self.log` without a trainer
            # A step with random parts has the same in each call.
            found = module.training_step(batch, 0)
    except Exception:  # noqa: BLE001 - a step without a trainer may raise any exception
        return None
    finally:
        module.train(training)
    loss = found.get("loss") if isinstance(found, dict) else found
    return float(loss) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None
