# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The reduction of a Keras model's loss, and a trial of losses of an unknown form.

Keras adds up the losses of outputs, of layers and of weights to one number. This number is a mean
over the rows of a batch, or a sum over them, or something else, which several processes cannot
compute by averaging gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras.src.backend.common.masking import get_keras_mask

from farandole._keras.value_collectives import to_numpy_array
from farandole.spark.keras.keras_inputs import zero_batch
from farandole.spark.keras.model_compilation import (
    compile_arguments,
    has_custom_train_step,
    ignored_class,
)
from farandole.spark.keras.probe_rows import LOSS_OPTIONS, ProbePartValues, read_probe_batches
from farandole.spark.keras.train_step_probe import refuse_non_mean_train_step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farandole.spark.keras.job import KerasTrainingJob

LOSS_REDUCTIONS = ("mean", "sum", "per_batch")
"""Values of the parameter `loss_reduction`."""
_WHOLE_BATCH_LOSSES = {"Dice", "Tversky", "Circle", "dice", "tversky", "circle"}
"""Keras's losses that compare or add up the rows of a batch."""


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
) -> KerasTrainingJob:
    """Refuses a loss that several processes or passes cannot compute.

    Losses of Keras that divide by more than rows are counted: `training.loss_counts`.

    Args:
        job: the run.
        model: a compiled copy of the user's.
        transformation: the user's transformation of rows, or `None`.
        wanted: the user's `loss_reduction`, or `None`.
        processes: most processes that the job may have.

    Returns:
        The run, which says whether losses are counted.

    Raises:
        ValueError: the loss of all rows does not follow from the losses of parts.
    """
    if processes == 1 and job.passes == 1:
        return job
    if has_custom_train_step(model):
        refuse_non_mean_train_step(job, model, transformation, wanted=wanted, processes=processes)
        return job
    losses = _output_losses(model)
    own_reductions = {getattr(loss, "reduction", None) for loss in losses}
    if wanted is not None:
        if wanted == "sum" and not _computes_own_loss(model):
            added = _added_loss_reductions(job, model, transformation, unknown="sum")
            return _with_counted_sum_losses(job, added) if "mean" in added else job
        return job
    is_known = not _computes_own_loss(model) and all(_is_mean_of_rows(loss) for loss in losses)
    if is_known and (job.passes == 1 or not _masks_outputs(job, model)):
        return _choose_loss_counting(job, model, losses, transformation)
    if "sum" in own_reductions and len(own_reductions) > 1:
        raise ValueError(
            "some outputs have a loss with reduction='sum', others a mean, so no factor makes the "
            f"gradients of {processes} processes those of one: use one reduction. {LOSS_OPTIONS}"
        )
    for loss in losses:
        _refuse_process_dependent_divisor(loss, weighted=job.weight is not None)
        if _is_keras_defined(loss) and not _is_mean_of_rows(loss):
            # By chance, parts of some rows may give what all rows give.
            raise ValueError(
                f"the loss {getattr(loss, 'name', type(loss).__name__)} of Keras compares or adds "
                "up the rows of a batch, so several processes or passes would train something else "
                f"than one process. {LOSS_OPTIONS}"
            )
    _check_loss_of_parts(job, model, transformation)
    return job


def _choose_loss_counting(
    job: KerasTrainingJob,
    model: Any,
    losses: Sequence[Any],
    transformation: Any,
) -> KerasTrainingJob:
    """Returns the run for outputs with losses of Keras, whose sums and counts are known."""
    if job.passes > 1:
        for loss in losses:
            _refuse_process_dependent_divisor(loss, weighted=job.weight is not None)
    added = _added_loss_reductions(job, model, transformation)
    reductions = {getattr(loss, "reduction", None) for loss in losses}
    if reductions == {"sum"} and set(added) <= {"sum"}:
        return job
    special = (
        _may_mask_rows(model)
        or "sum" in reductions
        or "sum" in added
        or ("mean_with_sample_weight" in reductions and job.weight is not None)
        or any(ignored_class(loss) is not None for loss in losses)
    )
    if not special:
        return job
    return replace(job, loss_reduction="mean", counts_losses=True, added_losses=added)


def _with_counted_sum_losses(job: KerasTrainingJob, added: tuple[str, ...]) -> KerasTrainingJob:
    """Returns the run for outputs with losses that the user calls sums, beside means."""
    return replace(
        job, loss_reduction="mean", counts_losses=True, sums_outputs=True, added_losses=added
    )


