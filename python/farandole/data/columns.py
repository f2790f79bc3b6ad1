# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The columns of a fit, and checks that data has them in a usable form."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farandole.data.encoding import MISSING_FLAG_SUFFIX, column_of_feature

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


@dataclass(frozen=True)
class PreparedColumn:
    """One column of prepared data: NumPy's name of its element, and the shape of one row."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def element_count(self) -> int:
        """Elements in one row."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ColumnRoles:
    """The role of each column."""

    features: tuple[str, ...]
    labels: tuple[str, ...]
    weight: str | None = None
    validation: float | str | None = None

    @property
    def stored_columns(self) -> list[str]:
        """Columns that prepared data holds, each once."""
        weight = [] if self.weight is None else [self.weight]
        return list(dict.fromkeys([*self.features, *self.labels, *weight]))

    @property
    def source_columns_to_read(self) -> list[str]:
        """Columns that are read from the DataFrame."""
        return (
            [*self.stored_columns, self.validation]
            if isinstance(self.validation, str)
            else self.stored_columns
        )

    def columns_with_roles(self) -> list[tuple[str, str]]:
        """Returns pairs of role and column name, such as `feature column` and `age`."""
        pairs = [("feature column", name) for name in self.features]
        pairs += [("label column", name) for name in self.labels]
        if self.weight is not None:
            pairs.append(("sample weight column", self.weight))
        if isinstance(self.validation, str):
            pairs.append(("validation column", self.validation))
        return pairs


def check_columns_present(roles: ColumnRoles, present: Sequence[str], where: str) -> None:
    """Refuses columns that are missing or ambiguous.

    Args:
        roles: the requested columns.
        present: the existing columns.
        where: the searched source, for messages.

    Raises:
        ValueError: naming the column and what might have been meant.
    """
    for role, given in roles.columns_with_roles():
        name = column_of_feature(given, present)
        if name != given and role != "feature column":
            raise ValueError(
                f"{role} {given!r} is not in the {where}: only a feature can show where {name!r} "
                "is missing"
            )
        if name not in present:
            name = name.removesuffix(MISSING_FLAG_SUFFIX)
            same = [one for one in present if one.lower() == name.lower()]
            close = same or difflib.get_close_matches(name, present, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"{role} {name!r} is not in the {where}{hint} columns: {', '.join(present)}"
            )
        if list(present).count(name) > 1:
            raise ValueError(
                f"{role} {name!r} is ambiguous, the {where} has several columns of that name"
            )
    if isinstance(roles.validation, str) and roles.validation in roles.stored_columns:
        raise ValueError(
            f"validation column {roles.validation!r} is also a feature, label or weight column"
        )


def refuse_missing_columns(names: Iterable[str], present: Collection[str], where: str) -> None:
    """Refuses columns that a source does not have.

    Args:
        names: the requested columns.
        present: the existing columns.
        where: name of the source, for messages.

    Raises:
        ValueError: naming the first column.
    """
    for name in names:
        if name not in present:
            raise ValueError(f"{where} has no column {name!r}: {', '.join(present)}")


def normalize_row_shape(shape: Sequence[int], size: int) -> tuple[int, ...]:
    """Returns the shape of one row, from a shape as users write it.

    Args:
        shape: shape of one row, or of a batch with -1 for its rows first; one more size may be left
            open by -1.
        size: elements in one row.

    Returns:
        The shape without rows, nothing left open; its sizes need not multiply to `size`.
    """
    lengths = tuple(shape[1:] if shape and shape[0] == -1 else shape)
    known = math.prod(length for length in lengths if length != -1)
    return tuple(size // known if length == -1 else length for length in lengths)


def check_shapes_fit(
    columns: dict[str, PreparedColumn],
    groups: Sequence[str | Sequence[str]],
    shapes: Sequence[Sequence[int]] | None,
    role: str,
) -> None:
    """Refuses shapes that do not fit their columns.

    Args:
        columns: columns of the prepared data.
        groups: the columns that get the shapes, one or several side by side for each.
        shapes: one shape per group.
        role: name of the columns in error messages.

    Raises:
        ValueError: naming the column, its size and the shape.
    """
    if shapes is None:
        return
    if len(shapes) != len(groups):
        raise ValueError(
            f"{role} column count {len(groups)} must equal the count of {role} shapes {len(shapes)}"
        )
    for group, shape in zip(groups, shapes, strict=True):
        names = [group] if isinstance(group, str) else list(group)
        size = sum(columns[name].element_count for name in names)
        if math.prod(normalize_row_shape(shape, size)) != size:
            column_text = (
                f"column {names[0]!r}"
                if len(names) == 1
                else f"columns {', '.join(map(repr, names))}"
            )
            raise ValueError(
                f"{role} {column_text} with size {size} does not fit shape {list(shape)}"
            )
