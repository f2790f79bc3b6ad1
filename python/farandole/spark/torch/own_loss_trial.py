# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Tries the own loss of a model before workers start: the type of labels that it takes, and what
divides it.

Each trial has a copy of the model, because models of transformers remember the kind of the first
labels that they get.
"""

from __future__ import annotations

import contextlib
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from farandole.spark.common.data.training_data import EXAMPLE_ROWS
from farandole.spark.torch.columns.model_losses import IGNORED_LABEL, ModelLoss
from farandole.spark.torch.columns.tensors import input_tensor
from farandole.spark.torch.loss_probe import (
    PartLoss,
    check_whole_against_parts,
    is_sum_of_parts,
)
from farandole.spark.torch.random_numbers import hold_random_numbers
from farandole.spark.torch.training.tensor_source import to_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farandole.spark.common.data.training_data import TrainingDataSpec
    from farandole.spark.torch.job import TorchLabel
    from farandole.spark.torch.model_trial import TriedModel

_IGNORED_SHARE = 0.4
"""Share of labels that are ignored in a trial."""


@dataclass(frozen=True)
class OwnLossTrial:
    """The result of a trial.

    Attributes:
        labels: the labels, with the types that the model takes.
        output_form: the form of the output, if the loss shows it.
    """

    labels: tuple[TorchLabel, ...]
    output_form: str | None


def try_own_loss(
    tried: TriedModel,
    labels: Sequence[TorchLabel],
    model: torch.nn.Module,
    rows: Mapping[str, torch.Tensor],
) -> OwnLossTrial:
    """Gives a model some labels, and computes the gradients of its loss.

    Args:
        tried: the call and the inputs of the model.
        labels: one per output.
        model: the model, which stays as it is.
        rows: columns by name.

    Raises:
        ValueError: the model returns no loss.
    """
    problems: list[Exception] = []
    for other in (None, "float32", "int64"):
        chosen = tuple(one if other is None else replace(one, dtype=other) for one in labels)
        if other is not None and chosen == tuple(labels):
            continue
        try:
            loss, outputs = _own_loss(tried, chosen, model, rows, EXAMPLE_ROWS, gradients=True)
        except Exception as error:  # noqa: BLE001 - a model may raise any exception
            problems.append(error)
            continue
        form = _output_form(loss, chosen, outputs, rows) if len(labels) == 1 else None
        if form == "logits":
            chosen = tuple(replace(one, indexes=True) for one in chosen)
        return OwnLossTrial(chosen, form)
    raise ValueError(f"loss is required: {problems[0]}") from problems[0]


def find_own_loss(
    tried: TriedModel,
    labels: Sequence[TorchLabel],
    model: torch.nn.Module,
    data: TrainingDataSpec,
    transformation: Any,
) -> ModelLoss:
    """Returns the own loss of a model with what divides it, by a trial on parts of some rows: their
    number, or the number of labels that are not ignored.

    Args:
        tried: the call and the inputs of the model.
        labels: result of `try_own_loss`.
        model: the model, which stays as it is.
        data: the rows.
        transformation: the user's transformation of rows, or `None`.

    Raises:
        ValueError: the loss of all rows is no mean of the losses of parts.
    """
    parts = data.read_probe_parts(transformation, to_tensors)[1:3]
    pieces = _with_whole(parts)
    if all(_may_ignore_labels(one) for one in labels):
        found = _counted_from(tried, labels, model, parts)
        if found is not None:
            return ModelLoss(found)
    losses = [float(_own_loss(tried, labels, model, columns, rows)[0]) for columns, rows in pieces]
    found = [
        PartLoss(loss * rows, float(rows)) for loss, (_, rows) in zip(losses, pieces, strict=True)
    ]
    check_whole_against_parts(found[0], found[1:], "the model's own loss", pieces[0][1])
    return ModelLoss()


def _counted_from(
    tried: TriedModel,
    labels: Sequence[TorchLabel],
    model: torch.nn.Module,
    parts: Sequence[tuple[Mapping[str, torch.Tensor], int]],
) -> int | None:
    """Returns the first label of a row that counts, if the loss is a mean over labels that are not
    ignored. Otherwise `None`.
    """
    masked = _with_whole([(_ignore_some_labels(columns, labels), rows) for columns, rows in parts])
    losses, first = _losses_of_parts(tried, labels, model, masked), labels[0].column
    if not losses:
        return None
    divisors: dict[int | None, list[float]] = {None: [float(rows) for _, rows in masked]}
    for start in (0, 1) if first.shape else (0,):
        count = ModelLoss(start).count_labels
        divisors[start] = [count(columns[first.name]) for columns, _ in masked]
    totals = {
        start: [loss * divisor for loss, divisor in zip(losses, found, strict=True)]
        for start, found in divisors.items()
    }
    # The losses of parts of a model that is not trained are nearly equal, and then several divisors
    # nearly fit. Only the one that is right fits to the last digits.
    best = min(totals, key=lambda start: abs(totals[start][0] / sum(totals[start][1:]) - 1))
    return best if is_sum_of_parts(totals[best][0], totals[best][1:]) else None


def _with_whole(
    parts: Sequence[tuple[Mapping[str, torch.Tensor], int]],
) -> list[tuple[Mapping[str, torch.Tensor], int]]:
    """Returns all rows, and then the parts."""
    names = parts[0][0]
    whole = {name: torch.cat([columns[name] for columns, _ in parts]) for name in names}
    return [(whole, sum(rows for _, rows in parts)), *parts]


def _may_ignore_labels(label: TorchLabel) -> bool:
    if label.dtype != "int64":
        return False
    return label.value_range is None or label.value_range[0] <= IGNORED_LABEL


def _ignore_some_labels(
    columns: Mapping[str, torch.Tensor], labels: Sequence[TorchLabel]
) -> dict[str, torch.Tensor]:
    """Returns columns in which some labels, others in each part, are ignored."""
    made = dict(columns)
    for torch_label in labels:
        label = columns[torch_label.column.name].long().clone()
        chance = torch.rand(label.shape, generator=torch.Generator().manual_seed(len(label)))
        chance[-1] = 1.0  # a part must have labels that count
        label[chance < _IGNORED_SHARE] = IGNORED_LABEL
        made[torch_label.column.name] = label
    return made


def _losses_of_parts(
    tried: TriedModel,
    labels: Sequence[TorchLabel],
    model: torch.nn.Module,
    parts: Sequence[tuple[Mapping[str, torch.Tensor], int]],
) -> list[float]:
    """Returns the loss of each part; none if the model does not take such labels."""
    try:
        return [float(_own_loss(tried, labels, model, *part)[0]) for part in parts]
    except Exception:  # noqa: BLE001 - a model may raise any exception
        return []


def _own_loss(
    tried: TriedModel,
    labels: Sequence[TorchLabel],
    model: torch.nn.Module,
    rows: Mapping[str, torch.Tensor],
    count: int,
    *,
    gradients: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns the loss and the outputs of a copy of a model."""
    copy = deepcopy(model).cpu().eval()
    host = torch.device("cpu")
    inputs = [input_tensor(rows, one, count, host) for one in tried.inputs]
    given = [_label_argument(one, rows, count) for one in labels]
    with torch.set_grad_enabled(gradients), hold_random_numbers():
        loss, rest = tried.call.split_own_loss(tried.call.call_model(copy, inputs, given))
        if gradients:
            trained = [one for one in copy.parameters() if one.requires_grad]
            if trained:
                torch.autograd.grad(loss, trained, allow_unused=True)
    return loss.detach(), tried.call.output_tensors(rest)


def _label_argument(
    label: TorchLabel, rows: Mapping[str, torch.Tensor], count: int
) -> torch.Tensor:
    value = rows[label.column.name][:count].to(getattr(torch, label.dtype))
    return value if label.shape is None else value.reshape(label.shape)


def _output_form(
    loss: torch.Tensor,
    labels: Sequence[TorchLabel],
    outputs: Sequence[torch.Tensor],
    rows: Mapping[str, torch.Tensor],
) -> str | None:
    """Returns the form of an output whose loss is one that torch has, too."""
    label, output = _label_argument(labels[0], rows, EXAMPLE_ROWS), outputs[0].detach()
    losses = {
        "logits": lambda: functional.cross_entropy(output, label),
        "values": lambda: functional.mse_loss(output.reshape(-1), label.reshape(-1).float()),
    }
    is_class = label.dtype == torch.int64 and label.dim() == 1 and output.dim() == 2  # noqa: PLR2004 - (rows, classes)
    fits = {"logits": is_class and output.shape[1] > 1, "values": label.numel() == output.numel()}
    for form, compute in losses.items():
        with contextlib.suppress(IndexError, RuntimeError):
            if fits[form] and torch.allclose(loss, compute(), rtol=1e-4, atol=1e-6):
                return form
    return None
