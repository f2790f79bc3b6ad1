# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checks of the driver before workers start: the mapping from columns to tensors, and whether
model and loss fit it.
"""

from __future__ import annotations

import itertools
import json
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from farandole._native import prepare as native
from farandole.common.counted_noun import format_counted_noun
from farandole.data.columns import normalize_row_shape
from farandole.spark.common.data.training_data import EXAMPLE_ROWS
from farandole.spark.common.runs.tracking import ModelExample
from farandole.spark.torch.columns.losses import label_dtype, shape_label, takes_class_indices
from farandole.spark.torch.columns.tensors import input_tensor
from farandole.spark.torch.model_trial import model_outputs
from farandole.spark.torch.training.batch_evaluator import describe_unknown_class
from farandole.spark.torch.training.scores import ScoreSums
from farandole.torch.loss_sums import ignored_label
from farandole.torch.sync_batch_norm import SyncBatchNorm

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from farandole.data.columns import PreparedColumn
    from farandole.data.prepare import PreparedData as Prepared
    from farandole.spark.torch.columns.model_calls import ModelCall
    from farandole.spark.torch.job import TorchInput, TorchLabel, TorchTrainingJob, TorchUserObjects


def check_optimizer(model: torch.nn.Module, optimizer: Any) -> None:
    """Refuses an optimizer without parameters of the model.

    Args:
        model: the user's.
        optimizer: the user's.

    Raises:
        ValueError: it is no optimizer, or one of other parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer: {optimizer!r}")
    own = {id(parameter) for parameter in model.parameters()}
    strange = sum(
        id(parameter) not in own
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    if strange:
        raise ValueError(f"the optimizer has parameters that the model does not have: {strange}")


def refuse_max_norm_embeddings(model: torch.nn.Module, processes: int) -> None:
    """Refuses tables that every process would change by its own rows.

    Args:
        model: the user's.
        processes: number of processes of the job.

    Raises:
        ValueError: an embedding has a `max_norm`.
    """
    if processes == 1:
        return
    for name, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag):
            continue
        if layer.max_norm is not None:
            raise ValueError(
                f"the embedding {name!r} has max_norm={layer.max_norm:g}, which changes the table "
                "in every forward pass: each process would change other rows, and processes "
                "would train different tables. Use one process, or leave max_norm out"
            )
        if layer.scale_grad_by_freq:
            warnings.warn(
                f"the embedding {name!r} has scale_grad_by_freq=True: each of the {processes} "
                "processes counts the indices of its own batch, so the result depends on the "
                "number of processes",
                stacklevel=2,
            )


