# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Lightning's training, as it runs in every process of a job.

If a run has a checkpoint, it continues after the last complete epoch, with the state of optimizers
and schedulers.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import warnings
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

import farandole.torch as hvd
from farandole.common import scratch_directories
from farandole.common.termination_notices import is_elastic_worker
from farandole.numpy.plain_value_exchange import broadcast_plain
from farandole.spark import task
from farandole.spark.common.runs.stop_request import StopCheck
from farandole.spark.lightning.elastic import LightningRunProgress, LightningRunState
from farandole.spark.lightning.lightning_loader import LightningLoader
from farandole.spark.lightning.local_steps import (
    local_steps_callback_class,
    local_steps_strategy_class,
)
from farandole.spark.lightning.run_recorder import recorder_class
from farandole.spark.torch.job import TorchTrainingResult
from farandole.spark.torch.saving import state_bytes
from farandole.spark.torch.training.process_setup import (
    choose_rank_device,
    create_sources,
    data_module_steps,
    prepare_process,
)
from farandole.stores.pickle_policy import (
    ALLOW_PICKLE_PARAMETER,
    ALLOW_PICKLE_VARIABLE,
    PickleNotAllowedError,
    resolve_pickle_decision,
)

if TYPE_CHECKING:
    from pathlib import Path

    from farandole.spark.lightning.job import LightningTrainingJob, LightningUserObjects
    from farandole.spark.lightning.run_recorder import LightningRunRecorder

_PRECISION_ARGUMENTS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def train_rank(job: LightningTrainingJob) -> TorchTrainingResult | None:
    """Trains one rank's part of a run.

    Args:
        job: what to do, the same on every rank.

    Returns:
        What rank 0 brings back; `None` from the others.
    """
    # Logged values are averaged here, with or without sync_dist. The checkpoint directory contains
    # logs, too.
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty.*")
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        # a word per checkpoint, and advertisements
        logging.getLogger(name).setLevel(logging.WARNING)
    hvd.init(process_sets="dynamic")
    with (
        scratch_directories.temporary_directory() as folder,
        contextlib.closing(StopCheck(job.store)) as halt,
    ):
        try:
            return _start_training(job, folder, halt)
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            hvd.shutdown()


def _start_training(
    job: LightningTrainingJob, folder: Path, halt: StopCheck
) -> TorchTrainingResult | None:
    prepare_process(job.loop, hvd.rank())
    device = choose_rank_device(job.loop.use_gpu and job.gpus != 0)
    objects: LightningUserObjects = state_bytes.unpickle_on_cpu(job.objects)
    if not is_elastic_worker():
        return _train_in_world(job, objects, device, folder, halt, None)
    from farandole.lightning import elastic  # noqa: PLC0415 - needs one of Lightning's packages

    return elastic.run(lambda state: _train_in_world(job, objects, device, folder, halt, state))(
        LightningRunState(LightningRunProgress())
    )


def _train_in_world(
    job: LightningTrainingJob,
    objects: LightningUserObjects,
    device: torch.device,
    folder: Path,
    halt: StopCheck,
    state: LightningRunState | None,
) -> TorchTrainingResult | None:
    """Trains from the beginning, or from the progress so far, to the end."""
    task.check_gpu_agreement(device.type == "cuda")
    rank, size = hvd.rank(), hvd.size()
    reached = LightningRunProgress() if state is None else state.reached
    resume, history = None, list(reached.history)
    if not reached.begun:
        # One read for all: a rank 0 of a lost gang may not have ended yet, and write another in
        # between.
        found = broadcast_plain(job.store.read_checkpoint_to_resume() if rank == 0 else None, 0)
        if found is not None:
            resume = folder / "resume.ckpt"
            resume.write_bytes(found)
            history = _load_checkpoint(job, found).get("farandole_history", [])
    moves = state is not None
    watch = recorder_class(job.package)(
        job, folder, history, rank, size, halt, (reached.place.rows, reached.total), moves=moves
    )
    watch.best = reached.best
    trainer = _create_trainer(job, objects, watch, folder, device)
    loader = held = None
    if objects.data_module is not None:
        data: dict[str, Any] = {"datamodule": _create_data_module(job, objects, rank, size)}
    else:
        train_source, val_source, _ = create_sources(
            job, objects.transformation, None, rank, size, moves=moves
        )
        counter = None if job.batches else objects.module.label_counter()
        loader = LightningLoader(
            train_source,
            job,
            job.data.train_steps,
            len(history),
            reached.place,
            size=size,
            passes=objects.trainer_args.get(
                "accumulate_grad_batches", job.loop.backward_passes_per_step
            ),
            counter=counter,
            of_all=not job.loop.takes_local_steps,
        )
        data = {"train_dataloaders": loader}
        if val_source is not None:
            held = LightningLoader(val_source, job, job.data.val_steps, len(history))
            data["val_dataloaders"] = held
    watch.use_loaders(loader, held)
    if not job.batches:
        objects.module.use_loaders(loader, held)
    module: Any = torch.compile(objects.module) if job.loop.compile else objects.module
    fit = trainer.fit
    if state is not None:
        state.reached = replace(reached, begun=True, history=history)
        state.begin_world(loader, watch)
        fit = partial(state.fit, trainer)
    path = None if resume is None else str(resume)
    fit(module, **data, ckpt_path=path, **_weights_only_argument(job, trainer))
    if hvd.rank() != 0:
        return None
    return TorchTrainingResult(
        state_bytes.pack_state({"model": watch.result_weights(trainer, objects.module)}),
        watch.history,
    )


