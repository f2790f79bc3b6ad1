# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Losses of Keras that divide by more than rows, as one process would compute them.

A loss with ignored labels, a mask or weights is a sum over values that is divided by a count. Each
process knows its own sum and count. The counts of all processes are added in each step, so that
the mean of the losses of processes is the sum of all values divided by the count of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
from keras.src.backend.common.masking import get_keras_mask

from farandole._keras.reducer import make_reducer
from farandole._keras.settings import GradientReductionSettings
from farandole.common import basics
from farandole.spark.keras.model_compilation import ignored_class

if TYPE_CHECKING:
    from collections.abc import Sequence

_WEIGHTED_MEAN = "mean_with_sample_weight"


def compute_losses_as_parts(
    model: Any, share: list[Any], added: Sequence[str], *, sums_outputs: bool
) -> None:
    """Lets a model compute the losses of this process as parts of the losses of all processes.

    Args:
        model: compiled and built. Only this object changes; its saved form does not.
        share: two elements: the factor of the gradients of the batch in progress, which is 0 if
            none of the rows count, and the batches whose gradients Keras averages.
        added: reductions of the losses that layers add and of regularizers, in the order of
            `model.losses`: `"sum"` or `"mean"`.
        sums_outputs: whether the losses of outputs are sums, whatever they say.
    """
    factor = _SumFactor(share)
    reducer = make_reducer(GradientReductionSettings(name="losses"))
    compiled: Any = model._compile_loss  # noqa: SLF001 - no public door
    if compiled is not None:
        compiled._flat_losses = [  # noqa: SLF001 - no public door
            entry._replace(
                loss=_FactoredSumLoss(entry.loss, factor)
                if sums_outputs or entry.loss.reduction == "sum"
                else _ProcessPartLoss(entry.loss, reducer, f"counts.{index}", share)
            )
            for index, entry in enumerate(compiled._flat_losses)  # noqa: SLF001 - no public door
        ]
    if "sum" not in added:
        return
    plain_loss, plain_added = model.compute_loss, model._aggregate_additional_loss  # noqa: SLF001 - no public door
    position = [0]

    def compute_loss(*arguments: Any, **named: Any) -> Any:
        position[0] = 0
        return plain_loss(*arguments, **named)

    def aggregate_added_loss(loss: Any) -> Any:
        value, reduction = plain_added(loss), added[position[0]]
        position[0] += 1
        return factor.scale_sum(value) if reduction == "sum" else value

    model.__dict__["compute_loss"] = compute_loss
    model.__dict__["_aggregate_additional_loss"] = aggregate_added_loss


class _SumFactor:
    """The factor of a sum over rows, before gradients get the share of the batch.

    Args:
        share: as in `compute_losses_as_parts`.
    """

    def __init__(self, share: list[Any]) -> None:
        self._share = share

    def scale_sum(self, value: Any) -> Any:
        """Returns a sum times the factor; 0 for a batch without rows that count."""
        ops: Any = keras.ops  # its functions are typed as if they returned None
        share, passes = self._share
        size = ops.convert_to_tensor(float(basics.size() * passes), dtype="float32")
        factor = ops.divide_no_nan(size, ops.cast(share, "float32"))
        return value * ops.cast(factor, value.dtype)


class _FactoredSumLoss:
    """A loss that is a sum over rows."""

    def __init__(self, loss: Any, factor: _SumFactor) -> None:
        self._loss, self._factor = loss, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return self._factor.scale_sum(self._loss(y_true, y_pred, sample_weight))


class _ProcessPartLoss:
    """A loss of Keras whose value is this process's part, before gradients get the share."""

    def __init__(self, loss: Any, reducer: Any, name: str, share: list[Any]) -> None:
        self._loss, self._reducer, self._name, self._share = loss, reducer, name, share

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        ops: Any = keras.ops  # its functions are typed as if they returned None
        value = self._loss(y_true, y_pred, sample_weight)
        share = self._share[0]
        count = _loss_divisor(self._loss, y_true, y_pred, sample_weight)
        if count is None:
            return value
        share = ops.cast(share, "float32")
        own = ops.stop_gradient(ops.cast(count, "float32"))
        own = own * ops.cast(share > 0, "float32")
        total = self._reducer.sum_over_ranks(own, self._name)
        factor = ops.divide_no_nan(own * basics.size(), total * share)
        return value * ops.cast(ops.stop_gradient(factor), value.dtype)


def _loss_divisor(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
    """Returns the number that a loss divides by; `None` if it is proportional to rows."""
    ops: Any = keras.ops  # its functions are typed as if they returned None
    mask = get_keras_mask(y_pred)
    ignored = ignored_class(loss)
    if ignored is not None:
        labels = ops.convert_to_tensor(y_true)
        shape = tuple(ops.shape(y_pred))
        axis = getattr(loss, "axis", None)
        axis = (-1 if axis is None else axis) % len(shape)
        valid = ops.reshape(
            ops.not_equal(labels, ops.cast(ignored, labels.dtype)), shape[:axis] + shape[axis + 1 :]
        )
        mask = valid if mask is None else ops.logical_and(mask, valid)
    if loss.reduction == _WEIGHTED_MEAN and sample_weight is not None:
        weights = ops.cast(sample_weight, "float32")
        if mask is None:
            return ops.sum(weights)
        missing = len(mask.shape) - len(weights.shape)
        weights = ops.reshape(weights, (*ops.shape(weights), *[1] * missing))
        return ops.sum(ops.cast(mask, "float32") * weights)
    return None if mask is None else ops.sum(ops.cast(mask, "float32"))