def check_batch_norms(
    job: TorchTrainingJob, model: torch.nn.Module, rows: dict[str, torch.Tensor], processes: int
) -> None:
    """Refuses batch norms that processes do not synchronize, or that get one row in a step.

    Args:
        job: the run.
        model: the user's.
        rows: some rows.
        processes: number of processes of the job.

    Raises:
        ValueError: a layer is torch's `SyncBatchNorm`, or would get one value per channel.
    """
    norms: dict[torch.nn.Module, str] = {
        layer: name
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - the class that all batch norms have in common
    }
    for layer, name in norms.items():
        if isinstance(layer, torch.nn.SyncBatchNorm) and processes > 1:
            raise ValueError(
                f"the layer {name!r} is torch's SyncBatchNorm, which synchronizes nothing here: it "
                "needs torch.distributed. Use "
                "farandole.torch.SyncBatchNorm.convert_sync_batchnorm(model)"
            )
    are_synchronized = [isinstance(layer, SyncBatchNorm) for layer in norms]
    step_rows = job.data.step_rows or job.data.batch_size * processes
    batch_rows = min(job.data.batch_size, step_rows // processes)
    limit = "batch_size is 1" if job.data.batch_size == 1 else "a process has one row of a step"
    is_small = batch_rows == 1 and not all(are_synchronized)
    ends_small = any(are_synchronized) and job.data.train_rows % step_rows == 1
    if not is_small and not ends_small:
        return
    few = _single_value_batch_norms(job, model, rows, norms)
    for layer in few:
        if is_small and not isinstance(layer, SyncBatchNorm):
            raise ValueError(
                f"the batch norm layer {norms[layer]!r} needs two rows in a batch, and {limit}: "
                "use a larger batch_size, or farandole.torch.SyncBatchNorm with several processes"
            )
        if ends_small and isinstance(layer, SyncBatchNorm):
            raise ValueError(
                f"the batch norm layer {norms[layer]!r} needs two rows in a step, and the last "
                f"step of an epoch has one: there are {job.data.train_rows} rows, and a step of "
                f"{format_counted_noun(processes, 'process')} has {step_rows}. Use another "
                "batch_size, or leave a row out"
            )


def _single_value_batch_norms(
    job: TorchTrainingJob,
    model: torch.nn.Module,
    rows: dict[str, torch.Tensor],
    norms: Iterable[torch.nn.Module],
) -> list[torch.nn.Module]:
    """Returns the batch norms that get one value per channel from one row."""
    few: list[torch.nn.Module] = []

    def record_single_value_norm(layer: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if given[0].numel() == given[0].shape[1]:
            few.append(layer)

    hooks = [layer.register_forward_pre_hook(record_single_value_norm) for layer in norms]
    try:
        model_outputs(job.call, job.inputs, model, rows, 1)
    finally:
        for hook in hooks:
            hook.remove()
    return few


def check_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Refuses a scheduler of another optimizer, which would change nothing.

    Args:
        scheduler: the user's scheduler, if there is one.
        optimizer: the user's optimizer.

    Raises:
        ValueError: the scheduler belongs to another optimizer.
    """
    if (
        not isinstance(scheduler, str)
        and getattr(scheduler, "optimizer", optimizer) is not optimizer
    ):
        raise ValueError("lr_scheduler was created with another optimizer")


def map_labels(
    names: Sequence[str],
    columns: dict[str, PreparedColumn],
    losses: Sequence[Any],
    shapes: Sequence[Sequence[int]] | None,
) -> list[tuple[PreparedColumn, str, tuple[int, ...] | None, bool]]:
    """Returns the mapping of each label column: column, type, shape, whether it contains indices of
    classes.

    Args:
        names: names of the columns.
        columns: by name.
        losses: one per label.
        shapes: as the user set them.
    """
    found = []
    for index, (name, loss) in enumerate(zip(names, losses, strict=True)):
        column = columns[name]
        shape = (
            None
            if shapes is None
            else (-1, *normalize_row_shape(shapes[index], column.element_count))
        )
        dtype = label_dtype(loss, column)
        found.append((column, dtype, shape, dtype == "int64" and takes_class_indices(loss)))
    return found


def mark_class_index_lists(
    call: ModelCall,
    labels: Sequence[TorchLabel],
    losses: Sequence[Any],
    inputs: Sequence[TorchInput],
    model: torch.nn.Module,
    rows: dict[str, torch.Tensor],
) -> tuple[TorchLabel, ...]:
    """Returns the labels, among them lists of integers as the indices of classes that they are.

    A loss that takes class indices also takes probabilities of classes. A list is one of
    probabilities if it has as many elements as the output.

    Args:
        call: the call of the model.
        labels: one per output.
        losses: one per label.
        inputs: arguments of the model.
        model: the user's.
        rows: some rows.

    Raises:
        ValueError: the model does not take the rows.
    """
    candidates = [
        takes_class_indices(loss)
        and not spec.indexes
        and spec.column.dtype.startswith(("int", "uint"))
        for spec, loss in zip(labels, losses, strict=True)
    ]
    if not any(candidates):
        return tuple(labels)
    outputs = model_outputs(call, inputs, model, rows)
    return tuple(
        replace(spec, dtype="int64", indexes=True)
        if is_candidate and output[0].numel() != spec.column.element_count
        else spec
        for spec, output, is_candidate in zip(labels, outputs, candidates, strict=True)
    )


def column_ranges(url: str) -> dict[str, tuple[float, float]]:
    """Returns the smallest and the largest value of each column that a preparation took note of.

    Args:
        url: URL of the data set.
    """
    manifest = native.read_manifest(url)
    columns = [] if manifest is None else json.loads(manifest)["columns"]
    return {
        column["name"]: (column["min"], column["max"])
        for column in columns
        if column.get("min") is not None and column.get("max") is not None
    }


def combined_column_ranges(prepared: Prepared) -> dict[str, tuple[float, float]]:
    """Returns the smallest and the largest value of each column, over training and validation rows.
    Columns for which one of them is unknown are left out.

    Args:
        prepared: the data.
    """
    found = column_ranges(prepared.train_url)
    if prepared.val_url is None:
        return found
    held = column_ranges(prepared.val_url)
    return {
        name: (min(low, held[name][0]), max(high, held[name][1]))
        for name, (low, high) in found.items()
        if name in held
    }


def refuse_useless_weights(prepared: Prepared, weight: str | None) -> None:
    """Refuses weights that leave nothing to learn from.

    Args:
        prepared: the data.
        weight: column of weights.

    Raises:
        ValueError: all weights are 0, or one is negative.
    """
    known = column_ranges(prepared.train_url).get(weight or "")
    if known is None:
        return
    low, high = known
    if high <= 0:
        raise ValueError(
            f"the weights in column {weight!r} are all 0: nothing can be learned from such rows"
        )
    if low < 0:
        raise ValueError(f"the weights in column {weight!r} must not be negative: {low:g}")


def try_model(
    job: TorchTrainingJob,
    objects: TorchUserObjects,
    losses: Sequence[Any],
    tensors: dict[str, torch.Tensor],
) -> list[torch.Tensor]:
    """Calls the model and its losses once, on some rows, so that misfits show before workers start.

    Args:
        job: the run.
        objects: copies of the user's.
        losses: one per label.
        tensors: some rows.

    Returns:
        The model's outputs.

    Raises:
        ValueError: columns do not fit; the message has names and shapes.
    """
    ScoreSums(objects.metrics, job.labels)  # refuses metrics that do not go with the labels
    outputs = model_outputs(job.call, job.inputs, objects.model, tensors)
    for torch_label, loss, found in zip(job.labels, losses, outputs, strict=True):
        _check_largest_class(job, torch_label, loss, found)
        if job.own_loss is None:
            _try_loss(torch_label, loss, found)
    return outputs


def model_example(
    job: TorchTrainingJob, tensors: dict[str, torch.Tensor], outputs: Sequence[torch.Tensor]
) -> ModelExample | None:
    """Returns the rows with which the model was tried; `None` if the model has several inputs, or
    inputs or outputs with names, which MLflow cannot use.

    Args:
        job: the run.
        tensors: the rows.
        outputs: outputs of the model for these rows.
    """
    if len(job.inputs) != 1 or job.inputs[0].ragged or job.inputs[0].argument or job.call.fields:
        return None
    given = input_tensor(tensors, job.inputs[0], EXAMPLE_ROWS, torch.device("cpu"))
    return ModelExample(_to_numpy(given), _to_numpy(outputs[0]) if len(outputs) == 1 else None)


def _to_numpy(tensor: torch.Tensor) -> Any:
    """Returns a tensor as NumPy has it, which knows no bfloat16."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().cpu().numpy()


def _check_largest_class(
    job: TorchTrainingJob, torch_label: TorchLabel, loss: Any, output: torch.Tensor
) -> None:
    known = column_ranges(job.data.train_url).get(torch_label.column.name)
    if (
        not torch_label.indexes
        or known is None
        or output.dim() < 2  # noqa: PLR2004 - (rows, classes)
        or torch_label.column.name not in job.data.columns
    ):
        return
    # The largest or one below 0 may be the loss's `ignore_index`. Then each batch is checked.
    if known[1] >= output.shape[1] and known[1] != ignored_label(loss):
        raise ValueError(describe_unknown_class(torch_label.column.name, known[1], output.shape[1]))


def _try_loss(torch_label: TorchLabel, loss: Any, found: torch.Tensor) -> None:
    # As many rows as the output has nowhere else: (2, 2) and (2,) would broadcast where (8, 2) and
    # (8,) do not.
    rows = next(rows for rows in itertools.count(2) if rows not in found.shape[1:])
    output = found[:1].expand(rows, *found.shape[1:])
    zeros = torch.zeros(
        rows,
        *torch_label.column.shape,
        dtype=torch.int64 if torch_label.dtype == "int64" else torch.float32,
    )
    label = shape_label(zeros, output, torch_label.shape)
    try:
        lost = loss(output, label)
    except Exception as error:
        problem = f"output {tuple(output.shape)} and {torch_label.dtype} label {tuple(label.shape)}"
        raise ValueError(
            f"the loss of column {torch_label.column.name!r} does not take {problem}: {error}"
        ) from error
    if not isinstance(lost, torch.Tensor) or lost.numel() != 1:
        problem = (
            f"a tensor of shape {tuple(lost.shape)}"
            if isinstance(lost, torch.Tensor)
            else repr(lost)
        )
        raise ValueError(
            f"the loss of column {torch_label.column.name!r} must return one number, a mean over "
            f"rows: {problem}"
        )
