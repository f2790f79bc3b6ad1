# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Means of loss and metrics over rows, whichever process holds them.

A metric is called with the output and the label of one batch and its value counts once per row, so that a short last
batch, or a process with fewer rows, weighs what it holds. Sums stay on the device until somebody asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import farandole.torch as hvd

if TYPE_CHECKING:
    from farandole.spark.torch.job import Job


class Scores:
    """Sums of one pass over data.

    Args:
        metrics: one group per metric: a function for every label, or one per label.
        job: which labels there are.
    """

    def __init__(self, metrics: list[list[Any]], job: Job) -> None:
        labels = [one.column.name for one in job.labels]
        self._groups = [
            [(name, index, function) for index, (name, function) in enumerate(zip(names, functions, strict=True))]
            for names, functions in (_spread(group, labels) for group in _distinct(metrics))
        ]
        count = sum(len(group) for group in self._groups)
        self._rows = 0
        self._sums: list[Any] = [0.0] * (1 + count)

    def add(self, outputs: list[torch.Tensor], labels: list[torch.Tensor], loss: torch.Tensor, rows: int) -> None:
        """Counts one batch.

        Args:
            outputs: of the rows that count.
            labels: of the same rows.
            loss: mean over these rows.
            rows: how many.
        """
        if rows == 0:
            return
        self._rows += rows
        self._sums[0] = self._sums[0] + loss.detach().double() * rows
        with torch.no_grad():
            values = [function(outputs[index], labels[index]) for group in self._groups for _, index, function in group]
        for position, value in enumerate(values, start=1):
            self._sums[position] = self._sums[position] + self._number(value, position) * rows

    def _number(self, value: Any, position: int) -> Any:
        if not isinstance(value, torch.Tensor):
            return float(value)
        if value.numel() != 1:
            name = [name for group in self._groups for name, _, _ in group][position - 1]
            raise ValueError(f"metric {name} must return one number, it returned shape {tuple(value.shape)}")
        return value.detach().double()

    def loss(self) -> float:
        """Mean loss so far, of this process alone."""
        return float(self._sums[0]) / max(self._rows, 1)

    def everywhere(self) -> dict[str, Any]:
        """The means over all processes; a collective call.

        Returns:
            `{"loss": ..., "all_metrics": [{name: value}, ...]}`, one dict per metric.
        """
        mine = torch.tensor([float(self._rows), *(float(total) for total in self._sums)], dtype=torch.float64)
        rows, *sums = hvd.allreduce(mine, op=hvd.Sum, name="farandole.scores").tolist()
        means = iter([total / max(rows, 1.0) for total in sums])
        return {
            "loss": next(means),
            "all_metrics": [{name: next(means) for name, _, _ in group} for group in self._groups],
        }


def _distinct(metrics: list[list[Any]]) -> list[list[tuple[str, Any]]]:
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


def _spread(group: list[tuple[str, Any]], labels: list[str]) -> tuple[list[str], list[Any]]:
    functions = group * len(labels) if len(group) == 1 else group
    if len(functions) != len(labels):
        raise ValueError(
            f"a metric needs one function, or one per label column: {len(group)} for {len(labels)} columns"
        )
    names = [
        name if len(labels) == 1 else f"{name}_{label}" for (name, _), label in zip(functions, labels, strict=True)
    ]
    return names, [function for _, function in functions]
