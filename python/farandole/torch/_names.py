# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Names and groups of an optimizer's parameters: the same on every rank, because gradients are
matched by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

MIN_UNITS_PER_MODEL = 8
"""Least number of units for a model's gradients, so that most units are sent while the backward
pass still runs.
"""
MIN_UNIT_BYTES = 1 << 20
"""Size of a unit below which a call costs more than its earlier start saves."""
MAX_UNIT_BYTES = 16 << 20
"""Size of a unit above which nothing is saved any more."""


def name_parameters(
    param_groups: list[dict[str, Any]], named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Returns every parameter of an optimizer with its name, in the optimizer's order.

    Raises:
        ValueError: When an entry is no pair, a name appears twice, or a parameter has none.
    """
    if named_parameters is None:
        return {
            parameter: f"allreduce.noname.{i}.{j}"
            for i, group in enumerate(param_groups)
            for j, parameter in enumerate(group["params"])
        }
    entries = list(named_parameters)
    if any(not isinstance(entry, tuple) for entry in entries):
        raise ValueError(
            "named_parameters must be (name, parameter) pairs, such as model.named_parameters()"
        )
    names = [name for name, _ in entries]
    repeated = (
        sorted({name for name in names if names.count(name) > 1})
        if len(set(names)) < len(names)
        else []
    )
    if repeated:
        raise ValueError(
            f"named_parameters must name each parameter differently: {', '.join(repeated)}"
        )
    given = {parameter: name for name, parameter in entries}
    parameters = [parameter for group in param_groups for parameter in group["params"]]
    unnamed = [id(parameter) for parameter in parameters if parameter not in given]
    if unnamed:
        raise ValueError(
            f"named_parameters lacks parameters of the optimizer, by object id: {unnamed}"
        )
    return {parameter: given[parameter] for parameter in parameters}


def batch_neighbouring_parameters(
    parameters: Sequence[torch.Tensor], limit: int, min_bytes: int | None = None
) -> list[list[torch.Tensor]]:
    """Returns batches of neighbours whose gradients arrive one after the other, the last ones
    first, up to `limit` bytes each.

    The tensors of a batch have one dtype and one device. With `min_bytes` the batches of the second
    half shrink to this size: while the last batch is sent, nothing is left to compute.
    """
    batches: list[list[torch.Tensor]] = []
    room = 0
    remaining_bytes = sum(parameter.nbytes for parameter in parameters)
    for parameter in reversed(parameters):
        last = batches[-1][-1] if batches else parameter
        room -= parameter.nbytes
        if (
            not batches
            or room < 0
            or (last.dtype, last.device) != (parameter.dtype, parameter.device)
        ):
            batches.append([])
            room = (
                limit if min_bytes is None else min(limit, max(min_bytes, remaining_bytes // 2))
            ) - parameter.nbytes
        batches[-1].append(parameter)
        remaining_bytes -= parameter.nbytes
    return batches


def group_parameters(
    names: dict[torch.Tensor, str], groups: int | Sequence[Sequence[torch.Tensor]] | None
) -> list[list[torch.Tensor]]:
    """Returns the parameters whose gradients are reduced as one unit: neighbours, consecutive
    groups, or given ones.

    Args:
        names: Every parameter of the optimizer and its name.
        groups: Number of groups, or their members; a parameter in no group is a unit by itself.

    Raises:
        ValueError: The number is not positive, or a list has an object that is no parameter, or a
            parameter twice.
    """
    trainable = [parameter for parameter in names if parameter.requires_grad]
    if groups is None:
        total = sum(parameter.nbytes for parameter in trainable)
        return batch_neighbouring_parameters(
            trainable,
            min(max(total // MIN_UNITS_PER_MODEL, MIN_UNIT_BYTES), MAX_UNIT_BYTES),
            MIN_UNIT_BYTES,
        )
    if isinstance(groups, int):
        if groups <= 0:
            raise ValueError(
                f"groups must be a positive number or a list of lists of parameters: {groups!r}"
            )
        count = min(groups, len(trainable))
        bounds = [len(trainable) * i // count for i in range(count + 1)] if count else []
        return [trainable[first:last] for first, last in pairwise(bounds)]
    seen: set[torch.Tensor] = set()
    if not isinstance(groups, Sequence):
        raise ValueError(
            f"groups must be a positive number or a list of lists of parameters: {groups!r}"
        )
    for group in groups:
        if isinstance(group, torch.Tensor):
            raise ValueError(
                "groups must be a list of lists of parameters, not a list of parameters"
            )
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError(f"groups must contain parameters: {type(parameter).__name__}")
            if parameter in seen:
                raise ValueError(
                    "groups must contain each parameter once: "
                    f"{names.get(parameter, id(parameter))}"
                )
            seen.add(parameter)
    wanted = [
        [parameter for parameter in group if parameter in names and parameter.requires_grad]
        for group in groups
    ]
    return [group for group in wanted if group] + [
        [parameter] for parameter in trainable if parameter not in seen
    ]
