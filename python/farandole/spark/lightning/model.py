# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TorchModel` of Lightning's estimator."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from pyspark.sql import Row

from farandole.spark.torch.model import TorchModel as PlainTorchModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class TorchModel(PlainTorchModel):
    """A model that adds predictions of the module's `forward` to DataFrames, like
    `farandole.spark.torch.TorchModel`.

    A subclass that overrides `get_prediction_fn` predicts in its own way: row by row as with
    Horovod, or batch by batch.
    """

    def get_prediction_fn(self) -> Callable[..., Any]:
        """Returns the function that predicts.

        A subclass returns one of two kinds:

        - A function of the model and one row, as with Horovod. The row is a `pyspark.sql.Row` with
          all columns of the DataFrame, of any type. It runs on the CPU.
        - A function that is marked with `farandole.spark.common.transform.batched`, of the model
          and its inputs: tensors as in `fit`, one per entry of `feature_columns`, rows first. This
          is faster.

        Both return a tensor, or a tuple or list of tensors, one per label. The function that this
        class returns takes either.
        """
        return _ModulePrediction(self._input_columns(), self.getInputShapes())

    def _custom_prediction_fn(self) -> Callable[..., Any] | None:
        function = self.get_prediction_fn()
        known = isinstance(function, _ModulePrediction)
        return function if _is_batched(function) and not known else None

    def _row_prediction_fn(self) -> Callable[..., Any] | None:
        function = self.get_prediction_fn()
        if _is_batched(function):
            return None
        _check_row_arguments(function)
        return function


class _ModulePrediction:
    """Calls a module with its inputs, or with those that are made of one row.

    Args:
        groups: the columns of each input.
        shapes: shape of each input's tensor; `None` is one row of the columns' elements.
    """

    batched = True

    def __init__(
        self, groups: Sequence[Sequence[str]], shapes: Sequence[Sequence[int]] | None
    ) -> None:
        self._groups = groups
        self._shapes = shapes or [[1, -1]] * len(groups)

    def __call__(self, module: Any, *inputs: Any) -> Any:
        """Returns the module's outputs."""
        if len(inputs) == 1 and isinstance(inputs[0], Row):
            row = inputs[0]
            inputs = tuple(
                torch.cat([_float_tensor(row[name]) for name in group]).reshape(list(shape))
                for group, shape in zip(self._groups, self._shapes, strict=True)
            )
        return module(*inputs)


def _float_tensor(value: Any) -> torch.Tensor:
    """Returns a number, a list of numbers or a vector of Spark as a flat tensor."""
    plain = value.toArray() if hasattr(value, "toArray") else value
    return torch.as_tensor(plain, dtype=torch.float32).reshape(-1)


def _is_batched(function: Callable[..., Any]) -> bool:
    return bool(getattr(function, "batched", False))


def _check_row_arguments(function: Callable[..., Any]) -> None:
    """Refuses a function that cannot be one of the model and a row.

    Raises:
        TypeError: it takes other arguments; the message says how a function of batches is marked.
    """
    signature = inspect.signature(function)
    several = any(one.kind is one.VAR_POSITIONAL for one in signature.parameters.values())
    try:
        signature.bind(None, None)
    except TypeError:
        several = True
    if several:
        raise TypeError(
            f"get_prediction_fn must return a function of (model, row), or one of whole batches "
            f"that is marked with farandole.spark.common.transform.batched; this one takes "
            f"{signature}"
        )
