# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Converts columns to tensors, in training and in `transform`.

One tensor per feature column, cast to float32 unless `input_dtypes` says otherwise. A vector or
list column of `n` elements is `(rows, n)`, a scalar column `(rows, 1)`; `input_shapes` says
otherwise, one shape per input, with -1 for the rows (`[-1, 1, 8, 8]`; a shape of one row, `[1, 8,
8]`, does as well). Columns listed together become one tensor, side by side in the order of the
list.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from farandole.data.columns import normalize_row_shape
from farandole.data.ragged import lengths_column_name
from farandole.spark.common.model.signature import format_batch_shape
from farandole.spark.torch.job import TorchInput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farandole.data.columns import PreparedColumn
    from farandole.data.encoding import ColumnEncoding
    from farandole.data.prepare import PreparedData
    from farandole.spark.common.data.batch_source import PaddedRankBatch
    from farandole.spark.torch.job import TorchLabel

INPUT_DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "bool",
)
"""Types that an input may be cast to."""


def create_torch_inputs(
    groups: Sequence[Sequence[str]],
    columns: Mapping[str, PreparedColumn],
    shapes: Sequence[Sequence[int]] | None,
    dtypes: Sequence[str] | None,
    known: PreparedData | ColumnEncoding,
    arguments: Sequence[tuple[str, ...]] = (),
) -> tuple[TorchInput, ...]:
    """Returns the tensor that each group of feature columns becomes.

    Args:
        groups: the columns of each input.
        columns: by name.
        shapes: one per input, where the user set them.
        dtypes: one per input, where the user set them.
        known: categories and ragged columns. Without `dtypes`, an input of nothing but categories
            is int64, as embeddings take it, and so are lists of integers of different lengths.
        arguments: path of each input, of a model that takes its inputs by keyword.

    Raises:
        ValueError: a column of lists is listed together with others.
    """
    made: list[TorchInput] = []
    for index, group in enumerate(groups):
        size = sum(columns[name].element_count for name in group)
        shape = (size,) if shapes is None else normalize_row_shape(shapes[index], size)
        lists = [name for name in group if name in known.ragged]
        if lists and len(group) > 1:
            raise ValueError(f"a ragged column must be a separate input: {lists[0]!r}")
        indices = all(
            name in known.categories or (name in lists and "int" in columns[name].dtype)
            for name in group
        )
        dtype = ("int64" if indices else "float32") if dtypes is None else dtypes[index]
        nested = any(known.ragged[name].nested for name in lists)
        made.append(
            TorchInput(
                tuple(group),
                (-1, *shape),
                dtype,
                arguments[index] if arguments else (),
                ragged=bool(lists),
                nested=nested,
            )
        )
    return tuple(made)


