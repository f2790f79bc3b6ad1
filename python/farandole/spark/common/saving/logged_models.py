# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The plain parameters of a fitted model beside the model of its framework that a service such as
MLflow keeps: columns, categories, thresholds and everything else that predictions need.
"""

# ruff: noqa: PLC0415 - MLflow is imported only if a model comes from it

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farandole.common import scratch_directories
from farandole.spark.common.model.output_columns import outputs_as_dicts
from farandole.spark.common.runs.tracking import MLFLOW_PARAMS_FILE
from farandole.stores.pickle_policy import require_unpickling_allowed
from farandole.stores.small_files import raise_as_damaged_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.ml.param import Params

_LEFT_OUT_PARAMS = frozenset(
    {
        "model",
        "optimizer",
        "loss",
        "loss_constructors",
        "transformation_fn",
        "history",
        "statistics",
        "paths",
        "_metadata",
        "allow_pickle",
    }
)
"""Parameters that are no plain values, that the service has elsewhere, or that are large."""


def collect_plain_params(model: Any) -> dict[str, Any] | None:
    """Returns the parameters of a fitted model that JSON can hold, by name; `None` if it has none,
    as a model of a class of the user's own.

    Args:
        model: the fitted model.
    """
    values = getattr(model, "_paramMap", None)
    if values is None:
        return None
    named = {param.name: value for param, value in values.items() if value is not None}
    if "outputs" in named:
        named["outputs"] = outputs_as_dicts(named["outputs"])
    return {
        name: value
        for name, value in named.items()
        if name not in _LEFT_OUT_PARAMS and _is_json(value)
    }


def load_from_mlflow(kind: type[Params], uri: str, *, allowed: bool | None) -> Any:
    """Returns a fitted model that MLflow keeps.

    Args:
        kind: class of the model.
        uri: address of the model in MLflow.
        allowed: whether the pickle of the module may be loaded; `None`: the environment decides.

    Raises:
        ImportError: MLflow is not installed.
        PickleNotAllowedError: pickles are not allowed.
        ValueError: Farandole has not logged the model, or its file is damaged.
    """
    try:
        from mlflow.artifacts import download_artifacts
        from mlflow.pytorch import load_model
    except ModuleNotFoundError as error:
        raise ImportError(
            "from_mlflow needs MLflow, which is not installed: pip install mlflow", name=error.name
        ) from error
    with scratch_directories.temporary_directory() as directory:
        downloaded = Path(download_artifacts(uri, dst_path=str(directory)))
        return _read_downloaded_model(kind, uri, downloaded, load_model, allowed=allowed)


def _read_downloaded_model(
    kind: type[Params],
    uri: str,
    directory: Path,
    load_model: Callable[..., Any],
    *,
    allowed: bool | None,
) -> Any:
    """Returns a fitted model of the files that MLflow keeps of it."""
    found = next(iter(sorted(directory.rglob(MLFLOW_PARAMS_FILE))), None)
    if found is None:
        raise ValueError(
            f"{uri} has no file {MLFLOW_PARAMS_FILE}, because mlflow=True of an estimator did not "
            f"log it: load it with mlflow.pytorch.load_model and give it to {kind.__name__} with "
            "its columns"
        )
    with raise_as_damaged_file(f"{MLFLOW_PARAMS_FILE} of {uri}"):
        params = dict(json.loads(found.read_text("utf-8")))
    require_unpickling_allowed(uri, allowed, "")
    model: Any = kind()
    known = {name: value for name, value in params.items() if name not in _LEFT_OUT_PARAMS}
    with raise_as_damaged_file(f"{MLFLOW_PARAMS_FILE} of {uri}"):
        model.setParams(**{name: value for name, value in known.items() if model.hasParam(name)})
    return model.setModel(load_model(str(directory), map_location="cpu").eval())


def _is_json(value: Any) -> bool:
    """Returns whether JSON gives a value back as it was, with lists in the place of tuples."""
    try:
        return json.loads(json.dumps(value)) == _tuples_as_lists(value)
    except (TypeError, ValueError):
        return False


def _tuples_as_lists(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_tuples_as_lists(one) for one in value]
    if isinstance(value, dict):
        return {name: _tuples_as_lists(one) for name, one in value.items()}
    return value
