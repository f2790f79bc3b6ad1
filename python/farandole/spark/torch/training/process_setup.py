# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The setup of a training process before its loop: seeds, threads, device, source of batches."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from typing import TYPE_CHECKING, Any

import torch

import farandole.torch as hvd
from farandole.common.resource_limits import usable_cores
from farandole.spark import task
from farandole.spark.torch.training import deferred_compiler
from farandole.spark.torch.training.batch_norm import MIN_BATCH_NORM_ROWS
from farandole.spark.torch.training.tensor_source import DataModuleSource, TensorSource

if TYPE_CHECKING:
    from farandole.spark.common.data.training_data import TrainingDataSpec
    from farandole.spark.torch.job import TorchTrainingJob, TrainingLoopOptions

BatchedSource = TensorSource | DataModuleSource


def prepare_process(loop: TrainingLoopOptions, rank: int) -> None:
    """Seeds and configures this process.

    Args:
        loop: how the training loop goes.
        rank: of this process.
    """
    if not loop.compile:
        deferred_compiler.defer_compiler()
    if loop.mp_start_method is not None:
        multiprocessing.set_start_method(loop.mp_start_method, force=True)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // hvd.local_size()))
    if loop.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    seed = loop.random_seed if loop.random_seed is not None else (0 if loop.deterministic else None)
    if seed is not None:
        torch.manual_seed(seed + rank)


def choose_rank_device(wanted: bool) -> torch.device:
    """Returns the device of this rank.

    Args:
        wanted: whether GPUs may be used.
    """
    here = wanted and torch.cuda.is_available()
    choice = task.choose_own_gpu(
        torch.cuda.device_count() if here else 0, hvd.local_rank(), hvd.local_size()
    )
    return torch.device("cpu") if choice is None else torch.device("cuda", choice.index)


def move_loss_to_device(loss: Any, device: torch.device) -> Any:
    """Returns a loss with its own tensors where the outputs are."""
    return loss.to(device) if isinstance(loss, torch.nn.Module) else loss


def create_sources(
    job: TorchTrainingJob,
    transformation: Any,
    data_module: Any,
    rank: int,
    size: int,
    *,
    moves: bool = False,
    least_rows: int = MIN_BATCH_NORM_ROWS,
) -> tuple[BatchedSource, BatchedSource | None, contextlib.AbstractContextManager[Any]]:
    """Returns training and validation batches, and the context in which they are read.

    Args:
        job: the run.
        transformation: of rows, by the user; or `None`.
        data_module: class of the user's; `None` is the native reader.
        rank: of this process.
        size: processes.
        moves: whether an epoch may continue with another number of processes.
        least_rows: rows of a batch at least, by repeats that do not count.
    """
    data = job.data
    if data_module is not None:
        steps = data_module_steps(data, size)
        module = data.create_data_module(
            data_module,
            epochs=job.loop.epochs,
            transformation=transformation,
            rank=rank,
            size=size,
            steps=steps,
        )
        held = None if data.val_url is None else DataModuleSource(module.val_data, steps[1])
        return DataModuleSource(module.train_data, steps[0]), held, module
    # Labels are cast after they have been checked. With a transformation, all columns are.
    casts: dict[str, str | None] = dict.fromkeys(data.columns)
    if transformation is None:
        used = [name for one in job.inputs for name in one.columns] + [
            one.column.name for one in job.labels
        ]
        used += [job.weight] if job.weight else []
        floats = {
            one.columns[0] for one in job.inputs if len(one.columns) == 1 and one.dtype == "float32"
        }
        floats |= {
            one.column.name
            for one in job.labels
            if one.dtype == "float32" and _is_exact_float32(one.column.dtype)
        }
        casts = {name: "float32" if name in floats else None for name in dict.fromkeys(used)}

    train, val = data.open_sources(
        TensorSource,
        casts,
        rank=rank,
        size=size,
        transformation=transformation,
        least=least_rows,
        moves=moves,
    )
    return train, val, contextlib.nullcontext()


def data_module_steps(data: TrainingDataSpec, size: int) -> tuple[int, int]:
    """Returns the steps of an epoch of a data module: as in Horovod, only complete batches.

    Args:
        data: that it reads.
        size: processes.
    """
    train = data.train_steps or max(1, data.train_rows // (data.batch_size * size))
    return train, data.val_steps or max(1, data.val_rows // (data.val_batch_size * size))


def _is_exact_float32(dtype: str) -> bool:
    """Returns whether labels of this type can be examined as float32."""
    return dtype.startswith(("float", "int", "uint", "bool"))
