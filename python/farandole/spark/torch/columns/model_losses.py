# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The loss that a model returns when it gets labels, in place of a loss of outputs and labels."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

IGNORED_LABEL = -100
"""Label that models leave out of their loss, as the cross entropy of torch does."""
_LABEL_ARGUMENT = "labels"


@dataclass(frozen=True)
class ModelLoss:
    """The own loss of a model, a mean over rows or over labels that are not ignored.

    Attributes:
        counted_from: first label of each row that counts, if the loss is a mean over labels that
            are not ignored. A language model does not predict the first one, so it counts from 1.
    """

    __name__: ClassVar[str] = "its own loss"

    counted_from: int | None = None

    def __call__(self, loss: torch.Tensor, _label: Any) -> torch.Tensor:
        """Returns the loss, which the model has computed."""
        return loss

    @property
    def label_count(self) -> Callable[[torch.Tensor], float] | None:
        """The function that counts the labels of a batch; `None` if rows count."""
        return None if self.counted_from is None else self.count_labels

    def count_labels(self, label: torch.Tensor) -> float:
        """Returns the number of labels that are not ignored.

        Args:
            label: labels of a batch, rows first.
        """
        counted = label[:, self.counted_from :] if label.dim() > 1 else label
        return float((counted != IGNORED_LABEL).sum())


def own_loss_arguments(
    model: torch.nn.Module, labels: Sequence[str], arguments: Sequence[tuple[str, ...]]
) -> tuple[str, ...]:
    """Returns the arguments of a model that take labels.

    Args:
        model: the model.
        labels: names of the label columns.
        arguments: path of each input; empty paths stand for positions.

    Raises:
        ValueError: the model has no such arguments, so a loss is required.
    """
    parameters = inspect.signature(model.forward).parameters
    kinds = {one.kind for one in parameters.values()}
    positions = [] if any(arguments) else list(parameters)[: len(arguments)]
    taken = {*positions, *(path[0] for path in arguments if path)}
    free = set(parameters) - taken
    if free >= set(labels):
        return tuple(labels)
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds and _LABEL_ARGUMENT not in taken
    if len(labels) == 1 and (_LABEL_ARGUMENT in free or takes_any):
        return (_LABEL_ARGUMENT,)
    wanted = " and ".join(map(repr, labels))
    raise ValueError(
        f"loss is required: {type(model).__name__}.forward has no argument for labels (called "
        f"{_LABEL_ARGUMENT!r}, or like the label column{'s' if len(labels) > 1 else ''} {wanted}) "
        "with which it would return a loss of its own"
    )
