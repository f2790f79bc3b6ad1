# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Converts columns to the inputs of a model, in training and in `transform`.

An input whose shape and type the model states gets them; else a vector or list column of `n`
elements is `(rows, n)`, a scalar column `(rows, 1)`, integers stay integers and the rest is
float32. Columns listed together become one array, side by side. A model with several inputs gets a
tuple, or a dict where it takes one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.data.columns import PreparedColumn, normalize_row_shape
from farandole.data.ragged import becomes_nested_tensor
from farandole.spark.common.model.signature import ModelInput, format_batch_shape
from farandole.spark.keras.job import KerasLabel, KerasModelShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    Array = npt.NDArray[Any]

_INTEGER_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def create_keras_inputs(
    model: Any, groups: Sequence[Sequence[str]], columns: Mapping[str, PreparedColumn]
) -> tuple[Any, Any]:
    """Returns the input of each group of feature columns.

    Args:
        model: may state its inputs.
        groups: the columns of each input.
        columns: by name.

    Returns:
        The inputs, and their names where the model takes a dict.

    Raises:
        ValueError: the columns do not fit the inputs that the model states.
    """
    stated = getattr(model, "inputs", None)
    sizes = [sum(max(1, columns[name].element_count) for name in group) for group in groups]
    if not stated:
        made = [
            ModelInput(
                tuple(group), (-1, size), _columns_dtype([columns[name].dtype for name in group])
            )
            for group, size in zip(groups, sizes, strict=True)
        ]
        return tuple(made), None
    if len(stated) != len(groups):
        hint = ""
        if len(stated) == 1 and len(groups) > 1:
            hint = (
                "; to put columns side by side, list them together: "
                f'feature_cols=[["{groups[0][0]}", ...]]'
            )
        raise ValueError(
            f"Feature column count {len(groups)} must equal model inputs count {len(stated)}{hint}"
        )
    names = input_keys(model, groups)
    if names is not None:
        order = sorted(names)  # as Keras has them
        stated = [stated[order.index(name)] for name in names]
    made = []
    for index, (group, size, model_input) in enumerate(zip(groups, sizes, stated, strict=True)):
        made.append(
            ModelInput(
                tuple(group),
                (-1, *_reshape_to_input_shape(group, size, model_input.shape[1:], index)),
                _supported_dtype(str(model_input.dtype)),
            )
        )
    return tuple(made), names


def input_keys(model: Any, groups: Sequence[Sequence[str]]) -> tuple[str, ...] | None:
    """Returns the names of a model's inputs, in the order of the feature columns, for a model that
    takes a dict.

    Args:
        model: a Keras model.
        groups: the columns of each input; if each is one column with the name of an input, they are
            assigned by name.
    """
    keys = getattr(model, "_inputs_struct", None)
    if not isinstance(keys, dict):
        return None
    names = tuple(sorted(keys))
    by_name = {tuple(group) for group in groups} == {(name,) for name in names}
    return tuple(group[0] for group in groups) if by_name else names


def refuse_nested_columns(ragged: Mapping[str, Any]) -> None:
    """Refuses nested columns, since Keras has no nested tensors.

    Args:
        ragged: treatment of lists of different lengths, by column.

    Raises:
        ValueError: naming the column.
    """
    for name, layout in ragged.items():
        if becomes_nested_tensor(layout):
            raise ValueError(
                f"Keras takes no nested tensors: use Pad instead of Nested for column {name!r}"
            )


