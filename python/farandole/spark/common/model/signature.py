# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The inputs of a model as plain values: their columns, shapes and types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


def input_signature(inputs: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns the inputs of a model as plain values, for its parameter `signature`.

    Args:
        inputs: with `columns`, `shape` (-1 for the rows) and `dtype`.
    """
    return [
        {"columns": list(one.columns), "shape": list(one.shape), "dtype": one.dtype}
        | {name: True for name in ("ragged", "nested") if getattr(one, name, False)}
        for one in inputs
    ]
