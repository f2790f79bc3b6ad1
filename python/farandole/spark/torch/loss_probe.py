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

from farandole.spark.common.data.source import sample_rows
from farandole.spark.torch.columns.loss_terms import LabelLoss
from farandole.spark.torch.columns.losses import shape_label
from farandole.spark.torch.mapping import model_outputs
from farandole.spark.torch.training.source import to_tensors
from farandole.torch import loss_sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farandole.spark.torch.job import TorchLabel, TorchTrainingJob

PROBE_PART_ROWS = (3, 20, 9) * 8
"""Rows of the parts on which a loss is tried. They are drawn from the whole data set, so that they
contain labels that only a few rows have. The parts are small, because the loss of a part with most
of the rows is close to the loss of all rows, for any loss.
"""
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


@dataclass(frozen=True)
class ProbeRows:
    """Real rows on which losses are tried.

    Attributes:
        columns: tensors by column.
        outputs: outputs of the model, one per label, as many rows as `columns` has.
    """

    columns: dict[str, torch.Tensor]
    outputs: list[torch.Tensor]


def needs_probe(loss: Any, reduction: str | None) -> bool:
    """Returns whether only a trial shows the form of the result of a loss.

    Args:
        loss: loss of one label.
        reduction: the user's word for it.
    """
    return reduction is None and loss_sums.known_reduction(loss) is None


def read_probe_rows(
    job: TorchTrainingJob, model: torch.nn.Module, transformation: Any, names: Sequence[str]
) -> ProbeRows:
    """Returns rows on which losses are tried.

    Args:
        job: the run.
        model: a copy of the user's.
        transformation: the user's transformation of rows, or `None`.
        names: columns that are read.
    """
    data, rows = job.data, sum(PROBE_PART_ROWS)
    arrays = sample_rows(
        data.train_url, names, rows, transformation, data.missing, data.ragged, spread=True
    )
    columns = to_tensors(arrays)
    outputs = model_outputs(job.inputs, job.labels, model, columns, _MODEL_ROWS)
    order = torch.arange(rows) % _MODEL_ROWS
    return ProbeRows(columns, [output[order] for output in outputs])


def check_loss_parts(
    torch_label: TorchLabel, loss: Any, output: torch.Tensor, values: torch.Tensor, name: str
) -> None:
    """Refuses a loss whose parts do not give the whole.

    Args:
        torch_label: the label.
        loss: its loss.
        output: output of the model.
        values: the label column, as many rows.
        name: words for the loss in the message.

    Raises:
        ValueError: the loss of all rows is not the mean of the losses of parts.
    """
    label_loss = LabelLoss(loss, torch_label)
    label = values.to(getattr(torch, torch_label.dtype))
    ends = torch.tensor(PROBE_PART_ROWS).cumsum(0).tolist()
    bounds = [(0, ends[-1]), *zip([0, *ends[:-1]], ends, strict=True)]
    found: list[PartLoss] = []
    for first, last in bounds:
        rows = last - first
        count = label_loss.count(label[first:last], rows)
        shaped = shape_label(label[first:last], output[first:last], torch_label.shape)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # a loss with random parts has the same in each call
                term = label_loss.term(output[first:last], shaped, None, count)
        except Exception as error:
            raise ValueError(
                f"{name} takes no batch of {rows} rows, so it cannot be averaged over processes: "
                f"{error}"
            ) from error
        found.append(PartLoss(float(term.value) * term.scale, term.count))
    check_parts(found[0], found[1:], name)


def check_parts(whole: PartLoss, parts: Sequence[PartLoss], name: str) -> None:
    """Refuses a loss whose parts do not give the whole.

    Args:
        whole: the loss of all rows.
        parts: the losses of `PROBE_PART_ROWS`.
        name: words for the loss in the message.

    Raises:
        ValueError: the loss of all rows is not the mean of the losses of parts.
    """
    if _is_close(whole.total, [one.total for one in parts]):
        return
    rows = sum(PROBE_PART_ROWS)
    if _is_close(whole.mean, [one.mean for one in parts]):
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


def check_loss_forms(
    job: TorchTrainingJob,
    losses: Sequence[Any],
    model: torch.nn.Module,
    transformation: Any,
    *,
    processes: int,
    names: Sequence[str],
) -> None:
    """Tries the losses of unknown forms, if several processes or passes make one step.

    Args:
        job: the run.
        losses: one per label.
        model: a copy of the user's.
        transformation: the user's transformation of rows, or `None`.
        processes: number of processes of the job.
        names: columns that are read.

    Raises:
        ValueError: a loss is no mean over rows; the message names the label and the options.
    """
    tried = [needs_probe(loss, job.loss_reduction) for loss in losses]
    if not any(tried) or (processes == 1 and job.loop.backward_passes == 1):
        return
    rows = read_probe_rows(job, model, transformation, names)
    for torch_label, loss, output, is_tried in zip(
        job.labels, losses, rows.outputs, tried, strict=True
    ):
        if is_tried:
            column = torch_label.column.name
            name = f"the loss {loss_sums.loss_name(loss)} of column {column!r}"
            check_loss_parts(torch_label, loss, output, rows.columns[column], name)


def _is_close(whole: float, parts: Sequence[float]) -> bool:
    """Returns whether a whole is the sum of its parts; NaN on both sides says nothing."""
    total = sum(parts)
    if math.isnan(whole):
        return math.isnan(total)
    return abs(whole - total) <= _RELATIVE_TOLERANCE * max(sum(map(abs, parts)), abs(whole), 1e-12)
