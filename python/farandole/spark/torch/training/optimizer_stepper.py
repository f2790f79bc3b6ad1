# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""From a backward pass to an optimizer step: precision, clipping, learning rates."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from typing import TYPE_CHECKING, Any

import torch

import farandole.torch as hvd
from farandole.spark.common.show.step_meter import StepMeter
from farandole.spark.torch.rate_schedules import RateScheduler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole.spark.torch.job import TrainingLoopOptions

AUTOCAST_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Values of `precision`, with the type for autocast."""


def gradient_operation(loop: TrainingLoopOptions) -> int:
    """Returns the reduction of the gradients of `OptimizerStepper.backward` over processes.

    Args:
        loop: options of the training loop.
    """
    return hvd.Sum if loop.precision == "fp16" else hvd.Average


class OptimizerStepper:
    """The steps of the optimizer, with gradient scaling and the schedule of learning rates.

    Attributes:
        meter: Meter of the time of a step.
        taken: Steps of the optimizer so far.
        run_share: Share of the run, by rows, that is done after the current step.

    Args:
        optimizer: distributed optimizer.
        scheduler: scheduler of learning rates, or a function that makes one for an optimizer, or
            `None`.
        loop: options of the training loop.
        device: device of the model.
        factor: factor of the learning rates; schedulers see the learning rates of one process.
    """

    def __init__(
        self,
        optimizer: Any,
        scheduler: Any,
        loop: TrainingLoopOptions,
        device: torch.device,
        factor: float,
    ) -> None:
        self.optimizer = optimizer
        self.meter = StepMeter()
        self.taken = 0
        self.run_share = 0.0
        self._max_steps = loop.max_steps
        self._rate_factor = factor
        self._clip = loop.gradient_clip_norm
        # FSDP reduces gradients in backward passes.
        self._has_own_gradients = loop.takes_local_steps or loop.shards_model
        self._is_sharded = loop.shard_optimizer
        self._device = device
        self._dtype = AUTOCAST_DTYPES[loop.precision]
        # bfloat16 has the exponents of float32 and needs no scaling.
        self._scaler = torch.amp.GradScaler(device.type) if loop.precision == "fp16" else None
        self._group_options = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self.scheduler: Any = None
        if scheduler is not None:
            with self._set_single_process_rates():
                self.scheduler = (
                    scheduler if hasattr(scheduler, "state_dict") else scheduler(optimizer)
                )
            _rebind_scheduler(self.scheduler, optimizer)

    def autocast_context(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context that models and losses are called in."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Computes gradients.

        Args:
            loss: one number.
        """
        if self._scaler is not None:
            # The part of this process in the loss of one process. As many times as much as there
            # are processes would overflow in steps in which one process does not.
            loss = self._scaler.scale(loss / hvd.size())
        with self.meter.trace_phase("backward"):
            loss.backward()

    def take_step(self) -> None:
        """Reduces gradients over processes and takes the optimizer's step."""
        self.taken += 1
        if self._has_own_gradients:
            if self._clip is not None:
                torch.nn.utils.clip_grad_norm_(self._present_gradients(), self._clip)
            with self.meter.measure_reduction():  # most of it, whenever parameters are averaged
                self.optimizer.step()
            return
        if self._is_sharded:
            with self.meter.measure_reduction():  # and the step, which gathers parameters
                if self._clip is not None:
                    self.optimizer.clip_grad_norm_(self._clip)
                self.optimizer.step()
            return
        if self._scaler is None and self._clip is None and not self.meter.needs_reduction_timing:
            self.optimizer.step()
            return
        with self.meter.measure_reduction():
            self.optimizer.synchronize()
        held = self._present_gradients()
        if not self.meter.has_gradient_sizes:
            self.meter.set_gradient_sizes(
                len(held), sum(each.grad.nbytes for each in held if each.grad is not None)
            )
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(held, self._clip)
        with self.optimizer.skip_synchronize():
            if self._scaler is None:
                self.optimizer.step()
            else:
                self._scaler.step(self.optimizer)
                self._scaler.update()

    def _present_gradients(self) -> list[torch.Tensor]:
        """Returns the parameters that have gradients."""
        return [
            parameter
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]

    def step_scheduler(self, monitored: float | None) -> None:
        """Takes the scheduler's step, if there is a scheduler.

        Args:
            monitored: monitored score, for a scheduler that takes one.
        """
        if self.scheduler is None:
            return
        if isinstance(self.scheduler, RateScheduler):
            steps_share = 0.0 if self._max_steps is None else self.taken / self._max_steps
            with self._set_single_process_rates():
                self.scheduler.set_rates(max(self.run_share, steps_share))
            return
        watches = "metrics" in inspect.signature(self.scheduler.step).parameters
        with self._set_single_process_rates(), warnings.catch_warnings():
            # Ignore these warnings: the scheduler marked the optimizer that it was created with,
            # which is on the driver, and does not find its marks on this optimizer.
            warnings.filterwarnings(
                "ignore", message=r".*(lr_scheduler\.step\(\)|optimizer\.step\(\)).*"
            )
            if watches:
                self.scheduler.step(monitored)
            else:
                self.scheduler.step()

    def checkpoint_state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint besides the optimizer."""
        state: dict[str, Any] = {}
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        if self._scaler is not None:
            state["scaler"] = self._scaler.state_dict()
        return state

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Loads the state of a checkpoint.

        Args:
            state: the whole checkpoint.
        """
        if self.scheduler is not None and "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])
            # One that was made on the spot has set its first rate, where the checkpoint's optimizer
            # had a later one.
            for group, kept in zip(self.optimizer.param_groups, self._group_options, strict=True):
                group.update(kept)
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])

    def restore_state(self, state: dict[str, Any], factor: float) -> None:
        """Restores a state of this run in a world of another size. The caller has restored the
        optimizer's state.

        Args:
            state: a result of `snapshot_state`.
            factor: new factor of the learning rates.
        """
        if self.scheduler is not None:
            self.scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
        if factor != state["factor"]:
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * factor / state["factor"]
        self._rate_factor = factor

    def snapshot_state(self) -> dict[str, Any]:
        """Returns the state that `restore_state` restores."""
        return copy.deepcopy(self.checkpoint_state()) | {"factor": self._rate_factor}

    @contextlib.contextmanager
    def _set_single_process_rates(self) -> Iterator[None]:
        """Sets the learning rates of one process in the optimizer."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] / self._rate_factor
        try:
            yield
        finally:
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * self._rate_factor


def _rebind_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Connects a scheduler that was made with the user's optimizer, and its parts, to the
    optimizer that steps.
    """
    scheduler.optimizer = optimizer
    for inner in getattr(scheduler, "_schedulers", ()):
        _rebind_scheduler(inner, optimizer)
