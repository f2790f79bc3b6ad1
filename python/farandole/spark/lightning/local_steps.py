# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Local SGD in Lightning: each process steps on its own gradients. Parameters are averaged every
`sync_every` steps, before each validation and at the end of each epoch.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

import farandole.torch as hvd
from farandole.spark.torch.training.batch_norm import average_moving_statistics

if TYPE_CHECKING:
    from collections.abc import Callable

_MIN_LOCAL_STEPS = 2
"""Value of `sync_every` from which processes take steps of their own."""


def refuse_options_of_local_steps(estimator: Any, min_processes: int, max_processes: int) -> None:
    """Refuses what does not go with local steps.

    Args:
        estimator: the `LightningEstimator`.
        min_processes: smallest number of processes of the backend.
        max_processes: largest number of processes of the backend.

    Raises:
        ValueError: the message names the option.
    """
    every = estimator.getSyncEvery()
    if every < _MIN_LOCAL_STEPS:
        return
    refused = {
        'precision="fp16", whose scaler looks at all gradients': (
            estimator.getPrecision() == "fp16"
        ),
        "gradient_compression": estimator.getGradientCompression() is not None,
        "global_batch_size": estimator.getGlobalBatchSize() is not None,
        "trainer_args['strategy']": "strategy" in (estimator.getTrainerArgs() or {}),
        "an elastic backend": min_processes != max_processes,
    }
    for option, given in refused.items():
        if given:
            raise ValueError(f"sync_every={every} cannot be combined with {option}")


def local_steps_strategy_class(strategy: type[Any]) -> type[Any]:
    """Returns the strategy of local steps.

    Args:
        strategy: the strategy that averages gradients.
    """

    class LocalStepsStrategy(strategy):
        def __init__(self, *args: Any, sync_every: int, **options: Any) -> None:
            super().__init__(*args, **options)
            self._sync_every = sync_every
            self._steps: dict[int, int] = {}
            self._has_own_steps = False

        def configure_ddp(self) -> None:
            """Leaves the module without DistributedDataParallel; all ranks begin equal."""
            hvd.broadcast_parameters(self.lightning_module.state_dict(), root_rank=0)

        def optimizer_step(
            self, optimizer: Any, closure: Callable[[], Any], *args: Any, **options: Any
        ) -> Any:
            result = super().optimizer_step(optimizer, closure, *args, **options)
            number = next(
                index
                for index, each in enumerate(self.optimizers)
                if each is optimizer or each is getattr(optimizer, "_optimizer", optimizer)
            )
            self._steps[number] = self._steps.get(number, 0) + 1
            self._has_own_steps = True
            if self._steps[number] % self._sync_every == 0:
                groups = self.optimizers[number].param_groups
                _average([each for group in groups for each in group["params"]], f"sgd.{number}")
            return result

        def synchronize(self) -> None:
            """Averages all parameters and moving statistics, if a step was taken since the last
            call; a collective call. The states of optimizers become the states of rank 0, which
            are in checkpoints.
            """
            if not self._has_own_steps:
                return
            self._has_own_steps, self._steps = False, {}
            _average(list(self.lightning_module.parameters()), "all")
            average_moving_statistics(self.lightning_module)
            for optimizer in self.optimizers:
                hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    return LocalStepsStrategy


def _average(parameters: list[torch.Tensor], name: str) -> None:
    """Replaces trained parameters by their means over ranks; a collective call."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if hvd.size() == 1 or not trained:
        return
    with torch.no_grad():
        means = hvd.grouped_allreduce(
            [parameter.detach() for parameter in trained],
            op=hvd.Average,
            name=f"farandole.lightning.local.{name}",
        )
        for parameter, mean in zip(trained, means, strict=True):
            parameter.copy_(mean)


class _SynchronizeLocalSteps:
    """Averages parameters before they are validated or saved."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Averages after the last batch of an epoch."""
        if trainer.is_last_batch:
            trainer.strategy.synchronize()

    def on_validation_start(self, trainer: Any, _module: Any) -> None:
        """Averages before a validation within an epoch."""
        trainer.strategy.synchronize()

    def on_train_epoch_end(self, trainer: Any, _module: Any) -> None:
        """Averages at the end of an epoch that ended early."""
        trainer.strategy.synchronize()


@cache
def local_steps_callback_class(base: type[Any]) -> type[Any]:
    """Returns the callback that averages parameters at the right moments.

    Args:
        base: the class of callbacks of one of Lightning's packages.
    """
    return type("SynchronizeLocalSteps", (_SynchronizeLocalSteps, base), {"__module__": __name__})
