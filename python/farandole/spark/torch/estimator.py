# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TorchEstimator`: a PyTorch model fitted data-parallel on a DataFrame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from farandole.data.columns import check_shapes_fit
from farandole.runner.backend import max_processes
from farandole.spark.common.data.reading import (
    create_transformation,
    missing_value_policy,
    training_data_spec,
)
from farandole.spark.common.datamodule import check_data_module
from farandole.spark.common.estimator import FarandoleEstimator
from farandole.spark.common.model.outputs import ModelOutput
from farandole.spark.common.model.signature import input_signature
from farandole.spark.common.runs.fingerprint import FingerprintPart
from farandole.spark.common.runs.trackers import create_trackers
from farandole.spark.torch import callbacks, mapping
from farandole.spark.torch.columns.loss_terms import check_weighable, find_loss_reduction
from farandole.spark.torch.columns.losses import construct_losses, loss_output_form
from farandole.spark.torch.columns.tensors import create_torch_inputs, describe_mapping
from farandole.spark.torch.fingerprint_parts import add_totals, model_parts
from farandole.spark.torch.job import (
    TorchLabel,
    TorchTrainingJob,
    TorchTrainingResult,
    TorchUserObjects,
    TrainingLoopOptions,
)
from farandole.spark.torch.loss_probe import check_loss_forms
from farandole.spark.torch.model import TorchModel
from farandole.spark.torch.params import TorchParams
from farandole.spark.torch.remote import train_rank
from farandole.spark.torch.saving import payload
from farandole.spark.torch.saving.persistence import (
    TorchEstimatorParamsReadable,
    TorchEstimatorParamsReader,  # noqa: F401 - Horovod has it here
    TorchEstimatorParamsWritable,
    TorchEstimatorParamsWriter,  # noqa: F401 - as above
)

if TYPE_CHECKING:
    from farandole.data.prepare import PreparedData as Prepared
    from farandole.runner.backend import Backend
    from farandole.spark.common.runs.fingerprint import Fingerprint
    from farandole.spark.common.show.progress import ProgressDisplay


