# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`KerasEstimator`: a Keras model fitted data-parallel on a DataFrame."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import keras
from pyspark.ml.util import MLReadable, MLWritable

from farandole._keras.values import as_array
from farandole.data.columns import Column, check_sizes
from farandole.spark.common.data.reading import data_of, missing_of, transformation_of
from farandole.spark.common.data.source import sample
from farandole.spark.common.datamodule import check_data_module
from farandole.spark.common.estimator import FarandoleEstimator
from farandole.spark.common.model.outputs import Output
from farandole.spark.common.model.signature import signature
from farandole.spark.common.runs.trackers import trackers_of
from farandole.spark.common.runs.tracking import Example
from farandole.spark.keras import compiled
from farandole.spark.keras.arrays import (
    check_padded,
    flat_outputs,
    inputs_of,
    model_inputs,
    told_mapping,
)
from farandole.spark.keras.job import Job, Objects, Shape
from farandole.spark.keras.model import KerasModel
from farandole.spark.keras.params import KerasParams
from farandole.spark.keras.parts import parts_of
from farandole.spark.keras.remote import train
from farandole.spark.keras.saving import payload
from farandole.spark.keras.saving.objects import dumps, travelling
from farandole.spark.keras.saving.persistence import (
    KerasEstimatorParamsReader,
    KerasEstimatorParamsWriter,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farandole.data.prepare import PreparedData as Prepared
    from farandole.runner.backend import Backend
    from farandole.spark.common.runs.fingerprint import Fingerprint, Part
    from farandole.spark.common.show.progress import Progress
    from farandole.spark.keras.compiled import Compiled
    from farandole.spark.keras.job import Trained

_QUIET_TENSORFLOW = "2"
_EXAMPLES = 2
"""Rows of an example."""


class KerasEstimatorParamsWritable(MLWritable):
    """Saves an estimator by Spark ML's `write()`."""

    def write(self) -> KerasEstimatorParamsWriter:
        """Returns the writer; `write().overwrite().save(path)` replaces the old directory, see
        `places`.
        """
        return KerasEstimatorParamsWriter(cast("Any", self))


class KerasEstimatorParamsReadable(MLReadable["KerasEstimator"]):
    """Loads an estimator by Spark ML's `read()`."""

    @classmethod
    def read(cls) -> KerasEstimatorParamsReader:
        """Returns the reader; loading runs the code that was pickled with the estimator."""
        return KerasEstimatorParamsReader(cast("Any", cls))


class KerasEstimator(
    KerasParams, FarandoleEstimator, KerasEstimatorParamsReadable, KerasEstimatorParamsWritable
):
    """Fits a Keras model on a DataFrame, on several processes at once, by Keras's own `fit`.

    The training processes use the Keras backend of the driver: TensorFlow, torch or JAX
    (`KERAS_BACKEND`, here or in `backend_env`). The model travels as a `.keras` file; classes and
    functions of yours that it is made of travel along. An optimizer, a loss or metrics that are not
    given here are those with which the model was compiled.

    Columns become arrays as follows. Every feature column is one input of the model, in the shape
    and type that the model states; an input it does not state is `(rows, n)` for vectors and arrays
    of length n, `(rows, 1)` for numbers, float32, or int64 for integers. Columns listed together,
    `feature_cols=[["a", "b"], "image"]`, are one input, side by side. A label has the shape of its
    output where it has as many elements, else that of its column. The model is tried on the driver
    and the mapping is printed.

    Training: gradients are averaged over processes. The learning rate, or a schedule, is multiplied
    by their number, in new and in resumed runs. A rate that a callback sets is used unchanged. Each
    row of a step has the same weight. Every process takes the same number of steps, and each row is
    seen once per epoch. Metrics are those of all rows, whichever process held them, and so are the
    logs that callbacks see. The moving statistics of batch normalisation are averaged at the end of
    every epoch. With `random_seed`, the split, the order, and Keras on each rank are seeded;
    dropout differs between ranks.

    If the checkpoint of a `run_id` is in the store, the run continues after its last complete
    epoch, up to `epochs` in total. It continues with the data, model, loss, optimizer and
    parameters that it was started with. Otherwise `fit` raises an error that lists the differences.
    Each fit of a tuner or with a map of parameters has its own run.
    """

    def _check(self) -> None:
        super()._check()
        model = self.getModel()
        if not isinstance(model, keras.Model):
            raise ValueError(f"model must be a keras.Model: {type(model).__name__}")
        known = compiled.compile_arguments(model)
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
            and not compiled.has_own_step(model)
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
        check_padded(self.getRagged())
        for callback in self.getCallbacks():
            if not isinstance(callback, keras.callbacks.Callback):
                raise TypeError(f"a callback must be a keras.callbacks.Callback: {callback!r}")

    def _environment(self) -> dict[str, str]:
        quiet = os.environ.get("TF_CPP_MIN_LOG_LEVEL", _QUIET_TENSORFLOW)
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

    def _train(self, backend: Backend, prepared: Prepared, shown: Progress) -> KerasModel:
        job, copy, outputs, fingerprint = self._job(prepared)
        shown.message(told_mapping(job.shape, job.labels, outputs))
        with (
            self._held(job, fingerprint, shown),
            trackers_of(self, job, prepared, fingerprint) as tracker,
        ):
            trained = cast("Trained", self._launch(backend, train, job, shown, tracker)[0])
            payload.load_state(copy.model, trained.model)
            tracker.model(copy.model, "keras", self._example(job, prepared, copy.model))
        return KerasModel(
            history=trained.history,
            model=copy.model,
            feature_columns=self.getFeatureCols(),
            label_columns=self.getLabelCols(),
            custom_objects=copy.custom_objects,
            run_id=job.run_id,
            signature=signature(job.shape.inputs),
            **self._carried(prepared),
            paths=job.paths(),
            outputs=[
                Output(one.column.dtype, bool(one.column.shape), _size(output))
                for one, output in zip(job.labels, outputs, strict=True)
            ],
        )

    def _example(self, job: Job, prepared: Prepared, model: Any) -> Example | None:
        """Some rows for MLflow; `None` where it is not asked for, or for several inputs, which
        it cannot name.
        """
        if not self.getMlflow() or len(job.shape.inputs) != 1 or job.shape.input_keys is not None:
            return None
        missing, transformation = missing_of(self, prepared), transformation_of(self)
        rows = sample(
            prepared.train_url,
            self._roles().kept,
            _EXAMPLES,
            transformation,
            missing,
            prepared.ragged,
        )
        given = model_inputs(job.shape, rows, _EXAMPLES)
        made = flat_outputs(
            model(keras.ops.convert_to_tensor(given), training=False),
            job.shape.output_keys,
            len(job.labels),
        )
        return Example(given, as_array(made[0]) if len(made) == 1 else None)

    def _form_of_loss(self) -> str | None:
        return compiled.form_of(
            self.getLoss() or compiled.compile_arguments(self.getModel()).get("loss")
        )

    def _own_parts(self) -> list[Part]:
        return parts_of(self.getModel(), self.getOptimizer(), self.getLoss())

    def _job(self, prepared: Prepared) -> tuple[Job, Compiled, list[tuple[int, ...]], Fingerprint]:
        """Returns the run's description, an own copy of the model, its outputs' rows, and a
        fingerprint.
        """
        check_padded(prepared.ragged)
        groups, labels = self._inputs(), self.getLabelCols()
        raw = self._roles().kept
        transformation = transformation_of(self)
        columns = {name: prepared.columns[name] for name in raw}
        if transformation is not None:
            made = sample(
                prepared.train_url,
                raw,
                2,
                transformation,
                missing_of(self, prepared),
                prepared.ragged,
            )
            columns = {
                name: Column(name, str(one.dtype), tuple(one.shape[1:]))
                for name, one in made.items()
            }
            missing = [name for name in raw if name not in columns]
            if missing:
                raise ValueError(
                    f"transformation_fn returns no columns with these names: {', '.join(missing)}"
                )
        check_sizes(columns, labels, self.getLabelShapes(), "label")
        model = self.getModel()
        inputs, keys = inputs_of(model, groups, columns)
        shape = Shape(inputs, keys, None)
        compiled.build(model, shape)
        given = {
            "loss": self.getLoss(),
            "loss_weights": self.getLossWeights(),
            "metrics": self.getMetrics() or None,
        }
        copy = compiled.compiled_copy(
            model,
            self.getOptimizer(),
            {name: value for name, value in given.items() if value is not None},
            self.getCustomObjects(),
            self.getBackwardPassesPerStep(),
        )
        weight = self.getSampleWeightCol()
        label_columns = [columns[name] for name in labels]
        shape, arrays, outputs = compiled.try_out(
            copy, shape, label_columns, self.getLabelShapes(), weight is not None
        )
        fingerprint = self._fingerprint(prepared)  # of a model that is built by now
        run_id = self._new_run("keras", fingerprint)
        objects = Objects(
            custom_objects=copy.custom_objects,
            loss=copy.loss,
            callbacks=travelling(self.getCallbacks()),
            checkpoint_callback=next(
                iter(travelling([one for one in [self.getCheckpointCallback()] if one])), None
            ),
            compression=self.getGradientCompression(),
            transformation=transformation,
            data_module=check_data_module(self.getDataModule()),
        )
        job = Job(
            model=copy.packed,
            objects=dumps(objects),
            store=self._store().to_remote(run_id, prepared.index),
            run_id=run_id,
            data=data_of(self, prepared, raw),
            shape=shape,
            labels=arrays,
            weight=weight,
            epochs=self.getEpochs(),
            random_seed=self.getRandomSeed(),
            use_gpu=self.getUseGpu(),
            mp_start_method=self.getMpStartMethod(),
            floatx=keras.config.floatx(),
            policy=keras.config.dtype_policy().name,
            verbose=self.getVerbose(),
            terminate_on_nan=self.getTerminateOnNan(),
            prefetch=self.getTensorflowDatasetPrefetchBufferSize(),
        )
        return job, copy, outputs, fingerprint


def _size(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
