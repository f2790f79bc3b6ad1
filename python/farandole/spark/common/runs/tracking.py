# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Logs a run to other services: parameters, losses and metrics of each epoch, and the final
model.
"""

# ruff: noqa: PLC0415 - MLflow is loaded when it is asked for

from __future__ import annotations

import inspect
import json
import logging
import os
import tempfile
import time
from abc import abstractmethod
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from farandole.runner.show.history import flatten_history_entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_MAX_MLFLOW_VALUE_CHARACTERS = 500
"""Characters that MLflow takes of a parameter."""
_MAX_MLFLOW_BATCH = 1000
"""Metrics that MLflow takes in one call."""
MLFLOW_PARAMS_FILE = "farandole-model.json"
"""File beside a logged model with the plain parameters of the fitted model."""
MLFLOW_VERDICT_TAG = "farandole.verdict"
"""Tag of the limit of the run's speed."""
_log = logging.getLogger("farandole")


class ModelExample(NamedTuple):
    """Some input rows of a model and their outputs.

    Attributes:
        input: Input arrays of the model, rows first.
        output: Output of the model for these rows; `None` if the model has several outputs.
    """

    input: Any
    output: Any


class TrackedDataset(NamedTuple):
    """The data that a run is trained or validated on.

    Attributes:
        url: Its place.
        rows: How many.
        digest: Of its content.
    """

    url: str
    rows: int
    digest: str