class TorchEstimator(
    TorchParams, FarandoleEstimator, TorchEstimatorParamsReadable, TorchEstimatorParamsWritable
):
    """An estimator that fits a PyTorch model on a DataFrame, on several processes at once.

    Columns become tensors as follows. Every feature column is one float32 tensor and one argument
    of the model, `(rows, n)` for vectors and arrays of length n, `(rows, 1)` for numbers, unless
    `input_shapes` or `input_dtypes` say otherwise; columns listed together, `feature_cols=[["a",
    "b"], "image"]`, are one tensor, side by side. A label is int64 if its loss takes class indices
    (`CrossEntropyLoss`, `NLLLoss`, ...), or if the loss is your own and the column holds integers,
    else float32. The first rows are tried on the driver and the mapping is printed.

    Training: gradients are averaged over processes. The learning rate is multiplied by their
    number, in new and in resumed runs. Each row of a step has the same weight. Every process takes
    the same number of steps, and each row is seen once per epoch. With `random_seed`, the split,
    the order, and torch on each rank are seeded.

    If the checkpoint of a `run_id` is in the store, the run continues after its last complete
    epoch, up to `epochs` in total. It continues with the data, model, loss, optimizer and
    parameters that it was started with. Otherwise `fit` raises an error that lists the differences.
    Each fit of a tuner or with a map of parameters has its own run.
    """

    def _check_params(self) -> None:
        super()._check_params()
        model, optimizer = self.getModel(), self.getOptimizer()
        if not isinstance(model, torch.nn.Module):
            raise ValueError(f"model must be a torch.nn.Module: {type(model).__name__}")
        mapping.check_optimizer(model, optimizer)
        mapping.check_scheduler(self.getLrScheduler(), optimizer)
        losses = self._label_losses()
        if len(losses) != len(self.getLabelCols()):
            raise ValueError(
                f"loss needs one loss, or one per label column {len(self.getLabelCols())}: "
                f"{len(losses)}"
            )
        if self.getLossConstructors() is None:
            for loss in losses:
                find_loss_reduction(loss, self.getLossReduction())
                if self.getSampleWeightCol() is not None:
                    check_weighable(loss)
        if self.getInputDtypes() is not None and len(self.getInputDtypes()) != len(
            self._input_columns()
        ):
            raise ValueError(
                f"input_dtypes needs one type per input {len(self._input_columns())}: "
                f"{self.getInputDtypes()}"
            )
        callbacks.check_callbacks(self.getCallbacks())
        if not callable(check_data_module(self.getDataModule()) or type):
            raise TypeError(f"data_module must be a class: {self.getDataModule()!r}")

    def _label_losses(self) -> list[Any]:
        """Returns the losses, or their constructors, one per label."""
        loss, constructors = self.getLoss(), self.getLossConstructors()
        if loss is not None and constructors is not None:
            raise ValueError(
                "at most one of parameters loss and loss_constructors may be specified"
            )
        given = constructors if loss is None else loss
        if given is None:
            raise ValueError("loss is required")
        losses = list(given) if isinstance(given, list | tuple) else [given]
        losses = losses * len(self.getLabelCols()) if len(losses) == 1 else losses
        for one in losses:
            if not callable(one):
                raise TypeError(f"loss must be a function of (output, label): {one!r}")
        return losses

    def get_model_class(self) -> type[TorchModel]:
        """Returns the class of the fitted model."""
        return TorchModel

    def _train_model(
        self, backend: Backend, prepared: Prepared, shown: ProgressDisplay
    ) -> TorchModel:
        mapping.check_embeddings(self.getModel(), max_processes(backend))
        fingerprint = add_totals(
            self._fit_fingerprint(prepared),
            self.getOptimizer(),
            backend.num_processes(),
            self.getBatchSize() * self.getBackwardPassesPerStep(),
        )
        job, objects, losses, tensors = self._create_job(prepared, fingerprint)
        outputs = mapping.try_model(job, objects, losses, tensors)
        if self.getDataModule() is None:
            mapping.check_batch_norms(job, objects.model, tensors, backend.num_processes())
        check_loss_forms(
            job,
            losses,
            objects.model,
            objects.transformation,
            processes=max_processes(backend),
            names=self._column_roles().stored_columns,
        )
        shown.show_message(describe_mapping(job.inputs, job.labels, outputs, losses))
        with (
            self._hold_run(job, fingerprint, shown) as job,
            create_trackers(self, job, prepared, fingerprint) as tracker,
        ):
            trained = cast(
                "TorchTrainingResult", self._launch_job(backend, train_rank, job, shown, tracker)[0]
            )
            state = payload.unpack_state(trained.checkpoint)
            objects.model.load_state_dict(state["model"])
            objects.optimizer.load_state_dict(state["optimizer"])
            tracker.log_model(
                objects.model, "pytorch", mapping.model_example(job, tensors, outputs)
            )
        input_dtypes = (
            [one.dtype for one in job.inputs] if prepared.encoding else self.getInputDtypes()
        )
        return TorchModel(
            history=trained.history,
            model=objects.model,
            feature_columns=self.getFeatureCols(),
            input_shapes=self.getInputShapes(),
            input_dtypes=input_dtypes,
            label_columns=self.getLabelCols(),
            optimizer=objects.optimizer,
            run_id=job.run_id,
            loss=self.getLoss(),
            loss_constructors=self.getLossConstructors(),
            signature=input_signature(job.inputs),
            **self._inherited_params(prepared),
            paths=job.file_paths(),
            outputs=[
                ModelOutput(one.column.dtype, bool(one.column.shape), output[1:].numel())
                for one, output in zip(job.labels, outputs, strict=True)
            ],
        )

    def _loss_output_form(self) -> str | None:
        loss = self.getLoss()
        return loss_output_form(loss[0] if isinstance(loss, list | tuple) and loss else loss)

    def _framework_fingerprint_parts(self) -> list[FingerprintPart]:
        losses = self._label_losses()
        what = "loss" if self.getLoss() is not None else "loss_constructors"
        return [
            *model_parts(self.getModel(), self.getOptimizer()),
            FingerprintPart.from_value(what, losses),
        ]

    def _create_job(
        self, prepared: Prepared, fingerprint: Fingerprint
    ) -> tuple[TorchTrainingJob, TorchUserObjects, list[Any], dict[str, torch.Tensor]]:
        """Returns the run's description, an own copy of the user's objects, its losses, and some
        rows.
        """
        transformation = create_transformation(self)
        raw = self._column_roles().stored_columns
        columns, tensors = mapping.transformed_columns(
            prepared, raw, transformation, missing_value_policy(self, prepared)
        )
        inputs, labels = self._input_columns(), self.getLabelCols()
        check_shapes_fit(columns, inputs, self.getInputShapes(), "feature")
        check_shapes_fit(columns, [[name] for name in labels], self.getLabelShapes(), "label")
        mapping.check_weight_column(prepared, self.getSampleWeightCol())
        objects = TorchUserObjects(
            model=self.getModel(),
            optimizer=self.getOptimizer(),
            losses=self._label_losses(),
            constructed=self.getLoss() is None,
            metrics=[
                list(one) if isinstance(one, list | tuple) else [one]
                for one in self.getMetrics() or []
            ],
            compression=self.getGradientCompression(),
            scheduler=self.getLrScheduler(),
            train_minibatch=self.getTrainMinibatchFn(),
            transformation=transformation,
            callbacks=tuple(self.getCallbacks()),
            data_module=check_data_module(self.getDataModule()),
        )
        packed = payload.pack_objects(
            objects,
            losses="loss" if self.getLoss() is not None else "loss_constructors",
            compression="gradient_compression",
            scheduler="lr_scheduler",
            train_minibatch="train_minibatch_fn",
            transformation="transformation_fn",
        )
        mine = payload.unpack_pickle(packed)
        losses = construct_losses(mine, model=mine.model, optimizer=mine.optimizer, rank=0, size=1)
        run_id = self._new_run_id("pytorch", fingerprint)
        shapes = self.getLabelShapes()
        # These may put other labels in place of those of the data.
        replaced = transformation or objects.data_module or self.getFill()
        ranges = {} if replaced else mapping.known_ranges(prepared)
        made = create_torch_inputs(
            inputs, columns, self.getInputShapes(), self.getInputDtypes(), prepared
        )
        job = TorchTrainingJob(
            objects=packed,
            store=self._filesystem_store().to_remote(run_id, prepared.index),
            run_id=run_id,
            data=training_data_spec(
                self, prepared, raw, unseeded=0 if self.getDeterministic() else None
            ),
            loop=TrainingLoopOptions.from_estimator(self),
            inputs=made,
            labels=mapping.find_index_lists(
                [
                    TorchLabel(*one, ranges.get(one[0].name))
                    for one in mapping.map_labels(labels, columns, losses, shapes)
                ],
                losses,
                made,
                mine.model,
                tensors,
            ),
            weight=self.getSampleWeightCol(),
            loss_weights=tuple(self.getLossWeights() or [1.0 / len(labels)] * len(labels)),
            loss_reduction=self.getLossReduction(),
        )
        return job, mine, losses, tensors
