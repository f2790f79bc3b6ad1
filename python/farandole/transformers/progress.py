# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reports of a `Trainer` to the driver of its job, which draws them as curves."""

from __future__ import annotations

import time
from typing import Any, Final

import transformers

from farandole.common.rank_progress import OWN_PROGRESS
from farandole.spark.task import report

_SPEED_SUFFIXES: Final = ("_runtime", "_per_second")
"""Ends of names of logged values that measure the machine and not the model."""


class ReportProgress(transformers.TrainerCallback):
    """Reports losses, metrics and checkpoints of a `Trainer` to the driver of the job.

    The run viewer and Spark's Training tab draw them as curves, and `on_progress` of
    `Backend.run` receives them. Rank 0 reports a step whenever Trainer logs a loss
    (`logging_steps`), and each epoch with the mean of the losses logged in it, by steps, and the
    last evaluation. Without a driver that shows them, it does nothing.

    `farandole.transformers.Trainer` has this callback; other trainers take it as
    `callbacks=[ReportProgress()]`.
    """

    def __init__(self) -> None:
        self._epoch_began = self._last_log_time = time.monotonic()
        self._last_logged_step = 0
        self._loss_sum, self._logged_steps = 0.0, 0
        self._train_values: dict[str, float] = {}
        self._validation: dict[str, Any] | None = None
        self._reported_steps = 0
        self._steps_in_epoch = 1
        self._epochs: int | None = None

    def on_train_begin(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Begins at the step of a resumed training."""
        del control
        try:
            batches = len(train_dataloader)
        except TypeError:  # a stream: one epoch of `max_steps`
            self._steps_in_epoch, self._epochs = max(1, state.max_steps), None
        else:
            self._steps_in_epoch = max(1, -(-batches // args.gradient_accumulation_steps))
            self._epochs = state.num_train_epochs
        self._last_logged_step = self._reported_steps = state.global_step
        self._last_log_time = time.monotonic()
        self._begin_epoch()

    def on_epoch_begin(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **_: Any,
    ) -> None:
        """Reports the epoch before, whose evaluation comes after its end."""
        del args, control
        self._report_epoch(state)

    on_train_end = on_epoch_begin

    def on_log(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Reports a step with the loss that Trainer logs."""
        del control
        values = {name: value for name, value in (logs or {}).items() if _is_number(value)}
        steps = state.global_step - self._last_logged_step
        if "loss" not in values or steps <= 0:
            return
        now = time.monotonic()
        seconds = now - self._last_log_time
        self._last_log_time, self._last_logged_step = now, state.global_step
        self._loss_sum += values.pop("loss") * steps
        self._logged_steps += steps
        self._train_values = {name: value for name, value in values.items() if name != "epoch"}
        if not state.is_world_process_zero:
            return
        epoch, before = divmod(state.global_step - 1, self._steps_in_epoch)
        rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size * steps
        report(
            {
                "kind": "step",
                "epoch": epoch,
                "epochs": self._epochs,
                "step": before + 1,
                "steps": self._steps_in_epoch,
                "loss": (logs or {})["loss"],
                "rows_per_second": rows / seconds if seconds > 0 else None,
            }
        )

    def on_evaluate(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        metrics: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Keeps the last evaluation of an epoch for its report."""
        del args, state, control
        values = {
            name.removeprefix("eval_"): value
            for name, value in (metrics or {}).items()
            if _is_number(value) and name != "epoch" and not name.endswith(_SPEED_SUFFIXES)
        }
        loss = values.pop("loss", None)
        self._validation = {"loss": loss, "all_metrics": [values]}

    def on_save(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **_: Any,
    ) -> None:
        """Takes note of a checkpoint, whose age the metrics of the job have."""
        del args, control
        if state.is_world_process_zero:
            OWN_PROGRESS.note_checkpoint()

    def _report_epoch(self, state: transformers.TrainerState) -> None:
        steps = state.global_step - self._reported_steps
        if steps > 0 and state.is_world_process_zero:
            epoch = (state.global_step - 1) // self._steps_in_epoch
            loss = self._loss_sum / self._logged_steps if self._logged_steps else None
            entry: dict[str, Any] = {
                "epoch": epoch,
                "seconds": time.monotonic() - self._epoch_began,
                "train": {"loss": loss, "all_metrics": [self._train_values]},
            }
            if self._validation is not None:
                entry["validation"] = self._validation
            report({"kind": "epoch", "entry": entry, "epochs": self._epochs, "steps": steps})
        self._reported_steps = state.global_step
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._epoch_began = time.monotonic()
        self._loss_sum, self._logged_steps = 0.0, 0
        self._train_values, self._validation = {}, None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
