# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The authority: a plain loop of PyTorch on one process, over batches of all rows in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tests.parity.torch_cells import CLASSES, GLOBAL_BATCH_ROWS, IGNORED_LABEL, LOSSES, LossCase
from torch import nn

EPOCHS = 2
LEARNING_RATE = 0.05


class Network(nn.Module):
    """One linear layer for each output."""

    def __init__(self, cases: list[LossCase]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(3, one.width) for one in cases)
        self.ends = [one.activation for one in cases]

    def forward(self, features: torch.Tensor) -> Any:
        outputs = [
            head(features) if end is None else end(head(features))
            for head, end in zip(self.heads, self.ends, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def make_label(kind: str, rows: int, draw: np.random.Generator) -> np.ndarray:
    """Returns a label column. Classes come in runs, so a rank's batch may lack some."""
    classes = (np.arange(rows) // 2) % CLASSES
    makers = {
        "number": lambda: draw.normal(size=rows),
        "vector": lambda: draw.normal(size=(rows, CLASSES)),
        "vector2": lambda: draw.normal(size=(rows, 2)),
        "sign": lambda: draw.choice([-1.0, 1.0], rows),
        "bit": lambda: draw.choice([0.0, 1.0], rows),
        "bits": lambda: draw.choice([0.0, 1.0], (rows, CLASSES)),
        "share": lambda: draw.uniform(0.1, 2.0, rows),
        "shares": lambda: draw.dirichlet(np.ones(CLASSES), rows),
        "class": lambda: classes,
        "class_as_float": lambda: classes.astype(np.float64),
        "class_or_ignored": lambda: np.where(np.arange(rows) % 3 == 1, IGNORED_LABEL, classes),
        "tags": lambda: draw.choice([0, 1, 2, IGNORED_LABEL], (rows, 2)),
        "targets": lambda: np.stack([classes, np.full(rows, -1), np.full(rows, -1)], axis=1),
        "shorts": lambda: draw.integers(0, 2, (rows, 2)),
    }
    found = makers[kind]()
    return found.astype(np.float32) if found.dtype.kind == "f" else found


def make_optimizer(kind: str, parameters: Any, scale: float = 1.0) -> torch.optim.Optimizer:
    rate = LEARNING_RATE * scale
    if kind == "adam":
        # A large `eps`: a gradient of 0 and one of 1e-9 must not make different steps.
        return torch.optim.Adam(parameters, lr=rate, eps=1e-2)
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9 if kind == "momentum" else 0.0)


def make_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)


def reference_loss(
    case: LossCase, output: torch.Tensor, label: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """Returns the loss of a batch as torch computes it; 0 for a mean of nothing."""
    loss = case.make()
    value = loss(output, label)
    if weights is not None:
        value = _weighted(loss, output, label, weights)
    return output.sum() * 0.0 if bool(value.isnan()) else value


def _weighted(
    loss: Any, output: torch.Tensor, label: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Returns the loss whose rows are multiplied by weights, divided as it is without them."""
    values: dict[str, torch.Tensor] = {}
    own = getattr(loss, "reduction", None) or getattr(loss, "keywords", {}).get("reduction", "mean")
    for reduction in ("none", "sum", own):
        if isinstance(loss, nn.Module):
            loss.reduction = reduction
            values[reduction] = loss(output, label)
        else:
            values[reduction] = loss(output, label, reduction=reduction)
    rows = values["none"].reshape(len(weights), -1).sum(dim=1)
    if own == "sum":
        return (rows * weights).sum()
    divisor = (values["sum"] / values[own]).detach()
    return (rows * weights).sum() / divisor


def prepare_label(case: LossCase, values: np.ndarray) -> torch.Tensor:
    """Returns labels as the estimator gives them to the loss."""
    found = torch.from_numpy(np.ascontiguousarray(values))
    if case.label.startswith("class") or case.label in ("tags", "targets", "shorts"):
        return found.long()
    return found.reshape(len(found), -1).float()


def train_plainly(cell: dict[str, Any], data: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns the parameters after a fit, and the losses of the last epoch."""
    cases = cases_of(cell)
    torch.manual_seed(0)
    network = Network(cases)
    optimizer = make_optimizer(cell["optimizer"], network.parameters())
    scheduler = make_scheduler(optimizer) if cell["scheduler"] else None
    held = data["held"] if cell["validation"] else np.zeros(len(data["held"]), dtype=bool)
    train, val = np.flatnonzero(~held), np.flatnonzero(held)
    share = 1.0 / len(cases)
    for _ in range(EPOCHS):
        numerators, counts = [0.0] * len(cases), [0.0] * len(cases)
        for first in range(0, len(train), GLOBAL_BATCH_ROWS):
            rows = train[first : first + GLOBAL_BATCH_ROWS]
            optimizer.zero_grad()
            outputs = _outputs(network, cases, data, rows)
            losses = _losses(outputs, cases, data, rows)
            _add_up(losses, outputs, cases, data, rows, numerators, counts)
            (torch.stack(losses).sum() * share).backward()
            if cell["clip"]:
                nn.utils.clip_grad_norm_(network.parameters(), cell["clip"])
            optimizer.step()
            if scheduler is not None and cell["scheduler"] == "step":
                scheduler.step()
        if scheduler is not None and cell["scheduler"] == "epoch":
            scheduler.step()
    steps = -(-len(train) // GLOBAL_BATCH_ROWS)
    found = {"loss": _mean(numerators, counts, share), "steps": steps}
    if cell["validation"]:
        numerators, counts = [0.0] * len(cases), [0.0] * len(cases)
        with torch.no_grad():
            outputs = _outputs(network, cases, data, val)
            losses = _losses(outputs, cases, data, val)
            _add_up(losses, outputs, cases, data, val, numerators, counts)
        found["val_loss"] = _mean(numerators, counts, share)
    parameters = torch.cat([one.detach().ravel() for one in network.parameters()])
    return {"parameters": parameters, **found}


def cases_of(cell: dict[str, Any]) -> list[LossCase]:
    return [LOSSES[name] for name in (cell["loss"], cell["second"]) if name is not None]


def _outputs(
    network: Network, cases: list[LossCase], data: dict[str, np.ndarray], rows: np.ndarray
) -> list[torch.Tensor]:
    outputs = network(torch.from_numpy(data["x"][rows]))
    return [outputs] if len(cases) == 1 else outputs


def _losses(
    outputs: list[torch.Tensor],
    cases: list[LossCase],
    data: dict[str, np.ndarray],
    rows: np.ndarray,
) -> list[torch.Tensor]:
    weights = torch.from_numpy(data["w"][rows]) if "w" in data else None
    return [
        reference_loss(case, output, prepare_label(case, data[f"y{index}"][rows]), weights)
        for index, (case, output) in enumerate(zip(cases, outputs, strict=True))
    ]


def _add_up(
    losses: list[torch.Tensor],
    outputs: list[torch.Tensor],
    cases: list[LossCase],
    data: dict[str, np.ndarray],
    rows: np.ndarray,
    numerators: list[float],
    counts: list[float],
) -> None:
    """Adds what the history divides: sums over rows, and what their means divide by."""
    for index, (case, loss) in enumerate(zip(cases, losses, strict=True)):
        label = prepare_label(case, data[f"y{index}"][rows])
        made, count = case.make(), float(len(rows))
        is_sum = case.reduction == "sum" or "sum" in (
            getattr(made, "reduction", ""), getattr(made, "keywords", {}).get("reduction")
        )  # fmt: skip
        if hasattr(made, "label_count"):
            count = float(made.label_count(label))
        elif (
            (case.label.startswith("class") or case.label == "tags")
            and not is_sum
            and "margin" not in type(made).__name__.lower()
        ):
            keywords = getattr(made, "keywords", {})
            weight = getattr(made, "weight", keywords.get("weight"))
            kept = label[label != getattr(made, "ignore_index", keywords.get("ignore_index", -100))]
            count = float(kept.numel() if weight is None else weight[kept].sum())
        if count == 0 and getattr(made, "label_smoothing", 0):
            # Rows of class weight 0 have a part of the sum, and torch divides it by 0.
            made.reduction = "none"
            parts = made(outputs[index].detach(), label)
            factors = torch.from_numpy(data["w"][rows]) if "w" in data else torch.ones(len(rows))
            numerators[index] += float((parts.reshape(len(rows), -1).sum(dim=1) * factors).sum())
            continue
        numerators[index] += float(loss.detach()) * (1.0 if is_sum else count)
        counts[index] += count


def _mean(numerators: list[float], counts: list[float], share: float) -> float:
    found = zip(numerators, counts, strict=True)
    return share * sum(total / count for total, count in found if count)


def make_data(cell: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the columns of a cell."""
    draw = np.random.default_rng(0)
    rows = cell["rows"]
    data = {"x": draw.normal(size=(rows, 3)).astype(np.float32), "held": np.arange(rows) % 4 == 2}
    for index, case in enumerate(cases_of(cell)):
        data[f"y{index}"] = make_label(case.label, rows, draw)
    if cell["weights"] is not None:
        random = draw.uniform(0.2, 3.0, rows).astype(np.float32)
        data["w"] = np.ones(rows, np.float32) if cell["weights"] == "ones" else random
    return data
