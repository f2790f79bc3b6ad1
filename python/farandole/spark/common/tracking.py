# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Logs a run to other services: parameters, losses and metrics of each epoch, and the final model."""

# ruff: noqa: PLC0415 - MLflow and wandb are loaded when they are asked for

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Self

from farandole.spark.common.history import flat

if TYPE_CHECKING:
    from collections.abc import Iterable
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


class Trackers(Tracker):
    """Several at once.

    Args:
        all: What logs.
    """

    def __init__(self, all: Iterable[Tracker]) -> None:  # noqa: A002 - of what there is
        self._all = list(all)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Starts all of them."""
        with ExitStack() as opening:
            for one in self._all:
                opening.enter_context(one)
            self._open = opening.pop_all()
        return self

    def report(self, record: dict[str, Any]) -> None:
        """As `Tracker.report`."""
        for one in self._all:
            one.report(record)

    def model(self, model: Any, flavor: str) -> None:
        """As `Tracker.model`."""
        for one in self._all:
            one.model(model, flavor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """As `Tracker.__exit__`."""
        self._open.__exit__(kind, error, traceback)


class WandbTracker(Tracker):
    """Logs to Weights & Biases: into the run that is active, or one of its own.

    Args:
        run_id: name of the run.
        parameters: plain values by name.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(self, run_id: str, parameters: dict[str, Any]) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("wandb=True needs the package wandb: pip install wandb", name="wandb") from error
        self._wandb: Any = wandb
        self._own = wandb.run is None
        self._name = run_id
        self._parameters = parameters
        self._run: Any = None

    def __enter__(self) -> Self:
        """Starts the run and logs the parameters."""
        self._run = self._wandb.init(name=self._name) if self._own else self._wandb.run
        if self._own:
            self._run.define_metric("*", step_metric="epoch")
        self._run.config.update(self._parameters, allow_val_change=True)
        return self

    def report(self, record: dict[str, Any]) -> None:
        """As `Tracker.report`."""
        if record.get("kind") == "epoch":
            # The epoch is a value and no step: W&B drops a step below its last one, as in an active run that has more,
            # or for epochs that are repeated after a restart.
            row = {name: float(value) for name, value in flat(record["entry"]).items()}
            self._run.log(row | {"epoch": int(row["epoch"])})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """As `Tracker.__exit__`."""
        if self._own:
            self._run.finish(exit_code=0 if kind is None else 1)


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
