# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The parameters that `KerasEstimator` has besides those of every estimator."""

# ruff: noqa: N815 - Spark ML's names

from __future__ import annotations

from typing import Any

from farandole.common import check
from farandole.spark.common.params import EstimatorParams, accessors, declare

_ENVIRONMENT = {"LIBHDFS_OPTS": "-Xms2048m -Xmx2048m"}


def _loss(value: Any) -> Any:
    """A Keras loss: its name, an object, a function, or a list or dict of them, one per output."""
    parts = value.values() if isinstance(value, dict) else (value if isinstance(value, list | tuple) else [value])
    for one in parts:
        if one is not None and not isinstance(one, str) and not callable(one):
            raise TypeError(f"loss must be a Keras loss, or a list or dict of them: {one!r}")
    return list(value) if isinstance(value, tuple) else value


def _metrics(value: Any) -> Any:
    """Keras metrics, as `compile` takes them."""
    if isinstance(value, dict):
        return value
    return list(value) if isinstance(value, list | tuple) else [value]


def _objects(value: Any) -> dict[str, Any]:
    """Classes and functions by name."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"custom_objects must be a dict of classes and functions by name: {value!r}")
    return dict(value)


def _environment(value: Any) -> dict[str, str]:
    """Variables by name."""
    if not isinstance(value, dict) or not all(isinstance(one, str) for pair in value.items() for one in pair):
        raise TypeError(f"backend_env must be a dict of strings: {value!r}")
    return dict(value)


def _checkpoint(value: Any) -> Any:
    """A callback that decides which model is kept."""
    import keras  # noqa: PLC0415 - a training process chooses its devices first

    if not isinstance(value, keras.callbacks.ModelCheckpoint):
        raise TypeError(f"checkpoint_callback must be a ModelCheckpoint, such as BestModelCheckpoint: {value!r}")
    return value


def _compression(value: Any) -> Any:
    """One of `Compression`: Keras hands over gradients one by one, so that a compressor of whole steps has no place."""
    if not all(callable(getattr(value, name, None)) for name in ("compress", "decompress")):
        raise TypeError(
            f"gradient_compression must be a member of farandole.keras.Compression, such as fp16: {value!r}"
        )
    return value


class KerasParams(EstimatorParams):
    """Parameters of estimators for Keras."""

    gradient_compression = declare("gradient_compression", "compression of gradients between processes", _compression)

    loss = declare("loss", "a Keras loss, or a list or dict with one per output", _loss)
    metrics = declare("metrics", "Keras metrics, as compile takes them", _metrics)
    custom_objects = declare(
        "custom_objects", "classes and functions by name; those in use are found without it, too", _objects
    )
    checkpoint_callback = declare(
        "checkpoint_callback", "decides which epoch's model fit returns; by default that of the last epoch", _checkpoint
    )
    data_module = declare("data_module", "a class that reads the data instead of the native reader", check.anything)
    backend_env = declare("backend_env", "variables to set in training processes", _environment)

    setCustomObjects, getCustomObjects = accessors("custom_objects")
    setCheckpointCallback, getCheckpointCallback = accessors("checkpoint_callback")
    setDataModule, getDataModule = accessors("data_module")
    setBackendEnv, getBackendEnv = accessors("backend_env")

    def __init__(self) -> None:
        """Gives every parameter its default."""
        super().__init__()
        self._setDefault(custom_objects={}, checkpoint_callback=None, data_module=None, backend_env=dict(_ENVIRONMENT))
