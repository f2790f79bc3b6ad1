# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""From rows to outputs, labels and a loss: what happens to one batch, in training and in
validation.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from farandole.spark.torch.columns.loss_terms import LabelLoss, LossTerm
from farandole.spark.torch.columns.losses import shape_label
from farandole.spark.torch.columns.model_calls import inputs_by_key
from farandole.spark.torch.columns.tensors import (
    check_finite_inputs,
    input_tensor,
    label_tensor,
    to_device,
)
from farandole.spark.torch.training.batch_norm import ignore_padding_in_buffers
from farandole.spark.torch.training.step_counts import LabelCounter
from farandole.torch.loss_sums import ignored_label

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farandole.spark.common.data.batch_source import PaddedRankBatch
    from farandole.spark.torch.job import TorchTrainingJob
    from farandole.spark.torch.training.optimizer_stepper import OptimizerStepper
    from farandole.spark.torch.training.step_counts import StepLossDivisors

ScoredBatch = tuple[list[torch.Tensor], list[torch.Tensor], list[LossTerm]]
"""Outputs and labels of the rows that count, and the losses of the labels."""


class BatchEvaluator:
    """The model and its losses, called on batches.

    Args:
        model: what is called; compiled, if the user wants that.
        module: the model, on its device.
        losses: one per label, on that device.
        job: the run.
        device: where.
        size: processes.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        module: torch.nn.Module,
        losses: Sequence[Any],
        job: TorchTrainingJob,
        device: torch.device,
        size: int,
    ) -> None:
        self.model = model
        self.module = module
        self.job = job
        self.device = device
        self.size = size
        self.first_pass = True
        self.weight_seen = 0.0
        self._losses = list(losses)
        self._label_losses = [
            LabelLoss(loss, one, job.loss_reduction, share, weighted=job.has_weights)
            for loss, one, share in zip(losses, job.labels, job.loss_weights, strict=True)
        ]
        self.counter = LabelCounter(self._label_losses, job.labels)

    def forward_with_losses(self, rows: PaddedRankBatch) -> ScoredBatch:
        """Calls the model and its losses.

        Args:
            rows: the batch.
        """
        # Batch normalisation needs two rows in training, and every rank needs a backward pass.
        # Therefore a batch with fewer rows is padded.
        valid, count, call = rows.valid, rows.count, self.job.call
        given = [] if self.job.own_loss is None else self._label_arguments(rows, count)
        with ignore_padding_in_buffers(self.module, valid, count):
            value = call.call_model(self.model, self.input_tensors(rows, count), given)
        own = None
        if given:
            own, value = call.split_own_loss(value)
        outputs = call.output_tensors(value)
        if valid == 0:
            compared = [own] * len(outputs) if own is not None and own.isfinite() else outputs
            return outputs, outputs, zero_loss_terms(compared)
        outputs = [output[:valid] for output in outputs]
        outputs, labels = self.shape_labels(outputs, self.label_tensors(rows, valid))
        counts, weights = self.counter.count_batch(rows), self.weight_tensor(rows, valid)
        compared = outputs
        if own is not None:
            # The padding repeats the first row: it is the only row that counts, so a mean stays
            # the same. A mean of ignored labels is NaN, and the output has a gradient of 0.
            own = own * (valid / count) if self.job.loss_reduction == "sum" else own
            compared = [
                own if each else output for each, output in zip(counts, outputs, strict=True)
            ]
        return outputs, labels, self.loss_terms(outputs, labels, weights, counts, compared)

    def _label_arguments(self, rows: PaddedRankBatch, count: int) -> list[torch.Tensor]:
        """Returns the labels as the model takes them for its own loss."""
        return [
            label if one.shape is None else label.reshape(one.shape)
            for one, label in zip(self.job.labels, self.label_tensors(rows, count), strict=True)
        ]

    def input_tensors(self, rows: PaddedRankBatch, count: int) -> list[torch.Tensor]:
        """Returns the model's arguments."""
        if self.first_pass and not self.job.data.missing.allow_nan:
            for one in self.job.inputs:
                check_finite_inputs(rows.columns, one, count)
        return [input_tensor(rows.columns, one, count, self.device) for one in self.job.inputs]

    def label_tensors(self, rows: PaddedRankBatch, count: int) -> list[torch.Tensor]:
        """Returns the label columns."""
        how = {"checked": self.first_pass, "allow_nan": self.job.data.missing.allow_nan}
        return [label_tensor(rows, one, count, self.device, **how) for one in self.job.labels]

    def weight_tensor(self, rows: PaddedRankBatch, count: int) -> torch.Tensor | None:
        """Returns the weight of each row, where there are weights."""
        weights = self._column_weights(rows, count)
        if self.job.class_weights is None:
            return weights
        label = rows.columns[self.job.labels[0].column.name][:count].to(self.device)
        return self.job.class_weights.weigh_rows(label, weights)

    def _column_weights(self, rows: PaddedRankBatch, count: int) -> torch.Tensor | None:
        if self.job.weight is None:
            return None
        weights = to_device(
            rows.columns[self.job.weight][:count], torch.float32, self.device
        ).reshape(-1)
        if self.first_pass:
            self.weight_seen += float(weights.sum())
        return weights

    def shape_labels(
        self, outputs: list[torch.Tensor], labels: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs, and labels in the shapes that their losses expect.

        Args:
            outputs: result of the model, or a list of its outputs.
            labels: as the columns hold them.
        """
        outputs = self.job.call.select_outputs(outputs)
        pairs = zip(self.job.labels, labels, outputs, strict=True)
        return outputs, [shape_label(label, output, one.shape) for one, label, output in pairs]

    def loss_terms(
        self,
        outputs: list[torch.Tensor],
        labels: list[torch.Tensor],
        weights: torch.Tensor | None,
        counts: Sequence[float],
        compared: Sequence[torch.Tensor] | None = None,
    ) -> list[LossTerm]:
        """Returns the losses of the labels, each multiplied by the label's loss weight.

        Args:
            outputs: of the rows that count.
            labels: in the shapes that their losses expect.
            weights: one per row, or `None`.
            counts: what the losses of these rows are divided by.
            compared: first argument of each label's loss; without it, the outputs.

        Raises:
            ValueError: a label is no class that its output has.
        """
        if self.first_pass:
            self._check_label_classes(outputs, labels)
        found = zip(self._label_losses, compared or outputs, labels, counts, strict=True)
        return [
            loss.batch_loss_term(output, label, weights, count)
            for loss, output, label, count in found
        ]

    def _check_label_classes(self, outputs: list[torch.Tensor], labels: list[torch.Tensor]) -> None:
        for index, one in enumerate(self.job.labels):
            if not one.indexes or outputs[index].dim() < 2 or labels[index].is_floating_point():  # noqa: PLR2004 - (rows, classes)
                continue
            classes = outputs[index].shape[1]
            ignored = ignored_label(self._losses[index])
            counted = labels[index][labels[index] != ignored]
            strange = counted[(counted < 0) | (counted >= classes)]
            if strange.numel():
                raise ValueError(describe_unknown_class(one.column.name, int(strange[0]), classes))


def zero_loss_terms(outputs: Sequence[torch.Tensor]) -> list[LossTerm]:
    """Returns losses of no rows, whose gradients are 0; each rank needs a backward pass.

    Args:
        outputs: one per label.
    """
    return [LossTerm(output.sum() * 0.0, 1.0, 0.0) for output in outputs]


def describe_unknown_class(name: str, value: float, classes: int) -> str:
    """Returns the message about a label for which the output has no class.

    Args:
        name: of the column.
        value: that it holds.
        classes: how many the output has.
    """
    return (
        f"label column {name!r} holds class {value:g}, the model's output has the classes 0 to "
        f"{classes - 1}"
    )


class UserMinibatchFunction:
    """The user's `train_minibatch_fn`, called with as many of Horovod's arguments as it takes.

    `loss_fn` counts every row of the step once, whichever process holds it, as the built-in loop
    does: on the last, shorter batch of an epoch it leaves out the rows that fill it up.

    Args:
        function: the user's.
        batches: what turns rows into tensors.
        optimizer: that it steps.
    """

    def __init__(
        self, function: Callable[..., Any], batches: BatchEvaluator, optimizer: Any
    ) -> None:
        self._function = function
        self._argument_count = _count_positional(function)
        self._batches = batches
        self._stepper: OptimizerStepper
        self._has_pending_gradients = False
        self._passes = 1
        # torch calls hooks for the distributed optimizer, and inside for the wrapped class.
        self._depth = 0
        optimizer.register_step_pre_hook(self._note_step_begin)
        optimizer.register_step_post_hook(self._count_step)

    def __call__(
        self, rows: PaddedRankBatch, step: int, passes: int, counts: StepLossDivisors
    ) -> ScoredBatch:
        """Trains on one batch.

        Args:
            rows: the batch.
            step: its number in the epoch.
            passes: batches that make one step of the optimizer.
            counts: what the losses of those batches are divided by.
        """
        batches, valid, count = self._batches, rows.valid, rows.count
        told: list[list[LossTerm]] = []

        def loss_fn(outputs: Any, labels: Any, weights: Any = None) -> torch.Tensor:
            self._has_pending_gradients = True
            outputs = batches.job.call.select_outputs(outputs)
            few = [output[:valid] for output in outputs], [label[:valid] for label in labels]
            terms = (
                batches.loss_terms(
                    *few,
                    None if weights is None else weights[:valid],
                    batches.counter.count_batch(rows),
                )
                if valid
                else zero_loss_terms(outputs)
            )
            told.append(terms)
            return counts.step_loss(terms)

        tensors = batches.input_tensors(rows, count)
        by_keyword = any(batches.job.call.arguments)
        arguments = (
            batches.model,
            self._stepper.optimizer,
            batches.shape_labels,
            loss_fn,
            inputs_by_key(batches.job.inputs, tensors) if by_keyword else tensors,
            batches.label_tensors(rows, count),
            batches.weight_tensor(rows, count),
            passes,
            step,
        )
        with (
            ignore_padding_in_buffers(batches.module, valid, count),
            self._stepper.autocast_context(),
        ):
            returned = self._function(*arguments[: self._argument_count])
        if not isinstance(returned, tuple) or len(returned) != 2:  # noqa: PLR2004 - outputs and loss
            raise ValueError(
                f"train_minibatch_fn must return (outputs, loss): {type(returned).__name__}"
            )
        if not told and batches.job.data.step_rows is not None:
            raise ValueError(
                "train_minibatch_fn with global_batch_size must compute its loss by its argument "
                "loss_fn: any other loss would give the rows of processes different weights"
            )
        outputs, labels = batches.shape_labels(returned[0], batches.label_tensors(rows, count))
        if told:
            terms = told[-1]
        else:  # a loss of the function's own
            own = torch.as_tensor(returned[1]).detach()
            terms = [
                LossTerm(own if index == 0 else own * 0.0, float(valid), float(valid))
                for index in range(len(labels))
            ]
        return [one[:valid] for one in outputs], [one[:valid] for one in labels], terms

    @property
    def is_between_steps(self) -> bool:
        """Whether no gradients wait for the optimizer's step."""
        return not self._has_pending_gradients

    def enter_world(self, stepper: OptimizerStepper) -> None:
        """Begins in a world, without gradients of the one before.

        Args:
            stepper: that counts the optimizer's steps.
        """
        self._stepper, self._has_pending_gradients = stepper, False

    def finish_epoch(self) -> None:
        """Takes the step of the epoch's last batches, where the function steps before a batch as
        Horovod's does.
        """
        if self._has_pending_gradients:
            self._stepper.optimizer.step()
            self._stepper.optimizer.zero_grad()

    def _note_step_begin(self, *_: Any) -> None:
        self._depth += 1

    def _count_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._depth -= 1
        held = (one for group in optimizer.param_groups for one in group["params"])
        if self._depth or all(one.grad is None for one in held):
            return
        self._stepper.taken += 1
        self._has_pending_gradients = False
        if self._batches.job.loop.lr_scheduler_interval == "step":
            self._stepper.step_scheduler(None)


def _count_positional(function: Callable[..., Any]) -> int:
    kinds = [one.kind for one in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return 9
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(kind in places for kind in kinds)
