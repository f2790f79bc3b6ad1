# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The steps of a fit, for all frameworks: check, prepare, train.

Errors that can be found without data are raised before data is written, and all others before
workers start.
"""

# ruff: noqa: PLC0415, SLF001 - Spark ML's names; what needs a session is loaded when there is one

from __future__ import annotations

import contextlib
import secrets
import time
import uuid
import warnings
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pyspark.ml import Estimator
from pyspark.ml.base import _FitMultipleIterator

from farandole.data.columns import ColumnRoles, check_columns_present
from farandole.data.encoding_learning import LEARNED_FILL_WORDS, EncodingSpec
from farandole.data.validation_splits import resolve_validation_split
from farandole.runner.errors import FarandoleJobError
from farandole.runner.foreign_backend import adapt_backend
from farandole.runner.show.journal import keep_run_journal
from farandole.runner.show.training_run_reports import report_run
from farandole.runner.timelines import collect_timelines
from farandole.spark.common.data.column_metadata import column_metadata
from farandole.spark.common.data.data_cleanup import delete_stale_prepared_data
from farandole.spark.common.data.encoded_copies import hold_encoded_data
from farandole.spark.common.data.existing_data import ExistingDataPaths, hold_prepared_data_leases
from farandole.spark.common.data.prepare import (
    declare_same_rows,
    describe_prepared_data,
    find_existing_data,
    prepare_data,
)
from farandole.spark.common.data.schema import check_types
from farandole.spark.common.data.training_data import training_data_spec
from farandole.spark.common.data.training_statistics import (
    add_statistics_to_existing_data,
    add_statistics_to_prepared_data,
)
from farandole.spark.common.estimator_hooks import EstimatorHooks
from farandole.spark.common.global_batch import refuse_options_of_global_batch, step_rows_of_all
from farandole.spark.common.model.base import (
    FarandoleModel,
    refuse_class_columns_for_values,
    require_output_form,
)
from farandole.spark.common.model.class_columns import ClassificationParams
from farandole.spark.common.model.signature import describe_column_mapping, input_signature
from farandole.spark.common.param_checks import feature_groups
from farandole.spark.common.runs.digests import value_digest
from farandole.spark.common.runs.fingerprint import (
    LENGTH_PARAMS,
    Fingerprint,
    data_parts,
    parameter_parts,
)
from farandole.spark.common.runs.finite_loss import NotFiniteError
from farandole.spark.common.runs.rank_metrics import log_rank_metrics, run_verdict
from farandole.spark.common.runs.run_fingerprint_check import (
    check_or_store_fingerprint,
    hold_run_lease,
    mark_param_map_fit,
    run_id_of_fit,
)
from farandole.spark.common.runs.stop_request import StopRequest
from farandole.spark.common.runs.trackers import create_trackers, loggable_parameters
from farandole.spark.common.saving.logged_models import collect_plain_params
from farandole.spark.common.show.progress import ProgressDisplay, create_progress_display
from farandole.spark.common.training_plan import FitResources
from farandole.spark.job.session_adapter import SparkSessionAdapter
from farandole.spark.shim import SparkPlugin
from farandole.stores.local_paths import executor_hosts, unshared_path_warning

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyspark.ml.param import Param
    from pyspark.sql import DataFrame

    from farandole.data.prepare import PreparedData as Prepared
    from farandole.data.validation_splits import ValidationSplit
    from farandole.runner.backend import Backend
    from farandole.spark.common.data.existing_data import Paths
    from farandole.spark.common.runs.fingerprint import FingerprintPart
    from farandole.spark.common.runs.tracking import Tracker
    from farandole.spark.common.training_plan import FrameworkTrainingJob
    from farandole.stores.store import AbstractFilesystemStore


class FarandoleEstimator(ClassificationParams, EstimatorHooks, Estimator[Any]):
    """The base of the estimators of all frameworks.

    Fits of all kinds of rows go through `_train`. A framework implements `_check_settings`,
    `_create_framework_job`, `get_model_class` and `_framework_fingerprint_parts`, and may implement
    `_loss_output_form` and `_worker_environment`.
    """

    _flavor: ClassVar[str]
    """MLflow's name of the framework, with which the names of runs begin."""

    def fit(  # pyright: ignore[reportIncompatibleMethodOverride] - Horovod's
        self,
        df: Any,
        params: Any = None,
        *,
        ui: bool = False,
        timeline: str | os.PathLike[str] | bool | None = None,
    ) -> Any:
        """Trains on a DataFrame, or on a pyarrow, pandas or polars table.

        Args:
            df: the rows.
            params: values of parameters that hold for this call; a list of them fits a model with
                each.
            ui: whether to open the run viewer on the store and print its link.
            timeline: file for one timeline of all ranks, with aligned clocks, that opens in
                Perfetto; `True` keeps it in the run, where the run viewer opens it.

        Returns:
            The fitted model, or a list of them.

        Raises:
            ValueError: a parameter, a column or the data does not fit; the message names it.
        """
        self._open_viewer(ui)
        with collect_timelines(timeline), mark_param_map_fit(params is not None):
            return super().fit(df, params)

    def fitMultiple(  # noqa: N802 - Spark's name
        self,
        dataset: DataFrame,
        paramMaps: Sequence[dict[Param[Any], Any]],  # noqa: N803 - as above
    ) -> Iterator[tuple[int, Any]]:
        """Fits a model with each map of parameters; Spark's tuners call this, and threads share the
        result.

        The rows are prepared once for all maps that need the same columns. Each fit waits until
        there are slots for all of its processes.

        Args:
            dataset: the rows.
            paramMaps: values of parameters, a map for each model.

        Returns:
            An iterator over pairs of the number of a map and its model, which threads may ask at
            the same time.
        """
        estimator, rows = self.copy(), f"rows-{uuid.uuid4().hex}"

        def fit_param_map(number: int) -> Any:
            with declare_same_rows(rows):
                return estimator.fit(dataset, paramMaps[number])

        return _FitMultipleIterator(fit_param_map, len(paramMaps))

    def fit_on_parquet(
        self,
        params: dict[Param[Any], Any] | None = None,
        dataset_idx: int | None = None,
        *,
        path: Paths | None = None,
        val_path: Paths | None = None,
        types: Mapping[str, str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        ui: bool = False,
        timeline: str | os.PathLike[str] | bool | None = None,
    ) -> Any:
        """Trains on Parquet data that exists already, in the store or at a path, without a
        DataFrame.

        With `backend=LocalBackend(...)` no Spark session is needed. Validation data is used when it
        is there.

        Args:
            params: values that hold for this call.
            dataset_idx: number of the data set; without it the store's unnumbered one.
            path: the training rows, if they are not in the store: a file, a pattern such as
                `/data/2024-*/*.parquet`, a directory, or a list of files, directories and patterns;
                a Delta or Iceberg table, by its path, as an object of deltalake or pyiceberg, or at
                a version that `farandole.data.open_table` chose; or a table of Unity Catalog,
                `uc://catalog.schema.table`, or files in a volume, `uc://catalog.schema.volume/path`.
                All training processes must see the files.
            val_path: the same for the validation rows.
            types: types of columns whose values are in names of directories, by NumPy's name or
                `string`, as for `ParquetLoader`: `{"code": "string"}`. Only with `path`.
            storage_options: credentials and endpoints of the paths, as for a store; default: the
                options of a store of this process with the same location, else the provider's
                environment. They are sent to the training processes. Only with `path`.
            ui: whether to open the run viewer on the store and print its link.
            timeline: file for one timeline of all ranks, with aligned clocks, that opens in
                Perfetto; `True` keeps it in the run, where the run viewer opens it.

        Returns:
            The fitted model.

        Raises:
            ValueError: a parameter, a column or the data does not fit; the message names it.
            FileNotFoundError: nothing is at a path.
            FarandoleJobError: a worker failed.
            RunDiffersError: a `ValueError`: the run of `run_id` was started with other data or
                parameters.
        """
        self._open_viewer(ui)
        with collect_timelines(timeline), mark_param_map_fit(params is not None):
            fitted = self.copy(params) if params else self
            given = ExistingDataPaths.from_paths(
                path, val_path, dataset_idx, types, storage_options
            )
            # A subclass's `_fit_on_parquet` may have Horovod's arguments, which have no paths.
            more = () if given is None else (given,)
            return fitted._fit_on_parquet(dataset_idx, *more)

    def _open_viewer(self, ui: bool) -> None:
        if ui and self.getStore() is not None:
            from farandole.ui import announce, show

            announce(show(self._store_as_filesystem()), "the runs of this store are at")

    def _fit(self, dataset: DataFrame) -> Any:
        if not hasattr(dataset, "mapInArrow"):
            return self._fit_table(dataset)
        self._check_settings()
        if dataset.isStreaming:
            raise ValueError(
                "fit does not take a streaming DataFrame: write the stream to a table and fit the "
                "table"
            )
        roles, store, wanted = (
            self._column_roles(),
            self._store_as_filesystem(),
            self.getStatistics(),
        )
        check_columns_present(roles, dataset.columns, "DataFrame")
        texts = self.getTransformationFn() is not None
        check_types(roles, dataset.schema, texts=texts, categories=self.getCategories())
        with self._open_fit_resources() as fit:
            hosts = executor_hosts(SparkSessionAdapter.from_active_session().context)
            warning = unshared_path_warning(store.prefix_path, hosts)
            if warning is not None:
                warnings.warn(warning, stacklevel=4)
            fit.shown.show_message("preparing data")
            with prepare_data(
                fit.backend.num_processes(),
                store,
                dataset,
                roles,
                self.getRandomSeed() or 0,
                self.getPartitionsPerProcess(),
                fill=self.getFill(),
                categories=self.getCategories(),
                split=self._validation_split(),
                ragged=self.getRagged(),
                allow_nan=self.getAllowNan(),
                compress_sparse=self.getCompressSparseCols(),
            ) as prepared:
                self._report_data_and_clean_up(prepared, fit.shown)
                self._check_metadata_compatibility(self._column_metadata(prepared))
                return self._train(
                    fit,
                    add_statistics_to_prepared_data(
                        prepared, dataset, dataset.columns, roles, wanted=wanted
                    ),
                )

    def _fit_table(self, dataset: Any) -> Any:
        """Fits on rows that Spark does not hold: a pyarrow, pandas or polars table, or a pyarrow
        dataset.
        """
        from farandole.data.inputs.frames import is_row_container
        from farandole.data.inputs.sources import open_source
        from farandole.data.prepare import native_writer_spec, prepare_source

        if not is_row_container(dataset):
            kind = type(dataset)
            raise TypeError(
                "fit takes a Spark DataFrame, or a pyarrow, pandas or polars table, "
                f"this is a {kind.__module__}.{kind.__qualname__}"
            )
        self._check_settings()
        roles, store, wanted = (
            self._column_roles(),
            self._store_as_filesystem(),
            self.getStatistics(),
        )
        source = open_source(dataset)
        names = source.schema.names
        check_columns_present(roles, names, "table")
        seed, allow_nan = self.getRandomSeed() or 0, self.getAllowNan()
        with self._open_fit_resources() as fit:
            fit.shown.show_message("preparing data")
            spec = native_writer_spec(roles, seed, self.getFill(), allow_nan=allow_nan)
            with prepare_source(
                source, store, roles, spec, "fit", self._encoding_spec()
            ) as prepared:
                self._report_data_and_clean_up(prepared, fit.shown)
                self._check_metadata_compatibility(self._column_metadata(prepared))
                return self._train(
                    fit,
                    add_statistics_to_prepared_data(prepared, source, names, roles, wanted=wanted),
                )

    def _fit_on_parquet(
        self, dataset_idx: int | None = None, given: ExistingDataPaths | None = None
    ) -> Any:
        self._check_settings()
        roles, store, wanted = (
            self._column_roles(),
            self._store_as_filesystem(),
            self.getStatistics(),
        )
        where = given or ExistingDataPaths.from_store(store, dataset_idx)
        # Shared before the data is opened, so that no process deletes it in between.
        with hold_prepared_data_leases(where):
            found = find_existing_data(store, roles, dataset_idx, where)
            wish = replace(self._encoding_spec(), split=None)  # it is split already
            made = hold_encoded_data(store, found, where, roles, wish, allow_nan=self.getAllowNan())
            with self._open_fit_resources(writes=store.saving_runs()) as fit, made as prepared:
                fit.shown.show_message(describe_prepared_data(prepared))
                return self._train(
                    fit,
                    add_statistics_to_existing_data(prepared, where.train, roles, wanted=wanted),
                )

    @contextlib.contextmanager
    def _open_fit_resources(self, *, writes: bool = True) -> Iterator[FitResources]:
        """Checks where the fit runs and writes, and shows its progress inside the context.

        Args:
            writes: whether the fit writes to its store.

        Raises:
            ValueError: the backend cannot run the job.
            OSError: the store cannot be written.
        """
        backend = adapt_backend(self._get_or_create_backend()).through(self._store_as_filesystem())
        if writes:
            self._store_as_filesystem().check_writable()
        backend.check()
        with create_progress_display(self.getVerbose()) as shown:
            yield FitResources(backend, shown)

    def _report_data_and_clean_up(self, prepared: Prepared, shown: ProgressDisplay) -> None:
        """Says which rows this fit has prepared, and deletes old rows of other fits."""
        shown.show_message(describe_prepared_data(prepared))
        store, tell = self._store_as_filesystem(), shown.show_message
        delete_stale_prepared_data(store, self.getGcOlderThan(), self.getGcMaxSize(), tell)

    def _train(self, fit: FitResources, prepared: Prepared) -> Any:
        """Trains on prepared data, and returns the fitted model."""
        metadata = self._column_metadata(prepared)
        self._check_params(metadata)
        plan = self._create_framework_job(prepared, fit.backend)
        for message in plan.messages:
            fit.shown.show_message(message)
        if plan.output_words:
            fit.shown.show_message(describe_column_mapping(plan.inputs, plan.output_words))
        with (
            self._hold_checked_run(plan.job, plan.fingerprint, fit.shown) as held,
            plan.hold_inputs(held) as job,
            create_trackers(self, job, prepared, plan.fingerprint) as tracker,
        ):
            trained = self._run_job_with_retries(fit, plan.train, job, tracker)[0]
            if (verdict := run_verdict(job)) is not None:
                tracker.log_verdict(verdict)
            model = plan.load_result(trained)
            params = None
            try:
                fitted = self.get_model_class()(
                    **plan.create_model_kwargs(model, trained.history, job.run_id, metadata)
                )
                if isinstance(fitted, FarandoleModel):  # a subclass may return any other class
                    own = {
                        "signature": input_signature(plan.inputs),
                        "paths": job.file_paths(),
                        "outputs": plan.outputs,
                        **self._inherited_params(prepared),
                        **plan.model_params,
                    }
                    fitted.set_unset_params(own)
                params = collect_plain_params(fitted)
            finally:  # services get the trained model, even if its class refuses to hold it
                tracker.log_model(model, self._flavor, plan.create_example(model), params)
        return fitted

    def _create_framework_job(self, prepared: Prepared, backend: Backend) -> FrameworkTrainingJob:
        """Returns the job that the framework makes of prepared data, after the checks that are
        possible before workers start.

        Args:
            prepared: the data.
            backend: runs the job.

        Raises:
            ValueError: model, loss or columns do not fit; the message names them.
        """
        raise NotImplementedError

    def _check_settings(self) -> None:
        """Refuses parameters that do not go together.

        Raises:
            ValueError: naming the parameter.
        """
        for name in ("model", "store", "feature_cols", "label_cols"):
            if self.getOrDefault(name) is None:
                raise ValueError(
                    f"{name} is required" if name != "model" else "Model parameter is required"
                )
        if self.getNumProc() is not None and self.getBackend() is not None:
            raise ValueError('At most one of parameters "backend" and "num_proc" may be specified')
        both = sorted(set(self._column_roles().features) & set(self.getLabelCols()))
        if both and not self._learns_features:
            raise ValueError(f"a column is both a feature and a label: {', '.join(both)}")
        if not self._store_as_filesystem().saving_runs():
            self._refuse_options_that_need_runs()
        fill = self.getFill() if isinstance(self.getFill(), dict) else {}
        unused = sorted(set(fill) - {"*", *self._column_roles().stored_columns})
        if unused:
            raise ValueError(
                f"fill must name features, labels or weights; these are not: {', '.join(unused)}"
            )
        strange = sorted(
            set(self.getCategories()) - {*self._column_roles().features, *self.getLabelCols()}
        )
        if strange:
            raise ValueError(
                f"categories must be features or labels; these are neither: {', '.join(strange)}"
            )
        self._validation_split()  # refuses what does not go together
        refuse_options_of_global_batch(self)
        columns = self._requested_class_columns() | (
            {} if self.getOrDefault("thresholds") is None else {"thresholds": ""}
        )
        if columns:
            form = require_output_form(
                next(iter(columns)), self._output_form(), self.getLabelCols()
            )
            refuse_class_columns_for_values(columns, form, self.getOrDefault("thresholds"))
        weights = self.getLossWeights()
        if weights is not None and len(weights) != len(self.getLabelCols()):
            raise ValueError(
                f"loss_weights needs one number per label column {len(self.getLabelCols())}: "
                f"{weights}"
            )

    def _refuse_options_that_need_runs(self) -> None:
        """Refuses what needs a store that saves runs."""
        if self.getOnFailure() == "restart":
            raise ValueError(
                "on_failure='restart' continues from a checkpoint, so the store must save runs"
            )
        if self.getTensorboard():
            raise ValueError(
                "tensorboard=True writes into the directory of the run, so the store must save runs"
            )

    def _run_job_with_retries(
        self, fit: FitResources, train: Callable[[Any], Any], job: Any, tracker: Tracker
    ) -> list[Any]:
        """Runs a job's training function, and repeats it after a failure if the user asked for
        that.

        Args:
            fit: runs the function, and shows what workers report.
            train: the function, of the job.
            job: what to do.
            tracker: gets the epochs, too.

        Returns:
            The results by rank.

        Raises:
            FarandoleJobError: a worker failed, and no restart is left.
        """
        backend, shown = fit.backend, fit.shown

        def handle_report(_rank: int, record: dict[str, Any]) -> None:
            shown.show_report(record)
            tracker.log_report(record)
            if stop is not None:
                stop.raise_if_ended()
                if stop.is_stop_newly_requested():
                    shown.show_message("stopping, as asked for in the notebook")
                    run.add_event("stop", "asked for in the notebook")

        left = self.getMaxRestarts() if self.getOnFailure() == "restart" else 0
        with (
            log_rank_metrics(tracker) as rank_metrics,
            keep_run_journal(self, job) as journal,
            report_run(
                SparkPlugin.from_active_context(),
                job.run_id,
                type(self).__name__,
                loggable_parameters(self),
                journal,
                shown.rank_reporter(),
                rank_metrics,
            ) as run,
            contextlib.closing(StopRequest(job.store)) as request,
            shown.offer_stop(request) as stop,
        ):
            variables = {} if stop is None else stop.stop_token_variables()
            env = self._worker_environment() | variables or None
            while True:
                try:
                    return backend.run(train, args=(job,), env=env, on_progress=handle_report)
                except FarandoleJobError as error:
                    if not left or (error.exception_type or "").endswith(
                        NotFiniteError.__name__
                    ):  # it would come again
                        raise
                    left -= 1
                    shown.show_message(
                        f"{error.reason}; starting again from the last checkpoint, restarts left: "
                        f"{left}"
                    )
                    run.record_restart(error.reason)

    def _new_run_id(self, fingerprint: Fingerprint) -> str:
        """Returns the run's name: as the user set it, or one that no other run has.

        Args:
            fingerprint: of the fit.
        """
        if self.getRunId():
            return run_id_of_fit(self.getRunId(), fingerprint)
        return f"{self._flavor}_{int(time.time())}_{secrets.token_hex(2)}"

    def _fit_fingerprint(
        self, prepared: Prepared, processes: int, totals: Mapping[str, str]
    ) -> Fingerprint:
        """Returns the parts that decide the result of a fit. A run continues with another number of
        processes if the rows of a step and the other totals are the same.

        Args:
            prepared: its data.
            processes: of the fit.
            totals: digests of the values of all processes together, by name of the part.
        """
        own = self._framework_fingerprint_parts()
        names = {one.name for one in own}
        parts = (*data_parts(prepared), *own, *parameter_parts(self, names))
        step = value_digest(step_rows_of_all(self, processes))
        step_totals = {"batch_size": step, "backward_passes_per_step": step}
        length = tuple(parameter_parts(self, (), LENGTH_PARAMS))
        return Fingerprint(parts, length).with_process_independent_totals(
            {**step_totals, **totals}, processes
        )

    def _job_fields(
        self, prepared: Prepared, fingerprint: Fingerprint, unseeded: int | None = None
    ) -> dict[str, Any]:
        """Returns the fields of a job that all frameworks have, but the user's objects."""
        run_id, names = self._new_run_id(fingerprint), self._column_roles().stored_columns
        return {
            "store": self._store_as_filesystem().to_remote(run_id, prepared.index),
            "run_id": run_id,
            "data": training_data_spec(self, prepared, names, unseeded),
            "weight": self.getSampleWeightCol(),
        }

    def _framework_fingerprint_parts(self) -> list[FingerprintPart]:
        """Returns the framework's parts of a fingerprint: model, optimizer, loss."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _hold_checked_run(
        self, job: Any, fingerprint: Fingerprint, shown: ProgressDisplay
    ) -> Iterator[Any]:
        """Holds the lease of a run, checks the run's fingerprint, and reports the epoch at which
        the run continues. Gives the job whose workers stop writing if the lease is lost.

        Args:
            job: the run.
            fingerprint: fingerprint of the fit.
            shown: receives the messages.

        Raises:
            RunInUseError: another fit trains the same run.
            RunDiffersError: the run was started with something else.
        """
        force, epochs = self.getResume() == "force", self.getEpochs()
        with hold_run_lease(job.store.run_path, job.run_id) as lease:
            job = replace(job, store=replace(job.store, lease_name=lease))
            check_or_store_fingerprint(
                job.store, job.run_id, fingerprint, epochs, force=force, tell=shown.show_message
            )
            checkpoint = job.file_paths().get("checkpoint")
            if checkpoint is not None and self._has_checkpoint(job.run_id):
                shown.show_message(
                    f"run {job.run_id} continues from its checkpoint {checkpoint}, up to epoch "
                    f"{epochs}"
                )
            yield job

    def _worker_environment(self) -> dict[str, str]:
        """Returns the variables that the framework needs in the workers, in addition to the
        backend's.
        """
        return {}

    def _store_as_filesystem(self) -> AbstractFilesystemStore:
        return cast("AbstractFilesystemStore", self.getStore())

    def _encoding_spec(self) -> EncodingSpec:
        """Categories, and what replaces missing values."""
        return EncodingSpec.from_arguments(
            self.getCategories(),
            self.getFill(),
            self.getLabelCols(),
            self._validation_split(),
            self.getRagged(),
        )

    def _validation_split(self) -> ValidationSplit | None:
        """Returns the rule that chooses the validation rows, if it needs more than each row
        alone.
        """
        columns = self.getValidationStratify(), self.getValidationGroup(), self.getValidationTime()
        return resolve_validation_split(self.getValidation(), *columns, self.getRandomSeed() or 0)

    def _inherited_params(self, prepared: Prepared) -> dict[str, Any]:
        """Returns the parameters that the fitted model inherits: categories, fill values,
        statistics, and the parameters of predictions.

        Args:
            prepared: the training data.
        """
        given, asked = self.getFill(), {"verbose": self.getVerbose(), **self._set_class_params()}
        if form := self._output_form():
            asked["output_form"] = form
        if self.getTransformationFn() is not None:
            names = (
                "transformation_fn",
                "transformation_edit_fields",
                "transformation_removed_fields",
            )
            known = {name: self.getOrDefault(name) for name in names}
            asked |= {name: value for name, value in known.items() if value is not None}
        if prepared.statistics is not None:
            asked["statistics"] = prepared.statistics
        if prepared.encoding is None:
            return {"fill": given, **asked}
        plain = {} if given is None else dict(given) if isinstance(given, dict) else {"*": given}
        values = {name: value for name, value in plain.items() if value not in LEARNED_FILL_WORDS}
        return {
            "fill": {**values, **prepared.fill} or None,
            "learned": dict(prepared.encoding.learned),
            "categories": prepared.categories,
            "ragged": {name: asdict(one) for name, one in prepared.ragged.items()},
            **asked,
        }

    def _output_form(self) -> str | None:
        """Returns the form of the model's only output: the set form, or else the form that the
        loss expects; `None` if it is unknown.
        """
        return self.getOrDefault("output_form") or (
            self._loss_output_form() if len(self.getLabelCols()) == 1 else None
        )

    def _loss_output_form(self) -> str | None:
        """Returns the output form that the loss expects; `None` for an unknown loss."""
        return None

    def _input_columns(self) -> list[list[str]]:
        """Returns the columns of each of the model's inputs: `feature_cols=["a", ["b", "c"]]`
        makes two inputs.
        """
        return feature_groups(self.getFeatureCols())

    def _column_metadata(self, prepared: Prepared) -> dict[str, dict[str, Any]]:
        """Returns the description of the prepared columns, as the hooks get it."""
        return column_metadata(
            prepared.columns[name] for name in self._column_roles().stored_columns
        )

    def _column_roles(self) -> ColumnRoles:
        return ColumnRoles(
            features=tuple(name for columns in self._input_columns() for name in columns),
            labels=tuple(self.getLabelCols()),
            weight=self.getSampleWeightCol(),
            validation=self.getValidation(),
        )


HorovodEstimator = FarandoleEstimator
"""Horovod's name of `FarandoleEstimator`."""

HorovodModel = FarandoleModel
"""Horovod's name of `FarandoleModel`."""
