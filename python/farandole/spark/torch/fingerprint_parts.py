# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The parts of a torch model and its optimizer that decide the result of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole.spark.common.runs.digests import (
    arrays_digest,
    class_name,
    describe_module,
    describe_optimizer,
    value_digest,
)
from farandole.spark.common.runs.fingerprint import INITIAL_WEIGHTS, FingerprintPart

if TYPE_CHECKING:
    import torch


def model_parts(
    model: torch.nn.Module, optimized: torch.optim.Optimizer | None
) -> list[FingerprintPart]:
    """Returns the parts of a fingerprint: architecture, initial weights, optimizer.

    Args:
        model: the user's.
        optimized: the user's optimizer; `None` where the model makes its own.
    """
    state = model.state_dict()
    numbers = sum(value.numel() for value in state.values() if hasattr(value, "numel"))
    digest = arrays_digest(state)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    parts = [
        FingerprintPart(
            "model",
            value_digest([describe_module(model), frozen]),
            f"{class_name(model)} of {numbers:,} numbers",
        ),
        FingerprintPart(INITIAL_WEIGHTS, digest, digest[:8]),
    ]
    if optimized is not None:
        parts.append(
            FingerprintPart(
                "optimizer",
                value_digest([type(optimized), describe_optimizer(optimized)]),
                _describe_optimizer(optimized),
            )
        )
    return parts


def total_learning_rate_digest(optimized: torch.optim.Optimizer, processes: int) -> dict[str, str]:
    """Returns the digest of the learning rates of all processes together, by name of the part.

    Args:
        optimized: the user's optimizer.
        processes: number of processes of the fit.
    """
    groups = [
        {
            name: entry * processes if name in ("lr", "initial_lr") else entry
            for name, entry in group.items()
        }
        for group in describe_optimizer(optimized)
    ]
    return {"optimizer": value_digest([type(optimized), groups])}


def _describe_optimizer(optimized: torch.optim.Optimizer) -> str:
    """Returns the optimizer's class, and the options that differ from the class's defaults."""
    import inspect  # noqa: PLC0415 - needed for messages only

    usual = {
        name: parameter.default
        for name, parameter in inspect.signature(type(optimized)).parameters.items()
    }
    groups: list[Any] = []
    for group in optimized.param_groups:
        options = {
            name: entry for name, entry in group.items() if name not in ("params", "initial_lr")
        }
        own = {
            name: entry
            for name, entry in options.items()
            if name == "lr" or entry != usual.get(name)
        }
        groups.append(", ".join(f"{name}={entry}" for name, entry in own.items()))
    return f"{class_name(optimized)}({'; '.join(groups)})"
