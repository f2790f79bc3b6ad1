# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What a training process sets up before its loop: seeds, threads, its device, where its batches come from."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from typing import TYPE_CHECKING, Any

import torch

import farandole.torch as hvd
from farandole.spark import task
from farandole.spark.common.visibility import seen
from farandole.spark.torch.source import ModuleSource, ParquetSource

if TYPE_CHECKING:
    from farandole.spark.torch.job import Job, Loop, Objects
    from farandole.spark.torch.source import Source


def prepare_process(loop: Loop, rank: int) -> None:
    """Seeds and configures this process.

    Args:
        loop: how the training loop goes.
        rank: of this process.
    """
    if loop.mp_start_method is not None:
        multiprocessing.set_start_method(loop.mp_start_method, force=True)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    if loop.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    seed = loop.random_seed if loop.random_seed is not None else (0 if loop.deterministic else None)
    if seed is not None:
        torch.manual_seed(seed + rank)


def device_of(wanted: bool) -> torch.device:
    """The device of this rank; every rank must come to the same kind.

    Args:
        wanted: whether GPUs may be used.
    """
    here = wanted and torch.cuda.is_available()
    ranks = int(hvd.allreduce(torch.tensor([int(here)]), op=hvd.Sum, name="farandole.devices"))
    if ranks not in (0, hvd.size()):
        raise RuntimeError(
            f"ranks do not all have a GPU: {ranks} of {hvd.size()} have; set use_gpu=False to train on CPUs"
        )
    choice = task.device(torch.cuda.device_count() if here else 0, hvd.local_rank(), hvd.local_size())
    return torch.device("cpu") if choice is None else torch.device("cuda", choice.index)


def on_device(loss: Any, device: torch.device) -> Any:
    """A loss with its own tensors where the outputs are."""
    return loss.to(device) if isinstance(loss, torch.nn.Module) else loss


def sources(
    job: Job, objects: Objects, rank: int, size: int
) -> tuple[Source, Source | None, contextlib.AbstractContextManager[Any]]:
    """Training and validation batches, and the context that they are read in.

    Args:
        job: the run.
        objects: the user's.
        rank: of this process.
        size: processes.
    """
    if objects.data_module is not None:
        return _of_module(job, objects, rank, size)
    data = job.data
    # Labels are cast after they have been looked at; with a transformation everything is.
    casts: dict[str, str | None] = dict.fromkeys(data.columns)
    if objects.transformation is None:
        used = [name for one in job.inputs for name in one.columns] + [one.column.name for one in job.labels]
        used += [job.weight] if job.weight else []
        floats = {one.columns[0] for one in job.inputs if len(one.columns) == 1 and one.dtype == "float32"}
        floats |= {one.column.name for one in job.labels if one.dtype == "float32" and _is_exact(one.column.dtype)}
        casts = {name: "float32" if name in floats else None for name in dict.fromkeys(used)}

    def source(url: str, batch_size: int, threads: int, *, shuffle: bool) -> ParquetSource:
        return ParquetSource(
            url,
            casts,
            batch_size=batch_size,
            rank=rank,
            size=size,
            seed=data.order_seed,
            shuffle=shuffle,
            threads=threads,
            in_memory=data.in_memory,
            transformation=objects.transformation,
        )

    with seen(data.train_url):
        train = source(data.train_url, data.batch_size, data.train_threads, shuffle=data.shuffle)
    val = None
    if data.val_url is not None:
        with seen(data.val_url):
            # In whatever order: means over rows are the same, and each byte is read once.
            val = source(data.val_url, data.val_batch_size, data.val_threads, shuffle=True)
    return train, val, contextlib.nullcontext()


def _is_exact(dtype: str) -> bool:
    """Whether a cast to float32 keeps what a look at the labels is after."""
    return dtype.startswith(("float", "int", "uint", "bool"))


def _of_module(
    job: Job, objects: Objects, rank: int, size: int
) -> tuple[Source, Source | None, contextlib.AbstractContextManager[Any]]:
    data = job.data
    train_steps = data.train_steps or max(1, data.train_rows // (data.batch_size * size))
    val_steps = data.val_steps or max(1, data.val_rows // (data.val_batch_size * size))
    module = objects.data_module(
        train_dir=data.train_url,
        val_dir=data.val_url,
        num_train_epochs=job.loop.epochs,
        has_val=data.val_url is not None,
        train_batch_size=data.batch_size,
        val_batch_size=data.val_batch_size,
        shuffle=data.shuffle,
        transform_fn=objects.transformation,
        inmemory_cache_all=data.in_memory,
        cur_shard=rank,
        shard_count=size,
        schema_fields=list(data.columns),
        storage_options=None,
        steps_per_epoch_train=train_steps,
        steps_per_epoch_val=val_steps,
        verbose=False,
        random_seed=data.order_seed,
    )
    train = ModuleSource(module.train_data, train_steps, size, data.batch_size)
    val = None if data.val_url is None else ModuleSource(module.val_data, val_steps, size, data.val_batch_size)
    return train, val, module
