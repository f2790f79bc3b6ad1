# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`transformation_fn`: changes values in the training processes, before the model gets them.

As in Horovod, the function takes one row, a dict of NumPy values by column, and returns one. A
function that is marked with `batched` takes and returns whole batches, a dict of arrays whose first
axis is rows, which is faster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Arrays = dict[str, npt.NDArray[Any]]


def batched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a `transformation_fn` that takes and returns whole batches.

    Args:
        function: function of a dict of arrays, rows first.
    """
    setattr(function, "batched", True)  # noqa: B010 - functions have no such attribute for a type checker
    return function


@dataclass(frozen=True)
class UserTransformation:
    """A user's function, and its declaration of the columns that it makes."""

    function: Callable[..., Any]
    edits: Sequence[tuple[str, str, tuple[int, ...] | None, bool]] = ()
    """Name, NumPy type, shape (`None` allows all) and whether nulls are allowed."""
    removed: Sequence[str] = ()
    absent: Sequence[str] = ()
    """Columns that the function gets in training and not in predictions."""

    def __call__(self, arrays: Arrays) -> Arrays:
        """Returns the batch with the columns that the function made of it.

        Args:
            arrays: columns by name, rows first; at least one row.

        Raises:
            ValueError: the function returned something else than rows of one shape, as many as it
                got.
        """
        rows = len(next(iter(arrays.values())))
        made = (
            self._transform_batch(arrays)
            if getattr(self.function, "batched", False)
            else self._transform_rows(arrays, rows)
        )
        for name in self.removed:
            made.pop(name, None)
        for name, dtype, shape, _ in self.edits:
            if name not in made:
                raise ValueError(
                    f"transformation_fn returns no column {name!r}, which "
                    "transformation_edit_fields names"
                )
            try:
                values = np.asarray(made[name]).astype(dtype)
                made[name] = values if shape is None else values.reshape(rows, *shape)
            except ValueError as error:
                raise ValueError(
                    f"column {name!r} of transformation_fn is not {dtype} {shape}: {error}"
                ) from None
        for name, values in made.items():
            if values.dtype.kind in "OSU":
                raise ValueError(
                    f"transformation_fn returns column {name!r} of {values.dtype}, which no "
                    "tensor can hold: "
                    "convert it to numbers, or name it in transformation_removed_fields"
                )
            if len(values) != rows:
                raise ValueError(
                    f"transformation_fn returned {len(values)} values of column {name!r} out of "
                    f"{rows} rows"
                )
        return made

    @property
    def reads_ahead(self) -> bool:
        """Whether the training makes the next batch while it computes with the last one: the user's
        function has a true attribute of this name.
        """
        return bool(getattr(self.function, "reads_ahead", False))

    @property
    def augment_rows(self) -> Callable[[Arrays, int, int], Arrays] | None:
        """Changes rows of the training after this transformation, and no others: a function of the
        columns of a batch, the seed of the order, and the number of the pass. `None` if the user's
        function has no method of this name.
        """
        return getattr(self.function, "augment_rows", None)

    def without_label_columns(
        self, names: Sequence[str], labels: Sequence[str]
    ) -> UserTransformation:
        """Returns the same for predictions, whose rows have no labels.

        Args:
            names: names of the features.
            labels: columns that training has besides.
        """
        others = [*labels, *(one[0] for one in self.edits), *self.removed]
        absent = [name for name in others if name not in names]
        return replace(self, edits=[one for one in self.edits if one[0] in names], absent=absent)

    def transform_features(self, arrays: Arrays, names: Sequence[str]) -> Arrays:
        """Returns the features of rows that are predicted.

        Args:
            arrays: features by name, rows first; at least one row.
            names: names of the features that the model takes.

        Raises:
            ValueError: as for a call; or the function needs a column that exists only in training,
                or omits a feature.
        """
        try:
            made = self(arrays)
        except KeyError as error:
            asked = error.args[0] if error.args else None
            if not isinstance(asked, str) or asked not in self.absent:
                raise  # the function looked up something of its own
            raise ValueError(
                f"transformation_fn asks for column {error}: in predictions it gets only the "
                f"features, which are {', '.join(names)}"
            ) from error
        lacking = [name for name in names if name not in made]
        if lacking:
            raise ValueError(
                f"transformation_fn returns no columns with these names: {', '.join(lacking)}"
            )
        return made

    def _transform_batch(self, arrays: Arrays) -> Arrays:
        made = self.function(dict(arrays))
        if not isinstance(made, dict):
            raise TypeError(
                f"transformation_fn must return a dict of columns: {type(made).__name__}"
            )
        return {name: np.asarray(values) for name, values in made.items()}

    def _transform_rows(self, arrays: Arrays, rows: int) -> Arrays:
        made: list[dict[str, Any]] = []
        for row in range(rows):
            transformed = self.function({name: values[row] for name, values in arrays.items()})
            if not isinstance(transformed, dict):
                raise TypeError(
                    f"transformation_fn must return a row, a dict by column: "
                    f"{type(transformed).__name__}"
                )
            made.append(transformed)
        try:
            return {name: np.stack([np.asarray(one[name]) for one in made]) for name in made[0]}
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"transformation_fn returns rows that differ in columns or shapes: {error}"
            ) from None
