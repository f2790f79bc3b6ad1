# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A run logged elsewhere while it goes on: parameters, losses and metrics of each epoch, the model at its end."""

# ruff: noqa: PLC0415 - MLflow is loaded when it is asked for

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

from farandole.spark.common.history import flat

if TYPE_CHECKING:
    from types import TracebackType

_LONGEST = 500
"""Characters that MLflow takes of a parameter."""


class Tracker(AbstractContextManager["Tracker"]):
    """Logs nothing; what logs something derives from it."""

    def report(self, record: dict[str, Any]) -> None:
        """Takes what a worker has sent."""

    def model(self, model: Any, flavor: str) -> None:
        """Takes the trained model.

        Args:
            model: as its framework has it.
            flavor: MLflow's module for it, such as `pytorch` or `keras`.
        """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the log; a failed run is marked as such."""


class MlflowTracker(Tracker):
    """Logs to MLflow: into the run that is active, or one of its own.

    Args:
        run_id: name of the run.
        parameters: plain values by name.

    Raises:
        ImportError: MLflow is not installed.
    """

    def __init__(self, run_id: str, parameters: dict[str, Any]) -> None:
        try:
            import mlflow  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("mlflow=True needs the package mlflow: pip install mlflow", name="mlflow") from error
        self._mlflow: Any = mlflow
        self._own = mlflow.active_run() is None
        self._name = run_id
        self._parameters = {name: str(value)[:_LONGEST] for name, value in parameters.items()}

    def __enter__(self) -> Self:
        """Starts the run and logs the parameters."""
        if self._own:
            self._mlflow.start_run(run_name=self._name)
        self._mlflow.log_params(self._parameters)
        return self

    def report(self, record: dict[str, Any]) -> None:
        """As `Tracker.report`."""
        if record.get("kind") == "epoch":
            row = flat(record["entry"])
            epoch = int(row.pop("epoch"))
            self._mlflow.log_metrics({name: float(value) for name, value in row.items()}, step=epoch)

    def model(self, model: Any, flavor: str) -> None:
        """As `Tracker.model`."""
        import inspect
        from importlib import import_module

        log = import_module(f"mlflow.{flavor}").log_model
        known = inspect.signature(log).parameters
        options = {"name" if "name" in known else "artifact_path": "model"}
        if "serialization_format" in known:
            options["serialization_format"] = "pickle"  # the other traces the model, and not every one can be traced
        log(model, **options)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """As `Tracker.__exit__`."""
        if self._own:
            self._mlflow.end_run(status="FINISHED" if kind is None else "FAILED")
