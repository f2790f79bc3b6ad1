# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Means of loss and metrics over the rows of all processes.

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
from farandole.numpy.plain import allgather_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farandole.spark.torch.job import Label


class Scores:
    """Sums of one pass over data.

    Args:
        metrics: one group per metric: a function for every label, or one per label.
        labels: which labels there are.
        before: sums of all processes that the pass has come to already, as `totals` told.
    """

    def __init__(
        self,
        metrics: list[list[Any]],
        labels: Sequence[Label],
        before: Sequence[float] | None = None,
    ) -> None:
        names = [one.column.name for one in labels]
        self._groups = [
            [
                (name, index, function)
                for index, (name, function) in enumerate(zip(*_spread(group, names), strict=True))
            ]
            for group in _distinct(metrics)
        ]
        self._flat = [one for group in self._groups for one in group]
        self._before = before
        self._rows = 0
        self._sums: list[Any] = [0.0] * (1 + len(self._flat))
        for _, _, function in self._flat:
            if is_stateful(function):
                function.reset()

    def add(
        self, outputs: list[torch.Tensor], labels: list[torch.Tensor], loss: torch.Tensor, rows: int
    ) -> None:
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
            for position, (name, index, function) in enumerate(self._flat, start=1):
                if is_stateful(function):
                    function.to(outputs[index].device).update(
                        outputs[index].detach(), labels[index]
                    )
                else:
                    value = _number(function(outputs[index].detach(), labels[index]), name)
                    self._sums[position] = self._sums[position] + value * rows

    def loss(self) -> float:
        """Mean loss so far, of this process alone."""
        return float(self._sums[0]) / max(self._rows, 1)

    def totals(self) -> list[float]:
        """Rows, and the sums over them, of all processes; a collective call."""
        mine = torch.tensor(
            [float(self._rows), *(float(total) for total in self._sums)], dtype=torch.float64
        )
        found = hvd.allreduce(mine, op=hvd.Sum, name="farandole.scores").tolist()
        return (
            found
            if self._before is None
            else [one + more for one, more in zip(self._before, found, strict=True)]
        )

    def everywhere(self) -> dict[str, Any]:
        """Returns the means over all processes; a collective call.

        Returns:
            `{"loss": ..., "all_metrics": [{name: value}, ...]}`, one dict per metric.
        """
        rows, *sums = self.totals()
        means = iter([total / max(rows, 1.0) for total in sums])
        return {
            "loss": next(means),
            "all_metrics": [
                {
                    key: value
                    for name, _, function in group
                    for key, value in _told(name, function, next(means)).items()
                }
                for group in self._groups
            ],
        }


def is_stateful(function: Any) -> bool:
    """Returns whether a metric keeps a state of its own, as those of torchmetrics do."""
    return all(
        callable(getattr(function, name, None)) for name in ("update", "compute", "reset", "to")
    )


def _told(name: str, function: Any, mean: float) -> dict[str, float]:
    if not is_stateful(function):
        return {name: mean}
    parts = list(function.values()) if hasattr(function, "values") else [function]
    for part in parts:
        part.dist_sync_fn = _gather
        part.distributed_available_fn = _has_others
    value = function.compute()
    if isinstance(value, dict):
        return {f"{name}_{key}": _number(one, key).item() for key, one in value.items()}
    return {name: float(_number(value, name))}


def _has_others() -> bool:
    return hvd.size() > 1


def _gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
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


def _number(value: Any, name: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return torch.tensor(float(value), dtype=torch.float64)
    if value.numel() != 1:
        raise ValueError(
            f"metric {name} must return one number, it returned shape {tuple(value.shape)}"
        )
    return value.detach().double().reshape(())


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
