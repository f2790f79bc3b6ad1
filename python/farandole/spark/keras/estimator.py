# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`KerasEstimator`: a Keras model fitted data-parallel on a DataFrame."""

from __future__ import annotations

import math
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import keras

from farandole._keras.callbacks import LearningRateWarmupCallback
from farandole._keras.value_collectives import to_numpy_array
from farandole.data.columns import check_shapes_fit
from farandole.spark.common.data.training_data import (
    EXAMPLE_ROWS,
    columns_from_sample_arrays,
    create_transformation,
    read_example_rows,
)
from farandole.spark.common.datamodule import resolve_data_module_class
from farandole.spark.common.estimator import FarandoleEstimator
from farandole.spark.common.global_batch import (
    learning_rate_factor,
    refuse_row_limit,
    require_row_for_each_process,
)
from farandole.spark.common.runs.tracking import ModelExample
from farandole.spark.common.training_plan import FrameworkTrainingJob
from farandole.spark.keras import model_compilation
from farandole.spark.keras.fingerprint_parts import model_parts, total_learning_rate_digest
from farandole.spark.keras.job import KerasModelShape, KerasTrainingJob, KerasUserObjects
from farandole.spark.keras.keras_inputs import (
    build_model_argument,
    create_keras_inputs,
    describe_output_with_label,
    flat_outputs,
    refuse_nested_columns,
)
from farandole.spark.keras.loss_forms import check_loss_form, find_loss_reduction
from farandole.spark.keras.model import KerasModel
from farandole.spark.keras.params import KerasParams
from farandole.spark.keras.remote import train_rank
from farandole.spark.keras.saving import model_bytes
from farandole.spark.keras.saving.persistence import (
    KerasEstimatorParamsReadable,
    KerasEstimatorParamsReader,  # noqa: F401 - Horovod has it here
    KerasEstimatorParamsWritable,
    KerasEstimatorParamsWriter,  # noqa: F401 - as above
)
from farandole.spark.keras.saving.user_objects import (
    copy_callbacks_without_model,
    pickle_user_objects,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farandole.data.prepare import PreparedData as Prepared
    from farandole.runner.backend import Backend
    from farandole.spark.common.runs.fingerprint import Fingerprint, FingerprintPart
    from farandole.spark.keras.job import KerasTrainingResult
    from farandole.spark.keras.model_compilation import CompiledModelCopy

_TENSORFLOW_LOG_LEVEL = "2"


class KerasEstimator(
    KerasParams, FarandoleEstimator, KerasEstimatorParamsReadable, KerasEstimatorParamsWritable
):
    """An estimator that fits a Keras model on a DataFrame, on several processes at once, by Keras's
    own `fit`.

    The training processes use the Keras backend of the driver: TensorFlow, torch or JAX
    (`KERAS_BACKEND`, here or in `backend_env`). The model is sent as a `.keras` file, together with
    your classes and functions that it uses. If no optimizer, loss or metrics are given here, the
    ones that the model was compiled with are used.

    Columns become arrays as follows. Every feature column is one input of the model, in the shape
    and type that the model states; an input it does not state is `(rows, n)` for vectors and arrays
    of length n, `(rows, 1)` for numbers, float32, or int64 for integers. Columns listed together,
    `feature_cols=[["a", "b"], "image"]`, are one input, side by side. If a label has as many
    elements as its output, the label gets the output's shape; else it keeps its column's shape. The
    driver tries the model on some rows and prints the mapping.

    Training: gradients are averaged over processes. The learning rate, or a schedule, is multiplied
    by their number, in new and in resumed runs. A rate that a callback sets is used unchanged. Each
    row of a step has the same weight. Every process takes the same number of steps, and each row is
    seen once per epoch. Metrics, and the logs that callbacks see, cover the rows of all processes.
    The moving statistics of batch normalisation are averaged at the end of
    every epoch. With `random_seed`, the split, the order, and Keras on each rank are seeded;
    dropout differs between ranks.

    If the checkpoint of a `run_id` is in the store, the run continues after its last complete
    epoch, up to `epochs` in total. It continues with the data, model, loss, optimizer and
    parameters that it was started with. Otherwise `fit` raises an error that lists the differences.
    Each fit of a tuner or with a map of parameters has its own run.
    """

    _flavor = "keras"

    def _check_settings(self) -> None:
        super()._check_settings()
        model = self.getModel()
        if not isinstance(model, keras.Model):
            raise ValueError(f"model must be a keras.Model: {type(model).__name__}")
        if isinstance(self.getFeatureCols(), dict):
            raise ValueError(
                "feature_cols by argument are for PyTorch: list the columns in the order of the "
                "model's inputs, or name the columns like the inputs of a model that takes a dict"
            )
        known = model_compilation.compile_arguments(model)
        optimizer = self.getOptimizer()
        if optimizer is None and getattr(model, "optimizer", None) is None:
            raise ValueError(
                "Optimizer parameter is required for the model to compile, or a compiled model"
            )
        if optimizer is not None and not isinstance(optimizer, str | keras.optimizers.Optimizer):
            raise ValueError(
                f"optimizer must be a Keras optimizer or its name: {type(optimizer).__name__}"
            )
        if (
            self.getLoss() is None
            and known.get("loss") is None
            and not model_compilation.has_custom_train_step(model)
        ):
            raise ValueError(
                "Loss parameter is required for the model to compile, or a compiled model"
            )
        loss = self.getLoss()
        if isinstance(loss, list) and len(loss) != len(self.getLabelCols()):
            raise ValueError(
                f"loss needs one loss, or one per label column {len(self.getLabelCols())}: "
                f"{len(loss)}"
            )
        refuse_nested_columns(self.getRagged())
        refuse_row_limit(self)
        for callback in self.getCallbacks():
            if not isinstance(callback, keras.callbacks.Callback):
                raise TypeError(f"a callback must be a keras.callbacks.Callback: {callback!r}")
            if self.getGlobalBatchSize() is not None and isinstance(
                callback, LearningRateWarmupCallback
            ):
                raise ValueError(
                    f"global_batch_size={self.getGlobalBatchSize()} cannot be combined with "
                    "LearningRateWarmupCallback, which begins with the rate divided by the number "
                    "of processes: use LearningRateScheduleCallback(rate, multiplier, "
                    "staircase=False) with a multiplier of the epoch"
                )

    def _refuse_options_of_local_steps(self, optimizer: Any, least: int, most: int) -> None:
        """Refuses options that need all gradients on each process, in each step.

        Args:
            optimizer: the optimizer of the compiled model.
            least: smallest number of processes of the backend.
            most: largest number of processes of the backend.
        """
        every = self.getSyncEvery() or 1
        if every == 1:
            return
        is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        inner = optimizer.inner_optimizer if is_scaled else optimizer
        passes = self.getBackwardPassesPerStep()
        refused = {
            "mixed_float16, whose loss scale looks at all gradients": is_scaled,
            "use_ema of the optimizer: processes would average different weights": getattr(
                inner, "use_ema", False
            ),
            "gradient_compression": self.getGradientCompression() is not None,
            "global_batch_size": self.getGlobalBatchSize() is not None,
            f"backward_passes_per_step={passes}": passes > 1,
            "an elastic backend": most != least,
        }
        for option, given in refused.items():
            if given:
                raise ValueError(f"sync_every={every} cannot be combined with {option}")

    def _worker_environment(self) -> dict[str, str]:
        quiet = os.environ.get("TF_CPP_MIN_LOG_LEVEL", _TENSORFLOW_LOG_LEVEL)
        return {
            "KERAS_BACKEND": keras.backend.backend(),
            "TF_CPP_MIN_LOG_LEVEL": quiet,
            **self.getBackendEnv(),
        }

    def get_model_class(self) -> type[KerasModel]:
        """Returns the class of the fitted model."""
        return KerasModel

    def get_model_shapes(self) -> tuple[list[list[int]], list[list[int]]]:
        """Shapes of the model's inputs and outputs, with -1 for unknown sizes."""
        model = self.getModel()
        inputs, outputs = (
            [[-1 if size is None else int(size) for size in one.shape] for one in side]
            for side in (model.inputs, model.outputs)
        )
        return inputs, outputs

    def _create_framework_job(self, prepared: Prepared, backend: Backend) -> FrameworkTrainingJob:
        most, processes = backend.max_processes(), backend.num_processes()
        require_row_for_each_process(self, most)
        job, copy, outputs, fingerprint = self._create_job(prepared, processes)
        least = backend.min_processes()
        self._refuse_options_of_local_steps(copy.model.optimizer, least, most)
        if self.getDataModule() is None:
            job = check_loss_form(
                job,
                copy.model,
                create_transformation(self),
                wanted=self.getLossReduction(),
                processes=1 if job.takes_local_steps else most,
            )

        def load_result(trained: KerasTrainingResult) -> Any:
            model_bytes.load_weights_and_optimizer(copy.model, trained.model)
            return copy.model

        def create_model_kwargs(
            model: Any, history: Any, run_id: str, metadata: Mapping[str, Any]
        ) -> dict[str, Any]:
            floatx = keras.config.floatx()
            kwargs = self._get_model_kwargs(model, history, run_id, metadata, floatx)
            if "custom_objects" in kwargs:  # with those that were found without being listed
                listed = kwargs["custom_objects"] or {}
                kwargs["custom_objects"] = {**copy.custom_objects, **listed}
            return kwargs

        return FrameworkTrainingJob(
            job=job,
            fingerprint=fingerprint,
            train=train_rank,
            inputs=job.shape.inputs,
            output_sizes=[math.prod(output) for output in outputs],
            load_result=load_result,
            create_example=partial(self._create_example, job, prepared),
            output_words=list(map(describe_output_with_label, job.labels, outputs)),
            create_model_kwargs=create_model_kwargs,
        )

    def _get_model_kwargs(
        self,
        model: Any,
        history: Mapping[str, Any],
        run_id: str,
        metadata: Mapping[str, Any],
        floatx: str,
    ) -> dict[str, Any]:
        """Returns the arguments of the class that `get_model_class` returns; called when the
        training has ended.

        Args:
            model: the trained model.
            history: losses and metrics, a list per name.
            run_id: name of the run.
            metadata: description of the columns, by name.
            floatx: Keras's type of floats.
        """
        return {
            "history": history,
            "model": model,
            "feature_columns": self.getFeatureCols(),
            "label_columns": self.getLabelCols(),
            "custom_objects": self.getCustomObjects(),
            "run_id": run_id,
            "_metadata": metadata,
            "_floatx": floatx,
        }

    def _create_example(
        self, job: KerasTrainingJob, prepared: Prepared, model: Any
    ) -> ModelExample | None:
        """Returns some rows for MLflow; `None` if MLflow is not used, or if the model has several
        inputs, which MLflow cannot name.
        """
        if not self.getMlflow() or len(job.shape.inputs) != 1 or job.shape.input_keys is not None:
            return None
        names = self._column_roles().stored_columns
        rows = read_example_rows(self, prepared, names, create_transformation(self))
        given = build_model_argument(job.shape, rows, EXAMPLE_ROWS)
        made = flat_outputs(
            model(keras.ops.convert_to_tensor(given), training=False),
            job.shape.output_keys,
            len(job.labels),
        )
        return ModelExample(given, to_numpy_array(made[0]) if len(made) == 1 else None)

    def _loss_output_form(self) -> str | None:
        return model_compilation.loss_output_form(
            self.getLoss() or model_compilation.compile_arguments(self.getModel()).get("loss")
        )

    def _framework_fingerprint_parts(self) -> list[FingerprintPart]:
        return model_parts(self.getModel(), self.getOptimizer(), self.getLoss())

    def _create_job(
        self, prepared: Prepared, processes: int
    ) -> tuple[KerasTrainingJob, CompiledModelCopy, list[tuple[int, ...]], Fingerprint]:
        """Returns the run's description, an own copy of the model, its outputs' rows, and a
        fingerprint.
        """
        refuse_nested_columns(prepared.ragged)
        groups, labels = self._input_columns(), self.getLabelCols()
        raw = self._column_roles().stored_columns
        transformation = create_transformation(self)
        columns = {name: prepared.columns[name] for name in raw}
        if transformation is not None:
            made = read_example_rows(self, prepared, raw, transformation)
            columns = columns_from_sample_arrays(made, raw)
        check_shapes_fit(columns, labels, self.getLabelShapes(), "label")
        model = self.getModel()
        inputs, keys = create_keras_inputs(model, groups, columns)
        shape = KerasModelShape(inputs, keys, None)
        model_compilation.build_by_zero_call(model, shape)
        given = {
            "loss": self.getLoss(),
            "loss_weights": self.getLossWeights(),
            "metrics": self.getMetrics() or None,
        }
        copy = model_compilation.copy_and_compile(
            model,
            self.getOptimizer(),
            {name: value for name, value in given.items() if value is not None},
            self.getCustomObjects(),
            self.getBackwardPassesPerStep(),
        )
        label_columns = [columns[name] for name in labels]
        shape, arrays, outputs = model_compilation.try_model(
            copy, shape, label_columns, self.getLabelShapes(), self.getSampleWeightCol() is not None
        )
        factor = 1 if (self.getSyncEvery() or 1) > 1 else learning_rate_factor(self, processes)
        totals = total_learning_rate_digest(copy.model, self.getOptimizer(), factor)
        fingerprint = self._fit_fingerprint(prepared, processes, totals)  # the model is built
        objects = KerasUserObjects(
            custom_objects=copy.custom_objects,
            loss=copy.loss,
            callbacks=copy_callbacks_without_model(self.getCallbacks()),
            checkpoint_callback=next(
                iter(
                    copy_callbacks_without_model(
                        [one for one in [self.getCheckpointCallback()] if one]
                    )
                ),
                None,
            ),
            compression=self.getGradientCompression(),
            transformation=transformation,
            data_module=resolve_data_module_class(self.getDataModule()),
        )
        job = KerasTrainingJob(
            model=copy.packed,
            objects=pickle_user_objects(objects),
            **self._job_fields(prepared, fingerprint),
            shape=shape,
            labels=arrays,
            epochs=self.getEpochs(),
            random_seed=self.getRandomSeed(),
            use_gpu=self.getUseGpu(),
            mp_start_method=self.getMpStartMethod(),
            floatx=keras.config.floatx(),
            policy=keras.config.dtype_policy().name,
            verbose=self.getVerbose(),
            terminate_on_nan=self.getTerminateOnNan(),
            prefetch=self.getTensorflowDatasetPrefetchBufferSize(),
            passes=self.getBackwardPassesPerStep(),
            sync_every=self.getSyncEvery() or 1,
            loss_reduction=find_loss_reduction(copy.model, self.getLossReduction()),
        )
        return job, copy, outputs, fingerprint
