# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Splits a loss into a sum over rows and the count that divides this sum.

Each rank computes its loss from its own rows. The mean of these losses over ranks is the loss of
all rows only if every rank divides by the same count. Class weights, ignored labels and batches of
different sizes make the counts differ. Then the sums must be added over ranks before they are
divided by the sum of the counts.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from farandole.torch.sync_batch_norm import is_batch_all_padding

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LABEL_COUNT_LOSSES: tuple[Any, ...] = (
    nn.CrossEntropyLoss, nn.NLLLoss, functional.cross_entropy, functional.nll_loss,
)  # fmt: skip
"""Losses whose mean divides by the class weights of the labels that are not ignored."""
_ROW_LOSSES: tuple[Any, ...] = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss,
    nn.SoftMarginLoss, nn.HingeEmbeddingLoss, nn.PoissonNLLLoss, nn.KLDivLoss, nn.MultiMarginLoss,
    nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss, functional.mse_loss, functional.l1_loss,
    functional.smooth_l1_loss, functional.huber_loss, functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits, functional.soft_margin_loss,
    functional.hinge_embedding_loss, functional.poisson_nll_loss, functional.kl_div,
    functional.multi_margin_loss, functional.multilabel_margin_loss,
    functional.multilabel_soft_margin_loss,
)  # fmt: skip
"""Losses whose mean divides by the number of elements, which is the same for every row."""
_OTHER_ARGUMENT_LOSSES: tuple[Any, ...] = (
    nn.GaussianNLLLoss, nn.CosineEmbeddingLoss, nn.MarginRankingLoss, nn.TripletMarginLoss,
    nn.TripletMarginWithDistanceLoss, functional.gaussian_nll_loss,
    functional.cosine_embedding_loss, functional.margin_ranking_loss,
    functional.triplet_margin_loss, functional.triplet_margin_with_distance_loss,
)  # fmt: skip
"""Losses that take other arguments than output and label; their mean divides by elements."""
_DEFAULT_IGNORED_LABEL = -100


