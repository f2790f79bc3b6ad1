# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Casts labels for a loss, and weighs rows in a loss.

A label column becomes `int64` if its loss takes class indices and the column has one element per
row (of any type: a Spark ML indexer returns doubles), and `float32` if its loss is another torch
loss. For the user's own loss it becomes `int64` if the column contains integers, else `float32`.

All rows of a step have the same weight, whichever process holds them. Padding has weight 0, and a
process with fewer rows weighs less, so two processes with a batch of 32 step like one process with
a batch of 64.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole.data.columns import Column
    from farandole.spark.torch.job import Objects

_INDEXED = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_INDEXED_FUNCTIONS = (functional.cross_entropy, functional.nll_loss, functional.multi_margin_loss)

_FORMS: dict[str, tuple[Any, ...]] = {
    "logits": (
        nn.CrossEntropyLoss, nn.MultiMarginLoss, nn.BCEWithLogitsLoss, functional.cross_entropy,
        functional.multi_margin_loss, functional.binary_cross_entropy_with_logits,
    ),
    "log_probabilities": (nn.NLLLoss, functional.nll_loss),
    "probabilities": (nn.BCELoss, functional.binary_cross_entropy),
    "values": (
        nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, functional.mse_loss,
        functional.l1_loss,
        functional.smooth_l1_loss, functional.huber_loss,
    ),
}  # fmt: skip


def form_of(loss: Any) -> str | None:
    """Returns the form of a model's output that a loss of torch takes, see
    `farandole.spark.common.model.classes`.

    Args:
        loss: of any kind; of one's own it tells nothing.
    """
    for form, losses in _FORMS.items():
        if any(loss is one or type(loss) is one for one in losses):
            return form
    return None


def constructed(objects: Objects, **arguments: Any) -> list[Any]:
    """Returns the given losses, or those that their constructors make.

    Args:
        objects: the user's.
        **arguments: what a constructor may ask for by name: `model`, `optimizer`, `rank`, `size`.

    Raises:
        TypeError: a constructor returns no function.
    """
    if not objects.constructed:
        return list(objects.losses)
    losses = [constructor(**_asked(constructor, arguments)) for constructor in objects.losses]
    for loss in losses:
        if not callable(loss):
            raise TypeError(f"loss_constructors must return functions of (output, label): {loss!r}")
    return losses


def _asked(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # classes written in C do not say
        return {}
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return arguments
    return {one.name: arguments[one.name] for one in parameters if one.name in arguments}


def takes_indices(loss: Any) -> bool:
    """Returns whether a torch loss takes the index of a class as label.

    Args:
        loss: of any kind.
    """
    return isinstance(loss, _INDEXED) or loss in _INDEXED_FUNCTIONS


def label_dtype(loss: Any, column: Column) -> str:
    """Returns the dtype a label column gets for its loss, by the rule of this module.

    Args:
        loss: the loss of that label.
        column: the label column.
    """
    if takes_indices(loss):
        return "int64" if column.size == 1 else "float32"
    owner = loss if inspect.isfunction(loss) or inspect.isbuiltin(loss) else type(loss)
    if (getattr(owner, "__module__", None) or "").startswith("torch.nn."):
        return "float32"
    return "int64" if column.dtype.startswith(("int", "uint")) else "float32"


def shaped(
    label: torch.Tensor, output: torch.Tensor, shape: tuple[int, ...] | None
) -> torch.Tensor:
    """Returns the label in the shape its loss expects.

    Args:
        label: rows first.
        output: what it will be compared with.
        shape: as set by the user, if at all.

    Returns:
        The label in that shape; without one, in the output's where it has as many elements: a loss
        of one's own would broadcast (rows,) and (rows, 1) to a matrix, and say nothing.
    """
    if shape is not None:
        return label.reshape(shape)
    if label.numel() == output.numel():
        return label.reshape(output.shape)
    if not label.is_floating_point() and label.shape[1:] == (1,):
        return label.reshape(-1)
    return label


def weighted(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns a loss that takes a weight per row: the mean of loss times weight.

    Args:
        loss: a loss of torch, or anything that takes `reduction="none"`.

    Returns:
        A function of (output, label, weights).

    Raises:
        ValueError: the loss cannot be had row by row.
    """
    name = getattr(loss, "__name__", type(loss).__name__)
    if isinstance(loss, nn.Module):
        if not hasattr(loss, "reduction"):
            raise ValueError(f"sample weights need a loss with a reduction, {name} has none")
        module: Any = copy.copy(loss)
        module.reduction = "none"
        single = module
    elif "reduction" in inspect.signature(loss).parameters:
        single = functools.partial(loss, reduction="none")
    else:
        raise ValueError(
            f"sample weights need a loss with an argument `reduction`, {name} has none"
        )

    def mean(output: torch.Tensor, label: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        losses = single(output, label)
        return (losses.reshape(len(weights), -1).mean(dim=1) * weights).mean()

    return mean


def share(valid: int, size: int, everywhere: int) -> float:
    """Returns the factor of the mean loss over this process's rows, before gradients are averaged
    over processes.

    Args:
        valid: rows of this process in this batch.
        size: processes.
        everywhere: rows of all processes in all batches whose gradients make the step.
    """
    return valid * size / everywhere
