# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A run's checkpoints: the last one, the best one, and the ones that are kept at an interval. See
`farandole.spark.common.show.epoch_reports` for their names.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import farandole.torch as hvd
from farandole.numpy.plain_value_exchange import broadcast_plain
from farandole.spark.common.show.epoch_reports import write_epoch_checkpoints, write_history
from farandole.spark.torch.job import TorchTrainingResult
from farandole.spark.torch.saving import state_bytes
from farandole.stores.pickle_policy import PickleNotAllowedError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from farandole.spark.torch.job import TorchTrainingJob


class RunCheckpoints:
    """The checkpoints of a run, which rank 0 writes and reads.

    Args:
        job: the run.
        rank: of this process.
        moves: whether another process may become rank 0: then all keep the best.

    Attributes:
        rank: of this process.
        best: the best so far, where that is kept.
    """

    def __init__(self, job: TorchTrainingJob, rank: int, *, moves: bool = False) -> None:
        self._job = job
        self._store = job.store
        self._moves = moves
        self.rank = rank
        self.best: bytes | None = None

    def load_checkpoint_on_all_ranks(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Loads the run's checkpoint into model and optimizer, equal on all ranks; a collective
        call.

        Args:
            model: on its device.
            optimizer: over its parameters.

        Returns:
            The rest of the checkpoint; empty for a fresh run.

        Raises:
            ValueError: the checkpoint is of another model or optimizer.
        """
        found = self._store.read_checkpoint_to_resume() if self.rank == 0 else None
        rest = (
            None
            if found is None
            else state_bytes.pack_state(self._load_state(found, model, optimizer))
        )
        rest = broadcast_plain(rest, 0)
        # moves its tensors to where the parameters are
        optimizer.load_state_dict(optimizer.state_dict())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return {} if rest is None else state_bytes.unpack_state(rest)

    def _load_state(
        self, found: bytes, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        try:
            state = state_bytes.unpack_state(found)
        except pickle.UnpicklingError as error:
            raise PickleNotAllowedError(
                f"the checkpoint of run {self._job.run_id!r} contains more than tensors and plain "
                "values, which no run of "
                f"this estimator writes, so it is not loaded: {self._store.run_path}: {error}"
            ) from error
        try:
            model.load_state_dict(state.pop("model"))
            optimizer.load_state_dict(state.pop("optimizer"))
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"the checkpoint of run {self._job.run_id!r} belongs to another model or "
                f"optimizer: choose another run_id, or move {self._store.run_path} elsewhere: "
                f"{error}"
            ) from error
        return state

    def write_epoch_and_keep_best(
        self, state: Callable[[], dict[str, Any]], history: list[dict[str, Any]]
    ) -> None:
        """Writes the files of an epoch.

        Args:
            state: makes the checkpoint.
            history: of all epochs so far.
        """
        best = self._job.loop.best_checkpoint
        is_best = best is not None and best.best_index(history) == len(history) - 1
        keeps = is_best and (self._moves or self.rank == 0)
        writes = self._store.saving_runs and self.rank == 0
        if not (keeps or writes):
            return
        packed = state_bytes.pack_state(state())
        if keeps:
            self.best = packed
        if not writes:
            return
        every = self._job.loop.checkpoint_every
        write_epoch_checkpoints(self._store, packed, len(history), is_best=is_best, every=every)
        write_history(self._store, history)

    def training_result(
        self, state: Callable[[], dict[str, Any]], history: list[dict[str, Any]]
    ) -> TorchTrainingResult | None:
        """Returns the result of rank 0: the last state, or the best one if requested.

        Args:
            state: makes a checkpoint.
            history: of all epochs.
        """
        if self.rank != 0:
            return None
        if (
            self._job.loop.best_checkpoint is not None
            and self._job.loop.best_checkpoint.best_index(history) is not None
        ):
            # A resumed run whose best epoch came before has it in the store alone.
            best = self.best or self._store.read_checkpoint(
                f"{self._store.checkpoint_filename}.best"
            )
            if best is not None:
                return TorchTrainingResult(best, history)
        return TorchTrainingResult(state_bytes.pack_state(state()), history)
