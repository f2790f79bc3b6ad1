# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""How columns become tensors, in training and in transform alike.

One tensor per feature column, cast to float32. A vector or list column of `n` elements is `(rows, n)`, a scalar column
`(rows, 1)`; `input_shapes` says otherwise, one shape per column, with -1 for the rows (`[-1, 1, 8, 8]`; a shape of one
row, `[1, 8, 8]`, does as well).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from farandole.spark.common.columns import row_shape
from farandole.spark.torch.job import Input

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farandole._native.reader import Batch
    from farandole.spark.common.columns import Column

_DTYPES = {"float32": torch.float32, "int64": torch.int64}


def inputs_of(columns: Sequence[Column], shapes: Sequence[Sequence[int]] | None) -> tuple[Input, ...]:
    """The tensor that each feature column becomes.

    Args:
        columns: the feature columns.
        shapes: one per column, where the user set them.
    """
    if shapes is None:
        return tuple(Input(column, (-1, column.size)) for column in columns)
    pairs = zip(columns, shapes, strict=True)
    return tuple(Input(column, (-1, *row_shape(shape, column.size))) for column, shape in pairs)


def column_tensor(batch: Batch, name: str, device: torch.device) -> torch.Tensor:
    """A column of a batch; on the CPU it shares the batch's memory.

    Args:
        batch: as the reader gives it.
        name: of the column.
        device: where the tensor is wanted.
    """
    column = batch.column(name)
    return torch.frombuffer(column, dtype=_DTYPES[column.dtype]).view(column.shape).to(device)


def outputs_of(value: Any, labels: int) -> list[torch.Tensor]:
    """A model's outputs as a list, one per label.

    Args:
        value: what the model returned: a tensor, or a tuple or list of them.
        labels: how many there must be.

    Raises:
        ValueError: the model returns something else, or another number.
    """
    outputs = [value] if isinstance(value, torch.Tensor) else value
    if not isinstance(outputs, list | tuple) or not all(isinstance(output, torch.Tensor) for output in outputs):
        raise ValueError(f"the model must return a tensor or a tuple of tensors, it returned {_kind(value)}")
    if len(outputs) != labels:
        raise ValueError(f"label column count {labels} must equal the count of model outputs {len(outputs)}")
    return list(outputs)


def told_misfit(names: Sequence[str], inputs: Sequence[torch.Tensor], error: Exception) -> str:
    """What to say when a model does not take its inputs.

    Args:
        names: the feature columns.
        inputs: their tensors.
        error: what the model raised.
    """
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in zip(names, inputs, strict=True))
    return f"the model does not take its {len(inputs)} feature columns as ({shapes}): {error}"


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {', '.join(type(one).__name__ for one in value)}"
    return type(value).__name__