def _reshape_to_input_shape(
    group: Sequence[str], size: int, shape: Sequence[int | None], index: int
) -> tuple[int, ...]:
    lengths = [-1 if length is None else int(length) for length in shape]
    known = math.prod(length for length in lengths if length != -1)
    fits = known == size if -1 not in lengths else known > 0 and size % known == 0
    if not fits or lengths.count(-1) > 1:
        named = repr(group[0]) if len(group) == 1 else f"[{', '.join(group)}]"
        raise ValueError(
            f"Feature column {named} with size {size} must equal that of the model input at index "
            f"{index}, whose shape is {tuple(shape)}"
        )
    return (
        tuple(normalize_row_shape(lengths, size))
        if lengths[:1] != [-1]
        else (size // known, *lengths[1:])
    )


def _columns_dtype(dtypes: Sequence[str]) -> str:
    return "int64" if all(dtype in _INTEGER_DTYPES for dtype in dtypes) else "float32"


def _supported_dtype(dtype: str) -> str:
    return dtype if dtype in (*_INTEGER_DTYPES, "bool", "float64") else "float32"


def reader_casts(
    shape: KerasModelShape, labels: Sequence[KerasLabel], weight: str | None
) -> dict[str, str | None]:
    """Returns the columns to read, with the types that the reader can cast them to.

    Args:
        shape: shape of the model.
        labels: labels of the run.
        weight: column of rows' weights.
    """
    casts: dict[str, str | None] = {}
    for keras_input in shape.inputs:
        casts |= dict.fromkeys(
            keras_input.columns,
            keras_input.dtype if keras_input.dtype in ("float32", "float64", "int64") else None,
        )
    casts |= {spec.column.name: spec.dtype for spec in labels}
    return casts | ({} if weight is None else {weight: "float32"})


def build_model_argument(shape: KerasModelShape, columns: Mapping[str, Array], rows: int) -> Any:
    """Returns the model's argument.

    Args:
        shape: shape of the model.
        columns: arrays by name, rows first.
        rows: in each.
    """
    return arrange_model_argument(input_arrays(shape, columns, rows), shape.input_keys)


def input_arrays(shape: KerasModelShape, columns: Mapping[str, Array], rows: int) -> list[Array]:
    """Returns the array of each input.

    Args:
        shape: shape of the model.
        columns: arrays by name, rows first.
        rows: in each.
    """
    made: list[Array] = []
    for keras_input in shape.inputs:
        if len(keras_input.columns) == 1:
            values = columns[keras_input.columns[0]]
        else:
            values = np.concatenate(
                [columns[name].reshape(rows, -1) for name in keras_input.columns], axis=1
            )
        made.append(
            values.astype(keras_input.dtype, copy=False).reshape(rows, *keras_input.shape[1:])
        )
    return made


def arrange_model_argument(arrays: Sequence[Any], keys: Sequence[str] | None) -> Any:
    """Arrays as a model takes them: one alone, several in a tuple, or all in a dict.

    Args:
        arrays: in order.
        keys: keys of the dict, if the model takes a dict.
    """
    if keys is not None:
        return dict(zip(keys, arrays, strict=True))
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def model_labels(
    shape: KerasModelShape, labels: Sequence[KerasLabel], columns: Mapping[str, Array], rows: int
) -> Any:
    """Returns the labels with which the model's outputs are compared.

    Args:
        shape: shape of the model.
        labels: labels of the run.
        columns: arrays by name, rows first.
        rows: in each.
    """
    made = [
        columns[spec.column.name].astype(spec.dtype, copy=False).reshape(rows, *spec.shape[1:])
        for spec in labels
    ]
    return arrange_model_argument(made, shape.output_keys)


def zero_batch(shape: KerasModelShape, labels: Sequence[KerasLabel], rows: int) -> tuple[Any, Any]:
    """Inputs and labels of nothing but zeros, to try a model with.

    Args:
        shape: shape of the model.
        labels: labels of the run.
        rows: number of rows.
    """
    x = [np.zeros((rows, *spec.shape[1:]), spec.dtype) for spec in shape.inputs]
    y = [np.zeros((rows, *spec.shape[1:]), spec.dtype) for spec in labels]
    return arrange_model_argument(x, shape.input_keys), arrange_model_argument(
        y, shape.output_keys
    ) if y else None


def output_keys(value: Any, labels: Sequence[str]) -> tuple[str, ...] | None:
    """Returns the names of a model's outputs in the order of the labels, for a model that returns a
    dict.

    Args:
        value: output of the model.
        labels: the label columns. If the dict has exactly these names, each output belongs to the
            label of its name; else the order of the dict decides.
    """
    if not isinstance(value, dict):
        return None
    keys = tuple(str(key) for key in value)
    return tuple(labels) if set(keys) == set(labels) else keys


def flat_outputs(value: Any, keys: Sequence[str] | None, count: int) -> list[Any]:
    """Returns a model's outputs as a list, one per label.

    Args:
        value: output of the model.
        keys: keys of the output if it is a dict.
        count: number of labels.

    Raises:
        ValueError: the number of outputs is not `count`.
    """
    if keys is not None:
        found = [value[key] for key in keys]
    else:
        found = list(value) if isinstance(value, list | tuple) else [value]
    if len(found) != count:
        raise ValueError(f"Label column count {count} must equal model outputs count {len(found)}")
    return found


def create_label(
    column: PreparedColumn, output: Sequence[int], stated: Sequence[int] | None
) -> KerasLabel:
    """Returns the array of one label column.

    Args:
        column: column of the label.
        output: shape of one row of the model's output.
        stated: shape as the user set it.
    """
    like_output = column.element_count == math.prod(output)
    # Labels that are compared element by element are numbers; class indices stay integers.
    dtype = "int64" if column.dtype in _INTEGER_DTYPES and not like_output else "float32"
    if stated is not None:
        return KerasLabel(column, dtype, (-1, *normalize_row_shape(stated, column.element_count)))
    return KerasLabel(column, dtype, (-1, *(output if like_output else column.shape)))


def describe_input_misfit(shape: KerasModelShape, error: Exception) -> str:
    """Returns the message about a model that does not accept its inputs.

    Args:
        shape: shape of the model.
        error: exception of the model.
    """
    shapes = ", ".join(f"{one.name} {format_batch_shape(one.shape)}" for one in shape.inputs)
    return f"the model does not take its {len(shape.inputs)} inputs as ({shapes}): {error}"


def describe_output_with_label(label: KerasLabel, output: Sequence[int]) -> str:
    """Describes for the user what an output is compared with.

    Args:
        label: the label column.
        output: shape of one row of the output.
    """
    shapes = [format_batch_shape(one) for one in ((-1, *output), label.shape)]
    return f"{shapes[0]} with {label.column.name} {label.dtype} {shapes[1]}"
