# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Elastic training with `Trainer`: a training that continues in another world from the last
checkpoint that `Trainer` has written.

A `Trainer` counts its processes once, so each world needs another trainer. The checkpoints that it
writes are the commits. Their steps have the rows of the world that wrote them, so a world of
another size gets a copy with the number of steps that it would have taken for these rows.

Example:
    @elastic.run
    def train(state):
        arguments = TrainingArguments(output_dir="out", save_steps=50)
        state.train(Trainer(model, arguments, train_dataset=rows))

    train(elastic.TrainerProgress())
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME

from farandole.common import basics
from farandole.common.elastic import ObjectState, leave, run_fn
from farandole.stores.durable_writes import is_present_file
from farandole.torch.ddp_errors import restore_error_types
from farandole.torch.functions import broadcast_object
from farandole.transformers import RANK_VARIABLES

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")

__all__ = ["TrainerProgress", "leave", "run"]

_RESCALED_DIRECTORY = "elastic"
"""Directory of rescaled copies of checkpoints in the output directory."""
_EARLIER_DIRECTORY = "earlier-worlds"
"""Directory of checkpoints whose steps have other rows in the output directory."""
_COUNTERS = ("last_epoch", "_step_count")
"""Entries of the state of a scheduler that count steps."""


def run(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """Wraps a training function: after a failure, or when processes join, it is called again in the
    new world.

    Args:
        func: The training function; takes a `TrainerProgress` first, makes arguments, model and
            trainer, and has the state train it.

    Returns:
        A function of the same arguments and result.
    """
    run_in_worlds = run_fn(restore_error_types(func), _restart_session)

    @functools.wraps(func)
    def join_and_run(*args: Any, **kwargs: Any) -> _Result:
        basics.init(process_sets="dynamic")
        return run_in_worlds(*args, **kwargs)

    return join_and_run


def _restart_session() -> None:
    """Leaves the world, and lets Accelerate count the processes of the next one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    basics.shutdown()
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001 - Accelerate has no public name for it
    GradientState._reset_state()  # noqa: SLF001 - as above
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)  # Accelerate would wait for the ranks of the last world
    basics.init(process_sets="dynamic")
    PartialState()


class TrainerProgress(ObjectState):
    """The last checkpoint of a training, and each keyword as an attribute.

    All hosts must see `output_dir`. The arguments of the trainer must save checkpoints
    (`save_strategy`, `save_steps`): the steps since the last one are trained again after a failure,
    and processes join after a checkpoint.

    Attributes:
        checkpoint: Directory of the last checkpoint; `None` before the first.
        step_rows: Rows of all processes in a step of the world that wrote it.

    Args:
        **kwargs: Further attributes and their first values.
    """

    checkpoint: str | None
    step_rows: int

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            bcast_object=broadcast_object,
            get_rank=basics.rank,
            **{"checkpoint": None, "step_rows": 0, **kwargs},
        )

    def train(
        self, trainer: transformers.Trainer, resume_from_checkpoint: str | None = None
    ) -> Any:
        """Trains from the last checkpoint to the end.

        Args:
            trainer: A trainer of this world, made in the training function.
            resume_from_checkpoint: Checkpoint at which the first world begins.

        Returns:
            The result of `trainer.train`.

        Raises:
            ValueError: The trainer saves no checkpoints, or it ends by `max_steps`.
        """
        arguments = trainer.args
        if str(arguments.save_strategy) in ("no", "SaveStrategy.NO"):
            raise ValueError(
                "an elastic training continues from the checkpoints of Trainer, and "
                "save_strategy='no' writes none"
            )
        if arguments.max_steps > 0:
            raise ValueError(
                "an elastic training must end by num_train_epochs, because steps have other rows "
                f"in another world, not by max_steps: {arguments.max_steps}"
            )
        step_rows = (
            arguments.train_batch_size * arguments.gradient_accumulation_steps * basics.size()
        )
        if self.checkpoint is not None and self.step_rows != step_rows:
            self._rescale_checkpoint(Path(str(arguments.output_dir)), step_rows)
        resumed = self.checkpoint or resume_from_checkpoint
        trainer.add_callback(_CommitCheckpoints(self, step_rows))
        result = trainer.train(resume_from_checkpoint=resumed)
        if basics.rank() == 0:
            shutil.rmtree(Path(str(arguments.output_dir)) / _RESCALED_DIRECTORY, ignore_errors=True)
        return result

    def _rescale_checkpoint(self, output: Path, step_rows: int) -> None:
        """Replaces the last checkpoint by a copy whose steps have the rows of this world; a
        collective call.
        """
        target, folder = "", output / _RESCALED_DIRECTORY / secrets.token_hex(8)
        if basics.rank() == 0:
            before = Path(str(self.checkpoint))
            target = str(copy_rescaled(before, folder, self.step_rows, step_rows))
        self.checkpoint = broadcast_object(target, root_rank=0)
        self.step_rows = step_rows
        self.save()
        if basics.rank() == 0:
            _set_aside_other_counts(output, Path(target))


def _set_aside_other_counts(output: Path, copy: Path) -> None:
    """Moves the checkpoints whose steps have other rows to a directory that Trainer does not list.
    Trainer keeps the checkpoints with the largest numbers, so it could delete newer ones instead.
    The copy names the best checkpoint by its new path.
    """
    folder = copy.parent
    aside = output / _EARLIER_DIRECTORY / folder.name
    aside.mkdir(parents=True)
    moved = {directory.name: directory for directory in output.glob("checkpoint-*")}
    for name, directory in moved.items():
        directory.rename(aside / name)
    state = json.loads((copy / TRAINER_STATE_NAME).read_text())
    best = state.get("best_model_checkpoint")
    if best is not None and Path(best).name in moved:
        state["best_model_checkpoint"] = str(aside / Path(best).name)
        _replace_file(copy / TRAINER_STATE_NAME, json.dumps(state).encode())
    for each in folder.parent.iterdir():
        if each != folder:
            shutil.rmtree(each, ignore_errors=True)  # a copy of a checkpoint that was set aside


def copy_rescaled(checkpoint: Path, folder: Path, rows_before: int, rows_now: int) -> Path:
    """Copies a checkpoint of Trainer, with steps of another number of rows.

    A step that is not complete in the new count is trained again. Files that do not change are
    linked where the file system can.

    Args:
        checkpoint: The checkpoint.
        folder: Directory of the copy.
        rows_before: Rows of a step in the checkpoint.
        rows_now: Rows of a step in the copy.
    """
    state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    step = state["global_step"] * rows_before // rows_now
    target = folder / f"checkpoint-{step}"
    shutil.copytree(checkpoint, target, copy_function=_link_or_copy)
    state["global_step"] = step
    if isinstance(state.get("best_global_step"), int):
        state["best_global_step"] = state["best_global_step"] * rows_before // rows_now
    _replace_file(target / TRAINER_STATE_NAME, json.dumps(state).encode())
    scheduler = target / SCHEDULER_NAME
    if is_present_file(scheduler):
        found = torch.load(scheduler, map_location="cpu", weights_only=True)
        for name in _COUNTERS:
            if isinstance(found.get(name), int):
                found[name] = found[name] * rows_before // rows_now
        scheduler.unlink()
        torch.save(found, scheduler)
    return target


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _replace_file(path: Path, content: bytes) -> None:
    path.unlink()  # it may be a link
    path.write_bytes(content)


class _CommitCheckpoints(transformers.TrainerCallback):
    """Commits each checkpoint of Trainer when it is complete."""

    def __init__(self, state: TrainerProgress, step_rows: int) -> None:
        self._state = state
        self._step_rows = step_rows

    def on_save(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **_: Any,
    ) -> None:
        """Commits: Trainer calls it on all ranks when rank 0 has written its files."""
        del control
        directory = str(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")
        # The files of rank 0 are complete when it sends their name.
        self._state.checkpoint = broadcast_object(directory, root_rank=0)
        self._state.step_rows = self._step_rows
        self._state.commit()