def _added_loss_reductions(
    job: KerasTrainingJob,
    model: Any,
    transformation: Any,
    *,
    unknown: str | None = None,
) -> tuple[str, ...]:
    """Returns the reductions of the losses that layers add and of regularizers.

    Args:
        job: the run.
        model: a compiled copy of the user's.
        transformation: the user's transformation of rows, or `None`.
        unknown: reduction of a loss that is neither a mean nor a sum over rows; `None` refuses it.

    Raises:
        ValueError: one is neither a mean nor a sum over rows.
    """
    layers = _inner_layers(model)
    if all(_is_keras_defined(one) and one.activity_regularizer is None for one in layers):
        return ("mean",) * len(model.losses)  # of weights, which do not depend on rows
    found = _losses_of_parts(job, model, transformation, _added_losses)
    reductions = []
    for index, whole in enumerate(found.whole):
        word = found.detect_part_reduction(index) or unknown
        if word is None:
            raise ValueError(
                f"the loss number {index + 1} of those that layers add is neither a mean nor a sum "
                f"over rows: of {found.row_count} rows it is {whole:g}, the mean of their parts is "
                f"{found.reduce_parts(index, 'mean'):g}, their sum "
                f"{found.reduce_parts(index, 'sum'):g}. Several processes would train something "
                f"else than one process. {LOSS_OPTIONS}"
            )
        reductions.append(word)
    return tuple(reductions)


def _refuse_process_dependent_divisor(loss: Any, *, weighted: bool) -> None:
    ignored = ignored_class(loss)
    name = getattr(loss, "name", type(loss).__name__)
    if ignored is not None and getattr(loss, "reduction", None) != "sum":
        raise ValueError(
            f"the loss {name} has ignore_class={ignored}, so each process would divide by the "
            "labels of its own rows that are not ignored. Give ignored rows a weight of 0 in "
            f"sample_weight_col instead, which divides by all rows. {LOSS_OPTIONS}"
        )
    if weighted and getattr(loss, "reduction", None) == "mean_with_sample_weight":
        raise ValueError(
            f"the loss {name} has reduction='mean_with_sample_weight', so each process would "
            "divide by the weights of its own rows. Use reduction='sum_over_batch_size'. "
            f"{LOSS_OPTIONS}"
        )


def _output_losses(model: Any) -> list[Any]:
    """Returns the losses of a compiled model's outputs."""
    given = keras.tree.flatten(compile_arguments(model).get("loss"))
    return [keras.losses.get(one) for one in given if one is not None]


def _computes_own_loss(model: Any) -> bool:
    return type(model).compute_loss is not keras.Model.compute_loss


def _inner_layers(model: Any) -> list[Any]:
    return list(model._flatten_layers(include_self=False))  # noqa: SLF001 - layers of layers have no public API


def _is_mean_of_rows(loss: Any) -> bool:
    """Returns whether a loss of Keras is computed row by row."""
    function = getattr(loss, "fn", loss)
    names = {getattr(function, "__name__", ""), type(loss).__name__}
    return _is_keras_defined(loss) and not names & _WHOLE_BATCH_LOSSES


def _is_keras_defined(value: Any) -> bool:
    module = getattr(value, "__module__", "") or ""
    wrapped = getattr(value, "fn", None)
    return module.startswith("keras.") and (wrapped is None or _is_keras_defined(wrapped))


def _masks_outputs(job: KerasTrainingJob, model: Any) -> bool:
    x, _ = zero_batch(job.shape, (), 2)
    output = model(keras.tree.map_structure(keras.ops.convert_to_tensor, x), training=False)
    return any(get_keras_mask(one) is not None for one in keras.tree.flatten(output))


def _may_mask_rows(model: Any) -> bool:
    return any(
        not _is_keras_defined(layer)
        or bool(getattr(layer, "mask_zero", False))
        or isinstance(layer, keras.layers.Masking)
        for layer in _inner_layers(model)
    )


def _check_loss_of_parts(job: KerasTrainingJob, model: Any, transformation: Any) -> None:
    found = _losses_of_parts(job, model, transformation, _total_loss)
    word = "sum" if job.loss_reduction == "sum" else "mean"
    if found.matches_reduced_parts(0, word):
        return
    if word == "mean" and found.detect_part_reduction(0) == "sum":
        raise ValueError(
            f"the loss of the model is a sum over rows: of {found.row_count} rows it is the sum of "
            'what it is of parts. Set loss_reduction="sum" so that several processes or passes '
            "train what one process trains"
        )
    raise ValueError(
        f"the loss of the model is no {word} over rows: of {found.row_count} rows it is "
        f"{found.whole[0]:g}, but the {word} of its parts is {found.reduce_parts(0, word):g}. "
        "Several processes or passes would train something else than one process: a mask, a loss "
        "that a layer adds, or a loss that divides by more than rows is no "
        f"{word}. {LOSS_OPTIONS}"
    )


def _losses_of_parts(
    job: KerasTrainingJob,
    model: Any,
    transformation: Any,
    losses_of: Callable[[Any, Any, Any, Any], list[float]],
) -> ProbePartValues:
    values = []
    for batch in read_probe_batches(job, transformation):
        values.append(losses_of(model, batch.x, batch.y, model(batch.x, training=False)))
        model.reset_metrics()
    return ProbePartValues.from_batches(values, job.policy)


def _total_loss(model: Any, x: Any, y: Any, output: Any) -> list[float]:
    return [float(to_numpy_array(model.compute_loss(x=x, y=y, y_pred=output)))]


def _added_losses(model: Any, _x: Any, _y: Any, _output: Any) -> list[float]:
    return [float(np.sum(to_numpy_array(loss))) for loss in model.losses]