def to_device(values: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns the values of a batch, with another type and on a device.

    If the device is a GPU, the values are first copied to page-locked memory. The GPU then
    continues its work and fetches the values in stream order. Otherwise the GPU would be idle
    before each copy, and wait for the next batch after the copy.

    Args:
        values: values in host memory, which may be changed afterwards.
        dtype: type of the result.
        device: device of the result.
    """
    if device.type != "cuda":
        return values.to(device, dtype)
    return values.to(dtype).pin_memory().to(device, non_blocking=True)


def input_tensor(
    columns: Mapping[str, torch.Tensor], torch_input: TorchInput, rows: int, device: torch.device
) -> torch.Tensor:
    """Returns the tensor of one input.

    Args:
        columns: tensors by name, rows first.
        torch_input: the input.
        rows: number of rows to use, from the first row on.
        device: device of the result.
    """
    dtype = getattr(torch, torch_input.dtype)
    if torch_input.nested:
        return _nested_tensor(columns, torch_input.columns[0], rows, dtype, device)
    if len(torch_input.columns) == 1:
        tensor = to_device(columns[torch_input.columns[0]][:rows], dtype, device)
        return tensor if torch_input.ragged else tensor.reshape(torch_input.shape)
    parts = [columns[name][:rows].to(dtype).reshape(rows, -1) for name in torch_input.columns]
    return to_device(torch.cat(parts, dim=1), dtype, device).reshape(torch_input.shape)


def _nested_tensor(
    columns: Mapping[str, torch.Tensor],
    name: str,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Returns a nested tensor of the jagged layout, made of padded rows and their lengths."""
    padded, lengths = columns[name][:rows], columns[lengths_column_name(name)][:rows]
    values = padded[torch.arange(padded.shape[1]) < lengths[:, None]]
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(
        to_device(values, dtype, device), to_device(offsets, torch.int64, device)
    )


def check_finite_inputs(
    columns: Mapping[str, torch.Tensor], torch_input: TorchInput, rows: int
) -> None:
    """Refuses features that would make outputs NaN, and with them gradients and all weights.

    Args:
        columns: tensors by name, rows first.
        torch_input: the input that they become.
        rows: number of rows to use, from the first row on.

    Raises:
        ValueError: NaN, infinities, or numbers too large for the input's type, by column.
    """
    dtype = getattr(torch, torch_input.dtype)
    limit = torch.finfo(dtype).max if dtype.is_floating_point else float("inf")
    for name in torch_input.columns:
        values = columns[name][:rows]
        if not values.is_floating_point():
            continue
        low, high = torch.aminmax(
            values if values.dtype in (torch.float32, torch.float64) else values.float()
        )
        if math.isfinite(low) and math.isfinite(high) and -limit <= low and high <= limit:
            continue
        strange = ~(values.abs() <= limit) | values.isinf()
        count = int(strange.reshape(rows, -1).any(dim=1).sum())
        problem = (
            "NaN"
            if bool(values.isnan().any())
            else f"infinite values, or values too large for {torch_input.dtype},"
        )
        raise ValueError(
            f"feature column {name!r} has {problem} in {count} of {rows} rows (allow_nan=True "
            "accepts them)"
        )


def label_tensor(
    rows: PaddedRankBatch,
    torch_label: TorchLabel,
    count: int,
    device: torch.device,
    *,
    checked: bool,
    allow_nan: bool,
) -> torch.Tensor:
    """Returns the tensor of one label column.

    Args:
        rows: rows of the batch.
        torch_label: the label.
        count: number of rows to use, from the first row on.
        device: device of the result.
        checked: whether values that no loss can mean are refused.
        allow_nan: whether NaN and infinities are not among them.

    Raises:
        ValueError: the column is not in the batch, or has values that are not numbers, or no
            indices.
    """
    name = torch_label.column.name
    values = rows.columns[name][:count]
    if checked and values.is_floating_point():
        strange = 0 if allow_nan else int((~torch.isfinite(values)).sum())
        if strange:
            problem = "not a number (NaN)" if bool(values.isnan().any()) else "infinite"
            raise ValueError(
                f"label column {name!r} has values that are {problem}: {strange} of {count} rows"
            )
        if torch_label.dtype == "int64" and bool((values != values.round()).any()):
            raise ValueError(
                f"label column {name!r} contains fractions, but its loss takes indices of classes"
            )
    return to_device(values, getattr(torch, torch_label.dtype), device)


def describe_input_misfit(
    names: Sequence[str], inputs: Sequence[torch.Tensor], error: Exception
) -> str:
    """Returns the message about a model that does not accept its inputs.

    Args:
        names: names of the inputs.
        inputs: tensors of the inputs.
        error: exception of the model.
    """
    shapes = ", ".join(
        f"{name} {tuple(tensor.shape)}" for name, tensor in zip(names, inputs, strict=True)
    )
    return f"the model does not take its {len(inputs)} feature columns as ({shapes}): {error}"


def describe_output_with_label(
    label: TorchLabel, output: torch.Tensor, loss: Callable[..., Any], field: str = ""
) -> str:
    """Describes for the user what an output is compared with.

    Args:
        label: the label column.
        output: output of the model for some rows.
        loss: loss of the label.
        field: name of the output in the model's result, if it has one.
    """
    shape, name = format_batch_shape((-1, *output.shape[1:])), type(loss).__name__
    shape = f"{field} {shape}" if field else shape
    return f"{shape} with {label.column.name} {label.dtype} by {getattr(loss, '__name__', name)}"