def loss_sum_and_count(loss: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a loss as a sum and the count that its mean divides by.

    Add the counts of all ranks, and let every rank compute gradients from its sum, multiplied by
    the number of ranks, divided by the count of all ranks. `DistributedDataParallel` and
    `DistributedOptimizer` average gradients over ranks, and the average is then the gradient of the
    loss of all rows.

    Args:
        loss: a loss of torch, as a module, a function or a `functools.partial` of a function. Its
            own reduction does not matter.
        *arguments: arguments of the loss, such as output and label.

    Returns:
        The sum, a tensor of one number with gradients, and the count, a float64 tensor of one
        number on the sum's device. `sum / count` is the loss with `reduction="mean"` of these rows.
        If the labels of all rows are ignored, both are 0, and also in an estimator on a rank that
        repeats a row because no row is left for the last step.

    Raises:
        TypeError: it is unknown what divides the loss: it is none of torch, or `CTCLoss`, which
            divides by the lengths of targets.

    Example:
        total, count = hvd.loss_sum_and_count(criterion, model(images), labels)
        count = hvd.allreduce(count, op=hvd.Sum)
        (total * hvd.size() / count.clamp(min=1e-9)).backward()
    """
    total, count = _split_loss(loss, arguments)
    return (total * 0.0, count * 0.0) if is_batch_all_padding() else (total, count)


def _split_loss(loss: Any, arguments: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a loss as a sum and a count, of all rows."""
    function, _ = unwrap_partial(loss)
    if _is_loss(function, _LABEL_COUNT_LOSSES):
        label = arguments[1]
        total = loss_with_reduction(loss, "sum")(*arguments)
        if not label.is_floating_point():
            return total, label_count(loss, label)
        # The labels are probabilities of classes, and every element counts.
        elements = label.numel() // label.shape[1 if label.dim() > 1 else 0]
        return total, torch.tensor(elements, dtype=torch.float64, device=total.device)
    if not _is_loss(function, (*_ROW_LOSSES, *_OTHER_ARGUMENT_LOSSES)):
        raise TypeError(
            f"what divides the mean of {loss_name(loss)} is unknown: it is no loss of torch that "
            "divides by elements or by class weights. Return its sum over rows and its count from "
            "your own code"
        )
    losses = loss_with_reduction(loss, "none")(*arguments)
    return losses.sum(), torch.tensor(losses.numel(), dtype=torch.float64, device=losses.device)


def loss_name(loss: Any) -> str:
    """Returns the name of a loss for messages."""
    function, _ = unwrap_partial(loss)
    return getattr(function, "__name__", type(function).__name__)


def unwrap_partial(loss: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the function of a partial function without positional arguments, and its keywords;
    of another loss, the loss itself.
    """
    if isinstance(loss, functools.partial) and not loss.args:
        return loss.func, dict(loss.keywords)
    return loss, {}


def known_reduction(loss: Any) -> str | None:
    """Returns the reduction of a loss of torch that takes output and label.

    Args:
        loss: any loss.

    Returns:
        `"mean"`, `"sum"` or `"batchmean"`; `None` for a loss of an unknown form.
    """
    function, keywords = unwrap_partial(loss)
    if not _is_loss(function, (*_LABEL_COUNT_LOSSES, *_ROW_LOSSES)):
        return None
    old_arguments = {"size_average", "reduce"} & {
        name for name, value in keywords.items() if value is not None
    }
    reduction = getattr(function, "reduction", keywords.get("reduction", "mean"))
    known = not old_arguments and reduction in ("mean", "sum", "batchmean")
    return reduction if known else None


def loss_with_reduction(loss: Any, reduction: str) -> Callable[..., torch.Tensor]:
    """Returns the same loss with another reduction.

    Args:
        loss: a loss with an attribute or an argument `reduction`.
        reduction: `"none"` or `"sum"`.

    Raises:
        ValueError: the loss has no reduction.
    """
    if isinstance(loss, nn.Module):
        if not hasattr(loss, "reduction"):
            raise ValueError(
                f"sample weights need a loss with a reduction, {loss_name(loss)} has none"
            )
        module: Any = copy.copy(loss)
        module.reduction = reduction
        return module
    if "reduction" in inspect.signature(loss).parameters:
        return functools.partial(loss, reduction=reduction)
    raise ValueError(
        f"sample weights need a loss with an argument `reduction`, {loss_name(loss)} has none"
    )


def divides_by_labels(loss: Any) -> bool:
    """Returns whether the mean of a loss divides by a count that depends on the labels."""
    return _is_loss(unwrap_partial(loss)[0], _LABEL_COUNT_LOSSES)


def class_weights(loss: Any) -> torch.Tensor | None:
    """Returns the class weights of a cross entropy or a negative log-likelihood, if it has any."""
    return _loss_option(loss, "weight", None)


def ignored_label(loss: Any) -> int:
    """Returns the label that a cross entropy or a negative log-likelihood leaves out."""
    return int(_loss_option(loss, "ignore_index", _DEFAULT_IGNORED_LABEL))


def label_count(loss: Any, label: torch.Tensor) -> torch.Tensor:
    """Returns the divisor of the mean of a loss, for labels that are indices of classes.

    Args:
        loss: a loss for which `divides_by_labels` is true.
        label: indices of classes, in any shape.

    Returns:
        The sum of the class weights of all labels that are not ignored, as a float64 tensor of one
        number.
    """
    counted = label[label != ignored_label(loss)].long()
    weights = class_weights(loss)
    if weights is None:
        return torch.tensor(counted.numel(), dtype=torch.float64, device=label.device)
    # A label that is no class is left to the loss, whose error names it.
    found = counted.clamp(0, len(weights) - 1)
    return weights.detach().to(label.device, torch.float64)[found].sum()


def _loss_option(loss: Any, name: str, default: Any) -> Any:
    function, keywords = unwrap_partial(loss)
    return (
        getattr(function, name, default)
        if isinstance(function, nn.Module)
        else keywords.get(name, default)
    )


def _is_loss(function: Any, losses: tuple[Any, ...]) -> bool:
    # Not `isinstance`: the `forward` of a subclass may compute anything.
    return any(function is one or type(function) is one for one in losses)
