# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The state that an optimizer keeps for each variable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class _LastVisitedVariableList(list[Any]):
    """A list of variables that records the variable that an iteration has reached."""

    current: Any = None

    def __iter__(self) -> Iterator[Any]:
        for entry in super().__iter__():
            self.current = entry
            yield entry
        self.current = None


def slots_with_owners(optimizer: Any, trained: Sequence[Any]) -> list[tuple[Any, int | None]]:
    """Returns the variables that an optimizer made for those it trains, such as momentums.

    Keras does not record which variable a slot belongs to. So a second optimizer is built from the
    configuration. It makes the same variables in the same order, and passes the trained variable
    along or iterates over it. Then it is dropped.

    Args:
        optimizer: A built Keras optimizer.
        trained: The variables that the optimizer was built with.

    Returns:
        Each slot with the `id` of its variable; `None` if the slot belongs to no single variable.

    Raises:
        ValueError: When the optimizer cannot be made of its configuration.
    """
    kind: Any = getattr(type(optimizer), "_farandole_kind", type(optimizer))
    watched = _LastVisitedVariableList(trained)
    owners: dict[int, int] = {}

    class RebuiltOptimizer(kind):
        def add_variable(self, *args: Any, **kwargs: Any) -> Any:
            made = super().add_variable(*args, **kwargs)
            if watched.current is not None:
                owners[id(made)] = id(watched.current)
            return made

        def add_variable_from_reference(
            self, reference_variable: Any, *args: Any, **kwargs: Any
        ) -> Any:
            before, watched.current = watched.current, reference_variable
            try:
                return super().add_variable_from_reference(reference_variable, *args, **kwargs)
            finally:
                watched.current = before

    config = optimizer.get_config()
    if "learning_rate" in config:
        config["learning_rate"] = 0.0  # a schedule of the user's may not come back
    try:
        second = RebuiltOptimizer.from_config(config)
        first = len(second.variables)
        second.build(watched)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"{kind.__name__} cannot be created from its configuration, so its state for the "
            f"local variables of this rank is unknown: {error}"
        ) from error
    made = second.variables[first:]
    variables = optimizer.variables
    return [
        (variable, owners.get(id(made_slot)))
        for variable, made_slot in zip(variables[len(variables) - len(made) :], made, strict=True)
    ]
