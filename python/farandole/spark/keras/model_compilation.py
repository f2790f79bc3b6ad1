# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The model that a run trains: a copy of the user's model, compiled with the parameters of the
estimator.

Parameters that the estimator lacks come from the compiled model, whose optimizer then keeps its
state. The user's own model is built if necessary, and otherwise not changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras

from farandole.spark.keras.job import KerasModelShape
from farandole.spark.keras.keras_inputs import (
    create_label,
    describe_input_misfit,
    flat_outputs,
    output_keys,
    zero_batch,
)
from farandole.spark.keras.saving import model_bytes
from farandole.spark.keras.saving.user_objects import custom_objects

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farandole.data.columns import PreparedColumn
    from farandole.spark.keras.job import KerasLabel


@dataclass
class CompiledModelCopy:
    """A copy of the user's model, ready to travel."""

    model: Any
    packed: bytes
    custom_objects: dict[str, Any]
    loss: Any


def compile_arguments(model: Any) -> dict[str, Any]:
    """Returns the arguments that a model was compiled with; empty when it was not.

    Args:
        model: a Keras model.
    """
    config = getattr(model, "_compile_config", None)
    return dict(config.config) if config is not None and model.compiled else {}


_LOSSES_BY_OUTPUT_FORM = {
    "probabilities": {
        "binary_crossentropy",
        "categorical_crossentropy",
        "sparse_categorical_crossentropy",
    },
    "values": {"mean_squared_error", "mean_absolute_error", "huber", "log_cosh", "poisson"},
}


def loss_output_form(loss: Any) -> str | None:
    """Returns the form of a model's output that a loss of Keras takes, see
    `farandole.spark.common.model.class_columns`.

    Args:
        loss: a loss, its name, or a list of one. The form of a custom loss is unknown.
    """
    if isinstance(loss, list | tuple) and len(loss) == 1:
        loss = loss[0]
    try:
        made = keras.losses.get(loss)
    except (ValueError, TypeError):
        return None
    if made is None or not getattr(made, "__module__", "").startswith("keras."):
        return None
    name = getattr(getattr(made, "fn", made), "__name__", type(made).__name__)
    form = next((form for form, names in _LOSSES_BY_OUTPUT_FORM.items() if name in names), None)
    return (
        "logits"
        if form == "probabilities" and getattr(made, "_fn_kwargs", {}).get("from_logits")
        else form
    )


def has_custom_train_step(model: Any) -> bool:
    """Returns whether the model overrides `train_step`, and so needs no loss.

    Args:
        model: a Keras model.
    """
    return type(model).train_step is not keras.Model.train_step


def build_by_zero_call(model: Any, shape: KerasModelShape) -> None:
    """Builds a model that has not been, by a call.

    Args:
        model: model of the user.
        shape: shape of its inputs.

    Raises:
        ValueError: it does not take them.
    """
    if not all(layer.built for layer in model._flatten_layers()):  # noqa: SLF001 - as Keras asks
        _call_on_zeros(model, shape)


def copy_and_compile(
    model: Any,
    optimizer: Any,
    given: Mapping[str, Any],
    custom: Mapping[str, Any],
    backward_passes: int,
) -> CompiledModelCopy:
    """Copies and compiles a model.

    Args:
        model: the user's model, built.
        optimizer: the estimator's optimizer; `None` takes the model's.
        given: further arguments of `compile` that the estimator was given.
        custom: the user's classes and functions by name.
        backward_passes: batches whose gradients make one step.

    Raises:
        ValueError: Keras cannot save or load the model; the message names the missing part.
    """
    if type(model).compile is not keras.Model.compile and not _overrides_compile_from_config(model):
        raise ValueError(
            f"{type(model).__name__} overrides compile(): it must override get_compile_config() "
            "and compile_from_config(), too, so that training processes can compile it"
        )
    found = custom_objects(model, custom, optimizer, *given.values())
    copy = _copy_model(model, found)
    arguments = {**compile_arguments(model), **given}
    if optimizer is not None and optimizer is not getattr(model, "optimizer", None):
        arguments["optimizer"] = _recreate_optimizer(optimizer, found, backward_passes)
    elif backward_passes > 1:
        arguments["optimizer"] = _recreate_optimizer(model.optimizer, found, backward_passes)
    else:
        arguments["optimizer"] = copy.optimizer if copy.compiled else model.optimizer
    if type(model).compile is keras.Model.compile:
        copy.compile(**arguments)
    if not copy.optimizer.built:
        copy.optimizer.build(copy.trainable_variables)
    packed = model_bytes.pack_model(copy)
    loaded = _unpack_model_copy(packed, found)
    loss = arguments.get("loss")
    restore_compiled_loss(loaded, loss)
    return CompiledModelCopy(loaded, packed, found, loss)


def restore_compiled_loss(model: Any, loss: Any) -> None:
    """Gives a model back the loss it was compiled with, which its file has only in part.

    Args:
        model: as loaded.
        loss: as the user gave it.
    """
    if loss is not None and type(model).compile is keras.Model.compile:
        model.compile(**{**compile_arguments(model), "loss": loss, "optimizer": model.optimizer})


