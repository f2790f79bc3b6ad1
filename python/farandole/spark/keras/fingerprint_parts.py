# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The parts of a Keras model, its optimizer and its loss that decide the result of a run."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np

from farandole.spark.common.runs.digests import (
    arrays_digest,
    brief_description,
    class_name,
    value_digest,
)
from farandole.spark.common.runs.fingerprint import INITIAL_WEIGHTS, FingerprintPart
from farandole.spark.keras.model_compilation import compile_arguments
from farandole.spark.keras.saving.user_objects import training_user_objects

_IGNORED_CONFIG_KEYS = frozenset(
    {
        "build_config",
        "compile_config",
        "keras_version",
        "module",
        "registered_name",
        "shared_object_id",
    }
)


def model_parts(model: Any, optimizer: Any, loss: Any) -> list[FingerprintPart]:
    """Returns the parts of a fingerprint: architecture, initial weights, optimizer, loss.

    Args:
        model: the user's, built.
        optimizer: the estimator's; `None` takes the compiled model's.
        loss: the estimator's; `None` takes the compiled model's.
    """
    known = compile_arguments(model)
    weights = {
        str(index): np.asarray(keras.ops.convert_to_numpy(weight))
        for index, weight in enumerate(model.weights)
    }
    numbers = sum(value.size for value in weights.values())
    shapes = [[list(value.shape), str(value.dtype)] for value in weights.values()]
    digest = arrays_digest(weights)
    used, config = _used_optimizer(model, optimizer)
    lost = known.get("loss") if loss is None else loss
    code = training_user_objects(model, known, lost)  # the architecture has only their names
    rate = config.get("learning_rate")
    rate = f"{rate:.6g}" if isinstance(rate, int | float) else brief_description(rate)
    parts = [
        FingerprintPart(
            "model",
            value_digest([_describe_architecture(model), shapes, code]),
            f"{class_name(model)} of {numbers:,} numbers",
        ),
        FingerprintPart(INITIAL_WEIGHTS, digest, digest[:8]),
        FingerprintPart(
            "optimizer",
            value_digest([type(used), config]),
            f"{class_name(used)}(learning_rate={rate})",
        ),
    ]
    return parts if lost is None else [*parts, FingerprintPart.from_value("loss", lost)]


def total_learning_rate_digest(model: Any, optimizer: Any, processes: int) -> dict[str, str]:
    """Returns the digest of the learning rate of all processes together, by name of the part. A
    schedule has no such rate.

    Args:
        model: a compiled copy of the user's.
        optimizer: the estimator's; `None` takes the compiled model's.
        processes: number of processes of the fit.
    """
    used, config = _used_optimizer(model, optimizer)
    rate = config.get("learning_rate")
    if not isinstance(rate, int | float):
        return {}
    # Rates are float32, and a quotient of one is not the nearest.
    config = config | {"learning_rate": f"{rate * processes:.5g}"}
    return {"optimizer": value_digest([type(used), config])}


def _used_optimizer(model: Any, optimizer: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the optimizer of a fit, and its configuration without its name."""
    used: Any = keras.optimizers.get(optimizer) if optimizer is not None else model.optimizer
    return used, {name: entry for name, entry in used.get_config().items() if name != "name"}


def _describe_architecture(model: Any) -> Any:
    """Returns the configuration, without the names that Keras counts up in every process."""
    try:
        config = json.loads(model.to_json())
    except Exception:  # noqa: BLE001 - a class of the user's that cannot tell: then its layers do
        return [type(layer).__qualname__ for layer in model._flatten_layers()]  # noqa: SLF001 - no public API
    layers = list(model._flatten_layers())  # noqa: SLF001 - as above
    names = {layer.name: f"#{index}" for index, layer in reversed(list(enumerate(layers)))}
    return _strip_names(config, names)


def _strip_names(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        named = {
            key: entry
            for key, entry in value.items()
            if key not in _IGNORED_CONFIG_KEYS and (key != "name" or entry in names)
        }
        return {str(key): _strip_names(entry, names) for key, entry in named.items()}
    if isinstance(value, list):
        return [_strip_names(entry, names) for entry in value]
    return names.get(value, value) if isinstance(value, str) else value