class Tracker(AbstractContextManager["Tracker"]):
    """A tracker that logs nothing; the base class of all trackers."""

    def log_report(self, record: dict[str, Any]) -> None:
        """Takes a worker's report."""

    def log_model(
        self,
        model: Any,
        flavor: str,
        example: ModelExample | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        """Takes the trained model.

        Args:
            model: model of its framework.
            flavor: MLflow's module for the model, such as `pytorch` or `keras`.
            example: some rows, if the model has one input.
            params: plain parameters of the fitted model, by name.
        """

    def log_ranks(self, metrics: dict[str, float], sample: int) -> None:
        """Takes the load of hosts and the times of ranks, on any thread.

        Args:
            metrics: numbers by name.
            sample: number of the sample, from 0.
        """

    def log_verdict(self, verdict: str) -> None:
        """Takes the limit of the run's speed.

        Args:
            verdict: of `farandole explain`.
        """

    @property
    def takes_ranks(self) -> bool:
        """Whether `log_ranks` logs anything. Otherwise, ranks need not report their load."""
        return False

    def __exit__(self, kind: type[BaseException] | None, /, *_: object) -> None:
        """Ends the log; a failed run is marked as such."""


class TrackerGroup(Tracker):
    """Several trackers that get the same reports.

    An error at the start is raised. After that, an error of a tracker is a warning, once for each
    kind of call: a service that is lost must not end a training or cost its model.

    Args:
        all: The trackers.
    """

    def __init__(self, all: Iterable[Tracker]) -> None:  # noqa: A002 - of what there is
        self._trackers = list(all)
        self._open = ExitStack()
        self._warned: set[tuple[int, str]] = set()

    def __enter__(self) -> Self:
        """Starts all of them."""
        with ExitStack() as opening:
            for one in self._trackers:
                one.__enter__()
                opening.push(partial(self._end_tracker, one))
            self._open = opening.pop_all()
        return self

    def log_report(self, record: dict[str, Any]) -> None:
        """Like `Tracker.log_report`."""
        for one in self._trackers:
            with self._warn_of_failure(one, "metrics of an epoch"):
                one.log_report(record)

    def log_model(
        self,
        model: Any,
        flavor: str,
        example: ModelExample | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        """Like `Tracker.log_model`."""
        for one in self._trackers:
            with self._warn_of_failure(one, "the model"):
                one.log_model(model, flavor, example, params)

    def log_ranks(self, metrics: dict[str, float], sample: int) -> None:
        """Like `Tracker.log_ranks`."""
        for one in self._trackers:
            with self._warn_of_failure(one, "metrics of ranks"):
                one.log_ranks(metrics, sample)

    def log_verdict(self, verdict: str) -> None:
        """Like `Tracker.log_verdict`."""
        for one in self._trackers:
            with self._warn_of_failure(one, "the verdict"):
                one.log_verdict(verdict)

    @property
    def takes_ranks(self) -> bool:
        """Like `Tracker.takes_ranks`."""
        return any(one.takes_ranks for one in self._trackers)

    def __exit__(self, *failure: Any) -> None:  # noqa: PYI036 - handed on
        """Like `Tracker.__exit__`."""
        self._open.__exit__(*failure)

    def _end_tracker(self, tracker: Tracker, *failure: Any) -> None:
        with self._warn_of_failure(tracker, "the end of the run"):
            tracker.__exit__(*failure)

    @contextmanager
    def _warn_of_failure(self, tracker: Tracker, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - of any service
            if (id(tracker), what) not in self._warned:
                self._warned.add((id(tracker), what))
                name = getattr(tracker, "package", type(tracker).__name__)
                _log.warning(
                    "%s did not take %s, and the fit continues without it: %s", name, what, error
                )


class _ServiceTracker(Tracker):
    """A tracker that logs to a service by its library: into the active run, or else a new run.

    Args:
        run_id: name of the run.
        parameters: plain values by name.

    Raises:
        ImportError: the library is not installed.
    """

    package: str
    """Name of the library, and of the estimator's parameter."""

    def __init__(self, run_id: str, parameters: dict[str, Any]) -> None:
        name = self.package
        try:
            self._library: Any = import_module(name)
        except ImportError as error:
            raise ImportError(
                f"{name}=True needs the package {name}: pip install {name}", name=name
            ) from error
        self._owns_run = not self._has_active_run()
        self._name = run_id
        self._parameters = parameters

    def __enter__(self) -> Self:
        """Starts the run, if none is active, and logs its known facts."""
        if self._owns_run:
            self._start_run()
        try:
            self._log_parameters()
        except BaseException:
            if self._owns_run:
                self._finish_run(failed=True)  # else the next fit would take it for the user's run
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, /, *_: object) -> None:
        """Like `Tracker.__exit__`."""
        if self._owns_run:
            self._finish_run(failed=kind is not None)

    def log_report(self, record: dict[str, Any]) -> None:
        """Like `Tracker.log_report`."""
        if record.get("kind") == "epoch":
            row = flatten_history_entry(record["entry"])
            epoch = int(row.pop("epoch"))
            self._log_epoch(epoch, {name: float(value) for name, value in row.items()})

    @abstractmethod
    def _log_epoch(self, epoch: int, row: dict[str, float]) -> None:
        """Logs the numbers of an epoch."""

    @abstractmethod
    def _has_active_run(self) -> bool:
        """Returns whether the user has a run."""

    @abstractmethod
    def _start_run(self) -> None:
        """Starts a run."""

    @abstractmethod
    def _log_parameters(self) -> None:
        """Logs the parameters."""

    @abstractmethod
    def _finish_run(self, *, failed: bool) -> None:
        """Ends the run that `_start_run` has started."""


class WandbTracker(_ServiceTracker):
    """A tracker that logs to Weights & Biases: into the active run, or else a new run."""

    package = "wandb"
    _run: Any

    def _has_active_run(self) -> bool:
        self._run = self._library.run
        return self._run is not None

    def _start_run(self) -> None:
        self._run = self._library.init(name=self._name)
        self._run.define_metric("*", step_metric="epoch")

    def _log_parameters(self) -> None:
        self._run.config.update(self._parameters, allow_val_change=True)

    def _log_epoch(self, epoch: int, row: dict[str, float]) -> None:
        # The epoch is a value and no step: W&B drops a step below its last one, as in an active run
        # that has more, or for epochs that are repeated after a restart.
        self._run.log({"epoch": epoch, **row})

    def _finish_run(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


class MlflowTracker(_ServiceTracker):
    """A tracker that logs to MLflow: into the active run, or else a new run.

    Args:
        run_id: name of the run.
        parameters: plain values by name.
        data: the data sets, by their purpose.
    """

    package = "mlflow"

    def __init__(
        self,
        run_id: str,
        parameters: dict[str, Any],
        data: Mapping[str, TrackedDataset] | None = None,
    ) -> None:
        super().__init__(
            run_id,
            {name: str(value)[:_MAX_MLFLOW_VALUE_CHARACTERS] for name, value in parameters.items()},
        )
        self._data = dict(data or {})
        self._active = ""

    @property
    def takes_ranks(self) -> bool:
        """Like `Tracker.takes_ranks`."""
        return True

    def log_ranks(self, metrics: dict[str, float], sample: int) -> None:
        """Like `Tracker.log_ranks`."""
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        # The active run is known on the thread of the fit only, so the run is named here.
        client, now = self._library.MlflowClient(), int(time.time() * 1000)
        batch = [Metric(name, value, now, sample) for name, value in metrics.items()]
        for start in range(0, len(batch), _MAX_MLFLOW_BATCH):
            client.log_batch(self._active, metrics=batch[start : start + _MAX_MLFLOW_BATCH])

    def log_verdict(self, verdict: str) -> None:
        """Like `Tracker.log_verdict`."""
        self._library.set_tag(MLFLOW_VERDICT_TAG, verdict)

    def _has_active_run(self) -> bool:
        return self._library.active_run() is not None

    def _start_run(self) -> None:
        self._library.start_run(run_name=self._name, **self._system_metrics_options())

    def _log_parameters(self) -> None:
        self._active = self._library.active_run().info.run_id
        self._library.log_params(self._parameters)
        for context, data in self._data.items():
            self._log_dataset(context, data)

    def _finish_run(self, *, failed: bool) -> None:
        self._library.end_run(status="FAILED" if failed else "FINISHED")

    def _system_metrics_options(self) -> dict[str, bool]:
        """Asks for the load of this host, if MLflow and psutil can measure it and the user has
        not decided.
        """
        known = "log_system_metrics" in inspect.signature(self._library.start_run).parameters
        decided = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING" in os.environ
        return (
            {"log_system_metrics": True}
            if known and not decided and find_spec("psutil") is not None
            else {}
        )

    def _log_dataset(self, context: str, data: TrackedDataset) -> None:
        try:
            from mlflow.data.dataset_source_registry import (  # pyright: ignore[reportMissingImports]
                resolve_dataset_source,
            )
            from mlflow.data.meta_dataset import MetaDataset  # pyright: ignore[reportMissingImports]
        except ImportError:
            return  # an old MLflow
        try:
            source = resolve_dataset_source(data.url)
        except Exception:  # noqa: BLE001 - MLflow knows fewer kinds of URLs than stores
            return
        dataset = MetaDataset(source, name=f"{data.rows} rows", digest=data.digest)
        self._library.log_input(dataset, context=context)

    def _log_epoch(self, epoch: int, row: dict[str, float]) -> None:
        self._library.log_metrics(row, step=epoch)

    def log_model(
        self,
        model: Any,
        flavor: str,
        example: ModelExample | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        """Like `Tracker.log_model`."""
        module = import_module(f"mlflow.{flavor}")
        log = module.log_model
        known = inspect.signature(log).parameters
        options: dict[str, Any] = {"name" if "name" in known else "artifact_path": "model"}
        if "serialization_format" in known:
            # the other traces the model, and not every one can be traced
            options["serialization_format"] = "pickle"
        if example is not None and {"signature", "input_example"} <= set(known):
            from mlflow.models import Model, infer_signature  # pyright: ignore[reportMissingImports]

            options |= {"signature": infer_signature(*example), "input_example": example.input}
            if flavor == "keras" and "name" in known:
                Model.log(None, _MlflowKerasFlavor(module), model=model, **options)
                return
        if params is None or "extra_files" not in known:
            log(model, **options)
            return
        with tempfile.TemporaryDirectory(prefix="farandole-mlflow-") as directory:
            path = Path(directory) / MLFLOW_PARAMS_FILE
            path.write_text(json.dumps(params), "utf-8")
            log(model, extra_files=[str(path)], **options)


class _MlflowKerasFlavor:
    """MLflow's flavor of Keras. MLflow 3.17 writes the example into a directory before it creates
    the directory, so this class creates the directory first.

    Args:
        module: `mlflow.keras`.
    """

    __name__ = "mlflow.keras"

    def __init__(self, module: Any) -> None:
        self._module = module

    def save_model(self, path: str, **options: Any) -> None:
        """Makes the directory, and has MLflow save the model in it."""
        Path(path).mkdir(parents=True, exist_ok=True)
        self._module.save_model(path=path, **options)
