# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The modules of a model whose parameters are gathered together: the units of FSDP.

Without names from the user, the units are the classes in `_no_split_modules`, which the models of
Hugging Face declare, or else the entries of `ModuleList` and `Sequential`. An entry with more
than one eighth of the parameters is divided further if it contains such lists. Only entries of
lists are units, because a model may read the weights of other modules without calling them, such
as the output projection of `MultiheadAttention`. Everything else belongs to the model's own unit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn.utils import parametrize

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_UNIT_SHARE = 1 / 8
"""Share of the parameters above which an entry of a list is divided further."""
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_sharding_units(model: nn.Module, names: Sequence[str] | None = None) -> list[str]:
    """Returns the paths of the units below the model, inner units first.

    A module that shares a parameter with the rest of the model is no unit.

    Args:
        model: The model.
        names: Classes or paths of modules from the user; `None` finds the units.

    Raises:
        ValueError: A name is of no module in the model.
    """
    modules = {path: module for path, module in model.named_modules() if path}
    if names is not None:
        _require_known_names(modules, names)
        chosen = [
            path
            for path, module in modules.items()
            if path in names or type(module).__name__ in names
        ]
    else:
        declared = _declared_block_classes(model)
        chosen = [path for path, module in modules.items() if type(module).__name__ in declared]
        chosen = chosen or list(_list_entries(model, _parameter_count(model) * MAX_UNIT_SHARE))
    owned = [path for path in chosen if _owns_its_parameters(model, modules[path])]
    return sorted(owned, key=lambda path: -path.count("."))


def _require_known_names(modules: dict[str, nn.Module], names: Sequence[str]) -> None:
    known = {*modules, *(type(module).__name__ for module in modules.values())}
    for name in names:
        if name not in known:
            raise ValueError(
                f"fsdp_modules names {name!r}, which is neither a class nor a path of a module in "
                "the model"
            )


def _declared_block_classes(model: nn.Module) -> set[str]:
    """Returns the names of classes that models of Hugging Face declare as their blocks."""
    return {
        name
        for module in model.modules()
        for name in getattr(module, "_no_split_modules", None) or ()
        if isinstance(name, str)
    }


def _list_entries(module: nn.Module, limit: float, path: str = "") -> Iterator[str]:
    is_list = isinstance(module, _CONTAINERS)
    for name, child in module.named_children():
        if isinstance(child, parametrize.ParametrizationList):
            continue
        below = f"{path}.{name}" if path else name
        is_entry = is_list and type(child) not in _CONTAINERS
        if not is_entry or _parameter_count(child) > limit:
            yield from _list_entries(child, limit, below)
        if is_entry and _parameter_count(child):
            yield below


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _owns_its_parameters(model: nn.Module, unit: nn.Module) -> bool:
    """Returns whether a module has parameters, and shares none with modules outside."""
    inside = set(unit.modules())
    own = {id(parameter) for parameter in unit.parameters()}
    outside = {
        id(parameter)
        for module in model.modules()
        if module not in inside
        for parameter in module.parameters(recurse=False)
    }
    return bool(own) and own.isdisjoint(outside)
