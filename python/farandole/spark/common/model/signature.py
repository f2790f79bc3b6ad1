# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The inputs of a model: their columns, shapes and types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class ModelInput:
    """One argument of a model: feature columns side by side, as one array or tensor."""

    columns: tuple[str, ...]
    shape: tuple[int, ...]
    """Shape of one batch, -1 for its rows."""
    dtype: str = "float32"
    """Name of the type of the elements that the model gets."""
    argument: tuple[str, ...] = ()
    """Name of the model's argument, and keys of dicts below it; empty for a position."""

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.columns[0] if len(self.columns) == 1 else f"[{', '.join(self.columns)}]"

    @property
    def short_name(self) -> str:
        """The argument, or the columns if the model takes its inputs by position."""
        return ".".join(self.argument) or self.name

    @property
    def argument_with_columns(self) -> str:
        """The name in messages, with the argument if there is one."""
        return f"{'.'.join(self.argument)}={self.name}" if self.argument else self.name


def format_batch_shape(shape: Sequence[int]) -> str:
    """Returns the shape of a batch for messages, with `rows` for -1."""
    return f"({', '.join('rows' if size == -1 else str(size) for size in shape)})"


def describe_column_mapping(inputs: Iterable[Any], outputs: Iterable[str]) -> str:
    """Describes for the user how columns become inputs of a model, and what it returns.

    Args:
        inputs: of the model.
        outputs: words for each output.
    """
    goes = ", ".join(
        f"{one.argument_with_columns} -> {'nested ' if getattr(one, 'nested', False) else ''}"
        f"{one.dtype} {format_batch_shape(one.shape)}"
        for one in inputs
    )
    return f"the model gets {goes}; it returns {', '.join(outputs)}"


def input_signature(inputs: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns the inputs of a model as plain values, for its parameter `signature`.

    Args:
        inputs: with `columns`, `shape` (-1 for the rows) and `dtype`.
    """
    return [
        {"columns": list(one.columns), "shape": list(one.shape), "dtype": one.dtype}
        | ({"argument": list(one.argument)} if one.argument else {})
        | {name: True for name in ("ragged", "nested") if getattr(one, name, False)}
        for one in inputs
    ]
