# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TransformSpec`: a function on rows or frames, and the schema of its results."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from petastorm.unischema import Unischema, UnischemaField

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def edit_field(
    name: str, numpy_dtype: Any, shape: tuple[int | None, ...], nullable: bool = False
) -> tuple[str, Any, tuple[int | None, ...], bool]:
    """Returns an entry of `edit_fields`.

    Args:
        name: Name of the field.
        numpy_dtype: Type of its elements.
        shape: Shape of one value.
        nullable: Whether values may be missing.
    """
    return name, numpy_dtype, shape, nullable


class TransformSpec:
    """A function that a reader applies, and how it changes the schema."""

    def __init__(
        self,
        func: Callable[[Any], Any] | None = None,
        edit_fields: Sequence[tuple[Any, ...]] | None = None,
        removed_fields: Sequence[str] | None = None,
        selected_fields: Sequence[str] | None = None,
    ) -> None:
        """Creates a transformation.

        Args:
            func: Gets a dict of one row in `make_reader`, and a pandas DataFrame of a row group in
                `make_batch_reader`; returns one with the fields of the new schema.
            edit_fields: New and changed fields: (name, dtype of NumPy, shape, nullable).
            removed_fields: Names of fields that the new schema lacks.
            selected_fields: Names of all fields of the new schema, in its order.

        Raises:
            ValueError: Both `removed_fields` and `selected_fields`.
        """
        if removed_fields is not None and selected_fields is not None:
            raise ValueError(
                "only one of removed_fields and selected_fields can be given to TransformSpec"
            )
        self.func = func
        self.edit_fields = edit_fields or []
        self.removed_fields = removed_fields or []
        self.selected_fields = selected_fields


def transform_schema(schema: Unischema, transform_spec: TransformSpec) -> Unischema:
    """Returns the schema of the function's results.

    Args:
        schema: The schema of the rows that are read.
        transform_spec: The function.
    """
    _warn_of_unknown_fields("removed_fields", transform_spec.removed_fields, schema.fields)
    excluded = {field[0] for field in transform_spec.edit_fields} | set(
        transform_spec.removed_fields
    )
    fields = {name: field for name, field in schema.fields.items() if name not in excluded}
    for name, dtype, shape, nullable in transform_spec.edit_fields:
        fields[name] = UnischemaField(name, dtype, shape, None, nullable)
    selected = transform_spec.selected_fields
    if selected is not None:
        _warn_of_unknown_fields("selected_fields", selected, fields)
        fields = {name: fields[name] for name in selected if name in fields}
    return Unischema(f"{schema._name}_transformed", list(fields.values()))  # noqa: SLF001


def _warn_of_unknown_fields(option: str, names: Sequence[str], known: Any) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        warnings.warn(
            f"{option} of TransformSpec names fields that the schema does not have, they are "
            f"ignored: {', '.join(unknown)}",
            stacklevel=4,
        )
