# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A sampler that continues in the middle of an epoch with any size of the world."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler

from farandole.common import basics

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized


class ElasticSampler(Sampler[int]):
    """Distributes the unprocessed samples of an epoch among the ranks.

    Call `record_batch` after every batch and `set_epoch` at the *end* of an epoch; keep the sampler
    in a `TorchState`.

    Args:
        dataset: Anything with a length.
        shuffle: Whether every epoch has a different order.
        seed: Equal on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch: all samples are to be processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that every rank has processed a batch. It takes effect with the next `reset`.

        Args:
            batch_idx: Not needed; accepted for compatibility with Horovod.
            batch_size: Samples of a full batch on this rank.
        """
        del batch_idx
        # The last batch may be smaller than full.
        self.processed_num = min(
            self.processed_num + batch_size * self.num_replicas, len(self.dataset)
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues at the position of a state."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, from which another sampler can continue."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def reset(self) -> None:
        """Distributes the remaining samples among the ranks of the present world."""
        self.num_replicas, self.rank = basics.size(), basics.rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)  # noqa: S311 - an order, not a secret
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Yields this rank's samples; repeats the first ones if the ranks' parts would differ in
        length.
        """
        remaining = self.remaining_indices
        return iter(
            [
                remaining[i % len(remaining)]
                for i in range(self.rank, self.total_size, self.num_replicas)
            ]
        )

    def __len__(self) -> int:
        """Returns the number of samples of this rank."""
        return self.num_samples
