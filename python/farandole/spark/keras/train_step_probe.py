# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Tries a model's own `train_step` on parts of real rows, before workers start.

The gradients that it gives to the optimizer are compared, because nothing else of a `train_step` is
known. Layers compute as in inference, so that neither dropout nor batch statistics make a mean over
rows something else.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from farandole._keras.value_collectives import to_numpy_array
from farandole.spark.keras.probe_rows import (
    LOSS_OPTIONS,
    ProbePartValues,
    are_close,
    read_probe_batches,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole.spark.keras.job import KerasTrainingJob
    from farandole.spark.keras.probe_rows import ProbeBatch


def refuse_non_mean_train_step(
    job: KerasTrainingJob,
    model: Any,
    transformation: Any,
    *,
    wanted: str | None,
    processes: int,
) -> None:
    """Refuses a `train_step` if its gradient of all rows is not the mean of the gradients of parts.

    A warning is logged if the step cannot be tried: it raises, or two calls give different
    gradients.

    Args:
        job: the run.
        model: a compiled copy of the user's.
        transformation: the user's transformation of rows, or `None`.
        wanted: the user's `loss_reduction`, or `None`.
        processes: most processes that the job may have.

    Raises:
        ValueError: the gradients are no mean over rows, or do not reach the model's optimizer.
    """
    name = f"train_step of {type(model).__name__}"
    if processes > 1:
        _refuse_other_optimizers(model, name)
    if wanted is not None:
        return
    batches = read_probe_batches(job, transformation)
    try:
        with _run_layers_in_inference(model):
            gradients = [_step_gradients(model, batch) for batch in [batches[0], *batches]]
    except Exception as error:  # noqa: BLE001 - a step outside of fit may raise any exception
        _warn_of_untried_loss(name, f"{type(error).__name__}: {error}")
        return
    again, *gradients = gradients
    if not again.size:
        raise ValueError(
            f"{name} gives no gradients to the model's optimizer, so each process would train a "
            "model of its own. Call self.optimizer.apply(gradients, variables), or on JAX "
            "self.optimizer.stateless_apply(...)"
        )
    found = ProbePartValues.from_batches([[gradient] for gradient in gradients], job.policy)
    if len({gradient.size for gradient in gradients}) > 1 or not are_close(
        again, found.whole[0], found.tolerance
    ):
        _warn_of_untried_loss(name, "two calls with the same rows give different gradients")
    elif found.detect_part_reduction(0) == "sum":
        raise ValueError(
            f"the loss in {name} is a sum over rows: the gradients of {found.row_count} rows are "
            'the sum of the gradients of parts. Set loss_reduction="sum" so that several processes '
            "or passes train what one process trains"
        )
    elif found.detect_part_reduction(0) is None:
        raise ValueError(
            f"the loss in {name} is no mean over rows: the gradients of {found.row_count} rows are "
            "not the mean of the gradients of parts, so several processes or passes would train "
            f"something else than one process. {LOSS_OPTIONS}"
        )


def _warn_of_untried_loss(name: str, reason: str) -> None:
    warnings.warn(
        f"{name} cannot be tried before the fit ({reason}), so its loss is taken for a mean over "
        "rows. With a sum, or a loss that divides by more than rows, several processes or passes "
        "would train something else than one process. loss_reduction='mean' says that it is a mean",
        stacklevel=2,
    )


def _refuse_other_optimizers(model: Any, name: str) -> None:
    own = {id(model.optimizer), id(getattr(model.optimizer, "inner_optimizer", None))}
    others = [
        key
        for key, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer) and id(value) not in own
    ]
    if others:
        raise ValueError(
            f"{name}: the model has the optimizer {', '.join(others)} besides model.optimizer. "
            "Gradients are averaged over processes only for model.optimizer. Train with one "
            "process, or use one optimizer for all variables"
        )


def _step_gradients(model: Any, batch: ProbeBatch) -> Any:
    """Returns the gradients that a step gives to the optimizer, as one vector."""
    found: list[Any] = []

    def record_gradients(grads: Any, *_variables: Any, **_options: Any) -> None:
        found.extend(
            to_numpy_array(keras.ops.convert_to_tensor(gradient)).astype(np.float64).reshape(-1)
            for gradient in grads
            if gradient is not None
        )

    data = (batch.x, batch.y) if batch.weights is None else (batch.x, batch.y, batch.weights)
    optimizer = model.optimizer
    optimizer.__dict__["apply"] = record_gradients
    try:
        if keras.backend.backend() == "jax":
            state = (
                model.trainable_variables,
                model.non_trainable_variables,
                optimizer.variables,
                model.metrics_variables,
            )
            model.train_step(tuple([variable.value for variable in part] for part in state), data)
        else:
            model.train_step(data)
    finally:
        del optimizer.__dict__["apply"]
        model.reset_metrics()
    return np.concatenate(found) if found else np.zeros(0)


@contextlib.contextmanager
def _run_layers_in_inference(model: Any) -> Iterator[None]:
    """Lets all layers compute as in inference."""
    changed = []
    for layer in model._flatten_layers():  # noqa: SLF001 - layers of layers have no public API
        if "training" not in inspect.signature(layer.call).parameters:
            continue
        plain_call = layer.call

        def call_for_inference(*given: Any, _plain_call: Any = plain_call, **named: Any) -> Any:
            return _plain_call(*given, **{**named, "training": False})

        layer.__dict__["call"] = call_for_inference
        changed.append(layer)
    try:
        yield
    finally:
        for layer in changed:
            del layer.__dict__["call"]
