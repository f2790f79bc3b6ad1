# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TorchEstimator`: a PyTorch model fitted data-parallel on a DataFrame."""

# ruff: noqa: ARG002, N815 - keyword_only reads the arguments; Spark ML's names

from __future__ import annotations

import itertools
import secrets
import time
from typing import TYPE_CHECKING, Any, cast

import torch
from pyspark import keyword_only

from farandole.spark.common import check
from farandole.spark.common.columns import check_sizes, row_shape
from farandole.spark.common.estimator import FarandoleEstimator
from farandole.spark.common.params import accessors, declare
from farandole.spark.torch import payload
from farandole.spark.torch.job import Job, Label, Objects, Trained
from farandole.spark.torch.losses import label_dtype, shaped, weighted
from farandole.spark.torch.model import Output, TorchModel
from farandole.spark.torch.remote import train
from farandole.spark.torch.scores import Scores
from farandole.spark.torch.tensors import inputs_of, outputs_of, told_misfit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farandole.spark.common.backend import Backend
    from farandole.spark.common.prepare import Prepared
    from farandole.spark.common.progress import Progress
    from farandole.spark.common.store import Store


class TorchEstimator(FarandoleEstimator):
    """Fits a PyTorch model on a DataFrame, on several processes at once.

    How columns become tensors: every feature column is one float32 tensor and one argument of the model, `(rows, n)`
    for vectors and arrays of length n, `(rows, 1)` for numbers, unless `input_shapes` says otherwise. A label is int64
    where its loss takes class indices (`CrossEntropyLoss`, `NLLLoss`, ...) or where the loss is your own and the
    column holds integers, else float32.

    How it learns: gradients are averaged over processes and the learning rate is multiplied by their number, on a
    fresh and on a resumed run alike. Each row of a step counts the same. Every process takes the same number of steps;
    each row is seen once per epoch. With `random_seed`, the split, the order, and torch on each rank are seeded.

    A `run_id` whose checkpoint is in the store is resumed: the run goes on after its last complete epoch, up to
    `epochs` of them all together.

    Args:
        num_proc: Training processes; default: Spark's default parallelism.
        model: A `torch.nn.Module`.
        backend: Where processes run, instead of `num_proc`: `SparkBackend`, `LocalBackend`.
        store: Where prepared data, checkpoints and logs live: a `Store`, or a path.
        optimizer: A torch optimizer over the model's parameters.
        loss: A loss of (output, label), or a list of one per label column.
        loss_weights: Weight of each label's loss; default: equal weights.
        metrics: Functions of (output, label), averaged over rows; a list inside the list gives one per label.
        feature_cols: Columns for the model.
        label_cols: Columns to compare the outputs with.
        validation: Share of rows held out, or a column: true or positive rows are held out.
        sample_weight_col: Column with each row's weight in the loss.
        batch_size: Rows per step and process; default 32.
        val_batch_size: The same for validation; default: `batch_size`.
        epochs: Times the rows are seen; default 1.
        verbose: 0 silent, 1 progress, 2 also what workers print; default 1.
        random_seed: Seed of everything.
        shuffle: Whether each epoch has its own order; default True.
        partitions_per_process: Most files of prepared data per process; default 10.
        run_id: Name of the run; default `pytorch_<time>`.
        train_steps_per_epoch: Fewer training steps per epoch.
        validation_steps_per_epoch: Fewer validation steps per epoch.
        input_shapes: Shape of each feature's tensor, -1 for its rows.
        label_shapes: Shape of each label's tensor, -1 for its rows.
        use_gpu: Train on GPUs where every process sees one; default True.
        backward_passes_per_step: Batches whose gradients make one step; default 1.
        gradient_compression: Such as `farandole.torch.Compression.fp16`.
    """

    input_shapes = declare("input_shapes", "shape of each feature's tensor", check.shapes("input_shapes"))

    setInputShapes, getInputShapes = accessors("input_shapes")

    @keyword_only
    def __init__(
        self,
        *,
        num_proc: int | None = None,
        model: torch.nn.Module | None = None,
        backend: Backend | None = None,
        store: Store | str | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Callable[..., torch.Tensor] | Sequence[Callable[..., torch.Tensor]] | None = None,
        loss_weights: Sequence[float] | None = None,
        metrics: Sequence[Any] | None = None,
        feature_cols: Sequence[str] | None = None,
        label_cols: Sequence[str] | None = None,
        validation: float | str | None = None,
        sample_weight_col: str | None = None,
        batch_size: int | None = None,
        val_batch_size: int | None = None,
        epochs: int | None = None,
        verbose: int | None = None,
        random_seed: int | None = None,
        shuffle: bool | None = None,
        partitions_per_process: int | None = None,
        run_id: str | None = None,
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        label_shapes: Sequence[Sequence[int]] | None = None,
        use_gpu: bool | None = None,
        backward_passes_per_step: int | None = None,
        gradient_compression: Any = None,
    ) -> None:
        super().__init__()
        self._setDefault(input_shapes=None)
        # Only what was passed is set: a default in the signature must not win over a param map.
        self.setParams(**cast("dict[str, Any]", self._input_kwargs))  # pyright: ignore[reportAttributeAccessIssue]

    def _check(self) -> None:
        super()._check()
        model, optimizer = self.getModel(), self.getOptimizer()
        if not isinstance(model, torch.nn.Module):
            raise ValueError(f"model must be a torch.nn.Module: {type(model).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"optimizer must be a torch.optim.Optimizer: {optimizer!r}")
        own = {id(parameter) for parameter in model.parameters()}
        strange = sum(id(one) not in own for group in optimizer.param_groups for one in group["params"])
        if strange:
            raise ValueError(f"the optimizer holds parameters that are not the model's: {strange}")
        losses = self._losses()
        if len(losses) != len(self.getLabelCols()):
            raise ValueError(f"loss needs one loss, or one per label column {len(self.getLabelCols())}: {len(losses)}")
        if self.getSampleWeightCol() is not None:
            for loss in losses:
                weighted(loss)

    def _losses(self) -> list[Any]:
        loss = self.getLoss()
        if loss is None:
            raise ValueError("loss is required")
        losses = list(loss) if isinstance(loss, list | tuple) else [loss] * len(self.getLabelCols())
        for one in losses:
            if not callable(one):
                raise TypeError(f"loss must be a function of (output, label): {one!r}")
        return losses

    def _train(self, backend: Backend, prepared: Prepared, shown: Progress) -> TorchModel:
        job, objects = self._job(prepared)
        outputs = _try_on_zeros(job, objects)
        checkpoint = job.paths().get("checkpoint")
        if checkpoint is not None and self._store().exists(checkpoint):
            shown.message(f"run {job.run_id} goes on from its checkpoint {checkpoint}, up to epoch {job.epochs}")
        results = backend.run(train, args=(job,), on_progress=lambda _rank, record: shown.report(record))
        trained = cast("Trained", results[0])
        state = payload.unpack_state(trained.checkpoint)
        objects.model.load_state_dict(state["model"])
        objects.optimizer.load_state_dict(state["optimizer"])
        return TorchModel(
            history=trained.history,
            model=objects.model,
            feature_columns=self.getFeatureCols(),
            input_shapes=self.getInputShapes(),
            label_columns=self.getLabelCols(),
            optimizer=objects.optimizer,
            run_id=job.run_id,
            loss=self.getLoss(),
            paths=job.paths(),
            outputs=[
                Output(one.column.dtype, bool(one.column.shape), output[1:].numel())
                for one, output in zip(job.labels, outputs, strict=True)
            ],
        )

    def _job(self, prepared: Prepared) -> tuple[Job, Objects]:
        """The run's description, and a copy of the user's objects that nobody else holds."""
        features, labels, shapes = self.getFeatureCols(), self.getLabelCols(), self.getLabelShapes()
        check_sizes(prepared.columns, features, self.getInputShapes(), "feature")
        check_sizes(prepared.columns, labels, shapes, "label")
        losses = self._losses()
        objects = Objects(
            model=self.getModel(),
            optimizer=self.getOptimizer(),
            losses=losses,
            metrics=[list(one) if isinstance(one, list | tuple) else [one] for one in self.getMetrics() or []],
            compression=self.getGradientCompression(),
        )
        packed = payload.pack(objects)
        run_id = self.getRunId() or f"pytorch_{int(time.time())}_{secrets.token_hex(2)}"
        seed = self.getRandomSeed()
        label_columns = [prepared.columns[name] for name in labels]
        job = Job(
            objects=packed,
            store=self._store().to_remote(run_id, prepared.index),
            run_id=run_id,
            train_url=prepared.train_url,
            val_url=prepared.val_url,
            inputs=inputs_of([prepared.columns[name] for name in features], self.getInputShapes()),
            labels=tuple(
                Label(
                    column,
                    label_dtype(loss, column),
                    None if shapes is None else (-1, *row_shape(shapes[index], column.size)),
                )
                for index, (loss, column) in enumerate(zip(losses, label_columns, strict=True))
            ),
            weight=self.getSampleWeightCol(),
            loss_weights=tuple(self.getLossWeights() or [1.0 / len(labels)] * len(labels)),
            batch_size=self.getBatchSize(),
            val_batch_size=self.getValBatchSize() or self.getBatchSize(),
            epochs=self.getEpochs(),
            order_seed=secrets.randbelow(2**31) if seed is None else seed,
            random_seed=seed,
            shuffle=self.getShuffle(),
            train_steps=self.getTrainStepsPerEpoch(),
            val_steps=self.getValidationStepsPerEpoch(),
            backward_passes=self.getBackwardPassesPerStep(),
            use_gpu=self.getUseGpu(),
        )
        return job, payload.unpack(packed)


def _try_on_zeros(job: Job, objects: Objects) -> list[torch.Tensor]:
    """Calls the model and its losses once, on two rows of zeros, so that misfits show before workers start."""
    Scores(objects.metrics, job)  # refuses metrics that do not go with the labels
    inputs = [torch.zeros(2, *one.shape[1:]) for one in job.inputs]
    training = objects.model.training
    objects.model.eval()
    try:
        with torch.no_grad():
            value = objects.model(*inputs)
    except Exception as error:
        raise ValueError(told_misfit([one.column.name for one in job.inputs], inputs, error)) from error
    finally:
        objects.model.train(training)
    outputs = outputs_of(value, len(job.labels))
    for one, output in zip(job.labels, outputs, strict=True):
        if output.shape[:1] != (2,):
            raise ValueError(
                f"the model must return one row per row of its input: for 2 rows, its output for column "
                f"{one.column.name!r} has shape {tuple(output.shape)}"
            )
    for one, loss, found in zip(job.labels, objects.losses, outputs, strict=True):
        # As many rows as the output has nowhere else: (2, 2) and (2,) would broadcast where (8, 2) and (8,) do not.
        rows = next(rows for rows in itertools.count(2) if rows not in found.shape[1:])
        output = found[:1].expand(rows, *found.shape[1:])
        zeros = torch.zeros(rows, *one.column.shape, dtype=torch.int64 if one.dtype == "int64" else torch.float32)
        label = shaped(zeros, output, one.shape)
        try:
            lost = loss(output, label)
        except Exception as error:
            told = f"output {tuple(output.shape)} and {one.dtype} label {tuple(label.shape)}"
            raise ValueError(f"the loss of column {one.column.name!r} does not take {told}: {error}") from error
        if not isinstance(lost, torch.Tensor) or lost.numel() != 1:
            told = f"a tensor of shape {tuple(lost.shape)}" if isinstance(lost, torch.Tensor) else repr(lost)
            raise ValueError(f"the loss of column {one.column.name!r} must return one number, a mean over rows: {told}")
    return outputs