def _create_trainer(
    job: LightningTrainingJob,
    objects: LightningUserObjects,
    watch: LightningRunRecorder,
    folder: Path,
    device: torch.device,
) -> Any:
    loop = job.loop
    lightning = import_module(job.package)
    checkpoint = lightning.callbacks.ModelCheckpoint
    own = [one for one in objects.callbacks if isinstance(one, checkpoint)]
    for one in own:
        one.dirpath = str(folder / "run")
    given = objects.logger or []
    loggers = given if isinstance(given, list | tuple) else [given]
    for logger in loggers:
        _redirect_logger_directory(logger, folder / "run" / job.store.logs_subdir)
    callbacks = [*objects.callbacks, watch]
    strategy: Any = loss_scaling_strategy_class(job.package)
    options = compression_hook_arguments(objects.compression)
    if loop.takes_local_steps:
        strategy, options = local_steps_strategy_class(strategy), {"sync_every": loop.sync_every}
        # Before the callbacks that save the weights.
        callbacks.insert(0, local_steps_callback_class(lightning.Callback)())
    arguments: dict[str, Any] = {
        "accelerator": "gpu" if device.type == "cuda" else "cpu",
        "devices": 1 if device.type == "cpu" else [device.index or 0],
        "strategy": strategy(watch, **options),
        "max_epochs": loop.epochs,
        "max_steps": loop.max_steps or -1,
        "max_time": None if loop.max_time is None else {"seconds": loop.max_time},
        "callbacks": callbacks,
        "logger": list(loggers) or False,
        "log_every_n_steps": job.log_every,
        "num_sanity_val_steps": 0,
        "precision": _PRECISION_ARGUMENTS[loop.precision],
        "accumulate_grad_batches": loop.backward_passes_per_step,
        "gradient_clip_val": loop.gradient_clip_norm,
        "deterministic": loop.deterministic or None,
        "profiler": objects.profiler,
        "enable_checkpointing": bool(own),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": str(folder / "run"),
    }
    return lightning.Trainer(**arguments | objects.trainer_args)


def loss_scaling_strategy_class(package: str) -> type[Any]:
    """Returns the strategy whose backward passes scale losses by the rows of all ranks.

    Args:
        package: `lightning.pytorch` or `pytorch_lightning`.
    """
    from farandole.lightning.strategy import strategy_class  # noqa: PLC0415 - needs one of the two packages

    class LossScalingStrategy(strategy_class(package)):
        def __init__(self, watch: LightningRunRecorder, **options: Any) -> None:
            super().__init__(**options)
            self._watch = watch

        def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            scaled = self._watch.scale_loss(closure_loss, self.lightning_module.trainer)
            return super().backward(scaled, *args, **kwargs)

    return LossScalingStrategy


def compression_hook_arguments(compression: Any) -> dict[str, Any]:
    """Returns the strategy's arguments for gradients that travel in a smaller form.

    Args:
        compression: as `DistributedOptimizer` takes it.

    Raises:
        TypeError: it is none.
    """
    if compression is None or compression is hvd.Compression.none:
        return {}
    from farandole.torch import ddp_comm_hook as hooks  # noqa: PLC0415 - brings torch.distributed
    from farandole.torch.compress import Compressor  # noqa: PLC0415 - as above

    if compression is hvd.Compression.fp16:
        return {"ddp_comm_hook": hooks.fp16_hook}
    if compression is hvd.Compression.bf16:
        return {"ddp_comm_hook": hooks.bf16_hook}
    if isinstance(compression, Compressor):
        return {
            "ddp_comm_state": hooks.CompressorState(compression),
            "ddp_comm_hook": hooks.compressor_hook,
        }
    raise TypeError(
        "gradient_compression must be a member of farandole.torch.Compression or a compressor: "
        f"{compression!r}"
    )


def _redirect_logger_directory(logger: Any, directory: Path) -> None:
    """Lets a logger write its files to the directory from which they are copied to the store."""
    for name in ("_root_dir", "_save_dir"):
        if hasattr(logger, name):
            setattr(logger, name, str(directory))


def _weights_only_argument(job: LightningTrainingJob, trainer: Any) -> dict[str, Any]:
    import inspect  # noqa: PLC0415 - once per run

    # `_load_checkpoint` has refused a checkpoint that contains code.
    takes = "weights_only" in inspect.signature(trainer.fit).parameters
    return {"weights_only": not resolve_pickle_decision(job.allow_pickle)} if takes else {}


def _load_checkpoint(job: LightningTrainingJob, found: bytes) -> dict[str, Any]:
    """Returns the checkpoint. Without the user's consent, a checkpoint whose unpickling runs code
    raises an error.
    """
    if resolve_pickle_decision(job.allow_pickle):
        return state_bytes.unpickle_on_cpu(found)
    try:
        return state_bytes.unpack_state(found)
    except pickle.UnpicklingError as error:
        raise PickleNotAllowedError(
            f"the checkpoint of run {job.run_id!r} contains more than tensors and plain "
            f"values: loading it runs code. If you trust {job.store.run_path}, set "
            f"{ALLOW_PICKLE_PARAMETER}=True or {ALLOW_PICKLE_VARIABLE}=1, else choose another "
            f"run_id: {error}"
        ) from error


def _create_data_module(
    job: LightningTrainingJob, objects: LightningUserObjects, rank: int, size: int
) -> Any:
    data = job.data
    if not isinstance(objects.data_module, type):
        return objects.data_module
    return data.create_data_module(
        objects.data_module,
        epochs=job.loop.epochs,
        transformation=objects.transformation,
        rank=rank,
        size=size,
        steps=data_module_steps(data, size),
    )
