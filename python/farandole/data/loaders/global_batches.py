# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`GlobalBatchLoader`: steps that have the same rows on any number of ranks."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.common.argument_checks import check_whole_number
from farandole.common.counted_noun import format_counted_noun
from farandole.data.loader import ParquetLoader, resolve_rank_and_size
from farandole.data.step_rows import own_row_count, recut_batches, step_row_counts

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from farandole._native.reader import Dataset, Reader
    from farandole.data.row_assignment import RowAssignment


class GlobalBatchLoader(ParquetLoader):
    """One rank's part of batches of all ranks together.

    A step has the next `global_batch_size` rows of the epoch on any number of ranks. If that number
    does not divide `global_batch_size`, the batches of two ranks differ by one row. A rank
    that has no row in the last step of an epoch gets a row again, with a `loss_factor` of 0. The
    training is the same on any number of ranks, also when an elastic job loses some, if

    - the loss is a mean over the rows of a batch, multiplied by `loss_factor`,
    - gradients are averaged over ranks, and
    - the learning rate does not depend on the number of ranks.
    """

    def __init__(
        self,
        path_or_dataset: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Dataset,
        global_batch_size: int,
        columns: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        """Opens the data set.

        Args:
            path_or_dataset: As for `ParquetLoader`.
            global_batch_size: Rows of one step on all ranks together.
            columns: As for `ParquetLoader`.
            options: Other options of `ParquetLoader`. `tail` is `keep` or `drop_last`.

        Raises:
            ValueError: `global_batch_size` is below the number of ranks, another tail, ragged
                columns, and as `ParquetLoader`.
        """
        tail = options.pop("tail", "keep")
        if tail not in ("keep", "drop_last"):
            raise ValueError(f"tail of a GlobalBatchLoader must be keep or drop_last: {tail!r}")
        self.global_batch_size = check_whole_number("global_batch_size", global_batch_size)
        self._drops_tail = tail == "drop_last"
        self._iteration_start = 0
        """Row of the epoch with which the present iteration has begun."""
        world = resolve_rank_and_size(options.get("rank"), options.get("size"))
        super().__init__(path_or_dataset, self._rank_batch_size(world[1]), columns, **options)
        if self._ragged:
            raise ValueError(
                "a GlobalBatchLoader divides batches again, and lists of different lengths differ "
                f"in width from batch to batch: leave out {', '.join(self._ragged)}"
            )

    def _rank_batch_size(self, size: int) -> int:
        if self.global_batch_size < size:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} has fewer rows than there are ranks: "
                f"{size}"
            )
        return -(-self.global_batch_size // size)

    def _make_reader(self, rank: int, size: int) -> Reader:
        self.batch_size = self._rank_batch_size(size)
        return super()._make_reader(rank, size)

    @property
    def loss_factor(self) -> float:
        """Factor of the mean loss over the last batch, with which each row of its step has the same
        weight if gradients are averaged over ranks.
        """
        _, row = self._consumed_at
        rows = self.dataset.rows - self._iteration_start
        end = row - self._iteration_start if row else rows - self._left_out_row_count(rows)
        if end <= 0:
            return 1.0
        begin = (end - 1) // self.global_batch_size * self.global_batch_size
        own = own_row_count(end, self.rank, self.size) - own_row_count(begin, self.rank, self.size)
        return own * self.size / (end - begin)

    def _left_out_row_count(self, rows: int) -> int:
        return rows % self.global_batch_size if self._drops_tail else 0

    def __len__(self) -> int:
        """Batches of the next iteration: of a whole epoch, or of the rest of the resumed one."""
        rows = self.dataset.rows - self._next_position[1]
        steps = -(-(rows - self._left_out_row_count(rows)) // self.global_batch_size)
        return max(0, steps)

    def _iterate(self) -> Iterator[dict[str, Any]]:
        epoch, start = self._next_position
        steps, self._iteration_start = len(self), start
        self._next_position = (epoch + 1, 0)
        rows = self.dataset.rows - start
        counts = step_row_counts(
            rows - self._left_out_row_count(rows), self.global_batch_size, self.rank, self.size
        )
        with closing(self._read_batches(self._reader, epoch, start)) as batches:
            counted = self._counted_batches(batches, own_row_count(rows, self.rank, self.size))
            last: dict[str, Any] = {}
            for done, cut in enumerate(recut_batches(counted, counts, self._join), 1):
                batch = cut
                # A mean over no rows is NaN, which a factor of 0 does not change.
                if not len(next(iter(cut.values()), ())):
                    last = last or self._read_first_batch(epoch)
                    batch = {name: values[:1] for name, values in last.items()}
                last = batch
                row = start + done * self.global_batch_size
                self._produced_at = (epoch, row) if done < steps else (epoch + 1, 0)
                yield batch

    def _counted_batches(
        self, batches: Iterator[dict[str, Any]], own_rows: int
    ) -> Iterator[tuple[dict[str, Any], int]]:
        """Yields batches with their numbers of rows."""
        for batch in batches:
            dealt, rows = min(self.batch_size, own_rows), len(next(iter(batch.values())))
            if rows != dealt:
                raise ValueError(
                    f"a GlobalBatchLoader has dealt {format_counted_noun(dealt, 'row')} to this "
                    f"batch, and transformation_fn returned {rows}: it must keep all rows"
                )
            own_rows -= rows
            yield batch, rows

    def _read_first_batch(self, epoch: int) -> dict[str, Any]:
        """Returns rows of the epoch for a rank that has none."""
        reader = super()._make_reader(0, 1)
        with closing(self._read_batches(reader, epoch, 0)) as batches:
            return next(batches)

    def _join(self, parts: list[Any]) -> Any:
        if self.framework == "numpy":
            return np.concatenate(parts)
        import torch  # noqa: PLC0415 - the framework of the batches

        return torch.cat(parts)

    def take_turns(self, books: RowAssignment | None = None) -> RowAssignment:
        """Refuses to be shared with a fault-tolerant optimizer.

        Args:
            books: The records of the other ranks, which are not read.

        Raises:
            ValueError: Always: such an optimizer finishes a step without the rows of lost ranks.
        """
        del books
        raise ValueError(
            "a fault-tolerant optimizer finishes a step without the rows of lost ranks, so a "
            "GlobalBatchLoader is for farandole.torch.elastic.run and other states that go back: "
            "share a ParquetLoader"
        )

    def _batches_of_worker_process(
        self, worker: int, workers: int, epoch: int, start: int, skip: int
    ) -> Iterator[dict[str, Any]]:
        del worker, workers, epoch, start, skip
        raise ValueError(
            "a GlobalBatchLoader has threads of its own: create the DataLoader with num_workers=0"
        )
