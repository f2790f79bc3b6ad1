# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Casts labels for a loss.

A label column becomes `int64` if its loss takes class indices and the column has one element per
row (of any type: a Spark ML indexer returns doubles), or if its loss takes a list of class indices.
A list of integers becomes `int64` if the model's output shows that it has indices of classes.
It becomes `float32` if its loss is another torch loss. A partial function counts as its function.
For the user's own loss it becomes `int64` if the column contains integers, else `float32`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from farandole.torch.loss_sums import unwrap_partial

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole.data.columns import PreparedColumn
    from farandole.spark.torch.job import TorchUserObjects

_INDEX_LOSS_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_INDEX_LOSS_FUNCTIONS = (
    functional.cross_entropy,
    functional.nll_loss,
    functional.multi_margin_loss,
)

_INDEX_LIST_LOSSES = (nn.MultiLabelMarginLoss, functional.multilabel_margin_loss)

_LOSSES_BY_OUTPUT_FORM: dict[str, tuple[Any, ...]] = {
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


def loss_output_form(loss: Any) -> str | None:
    """Returns the form of a model's output that a loss of torch takes, see
    `farandole.spark.common.model.class_columns`.

    Args:
        loss: any loss. The form of a custom loss is unknown.
    """
    function, _ = unwrap_partial(loss)
    for form, losses in _LOSSES_BY_OUTPUT_FORM.items():
        if any(function is one or type(function) is one for one in losses):
            return form
    return None


def construct_losses(objects: TorchUserObjects, **arguments: Any) -> list[Any]:
    """Returns the given losses, or the results of their constructors.

    Args:
        objects: the user's objects.
        **arguments: arguments that a constructor may take by name: `model`, `optimizer`, `rank`,
            `size`.

    Raises:
        TypeError: a constructor returns no function.
    """
    if not objects.constructed:
        return list(objects.losses)
    losses = [
        constructor(**_requested_arguments(constructor, arguments))
        for constructor in objects.losses
    ]
    for loss in losses:
        if not callable(loss):
            raise TypeError(f"loss_constructors must return functions of (output, label): {loss!r}")
    return losses


def _requested_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # classes written in C do not say
        return {}
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return arguments
    return {one.name: arguments[one.name] for one in parameters if one.name in arguments}


def takes_class_indices(loss: Any) -> bool:
    """Returns whether a torch loss takes the index of a class as label.

    Args:
        loss: loss of any kind.
    """
    function, _ = unwrap_partial(loss)
    return isinstance(function, _INDEX_LOSS_CLASSES) or function in _INDEX_LOSS_FUNCTIONS


def label_dtype(loss: Any, column: PreparedColumn) -> str:
    """Returns the dtype a label column gets for its loss, by the rule of this module.

    Args:
        loss: the loss of that label.
        column: the label column.
    """
    if takes_class_indices(loss):
        return "int64" if column.element_count == 1 else "float32"
    function, _ = unwrap_partial(loss)
    if function in _INDEX_LIST_LOSSES or type(function) in _INDEX_LIST_LOSSES:
        return "int64"
    is_function = inspect.isfunction(function) or inspect.isbuiltin(function)
    owner = function if is_function else type(function)
    if (getattr(owner, "__module__", None) or "").startswith("torch.nn."):
        return "float32"
    return "int64" if column.dtype.startswith(("int", "uint")) else "float32"


def shape_label(
    label: torch.Tensor, output: torch.Tensor, shape: tuple[int, ...] | None
) -> torch.Tensor:
    """Returns the label in the shape its loss expects.

    Args:
        label: the label, rows first.
        output: output that the loss compares with the label.
        shape: shape set by the user, if any.

    Returns:
        The label in the user's shape; without one, in the output's shape if both have as many
        elements. A custom loss would silently broadcast (rows,) and (rows, 1) to a matrix.
    """
    if shape is not None:
        return label.reshape(shape)
    if label.numel() == output.numel():
        return label.reshape(output.shape)
    if not label.is_floating_point() and label.shape[1:] == (1,):
        return label.reshape(-1)
    return label
