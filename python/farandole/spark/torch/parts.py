# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The parts of a torch model and its optimizer that decide the result of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole.spark.common.runs.digests import arrays, class_name, digest, module, optimizer
from farandole.spark.common.runs.fingerprint import INITIAL, Part

if TYPE_CHECKING:
    import torch


def parts_of(model: torch.nn.Module, optimized: torch.optim.Optimizer | None) -> list[Part]:
    """Returns the parts of a fingerprint: architecture, initial weights, optimizer.

    Args:
        model: the user's.
        optimized: the user's optimizer; `None` where the model makes its own.
    """
    state = model.state_dict()
    numbers = sum(value.numel() for value in state.values() if hasattr(value, "numel"))
    words = arrays(state)
    frozen = [name for name, one in model.named_parameters() if not one.requires_grad]
    parts = [
        Part(
            "model", digest([module(model), frozen]), f"{class_name(model)} of {numbers:,} numbers"
        ),
        Part(INITIAL, words, words[:8]),
    ]
    if optimized is not None:
        parts.append(
            Part("optimizer", digest([type(optimized), optimizer(optimized)]), _told(optimized))
        )
    return parts


def _told(optimized: torch.optim.Optimizer) -> str:
    """Returns the optimizer's class, and of its options those that are not the class's own."""
    import inspect  # noqa: PLC0415 - asked for in messages alone

    usual = {
        name: one.default for name, one in inspect.signature(type(optimized)).parameters.items()
    }
    groups: list[Any] = []
    for group in optimized.param_groups:
        options = {name: one for name, one in group.items() if name not in ("params", "initial_lr")}
        own = {name: one for name, one in options.items() if name == "lr" or one != usual.get(name)}
        groups.append(", ".join(f"{name}={one}" for name, one in own.items()))
    return f"{class_name(optimized)}({'; '.join(groups)})"