def try_model(
    compiled: CompiledModelCopy,
    shape: KerasModelShape,
    columns: Sequence[PreparedColumn],
    label_shapes: Sequence[Sequence[int]] | None,
    weighted: bool,
) -> tuple[KerasModelShape, tuple[KerasLabel, ...], list[tuple[int, ...]]]:
    """Calls model, losses and metrics once, on two rows of zeros, so that misfits show before
    workers start.

    Args:
        compiled: the copy.
        shape: shape of its inputs.
        columns: columns of the labels.
        label_shapes: as the user set them.
        weighted: whether rows have weights.

    Returns:
        The shape with the names of outputs, the labels, and the shape of one row of each output.

    Raises:
        ValueError: something does not fit.
    """
    model = compiled.model
    value = _call_on_zeros(model, shape)
    names = [column.name for column in columns]
    keys = output_keys(value, names)
    outputs = [tuple(output.shape) for output in flat_outputs(value, keys, len(names))]
    for name, output in zip(names, outputs, strict=True):
        if output[:1] != (2,):
            raise ValueError(
                "the model must return one row per row of its input: for 2 rows, its output for "
                f"column {name!r} has shape {output}"
            )
    rows = [output[1:] for output in outputs]
    labels = tuple(
        create_label(column, output, None if label_shapes is None else label_shapes[index])
        for index, (column, output) in enumerate(zip(columns, rows, strict=True))
    )
    whole = KerasModelShape(shape.inputs, shape.input_keys, keys)
    if not has_custom_train_step(model):
        _try_losses(model, whole, labels, value, weighted)
    return whole, labels, rows


def _try_losses(
    model: Any, shape: KerasModelShape, labels: Sequence[KerasLabel], value: Any, weighted: bool
) -> None:
    x, y = (
        keras.tree.map_structure(keras.ops.convert_to_tensor, part)
        for part in zero_batch(shape, labels, 2)
    )
    weights = keras.ops.ones((2,)) if weighted else None
    try:
        loss = model.compute_loss(x=x, y=y, y_pred=value, sample_weight=weights)
        model.compute_metrics(x, y, value, weights)
    except Exception as error:
        labels_text = ", ".join(
            f"{spec.column.name} {spec.dtype} (2, {', '.join(map(str, spec.shape[1:]))})"
            for spec in labels
        )
        raise ValueError(
            f"the loss or a metric does not take the model's output and the labels "
            f"({labels_text}): {error}"
        ) from error
    model.reset_metrics()
    if tuple(loss.shape):
        raise ValueError(
            f"the loss must be one number, a mean over rows: its shape is {tuple(loss.shape)}"
        )


def _call_on_zeros(model: Any, shape: KerasModelShape) -> Any:
    x, _ = zero_batch(shape, (), 2)
    try:
        return model(keras.tree.map_structure(keras.ops.convert_to_tensor, x), training=False)
    except Exception as error:
        raise ValueError(describe_input_misfit(shape, error)) from error


def _copy_model(model: Any, found: Mapping[str, Any]) -> Any:
    try:
        packed = model_bytes.pack_model(model)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(
            f"Keras cannot save the model {model.name!r}, so no process can get it: {error}"
        ) from error
    return _unpack_model_copy(packed, found)


def _unpack_model_copy(packed: bytes, found: Mapping[str, Any]) -> Any:
    try:
        return model_bytes.unpack_model(
            packed, found, safe_mode=False
        )  # made here, of the user's own model
    except (TypeError, ValueError) as error:
        raise ValueError(
            "the saved model cannot be loaded; classes and functions that Keras does not know by "
            "name go into "
            f"custom_objects: {error}"
        ) from error


def _overrides_compile_from_config(model: Any) -> bool:
    return type(model).compile_from_config is not keras.Model.compile_from_config


def _recreate_optimizer(optimizer: Any, found: Mapping[str, Any], backward_passes: int) -> Any:
    """Returns the optimizer of a name or configuration, without the state and variables of any
    model.
    """
    known = keras.optimizers.get(optimizer)
    config: Any = keras.optimizers.serialize(known)
    if backward_passes > 1:
        inner = config["config"].get("inner_optimizer", config)
        if inner["config"].get("gradient_accumulation_steps"):
            raise ValueError(
                "give either backward_passes_per_step or an optimizer's "
                "gradient_accumulation_steps, not both"
            )
        inner["config"]["gradient_accumulation_steps"] = backward_passes
    return keras.optimizers.deserialize(config, custom_objects=dict(found))


def ignored_class(loss: Any) -> int | None:
    """Returns the class that a loss of Keras ignores; `None` if it ignores none.

    Args:
        loss: a Keras loss.
    """
    found = getattr(loss, "ignore_class", None)
    if found is None:
        found = (getattr(loss, "_fn_kwargs", None) or {}).get("ignore_class")
    return found
