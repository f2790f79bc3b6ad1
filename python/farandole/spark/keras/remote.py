# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The entry of a training process: it chooses devices before Keras is imported."""

# ruff: noqa: PLC0415 - that is what this module is for

from __future__ import annotations

import contextlib
import multiprocessing
import os
from typing import TYPE_CHECKING, Any

from farandole.common import basics
from farandole.common.resource_limits import usable_cores
from farandole.common.termination_notices import is_elastic_worker
from farandole.spark import task

if TYPE_CHECKING:
    from farandole.spark.keras.job import KerasTrainingJob, KerasTrainingResult


def train_rank(job: KerasTrainingJob) -> KerasTrainingResult | None:
    """Trains one rank's part of a run.

    Args:
        job: what to do, the same on every rank.

    Returns:
        What rank 0 brings back; `None` from the others.
    """
    if job.mp_start_method is not None:
        multiprocessing.set_start_method(job.mp_start_method, force=True)
    basics.init()
    try:
        prepare_devices(os.environ.get("KERAS_BACKEND", "tensorflow"), job.use_gpu)
        from farandole.spark.keras.training.trainer import KerasTrainer

        return KerasTrainer(job).run()
    finally:
        basics.shutdown()


def prepare_devices(backend: str, wanted: bool) -> None:
    """Gives this process its share of the cores and, where every process has one, its GPU; a
    collective call.

    Args:
        backend: of Keras.
        wanted: whether GPUs may be used.

    Raises:
        RuntimeError: some processes see a GPU and some do not.
    """
    prepare: dict[str, Any] = {
        "tensorflow": _prepare_tensorflow,
        "torch": _prepare_torch,
        "jax": _prepare_jax,
    }
    if backend in prepare:
        prepare[backend](wanted)


def _prepare_tensorflow(wanted: bool) -> None:
    import tensorflow as tf

    if not {"TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"} & set(os.environ):
        # it runs already, where a backend trains in the driver's own process
        with contextlib.suppress(RuntimeError):
            tf.config.threading.set_intra_op_parallelism_threads(_cores_per_process())
    devices = tf.config.list_physical_devices("GPU")
    chosen = _choose_gpu(len(devices) if wanted else 0)
    tf.config.set_visible_devices([] if chosen is None else [devices[chosen]], "GPU")
    if chosen is not None:
        tf.config.experimental.set_memory_growth(devices[chosen], enable=True)


def _prepare_torch(wanted: bool) -> None:
    import torch

    from farandole.spark.torch.training import deferred_compiler

    # Keras imports it, and calls it where a model was compiled with jit_compile=True
    deferred_compiler.defer_compiler()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(_cores_per_process())
    chosen = _choose_gpu(torch.cuda.device_count() if wanted and torch.cuda.is_available() else 0)
    if chosen is None:
        os.environ["KERAS_TORCH_DEVICE"] = "cpu"
    else:
        torch.cuda.set_device(chosen)


def _prepare_jax(wanted: bool) -> None:
    if not wanted:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    devices = (
        [device for device in jax.local_devices() if device.platform == "gpu"] if wanted else []
    )
    chosen = _choose_gpu(len(devices))
    if chosen is not None:
        jax.config.update("jax_default_device", devices[chosen])
    elif devices:
        jax.config.update("jax_default_device", jax.local_devices(backend="cpu")[0])


def _choose_gpu(count: int) -> int | None:
    """Returns the number of this process's GPU among those it sees, where every process sees
    one.
    """
    # In an elastic job each process asks for itself: one that joins later has no peer that calls
    # the same.
    if not is_elastic_worker():
        task.check_gpu_agreement(count > 0)
    choice = task.choose_own_gpu(count, basics.local_rank(), basics.local_size())
    return None if choice is None else choice.index


def _cores_per_process() -> int:
    return max(1, usable_cores() // basics.local_size())
