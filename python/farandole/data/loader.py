# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`ParquetLoader`: an iterable of batches."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from farandole._native.reader import Dataset, Reader
from farandole.data.arrays import converter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

BYTE_BUDGET = 512 << 20
"""Bytes of decoded data that one loader holds, by default."""

WEIGHTS = "_weights"
"""Key of the rows' weights in a batch, with `tail="pad"`."""


class ParquetLoader:
    """One rank's batches of a data set; every iteration is the next epoch.

    The order of an epoch is a function of the data set, the seed and the number of the epoch: where `size * batch_size`
    is equal, all ranks together see the same batches at every size. All ranks have the same number of batches.

    Batches are dicts of writable tensors or arrays that share one piece of memory, which lives as long as any of them.
    """

    def __init__(
        self,
        path_or_dataset: str | os.PathLike[str] | Dataset,
        batch_size: int,
        *,
        columns: Sequence[str] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        size: int | None = None,
        tail: Literal["keep", "pad", "drop"] = "keep",
        cast: Mapping[str, str] | None = None,
        framework: Literal["numpy", "torch"] = "numpy",
        byte_budget: int = BYTE_BUDGET,
        threads: int | None = None,
    ) -> None:
        """Opens the data set.

        Args:
            path_or_dataset: A directory of Parquet files, prepared by Farandole or by anybody; or what
                `Dataset.open` made of it.
            batch_size: Rows of one batch of this rank.
            columns: Which columns; default: all of numbers, and of vectors of one length.
            shuffle: Whether rows come in random order, or in that of the files. Unshuffled, every rank reads all files.
            seed: Of the shuffle; the same on every rank.
            rank: This rank; default: that of the running job, or 0.
            size: How many ranks share the data; default: that of the running job, or 1.
            tail: What becomes of the rows that do not fill a batch on every rank: a shorter last batch (which may be
                empty on some ranks), a last batch filled up with rows of weight 0 (then batches have `"_weights"`), or
                nothing at all.
            cast: Types to convert to, by column: `{"features": "float32"}`; `"*"` stands for all other float columns.
            framework: Arrays of NumPy or tensors of torch.
            byte_budget: Bytes of decoded data held at once.
            threads: Reading threads; default: 2.

        Raises:
            FileNotFoundError: There is no Parquet at this path.
            ValueError: Files that disagree, columns that do not exist or that no batch can hold.
        """
        opened = path_or_dataset if isinstance(path_or_dataset, Dataset) else Dataset.open(os.fspath(path_or_dataset))
        here, everywhere = _world()
        self.dataset = opened
        self.rank = here if rank is None else rank
        self.size = everywhere if size is None else size
        self.batch_size = batch_size
        self._epoch = 0
        self._convert = converter(framework)
        self._weights = WEIGHTS if tail == "pad" else None
        self._reader = Reader(
            opened,
            columns=None if columns is None else list(columns),
            batch_size=batch_size,
            rank=self.rank,
            size=self.size,
            seed=seed,
            shuffle=shuffle,
            byte_budget=byte_budget,
            threads=threads,
            tail=tail,
            cast=None if cast is None else dict(cast),
        )
        self._fields = self._reader.columns

    @property
    def columns(self) -> list[str]:
        """Names of the columns of a batch."""
        return [field.name for field in self._fields]

    def set_epoch(self, epoch: int) -> None:
        """Chooses which epoch the next iteration is."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Batches of one epoch."""
        return self._reader.steps()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Reads an epoch; threads end with the iteration, also when it is left early."""
        epoch = self._reader.epoch(self._epoch)
        self._epoch += 1
        try:
            for batch in epoch:
                yield self._convert(batch, self._fields, self._weights)
        finally:
            epoch.close()


def _world() -> tuple[int, int]:
    """Rank and size of the running job."""
    from farandole._native import engine  # noqa: PLC0415 - only a loader without its own rank asks

    if not engine.is_initialized():
        return 0, 1
    world = engine.world()
    return world.rank, world.size
