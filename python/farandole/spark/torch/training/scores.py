# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Means of loss and metrics over the rows of all processes.

The loss of each label is a sum over rows, divided by what the label's loss divides by: the rows, or
the class weights of labels that are not ignored.
A metric is called with the output and the label of one batch. Its value is weighted by the number
of rows, so a short last batch, or a process with fewer rows, weighs less. Sums stay on the device
until they are read. A torchmetrics metric keeps its own state; the states of all processes are
combined at the end of the pass.

In an elastic job, the sums continue when the world changes. The states of torchmetrics start again
and cover the rows since then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import farandole.torch as hvd
from farandole.numpy.plain_value_exchange import allgather_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farandole.spark.torch.columns.loss_terms import LossTerm
    from farandole.spark.torch.job import TorchLabel


class ScoreSums:
    """Sums of one pass over data.

    Args:
        metrics: one group per metric: a function for every label, or one per label.
        labels: the labels.
        before: sums of all processes from an earlier part of the pass, a result of `global_totals`.
    """

    def __init__(
        self,
        metrics: list[list[Any]],
        labels: Sequence[TorchLabel],
        before: Sequence[float] | None = None,
    ) -> None:
        names = [one.column.name for one in labels]
        self._groups = [
            [
                (name, index, function)
                for index, (name, function) in enumerate(
                    zip(*_metrics_per_label(group, names), strict=True)
                )
            ]
            for group in _name_metrics(metrics)
        ]
        self._metrics = [one for group in self._groups for one in group]
        self._earlier_totals = before
        self._rows = 0
        self._loss_sums: list[Any] = [0.0] * len(labels)
        self._loss_counts = [0.0] * len(labels)
        self._sums: list[Any] = [0.0] * len(self._metrics)
        for _, _, function in self._metrics:
            if is_stateful(function):
                function.reset()

    def add_batch(
        self,
        outputs: list[torch.Tensor],
        labels: list[torch.Tensor],
        terms: Sequence[LossTerm],
        rows: int,
    ) -> None:
        """Counts one batch.

        Args:
            outputs: of the rows that count.
            labels: of the same rows.
            terms: losses of the labels over these rows.
            rows: how many.
        """
        if rows == 0:
            return
        self._rows += rows
        for index, term in enumerate(terms):
            added = term.value.detach().double() * term.scale
            self._loss_sums[index] = self._loss_sums[index] + added
            self._loss_counts[index] += term.count
        with torch.no_grad():
            for position, (name, index, function) in enumerate(self._metrics):
                if is_stateful(function):
                    function.to(outputs[index].device).update(
                        outputs[index].detach(), labels[index]
                    )
                else:
                    value = _to_scalar(function(outputs[index].detach(), labels[index]), name)
                    self._sums[position] = self._sums[position] + value * rows

    def mean_loss(self) -> float:
        """Returns the mean loss so far, of this process alone."""
        return _mean_loss([float(one) for one in self._loss_sums], self._loss_counts)

    def global_totals(self) -> list[float]:
        """Returns the rows of all processes, the sums and counts of the labels' losses, and the
        sums of metrics; a collective call.
        """
        sums = [float(total) for total in (*self._loss_sums, *self._loss_counts, *self._sums)]
        mine = torch.tensor([float(self._rows), *sums], dtype=torch.float64)
        found = hvd.allreduce(mine, op=hvd.Sum, name="farandole.scores").tolist()
        return (
            found
            if self._earlier_totals is None
            else [one + more for one, more in zip(self._earlier_totals, found, strict=True)]
        )

    def global_scores(self) -> dict[str, Any]:
        """Returns the means over all processes; a collective call.

        Returns:
            `{"loss": ..., "all_metrics": [{name: value}, ...]}`, one dict per metric.
        """
        rows, *sums = self.global_totals()
        labels = len(self._loss_sums)
        means = iter([total / max(rows, 1.0) for total in sums[2 * labels :]])
        return {
            "loss": _mean_loss(sums[:labels], sums[labels : 2 * labels]),
            "all_metrics": [
                {
                    key: value
                    for name, _, function in group
                    for key, value in _metric_values(name, function, next(means)).items()
                }
                for group in self._groups
            ],
        }


def _mean_loss(sums: Sequence[float], counts: Sequence[float]) -> float:
    """Returns the sum of the labels' mean losses; a label that never counts adds 0."""
    return sum(total / count for total, count in zip(sums, counts, strict=True) if count)


def is_stateful(function: Any) -> bool:
    """Returns whether a metric has state, like the metrics of torchmetrics."""
    return all(
        callable(getattr(function, name, None)) for name in ("update", "compute", "reset", "to")
    )


def _metric_values(name: str, function: Any, mean: float) -> dict[str, float]:
    if not is_stateful(function):
        return {name: mean}
    parts = list(function.values()) if hasattr(function, "values") else [function]
    for part in parts:
        part.dist_sync_fn = _gather_tensor
        part.distributed_available_fn = _has_peers
    value = function.compute()
    if isinstance(value, dict):
        return {f"{name}_{key}": _to_scalar(one, key).item() for key, one in value.items()}
    return {name: float(_to_scalar(value, name))}


def _has_peers() -> bool:
    return hvd.size() > 1


def _gather_tensor(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Gathers a tensor of any shape from every rank, in the form that torchmetrics expects."""
    del group
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    mine = (
        str(tensor.dtype).removeprefix("torch."),
        list(tensor.shape),
        flat.view(torch.uint8).numpy(),
    )
    return [
        torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape).to(tensor.device)
        for dtype, shape, data in allgather_plain(mine)
    ]


def _to_scalar(value: Any, name: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return torch.tensor(float(value), dtype=torch.float64)
    if value.numel() != 1:
        raise ValueError(
            f"metric {name} must return one number, it returned shape {tuple(value.shape)}"
        )
    return value.detach().double().reshape(())


def _name_metrics(metrics: list[list[Any]]) -> list[list[tuple[str, Any]]]:
    """Names every function after itself, and the second of a name with a number."""
    seen: dict[str, int] = {}
    named: list[list[tuple[str, Any]]] = []
    for group in metrics:
        names: list[tuple[str, Any]] = []
        for function in group:
            name = getattr(function, "__name__", type(function).__name__).strip("<>")
            seen[name] = seen.get(name, 0) + 1
            names.append((name if seen[name] == 1 else f"{name}_{seen[name]}", function))
        named.append(names)
    return named


def _metrics_per_label(
    group: list[tuple[str, Any]], labels: list[str]
) -> tuple[list[str], list[Any]]:
    if len(group) == 1 and len(labels) > 1 and is_stateful(group[0][1]):
        import copy  # noqa: PLC0415 - a state for every label

        group = [(name, copy.deepcopy(function)) for name, function in group for _ in labels]
    functions = group * len(labels) if len(group) == 1 else group
    if len(functions) != len(labels):
        raise ValueError(
            f"a metric needs one function, or one per label column: {len(group)} for "
            f"{len(labels)} columns"
        )
    names = [
        name if len(labels) == 1 else f"{name}_{label}"
        for (name, _), label in zip(functions, labels, strict=True)
    ]
    return names, [function for _, function in functions]
