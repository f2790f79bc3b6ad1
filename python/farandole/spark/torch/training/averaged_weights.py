# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Weights averaged over the steps of a run, which validation and the fitted model use."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole.spark.torch.training.batch_evaluator import BatchEvaluator

CHECKPOINT_KEY = "average"
"""Key of the averaged weights in a checkpoint."""


class AveragedWeights:
    """An exponential moving average of a model's weights; the first step's weights begin it.

    Attributes:
        averaged: The averaging module of torch, for elastic states.

    Args:
        model: The model that trains.
        decay: Share of the average that each step keeps.
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self._model = model
        self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def add_step(self) -> None:
        """Adds the present weights to the average."""
        self.averaged.update_parameters(self._model)

    def copy_buffers(self) -> None:
        """Copies the model's buffers, such as moving statistics, which are not averaged."""
        with torch.no_grad():
            pairs = zip(self.averaged.module.buffers(), self._model.buffers(), strict=True)
            for target, source in pairs:
                target.copy_(source)

    @contextlib.contextmanager
    def replace_in(self, batches: BatchEvaluator) -> Iterator[None]:
        """Lets an evaluator call the model with averaged weights, in evaluation mode.

        Args:
            batches: The evaluator.
        """
        trained = batches.model, batches.module
        module = self.averaged.module.eval()
        batches.model, batches.module = module, module
        try:
            yield
        finally:
            batches.model, batches.module = trained

    def checkpoint_state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        count = int(self.averaged.n_averaged)
        return {CHECKPOINT_KEY: {"weights": self.averaged.module.state_dict(), "steps": count}}

    def load_checkpoint_state(self, checkpoint: dict[str, Any]) -> None:
        """Loads the state of a checkpoint; without it, the average begins with the model.

        Args:
            checkpoint: The checkpoint.
        """
        state = checkpoint.get(CHECKPOINT_KEY)
        if state is not None:
            self.averaged.module.load_state_dict(state["weights"])
            self.averaged.n_averaged.fill_(state["steps"])


def fitted_weights(checkpoint: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the weights of the fitted model: averaged ones, if the checkpoint has them.

    Args:
        checkpoint: The checkpoint.
    """
    average = checkpoint.get(CHECKPOINT_KEY)
    return checkpoint["model"] if average is None else average["weights"]
