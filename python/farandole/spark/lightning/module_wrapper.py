# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A plain module, its optimizer and its losses as a `LightningModule`."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from farandole.spark.torch.columns.loss_terms import LabelLoss, mean_batch_loss
from farandole.spark.torch.columns.losses import shape_label
from farandole.spark.torch.columns.model_calls import tensors_of_batch
from farandole.spark.torch.training.batch_evaluator import zero_loss_terms
from farandole.spark.torch.training.step_counts import LabelCounter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farandole.spark.lightning.lightning_loader import LightningLoader
    from farandole.spark.torch.columns.class_weights import ClassWeights
    from farandole.spark.torch.columns.model_calls import ModelCall
    from farandole.spark.torch.job import TorchInput, TorchLabel


class _PlainModuleSteps:
    """The training steps on batches by column that a plain module needs to be a Lightning
    module.
    """

    model: torch.nn.Module
    log_dict: Any

    def set_training_objects(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        interval: str,
        losses: Sequence[Any],
        loss_weights: Sequence[float],
        metrics: Sequence[Sequence[Any]],
        inputs: Sequence[TorchInput],
        call: ModelCall,
        labels: Sequence[TorchLabel],
        weight: str | None,
        class_weights: ClassWeights | None = None,
        reduction: str | None = None,
    ) -> None:
        """Takes the user's objects."""
        self.model = model
        self._optimizer_parts = (optimizer, scheduler, interval)
        weighted = weight is not None or class_weights is not None
        self._losses = [
            LabelLoss(loss, torch_label, reduction, share, weighted=weighted)
            for loss, torch_label, share in zip(losses, labels, loss_weights, strict=True)
        ]
        self._metrics = [(list(group) * len(labels))[: len(labels)] for group in metrics]
        self._inputs = tuple(inputs)
        self._call = call
        self._labels = tuple(labels)
        self._weight = weight
        self._class_weights = class_weights
        self.use_loaders(None, None)

    def forward(self, *inputs: torch.Tensor, **by_keyword: Any) -> Any:
        """Calls the module."""
        return self.model(*inputs, **by_keyword)

    def label_counter(self) -> LabelCounter:
        """Returns what counts the labels of batches."""
        return LabelCounter(self._losses, self._labels)

    def use_loaders(self, train: LightningLoader | None, val: LightningLoader | None) -> None:
        """Takes the loaders, which know the rows and counts of their batches.

        Args:
            train: loader of training batches.
            val: loader of validation batches.
        """
        self._loaders = {"train": train, "val": val}
        self._step_loss: torch.Tensor | None = None
        self.reset_loss_sums()

    def reset_loss_sums(self) -> None:
        """Begins the sums of an epoch."""
        nothing = [0.0] * len(self._labels)
        self.loss_sums: dict[str, tuple[list[Any], list[float]]] = {
            stage: (list(nothing), list(nothing)) for stage in ("train", "val")
        }

    def take_step_loss(self) -> torch.Tensor | None:
        """Returns the part of the batch in progress in the step's loss, once; `None` if unknown."""
        found, self._step_loss = self._step_loss, None
        return found

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        """Returns the mean loss of a batch."""
        return self._batch_loss(batch, "train", index)

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        """Returns the mean loss of a batch."""
        return self._batch_loss(batch, "val", index)

    def configure_optimizers(self) -> Any:
        """Returns the user's optimizer, and the scheduler if there is one."""
        optimizer, scheduler, interval = self._optimizer_parts
        if scheduler is None:
            return optimizer
        made = scheduler if hasattr(scheduler, "state_dict") else scheduler(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "interval": interval}}

    def _batch_loss(self, batch: dict[str, torch.Tensor], stage: str, index: int) -> torch.Tensor:
        inputs = tensors_of_batch(self._inputs, batch)
        given = (
            [batch[one.column.name] for one in self._labels] if self._call.label_arguments else []
        )
        own, result = None, self._call.call_model(self.forward, inputs, given)
        if given:
            own, result = self._call.split_own_loss(result)
        outputs = self._call.output_tensors(result)
        labels = [
            shape_label(batch[torch_label.column.name], output, torch_label.shape)
            for torch_label, output in zip(self._labels, outputs, strict=True)
        ]
        weights = None if self._weight is None else batch[self._weight]
        if self._class_weights is not None:
            label = batch[self._labels[0].column.name]
            weights = self._class_weights.weigh_rows(label, weights)
        loader = self._loaders[stage]
        read = None if loader is None else loader.yielded_batch_record(index)
        if read is not None and not read.valid:
            compared = [own] * len(outputs) if own is not None and own.isfinite() else outputs
            terms = zero_loss_terms(compared)
        else:
            divisors = (
                list(read.own)
                if read is not None and read.own
                else [
                    loss.loss_divisor(label, len(output))
                    for loss, output, label in zip(self._losses, outputs, labels, strict=True)
                ]
            )
            # A mean of ignored labels alone is NaN. The output then has a gradient of 0.
            terms = [
                loss.batch_loss_term(
                    output if own is None or not divisor else own, label, weights, divisor
                )
                for loss, output, label, divisor in zip(
                    self._losses, outputs, labels, divisors, strict=True
                )
            ]
        if read is not None and read.counts is not None and stage == "train":
            self._step_loss = read.counts.step_loss(terms)
        sums, counts = self.loss_sums[stage]
        for position, term in enumerate(terms):
            sums[position] = sums[position] + term.value.detach().double() * term.scale
            counts[position] += term.count
        loss = mean_batch_loss(terms)
        values = {f"{stage}_loss": loss} | {
            f"{stage}_{name}": value for name, value in self._metric_values(outputs, labels)
        }
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=len(labels[0]))
        return loss

    def _metric_values(
        self, outputs: list[torch.Tensor], labels: list[torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for group in self._metrics:
            for torch_label, function, output, label in zip(
                self._labels, group, outputs, labels, strict=True
            ):
                name = getattr(function, "__name__", type(function).__name__).strip("<>")
                key = name if len(self._labels) == 1 else f"{name}_{torch_label.column.name}"
                yield key, torch.as_tensor(function(output.detach(), label), dtype=torch.float32)


@cache
def wrapper_class(package: str) -> type[Any]:
    """Returns the class for one of Lightning's packages.

    Args:
        package: `lightning.pytorch` or `pytorch_lightning`.
    """
    base = import_module(package).LightningModule
    return type("WrappedModule", (_PlainModuleSteps, base), {"__module__": __name__})


def wrap_module(package: str, **parts: Any) -> Any:
    """Returns a Lightning module whose steps are prepared.

    Args:
        package: as in `wrapper_class`.
        **parts: arguments of `set_training_objects`.
    """
    module = wrapper_class(package)()
    module.set_training_objects(**parts)
    return module
