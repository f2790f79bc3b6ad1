# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The reduction of a Keras model's loss, and a trial of losses of an unknown form.

Keras adds up the losses of outputs, of layers and of weights to one number. This number is a mean
over the rows of a batch, or a sum over them, or something else, which several processes cannot
compute by averaging gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from farandole._keras.values import as_array
from farandole.spark.common.data.source import drawn_rows
from farandole.spark.keras.arrays import model_inputs, model_labels
from farandole.spark.keras.model_compilation import (
    compile_arguments,
    has_custom_train_step,
    ignored_class,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farandole.spark.keras.job import KerasTrainingJob

LOSS_REDUCTIONS = ("mean", "sum", "per_batch")
"""Values of the parameter `loss_reduction`."""
_PROBE_PART_ROWS = (3, 20, 233)
_RELATIVE_TOLERANCE = 1e-4
_WHOLE_BATCH_LOSSES = {"Dice", "Tversky", "Circle", "dice", "tversky", "circle"}
"""Keras's losses that compare or add up the rows of a batch."""
_OPTIONS = (
    'Set loss_reduction: "mean" averages the losses of batches by their rows, "sum" adds them, '
    '"per_batch" averages them by batches'
)


def find_loss_reduction(model: Any, wanted: str | None) -> str:
    """Returns the reduction of a model's loss, one of `LOSS_REDUCTIONS`.

    Args:
        model: compiled.
        wanted: the user's word for it, or `None`.
    """
    if wanted is not None:
        return wanted
    found = {getattr(loss, "reduction", None) for loss in _output_losses(model)}
    return "sum" if found == {"sum"} else "mean"


def check_loss_form(
    job: KerasTrainingJob,
    model: Any,
    transformation: Any,
    *,
    wanted: str | None,
    processes: int,
    names: Sequence[str],
) -> KerasTrainingJob:
    """Refuses a loss that several processes or passes cannot compute.

    Losses of Keras that divide by more than rows are counted: `training.loss_counts`.

    Args:
        job: the run.
        model: a compiled copy of the user's.
        transformation: of rows, by the user; or `None`.
        wanted: the user's `loss_reduction`, or `None`.
        processes: most processes that the job may have.
        names: columns that are read.

    Returns:
        The run, which says whether losses are counted.

    Raises:
        ValueError: the loss of all rows does not follow from the losses of parts.
    """
    alone = processes == 1 and job.passes == 1
    if wanted is not None or alone or has_custom_train_step(model):
        return job
    losses = _output_losses(model)
    can_count = job.passes == 1 and not _computes_own_loss(model)
    if can_count and all(_is_mean_of_rows(loss) for loss in losses):
        return _count_losses(job, model, losses, transformation, names)
    reductions = {getattr(loss, "reduction", None) for loss in losses}
    if "sum" in reductions and len(reductions) > 1:
        raise ValueError(
            "some outputs have a loss with reduction='sum', others a mean, so no factor makes the "
            f"gradients of {processes} processes those of one: use one reduction. {_OPTIONS}"
        )
    for loss in losses:
        _check_known_loss(loss, weighted=job.weight is not None)
    if not _is_known(model, losses):
        _try_parts(job, model, transformation, names)
    return job


def _count_losses(
    job: KerasTrainingJob,
    model: Any,
    losses: Sequence[Any],
    transformation: Any,
    names: Sequence[str],
) -> KerasTrainingJob:
    """Returns the run for outputs with losses of Keras, whose sums and counts are known."""
    layers = _inner_layers(model)
    added: tuple[str, ...] = ()
    if not all(_is_keras(layer) for layer in layers):
        added = _added_reductions(job, model, transformation, names)
    has_masks = any(_masks_rows(layer) or not _is_keras(layer) for layer in layers)
    reductions = {getattr(loss, "reduction", None) for loss in losses}
    special = (
        has_masks
        or "sum" in added
        or ("sum" in reductions and (len(reductions) > 1 or added))
        or ("mean_with_sample_weight" in reductions and job.weight is not None)
        or any(ignored_class(loss) is not None for loss in losses)
    )
    if not special or (reductions == {"sum"} and not added):
        return job
    return replace(job, loss_reduction="mean", counts_losses=True, added_losses=added)


def _added_reductions(
    job: KerasTrainingJob, model: Any, transformation: Any, names: Sequence[str]
) -> tuple[str, ...]:
    """Returns the reductions of the losses that layers add and of regularizers.

    Raises:
        ValueError: One is neither a mean nor a sum over rows.
    """
    found = _losses_of_parts(job, model, transformation, names, _added_losses)
    reductions = []
    for index in range(len(found.whole)):
        parts = [losses[index] for losses in found.parts]
        word = found.reduction(found.whole[index], parts)
        if word is None:
            raise ValueError(
                f"the loss number {index + 1} of those that layers add is neither a mean nor a sum "
                f"over rows: of {found.rows} rows it is {found.whole[index]:g}, of their parts "
                f"{', '.join(f'{one:g}' for one in parts)}. Several processes would train "
                f"something else than one process. {_OPTIONS}"
            )
        reductions.append(word)
    return tuple(reductions)


def _check_known_loss(loss: Any, *, weighted: bool) -> None:
    ignored = ignored_class(loss)
    name = getattr(loss, "name", type(loss).__name__)
    if ignored is not None and getattr(loss, "reduction", None) != "sum":
        raise ValueError(
            f"the loss {name} has ignore_class={ignored}, so each process would divide by the "
            "labels of its own rows that are not ignored. Give ignored rows a weight of 0 in "
            f"sample_weight_col instead, which divides by all rows. {_OPTIONS}"
        )
    if weighted and getattr(loss, "reduction", None) == "mean_with_sample_weight":
        raise ValueError(
            f"the loss {name} has reduction='mean_with_sample_weight', so each process would "
            "divide by the weights of its own rows. Use reduction='sum_over_batch_size'. "
            f"{_OPTIONS}"
        )


def _output_losses(model: Any) -> list[Any]:
    """Returns the losses of a compiled model's outputs."""
    given = keras.tree.flatten(compile_arguments(model).get("loss"))
    return [keras.losses.get(one) for one in given if one is not None]


def _is_known(model: Any, losses: Sequence[Any]) -> bool:
    """Returns whether all parts of a model's loss are Keras's own."""
    layers = _inner_layers(model)
    return (
        not _computes_own_loss(model)
        and all(_is_mean_of_rows(loss) for loss in losses)
        and all(_is_keras(layer) for layer in layers)
        and not any(_masks_rows(layer) for layer in layers)
    )


def _computes_own_loss(model: Any) -> bool:
    return type(model).compute_loss is not keras.Model.compute_loss


def _inner_layers(model: Any) -> list[Any]:
    return list(model._flatten_layers(include_self=False))  # noqa: SLF001 - layers of layers have no public door


def _is_mean_of_rows(loss: Any) -> bool:
    """Returns whether a loss of Keras is computed row by row."""
    function = getattr(loss, "fn", loss)
    names = {getattr(function, "__name__", ""), type(loss).__name__}
    return _is_keras(loss) and not names & _WHOLE_BATCH_LOSSES


def _is_keras(value: Any) -> bool:
    module = getattr(value, "__module__", "") or ""
    wrapped = getattr(value, "fn", None)
    return module.startswith("keras.") and (wrapped is None or _is_keras(wrapped))


def _masks_rows(layer: Any) -> bool:
    return bool(getattr(layer, "mask_zero", False)) or isinstance(layer, keras.layers.Masking)


@dataclass(frozen=True)
class _PartLosses:
    """Losses of rows and of their parts."""

    rows: int
    whole: list[float]
    parts: list[list[float]]

    def mean(self, parts: Sequence[float]) -> float:
        """Returns the mean of the losses of parts, weighted by rows."""
        weighed = zip(parts, _PROBE_PART_ROWS, strict=True)
        return sum(loss * count for loss, count in weighed) / self.rows

    def reduction(self, whole: float, parts: Sequence[float]) -> str | None:
        """Returns `"mean"` or `"sum"` if a loss is one over rows."""
        if _are_close(whole, self.mean(parts)):
            return "mean"
        return "sum" if _are_close(whole, sum(parts)) else None


def _are_close(one: float, other: float) -> bool:
    return abs(one - other) <= _RELATIVE_TOLERANCE * max(abs(one), abs(other), 1e-12)


def _try_parts(
    job: KerasTrainingJob, model: Any, transformation: Any, names: Sequence[str]
) -> None:
    found = _losses_of_parts(job, model, transformation, names, _total_loss)
    rows, whole = found.rows, found.whole[0]
    parts = [losses[0] for losses in found.parts]
    word = "sum" if job.loss_reduction == "sum" else "mean"
    expected = sum(parts) if word == "sum" else found.mean(parts)
    if _are_close(whole, expected):
        return
    if word == "mean" and found.reduction(whole, parts) == "sum":
        raise ValueError(
            f"the loss of the model is a sum over rows: of {rows} rows it is the sum of what it is "
            'of parts. Set loss_reduction="sum" so that several processes or passes train what '
            "one process trains"
        )
    raise ValueError(
        f"the loss of the model is no {word} over rows: of {rows} rows it is {whole:g}, but the "
        f"{word} of its parts is {expected:g}. Several processes or passes would train something "
        "else than one process: a mask, a loss that a layer adds, or a loss that divides by more "
        f"than rows is no {word}. {_OPTIONS}"
    )


def _losses_of_parts(
    job: KerasTrainingJob,
    model: Any,
    transformation: Any,
    names: Sequence[str],
    losses_of: Callable[[Any, Any, Any, Any], list[float]],
) -> _PartLosses:
    data, rows = job.data, sum(_PROBE_PART_ROWS)
    columns = drawn_rows(data.train_url, names, rows, transformation, data.missing, data.ragged)

    def losses_of_rows(first: int, last: int) -> list[float]:
        part = {name: values[first:last] for name, values in columns.items()}
        x, y = (
            keras.tree.map_structure(keras.ops.convert_to_tensor, one)
            for one in (
                model_inputs(job.shape, part, last - first),
                model_labels(job.shape, job.labels, part, last - first),
            )
        )
        found = losses_of(model, x, y, model(x, training=False))
        model.reset_metrics()
        return found

    parts, first = [], 0
    for count in _PROBE_PART_ROWS:
        parts.append(losses_of_rows(first, first + count))
        first += count
    return _PartLosses(rows, losses_of_rows(0, rows), parts)


def _total_loss(model: Any, x: Any, y: Any, output: Any) -> list[float]:
    return [float(as_array(model.compute_loss(x=x, y=y, y_pred=output)))]


def _added_losses(model: Any, _x: Any, _y: Any, _output: Any) -> list[float]:
    return [float(np.sum(as_array(loss))) for loss in model.losses]
