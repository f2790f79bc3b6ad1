# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The reduction of a Keras model's loss, and a trial of losses of an unknown form.

Keras adds up the losses of outputs, of layers and of weights to one number. This number is a mean
over the rows of a batch, or a sum over them, or something else, which several processes cannot
compute by averaging gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from farandole._keras.values import as_array
from farandole.spark.common.data.source import first_rows
from farandole.spark.keras.arrays import model_inputs, model_labels
from farandole.spark.keras.model_compilation import compile_arguments, has_custom_train_step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farandole.spark.keras.job import KerasTrainingJob

LOSS_REDUCTIONS = ("mean", "sum", "per_batch")
"""Values of the parameter `loss_reduction`."""
_PROBE_PART_ROWS = (3, 20, 41)
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
) -> None:
    """Refuses a loss that several processes or passes cannot compute.

    Args:
        job: the run.
        model: a compiled copy of the user's.
        transformation: of rows, by the user; or `None`.
        wanted: the user's `loss_reduction`, or `None`.
        processes: of the job.
        names: columns that are read.

    Raises:
        ValueError: the loss of all rows does not follow from the losses of parts.
    """
    alone = processes == 1 and job.passes == 1
    if wanted is not None or alone or has_custom_train_step(model):
        return
    losses = _output_losses(model)
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


def _check_known_loss(loss: Any, *, weighted: bool) -> None:
    ignored = getattr(loss, "ignore_class", None)
    if ignored is None:
        ignored = getattr(loss, "_fn_kwargs", {}).get("ignore_class")
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
    own = type(model).compute_loss is not keras.Model.compute_loss
    layers = list(model._flatten_layers(include_self=False))  # noqa: SLF001 - layers of layers have no public door
    return (
        not own
        and all(_is_mean_of_rows(loss) for loss in losses)
        and all(_is_keras(layer) for layer in layers)
        and not any(_masks_rows(layer) for layer in layers)
    )


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


def _try_parts(
    job: KerasTrainingJob, model: Any, transformation: Any, names: Sequence[str]
) -> None:
    data, rows = job.data, sum(_PROBE_PART_ROWS)
    columns = first_rows(data.train_url, names, rows, transformation, data.missing, data.ragged)
    first, found = 0, []
    whole = _loss_of_rows(job, model, columns, 0, rows)
    for count in _PROBE_PART_ROWS:
        found.append((_loss_of_rows(job, model, columns, first, first + count), count))
        first += count
    mean = sum(loss * count for loss, count in found) / rows
    total = sum(loss for loss, _ in found)
    expected, word = (total, "sum") if job.loss_reduction == "sum" else (mean, "mean")
    if abs(whole - expected) <= _RELATIVE_TOLERANCE * max(abs(whole), abs(expected), 1e-12):
        return
    if word == "mean" and abs(whole - total) <= _RELATIVE_TOLERANCE * max(abs(whole), 1e-12):
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


def _loss_of_rows(
    job: KerasTrainingJob, model: Any, columns: Mapping[str, Any], first: int, last: int
) -> float:
    part = {name: values[first:last] for name, values in columns.items()}
    x, y = (
        keras.tree.map_structure(keras.ops.convert_to_tensor, one)
        for one in (
            model_inputs(job.shape, part, last - first),
            model_labels(job.shape, job.labels, part, last - first),
        )
    )
    output = model(x, training=False)
    loss = float(as_array(model.compute_loss(x=x, y=y, y_pred=output)))
    model.reset_metrics()
    return loss
