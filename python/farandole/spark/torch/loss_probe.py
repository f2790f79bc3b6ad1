# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Tries a loss of an unknown form on parts of real rows, before workers start.

The average of the gradients of processes equals the gradient of one process if the loss of all rows
is the mean of the losses of parts, weighted by the count of each part. Labels of real rows are
compared with outputs of the model, which need not belong to the same rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from farandole.spark.common.data.training_data import PROBE_PART_ROWS
from farandole.spark.torch.columns.loss_terms import LabelLoss
from farandole.spark.torch.columns.losses import shape_label
from farandole.spark.torch.model_trial import model_outputs
from farandole.spark.torch.random_numbers import hold_random_numbers
from farandole.spark.torch.training.tensor_source import to_tensors
from farandole.torch import loss_sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farandole.spark.common.data.training_data import ProbePart
    from farandole.spark.torch.job import TorchLabel, TorchTrainingJob

_MODEL_ROWS = 16
"""Rows for which the model is called; labels are compared with these outputs in turn."""
_RELATIVE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class PartLoss:
    """The loss of some rows: a sum, and what divides it."""

    total: float
    count: float

    @property
    def mean(self) -> float:
        """The loss itself."""
        return self.total / self.count if self.count else 0.0


def needs_probe(loss: Any, reduction: str | None) -> bool:
    """Returns whether only a trial shows the form of the result of a loss.

    Args:
        loss: loss of one label.
        reduction: the user's word for it.
    """
    return reduction is None and loss_sums.known_reduction(loss) is None


def check_label_loss_parts(
    torch_label: TorchLabel, loss: Any, output: torch.Tensor, parts: Sequence[ProbePart], name: str
) -> None:
    """Refuses a loss whose parts do not give the whole.

    Args:
        torch_label: the label.
        loss: its loss.
        output: output of the model, whose rows are compared with the labels in turn.
        parts: all rows, and then the parts of these rows.
        name: words for the loss in the message.

    Raises:
        ValueError: the loss of all rows is not the mean of the losses of parts.
    """
    label_loss, first = LabelLoss(loss, torch_label), 0
    found: list[PartLoss] = []
    for columns, rows in parts:
        first = 0 if len(found) <= 1 else first  # all rows, and the first part
        some = output[torch.arange(first, first + rows) % len(output)]
        first += rows
        label = columns[torch_label.column.name].to(getattr(torch, torch_label.dtype))
        count, shaped = (
            label_loss.loss_divisor(label, rows),
            shape_label(label, some, torch_label.shape),
        )
        try:
            with torch.no_grad(), hold_random_numbers(0):
                # A loss with random parts has the same in each call.
                term = label_loss.batch_loss_term(some, shaped, None, count)
        except Exception as error:
            raise ValueError(
                f"{name} takes no batch of {rows} rows, so it cannot be averaged over processes: "
                f"{error}"
            ) from error
        found.append(PartLoss(float(term.value) * term.scale, term.count))
    check_whole_against_parts(found[0], found[1:], name)


def check_whole_against_parts(
    whole: PartLoss, parts: Sequence[PartLoss], name: str, rows: int = sum(PROBE_PART_ROWS)
) -> None:
    """Refuses a loss whose parts do not give the whole.

    Args:
        whole: the loss of all rows.
        parts: the losses of the parts, such as `PROBE_PART_ROWS`.
        name: words for the loss in the message.
        rows: number of all rows.

    Raises:
        ValueError: the loss of all rows is not the mean of the losses of parts.
    """
    if is_sum_of_parts(whole.total, [one.total for one in parts]):
        return
    if is_sum_of_parts(whole.mean, [one.mean for one in parts]):
        raise ValueError(
            f"{name} is a sum over rows: of {rows} rows it is the sum of what it is of parts. Set "
            'loss_reduction="sum" so that several processes or passes train what one process trains'
        )
    mean = sum(one.total for one in parts) / max(sum(one.count for one in parts), 1e-12)
    raise ValueError(
        f"{name} is no mean over rows: of {rows} rows it is {whole.mean:g}, but the mean of its "
        f"parts is {mean:g}. "
        "Several processes or passes would train something else than one process. Use a loss that "
        "is a mean over rows, give the loss a method `label_count(label)` that returns what "
        'it divides by, or set loss_reduction: "mean" averages the losses of batches by their '
        'rows, "sum" adds them, "per_batch" averages them by batches'
    )


def try_unknown_losses(
    job: TorchTrainingJob,
    losses: Sequence[Any],
    model: torch.nn.Module,
    transformation: Any,
    *,
    processes: int,
) -> None:
    """Tries the losses of unknown forms, if several processes or passes make one step.

    Args:
        job: the run.
        losses: one per label.
        model: a copy of the user's.
        transformation: the user's transformation of rows, or `None`.
        processes: number of processes of the job.

    Raises:
        ValueError: a loss is no mean over rows; the message names the label and the options.
    """
    tried = [needs_probe(loss, job.loss_reduction) for loss in losses]
    if (
        job.own_loss is not None
        or not any(tried)
        or (processes == 1 and job.loop.backward_passes_per_step == 1)
    ):
        return
    parts = job.data.read_probe_parts(transformation, to_tensors)
    outputs = model_outputs(job.call, job.inputs, model, parts[0].columns, _MODEL_ROWS)
    for label, loss, output, is_tried in zip(job.labels, losses, outputs, tried, strict=True):
        if is_tried:
            name = f"the loss {loss_sums.loss_name(loss)} of column {label.column.name!r}"
            check_label_loss_parts(label, loss, output, parts, name)


def is_sum_of_parts(whole: float, parts: Sequence[float]) -> bool:
    """Returns whether a whole is the sum of its parts; NaN on both sides says nothing."""
    total = sum(parts)
    if math.isnan(whole):
        return math.isnan(total)
    return abs(whole - total) <= _RELATIVE_TOLERANCE * max(sum(map(abs, parts)), abs(whole), 1e-12)
