# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Groups of an optimizer by names of parameters, and learning rates that fall from layer to layer.

The layers of a model are the blocks in its lists of equal modules, such as the layers of a
transformer. Layer-wise decay is the method of ULMFiT (Howard and Ruder 2018) in the form of ELECTRA
and BEiT: the head has the full rate, and each layer below has a share of the rate of the layer
above. The parameters before the first layer, such as embeddings, count as a layer of their own.
"""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MIN_BLOCKS = 2


def check_parameter_groups(name: str, value: Any) -> dict[str, dict[str, Any]]:
    """Returns options of an optimizer by pattern.

    Args:
        name: name of the parameter.
        value: value of the parameter.

    Raises:
        TypeError: it is no dict of dicts.
        ValueError: a pattern is no regular expression, or has no options.
    """
    if not isinstance(value, dict) or not all(
        isinstance(pattern, str) and isinstance(options, dict) for pattern, options in value.items()
    ):
        raise TypeError(
            f'{name} must be a dict of options by pattern, such as {{"bias": {{"weight_decay": 0}}'
            f"}}: {value!r}"
        )
    for pattern, options in value.items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{name} has {pattern!r}, which is no regular expression: {error}"
            ) from None
        if not options:
            raise ValueError(f"{name} has no options for {pattern!r}")
    return {pattern: dict(options) for pattern, options in value.items()}


def split_parameter_groups(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    groups: Mapping[str, Mapping[str, Any]],
    layer_decay: float | None,
) -> torch.optim.Optimizer:
    """Returns a copy of an optimizer, of the same parameters, with more groups.

    Args:
        model: names the parameters.
        optimizer: its groups have the options of all parameters that no pattern changes.
        groups: options by pattern. A pattern is found anywhere in a name. If several are, the
            options of later ones win.
        layer_decay: share of a layer's rate that the layer below has; `None` is 1.

    Raises:
        ValueError: a pattern matches no parameter of the optimizer, an option is unknown, or the
            model has no layers.
    """
    for pattern, options in groups.items():
        known = {name for group in optimizer.param_groups for name in group} - {"params"}
        for name in options:
            if name not in known:
                raise ValueError(
                    f"parameter_groups has {name!r} for {pattern!r}, which is no option of "
                    f"{type(optimizer).__name__}: {', '.join(sorted(known))}"
                )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    depths = {} if layer_decay is None else depths_below_head(model)
    unmatched = dict.fromkeys(groups)
    split: dict[Any, dict[str, Any]] = {}
    for number, group in enumerate(optimizer.param_groups):
        shared = {name: value for name, value in group.items() if name != "params"}
        for parameter in group["params"]:
            name = names[id(parameter)]
            matched = tuple(pattern for pattern in groups if re.search(pattern, name))
            options = dict(shared)
            for pattern in matched:
                options |= groups[pattern]
                unmatched.pop(pattern, None)
            depth = depths.get(name, 0)
            if layer_decay is not None:
                options["lr"] = options["lr"] * layer_decay**depth
            found = split.setdefault((number, matched, depth), options | {"params": []})
            found["params"].append(parameter)
    if unmatched:
        raise ValueError(
            f"parameter_groups has {', '.join(map(repr, unmatched))}, which matches no parameter "
            f"that the optimizer has; the first ones are {', '.join(list(names.values())[:3])}"
        )
    made = copy.copy(optimizer)
    made.param_groups = list(split.values())
    return made


def depths_below_head(model: torch.nn.Module) -> dict[str, int]:
    """Returns the number of layers from each parameter up to the head, by name of the parameter.

    Args:
        model: has lists of equal modules.

    Raises:
        ValueError: it has none.
    """
    blocks = list(_block_names(model, ""))
    if not blocks:
        raise ValueError(
            f"layer_decay finds no layers in the model, a {type(model).__name__}: it has no list "
            "of equal modules; set learning rates by parameter_groups"
        )
    top, level, depths = len(blocks) + 1, 0, {}
    for name, _ in model.named_parameters():
        number = next((n for n, block in enumerate(blocks, 1) if name.startswith(block)), None)
        if number is not None:
            level = number
        elif level == len(blocks):
            level = top
        depths[name] = top - level
    return depths


def _block_names(module: torch.nn.Module, prefix: str) -> Iterator[str]:
    """Yields the names of the modules in the outermost lists of equal modules, with a dot."""
    children = [
        (f"{prefix}{name}.", child)
        for name, child in module.named_children()
        if next(child.parameters(), None) is not None
    ]
    is_list = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
    if is_list and len(children) >= _MIN_BLOCKS and len({type(each) for _, each in children}) == 1:
        yield from (name for name, _ in children)
        return
    for name, child in children:
        yield from _block_names(child, name)
