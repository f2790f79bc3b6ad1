# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Logs a run to other services: parameters, losses and metrics of each epoch, and the final model."""

# ruff: noqa: PLC0415 - MLflow and wandb are loaded when they are asked for

from __future__ import annotations

import hashlib
import os
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from farandole.runner.show.history import flat

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

_LONGEST = 500
"""Characters that MLflow takes of a parameter."""


class Example(NamedTuple):
    """Some rows of a model.

    Attributes:
        input: Arrays that it takes, rows first.
        output: What it makes of them; `None` where it has several outputs.
    """

    input: Any
    output: Any


class Tracker(AbstractContextManager["Tracker"]):
    """Logs nothing; what logs something derives from it."""

    def report(self, record: dict[str, Any]) -> None:
        """Takes what a worker has sent."""

    def model(self, model: Any, flavor: str, example: Example | None = None) -> None:
        """Takes the trained model.

        Args:
            model: as its framework has it.
            flavor: MLflow's module for it, such as `pytorch` or `keras`.
            example: some rows, where the model has one input.
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

    def model(self, model: Any, flavor: str, example: Example | None = None) -> None:
        """As `Tracker.model`."""
        for one in self._all:
            one.model(model, flavor, example)

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
        data: place and number of rows of each data set, by what it is for.

    Raises:
        ImportError: MLflow is not installed.
    """

    def __init__(
        self, run_id: str, parameters: dict[str, Any], data: Mapping[str, tuple[str, int]] | None = None
    ) -> None:
        try:
            import mlflow  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("mlflow=True needs the package mlflow: pip install mlflow", name="mlflow") from error
        self._mlflow: Any = mlflow
        self._own = mlflow.active_run() is None
        self._name = run_id
        self._parameters = {name: str(value)[:_LONGEST] for name, value in parameters.items()}
        self._data = dict(data or {})

    def __enter__(self) -> Self:
        """Starts the run and logs the parameters and the data sets."""
        if self._own:
            self._mlflow.start_run(run_name=self._name, **self._system_metrics())
        try:
            self._mlflow.log_params(self._parameters)
            for context, (url, rows) in self._data.items():
                self._dataset(context, url, rows)
        except BaseException:
            if self._own:
                self._mlflow.end_run(status="FAILED")  # else the next fit would take it for the user's run
            raise
        return self

    def _system_metrics(self) -> dict[str, bool]:
        """Asks for the load of this host, where MLflow and psutil can tell it and nobody has decided otherwise."""
        import inspect
        from importlib.util import find_spec

        known = "log_system_metrics" in inspect.signature(self._mlflow.start_run).parameters
        decided = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING" in os.environ
        return {"log_system_metrics": True} if known and not decided and find_spec("psutil") is not None else {}

    def _dataset(self, context: str, url: str, rows: int) -> None:
        try:
            from mlflow.data.dataset_source_registry import (  # pyright: ignore[reportMissingImports]
                resolve_dataset_source,
            )
            from mlflow.data.meta_dataset import MetaDataset  # pyright: ignore[reportMissingImports]
        except ImportError:
            return  # an old MLflow
        digest = hashlib.sha256(f"{url} {rows}".encode()).hexdigest()[:12]
        try:
            source = resolve_dataset_source(url)
        except Exception:  # noqa: BLE001 - MLflow knows fewer kinds of URLs than stores
            return
        dataset = MetaDataset(source, name=f"{rows} rows", digest=digest)
        self._mlflow.log_input(dataset, context=context)

    def report(self, record: dict[str, Any]) -> None:
        """As `Tracker.report`."""
        if record.get("kind") == "epoch":
            row = flat(record["entry"])
            epoch = int(row.pop("epoch"))
            self._mlflow.log_metrics({name: float(value) for name, value in row.items()}, step=epoch)

    def model(self, model: Any, flavor: str, example: Example | None = None) -> None:
        """As `Tracker.model`."""
        import inspect
        from importlib import import_module

        log = import_module(f"mlflow.{flavor}").log_model
        known = inspect.signature(log).parameters
        options: dict[str, Any] = {"name" if "name" in known else "artifact_path": "model"}
        if "serialization_format" in known:
            options["serialization_format"] = "pickle"  # the other traces the model, and not every one can be traced
        if example is not None and {"signature", "input_example"} <= set(known):
            from mlflow.models import infer_signature  # pyright: ignore[reportMissingImports]

            options |= {"signature": infer_signature(*example), "input_example": example.input}
        log(model, **options)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """As `Tracker.__exit__`."""
        if self._own:
            self._mlflow.end_run(status="FINISHED" if kind is None else "FAILED")
