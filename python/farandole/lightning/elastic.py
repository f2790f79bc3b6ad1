# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Elastic training with Lightning: a `Trainer.fit` that continues in another world.

A `Trainer` cannot change its world, so each world has its own trainer. It begins with a checkpoint
of Lightning that is kept in memory. For Lightning, the rest of an epoch is an epoch with fewer
batches.

Example:
    @elastic.run
    def train(state):
        trainer = Trainer(strategy="farandole", max_epochs=20)
        state.fit(trainer, model, loader)

    train(elastic.LightningState(sampler=sampler))
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from farandole.common import basics, scratch_directories
from farandole.common.elastic import leave, run_fn
from farandole.torch.ddp_errors import restore_error_types
from farandole.torch.elastic.sampler import ElasticSampler
from farandole.torch.elastic.state import TorchState
from farandole.torch.elastic.state_copies import copy_state
from farandole.torch.functions import broadcast_object

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")

__all__ = ["LightningState", "leave", "run"]


def run(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """Wraps a training function: after a failure the state goes back to the last commit, in a new
    world.

    Args:
        func: The training function; takes a `LightningState` first, makes a trainer, and has the
            state fit with it.

    Returns:
        A function of the same arguments and result.
    """
    return run_fn(restore_error_types(func), _restart_session)


def _restart_session() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    basics.shutdown()
    basics.init(process_sets="dynamic")


class LightningState(TorchState):
    """State of a fit: the content of Lightning's checkpoint, and each keyword as an attribute.

    Args:
        every: Steps from one commit to the next. A commit copies the content of a checkpoint and
            communicates with all ranks.
        **kwargs: Further attributes and their first values. An `ElasticSampler`, or a loader of
            `farandole.data`, is kept with the model, so that the samples of an epoch count as
            there.
    """

    every: int
    _trainer: Any
    _checkpoint: dict[str, Any] | None
    _spare: dict[str, Any] | None

    def __init__(self, every: int = 10, **kwargs: Any) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1: {every}")
        # Bypasses __setattr__, which needs the handled attributes to be set first.
        vars(self).update(every=every, _trainer=None, _checkpoint=None, _spare=None)
        super().__init__(**kwargs)

    def fit(self, trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        """Lets a trainer continue from the last commit, and commits while it trains.

        Args:
            trainer: A trainer of this world, with the strategy `"farandole"`; made in the training
                function.
            module: The module to train.
            *args: As for `Trainer.fit`.
            **kwargs: As for `Trainer.fit`; the first world starts from a given `ckpt_path`.

        Raises:
            ValueError: The trainer has `max_steps`, by which Lightning counts otherwise, or its
                strategy divides the model.
        """
        if hasattr(type(trainer.strategy), "device_mesh"):
            raise ValueError(
                "an elastic fit needs a whole model on each rank, because the part of a lost rank "
                f"is lost: {type(trainer.strategy).__name__} divides it. Start the job again from "
                "its last checkpoint, which any number of ranks can read"
            )
        if trainer.max_steps != -1:
            raise ValueError(
                f"an elastic fit must end by max_epochs, not by max_steps: {trainer.max_steps}"
            )
        trainer.callbacks.append(
            _make_commit_callback(type(trainer).__module__.partition(".trainer")[0], self)
        )
        # The rest of an epoch has fewer batches than the next epoch, and Lightning counts them when
        # it loads.
        trainer.reload_dataloaders_every_n_epochs = 1
        with scratch_directories.temporary_directory() as folder:
            if self._checkpoint is not None:
                path = folder / "state.ckpt"
                torch.save(self._checkpoint, path)
                kwargs["ckpt_path"] = str(path)
                if "weights_only" in inspect.signature(trainer.fit).parameters:
                    kwargs["weights_only"] = False  # this process has written it
            self._trainer = trainer
            try:
                trainer.fit(module, *args, **kwargs)
            finally:
                self._trainer = None

    def save(self) -> None:
        """Saves the state while a trainer trains; otherwise the last saved state stays."""
        if self._trainer is not None:
            taken = copy_state(_rewind_epoch_progress(_dump_checkpoint(self._trainer)), self._spare)
            self._checkpoint, self._spare = taken, self._checkpoint
        super().save()

    def sync(self) -> None:
        """Broadcasts everything of rank 0, and keeps it."""
        self._checkpoint = broadcast_object(self._checkpoint, root_rank=0)
        super().sync()

    def _refuse_unstorable_state(self) -> None:
        raise NotImplementedError(
            "Lightning writes its own checkpoints: give the trainer a ModelCheckpoint, and fit a "
            "ckpt_path"
        )

    def samplers(self) -> list[ElasticSampler]:
        """Returns the samplers among the attributes."""
        return [value for value in vars(self).values() if isinstance(value, ElasticSampler)]

    def note_finished_batch(self, trainer: Any, batches: int) -> None:
        """Takes note of a batch that was trained on, before a commit.

        Args:
            trainer: The trainer that runs.
            batches: Number of batches of the epoch that this trainer has done.
        """
        for sampler in self.samplers():
            sampler.record_batch(batches - 1, trainer.train_dataloader.batch_size)

    def is_commit_due(self, trainer: Any, batches: int) -> bool:
        """Returns whether a commit follows: where no gradients wait, and not after an epoch's last
        batch.

        That epoch is not over before its validation is.

        Args:
            trainer: The trainer that runs.
            batches: Number of batches of the epoch that this trainer has done.
        """
        due = batches % (self.every * trainer.accumulate_grad_batches) == 0
        return due and batches < trainer.num_training_batches

    def note_finished_epoch(self, trainer: Any) -> None:
        """Takes note of the end of an epoch.

        Args:
            trainer: The trainer that runs.
        """
        for sampler in self.samplers():
            sampler.set_epoch(trainer.current_epoch + 1)


def _dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """Returns the content of a checkpoint, as `Trainer.save_checkpoint` would write it."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)  # noqa: SLF001 - no public API


def _rewind_epoch_progress(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint as if the epoch in progress were to begin: its data begins where the
    state says.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
    for kind in ("total", "current"):
        done = progress[kind]["completed"]
        progress[kind].update(ready=done, started=done, processed=done)
    return checkpoint


class _CommitCallback:
    """The points of a fit at which the state is committed."""

    def __init__(self, state: LightningState) -> None:
        self._state = state
        self._sampler_states: list[dict[str, Any]] | None = [
            sampler.state_dict() for sampler in state.samplers()
        ]

    @property
    def state_key(self) -> str:
        """The key of the callback's state in a checkpoint."""
        return "farandole.elastic"

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Commits: the epoch before is over with all that follows it."""
        del trainer, module
        if self._sampler_states is not None:
            # Lightning has just had them begin the epoch that they were in the middle of.
            for sampler, sampler_state in zip(
                self._state.samplers(), self._sampler_states, strict=True
            ):
                sampler.load_state_dict(sampler_state)
            self._sampler_states = None
        self._state.commit()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Commits where it is time."""
        del module, outputs, batch
        done = batch_idx + 1
        self._state.note_finished_batch(trainer, done)
        if self._state.is_commit_due(trainer, done):
            self._state.commit()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Lets samplers begin the next epoch."""
        del module
        self._state.note_finished_epoch(trainer)


def _make_commit_callback(package: str, state: LightningState) -> Any:
    """Returns the callback, for one of Lightning's packages."""
    base = import_module(package).Callback
    return type("FarandoleCommits", (_CommitCallback, base), {"__module__": __name__})(state)
