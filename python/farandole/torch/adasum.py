# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The Adasum optimizer: every rank steps on its own gradients, and the steps are combined."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from farandole.common.rank_progress import OWN_PROGRESS
from farandole.torch._allreduce import grouped_allreduce
from farandole.torch._unwrapped_copies import unwrapped_copy_recipe
from farandole.torch.compression import Compression, Compressor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from farandole.torch._reduce import TensorReduction


class _DistributedAdasumOptimizer(torch.optim.Optimizer):
    """The mixin that `DistributedOptimizer(op=Adasum)` adds to the class of the wrapped optimizer.

    Horovod steps parameter by parameter while the backward pass runs; here the wrapped optimizer
    takes one whole step, so that gradients can be clipped before it, and options that look at all
    parameters work.
    """

    _parameter_names: dict[torch.Tensor, str]
    _compression: type[Compressor] = Compression.none
    _reduction: TensorReduction | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies as a plain optimizer; `DistributedOptimizer` wraps the copy again."""
        return unwrapped_copy_recipe(self, _DistributedAdasumOptimizer)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Does nothing: gradients add up until `step`, however many passes that takes.

        Raises:
            ValueError: When `passes` is not positive.
        """
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step must be positive: {passes!r}")

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuses a GradScaler, which reads this property first: ranks would skip different steps,
        and the other ranks would wait.
        """
        if self._reduction is not None:
            raise ValueError(
                "op=Adasum cannot be combined with a GradScaler: train in bfloat16, or reduce "
                "with Average"
            )
        return self.__dict__.get("_step_supports_amp_scaling", False)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports

    def synchronize(self) -> None:
        """Does nothing: `step` combines steps, not gradients."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises an error: there is no step without a combination.

        Raises:
            AssertionError: Always.
        """
        raise AssertionError(
            "skip_synchronize() is not possible with op=Adasum, which combines steps, not gradients"
        )
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes the wrapped optimizer's step on this rank's gradients, then combines the changes of
        all ranks' steps.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            The result of the wrapped optimizer.

        Raises:
            ValueError: When ranks disagree about a parameter.
            FarandoleInternalError: When a peer failed or the session was shut down; parameters are
                as before.
        """
        if self._reduction is None:
            result = super().step(closure)
            OWN_PROGRESS.end_step()
            return result
        parameters = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        starts = [parameter.detach().clone() for parameter in parameters]
        result = super().step(closure)
        with torch.no_grad():
            changes = [
                parameter - start for parameter, start in zip(parameters, starts, strict=True)
            ]
            for parameter, start in zip(parameters, starts, strict=True):
                parameter.copy_(start)
            with OWN_PROGRESS.measure_reduction():
                combined = grouped_allreduce(
                    changes,
                    name="adasum",
                    compression=self._compression,
                    op=self._reduction.op,
                    process_set=self._reduction.process_set,
                )
            for parameter, change in zip(parameters, combined, strict=True):
                parameter.add_(change)
        OWN_PROGRESS.end_step()
        return result
