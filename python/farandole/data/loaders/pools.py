# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Loaders that choose rows: each batch of a `ParquetLoader` is a pool of rows for smaller batches.

`WeightedLoader` draws one batch from each pool, with probabilities by weight or by class.
`LengthLoader` cuts each pool into batches of rows of similar length. Their choice is a function of
the pool, the seed, the epoch and the first row of the pool. So all ranks have the same number of
batches, and a few integers are enough to resume.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.common.argument_checks import check_whole_number
from farandole.data.data_loader_base import BaseDataLoader
from farandole.data.loader import WEIGHTS_KEY, ParquetLoader
from farandole.data.loaders.global_batches import GlobalBatchLoader

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Batch = dict[str, Any]

LENGTH_SUFFIX = "__length"
"""The suffix of the column that holds the lengths of a ragged column."""
_STATE_VERSION = 1


class PoolLoader(BaseDataLoader):
    """Batches that are made of the batches of another loader."""

    def __init__(self, loader: ParquetLoader, batch_size: int) -> None:
        """Stores the arguments; reading starts with the first iteration.

        Args:
            loader: Its batches are the pools. This loader decides from now on when it is read.
            batch_size: Rows of one batch of this rank.

        Raises:
            TypeError: `loader` is something else, or a `GlobalBatchLoader`.
            ValueError: `batch_size` is below 1.
        """
        if not isinstance(loader, ParquetLoader):
            raise TypeError(f"loader must be a ParquetLoader: {type(loader).__name__}")
        if isinstance(loader, GlobalBatchLoader):
            raise TypeError(
                "loader must be a ParquetLoader with batches of one size: a GlobalBatchLoader has "
                "others on each number of ranks"
            )
        if lists := loader._nested_columns():  # noqa: SLF001 - internal to this package
            raise ValueError(f"rows of a pool must be padded: prepare {', '.join(lists)} with Pad")
        self.loader, self.batch_size = loader, check_whole_number("batch_size", batch_size)
        self._skipped_batches = 0
        """Batches of the first pool that the next iteration passes over."""
        self._produced_at = self._consumed_at = (self._pool_state(), 0)

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are read."""
        return self.loader.columns

    @property
    def epoch(self) -> int:
        """The number of the next epoch."""
        return self.loader.epoch

    def set_epoch(self, epoch: int) -> None:
        """Chooses which epoch the next iteration is.

        Args:
            epoch: From 0 on.
        """
        self.loader.set_epoch(epoch)
        self._skipped_batches = 0
        self._consumed_at = self._produced_at = (self._pool_state(), 0)

    def __len__(self) -> int:
        """Batches of the next iteration."""
        size, rows = self.loader.size * self.loader.batch_size, self.loader.dataset.rows
        first = self._pool_state()["rows"]
        pools = len(self.loader)
        if not pools:
            return 0
        last = first + (pools - 1) * size
        return (
            (pools - 1) * self._pool_batch_count(first)
            + self._pool_batch_count(min(last, rows))
            - self._skipped_batches
        )

    def _pool_state(self) -> dict[str, Any]:
        """Returns the state of the pools' loader before the first batch of its next iteration."""
        epoch, rows = self.loader._next_position  # noqa: SLF001 - internal to this package
        return {**self.loader.state_dict(), "epoch": epoch, "rows": rows}

    @abstractmethod
    def _pool_batch_count(self, start: int) -> int:
        """Batches of the pool that begins at a row of the epoch, the same on every rank."""

    @abstractmethod
    def _cut_pool_into_batches(self, pool: Batch, epoch: int, start: int) -> list[Batch]:
        """Cuts a pool into batches."""

    def _random_generator(self, *numbers: int) -> np.random.Generator:
        return np.random.default_rng([self.loader.seed, *numbers])

    def _max_pool_row_count(self, start: int) -> int:
        """Returns the rows of a pool on the rank that has most."""
        if self.loader.tail == "pad":
            return self.loader.batch_size
        return min(
            self.loader.batch_size, -(-(self.loader.dataset.rows - start) // self.loader.size)
        )

    def _iterate(self) -> Iterator[Batch]:
        before, skipped, self._skipped_batches = self._pool_state(), self._skipped_batches, 0
        with closing(iter(self.loader)) as pools:  # pyright: ignore[reportArgumentType] - a generator
            for pool in pools:
                after = self.loader.state_dict()
                parts = self._cut_pool_into_batches(pool, before["epoch"], before["rows"])
                for number, part in enumerate(parts[skipped:], skipped + 1):
                    self._produced_at = (before, number) if number < len(parts) else (after, 0)
                    yield part
                before, skipped = after, 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the consumer, the same on every rank after the same number of
        batches.

        Between two pools, a loader of another size and batch size can take it. Within a pool, both
        must be equal.
        """
        state, taken = self._consumed_at
        shape = [self.loader.size, self.loader.batch_size, self.batch_size] if taken else None
        return {
            "version": _STATE_VERSION,
            "kind": type(self).__name__,
            "loader": state,
            "taken": taken,
            "shape": shape,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue where a state was taken.

        Args:
            state: From `state_dict`.

        Raises:
            ValueError: A state of another kind of loader or another data set, or one from within a
                pool of another size.
        """
        if state.get("version") != _STATE_VERSION or state.get("kind") != type(self).__name__:
            raise ValueError(
                f"not a state of {type(self).__name__}: {state.get('kind')} {state.get('version')}"
            )
        own_shape = [self.loader.size, self.loader.batch_size, self.batch_size]
        if state["taken"] and list(state["shape"]) != own_shape:
            raise ValueError(
                "the state was taken within a pool, so ranks, pool and batch_size must be the "
                "same: "
                f"{list(state['shape'])} there, {own_shape} here"
            )
        self.loader.load_state_dict(state["loader"])
        self._skipped_batches = int(state["taken"])
        self._consumed_at = self._produced_at = (self._pool_state(), self._skipped_batches)

    def close(self) -> None:
        """Ends the worker processes of the loader."""
        self.loader.close()


class WeightedLoader(PoolLoader):
    """Draws one batch from each pool, with replacement, in proportion to weights.

    A row of weight 2 comes twice as often as one of weight 1. The draw is systematic: a row that is
    expected 2.3 times comes 2 or 3 times. A larger pool is closer to the proportions of the whole
    data set.

    Padding of a pool (`tail="pad"`) is never drawn: the last batch is shorter, as with
    `tail="keep"`.
    """

    def __init__(
        self,
        loader: ParquetLoader,
        batch_size: int,
        *,
        weights: str | Mapping[str, Mapping[Any, float]] | None = None,
        balanced: str | None = None,
    ) -> None:
        """Stores the arguments; reading starts with the first iteration.

        Args:
            loader: Its batches are the pools, for example of 4 to 16 times `batch_size` rows.
            batch_size: Rows that are drawn from a pool.
            weights: The column with each row's weight, or weights by value of a column:
                `{"label": {0: 1.0, 1: 20.0}}`.
            balanced: A column of classes. All classes of a pool get the same share of the batch.

        Raises:
            TypeError: `loader` is something else.
            ValueError: Not one of `weights` and `balanced`, or a column that is not read.
        """
        super().__init__(loader, batch_size)
        if (weights is None) == (balanced is None):
            raise ValueError("WeightedLoader needs weights= or balanced=, and not both")
        if isinstance(weights, Mapping) and len(weights) != 1:
            raise ValueError(
                "weights by value must be for exactly one column: "
                f"{', '.join(map(str, weights)) or 'none'}"
            )
        self._values: dict[Any, float] | None = None
        if isinstance(weights, Mapping):
            ((self._column, values),) = weights.items()
            self._values = dict(values)
        else:
            self._column = weights or balanced or ""
        self._balanced = balanced is not None
        if self._column not in loader.columns:
            option = "balanced" if self._balanced else "weights"
            raise ValueError(
                f"{option} names column {self._column!r}, which the loader does not read: "
                f"{', '.join(loader.columns)}"
            )

    def _pool_batch_count(self, start: int) -> int:
        del start
        return 1

    def _cut_pool_into_batches(self, pool: Batch, epoch: int, start: int) -> list[Batch]:
        if self.loader.tail == "pad":  # padding is no row: it is in no class and has no share
            real = np.flatnonzero(np.asarray(pool[WEIGHTS_KEY]))
            pool = {name: values[real] for name, values in pool.items()}
        weight, owners = self._row_weights(np.asarray(pool[self._column]))
        chosen = self._draw_rows(
            weight, owners, self._random_generator(epoch, start, self.loader.rank)
        )
        return [{name: values[chosen] for name, values in pool.items()}]

    def _row_weights(self, column: Array) -> tuple[Array, Array]:
        """Returns the weight of each row, and the number of its value where that decides."""
        if column.ndim != 1:
            raise ValueError(
                f"column {self._column!r} has {column.shape[1:]} values in each row, but weights "
                "need one"
            )
        if self._values is None and not self._balanced:
            weight, owners = column.astype(np.float64), np.zeros(len(column), np.int64)
        else:
            found, owners, counts = np.unique(column, return_inverse=True, return_counts=True)
            if self._balanced:
                each = 1.0 / counts
            else:
                each = np.array(
                    [self._weight_of_value(value) for value in found.tolist()], np.float64
                )
            weight = each[owners] if len(found) else np.zeros(0)
        if not np.all(np.isfinite(weight) & (weight >= 0)):
            wrong = weight[~(np.isfinite(weight) & (weight >= 0))][0]
            raise ValueError(
                f"weights of column {self._column!r} must be finite numbers, 0 or more: {wrong}"
            )
        return weight, owners

    def _weight_of_value(self, value: Any) -> float:
        if value not in (self._values or {}):
            raise ValueError(
                f"weights has no weight for the value {value!r} of column {self._column!r}"
            )
        return (self._values or {})[value]

    def _draw_rows(self, weight: Array, owners: Array, random: np.random.Generator) -> Array:
        """Returns the rows of a pool; of a shorter pool, as many in proportion."""
        if not len(weight):
            return np.zeros(0, np.int64)
        count = max(1, round(self.batch_size * min(1.0, len(weight) / self.loader.batch_size)))
        # The order of a pool is interleaved from blocks: equal steps through it would hit some
        # blocks only.
        order = random.permutation(len(weight))
        # so that each value gets its share, give or take one
        order = order[np.argsort(owners[order], kind="stable")]
        ends = np.cumsum(weight[order])
        if not ends[-1] > 0:
            raise ValueError(
                f"all {len(weight)} rows of a pool have weight 0 in column {self._column!r}"
            )
        points = (random.random() + np.arange(count)) * (ends[-1] / count)
        last = int(np.flatnonzero(weight[order])[-1])
        chosen = order[np.minimum(np.searchsorted(ends, points, side="right"), last)]
        return random.permutation(chosen)


class LengthLoader(PoolLoader):
    """Cuts each pool into batches of rows of similar length, so that a batch needs little padding.

    In the same step, all ranks have rows of about the same length. Batches have one more column for
    each ragged one, `<column>__length`, with the number of values of each row.
    """

    def __init__(
        self, loader: ParquetLoader, column: str, batch_size: int, *, even: str = "rows"
    ) -> None:
        """Stores the arguments; reading starts with the first iteration.

        Args:
            loader: Its batches are the pools, for example of 16 to 64 times `batch_size` rows.
            column: The ragged column whose lengths count. Its `Pad` should have `buckets`: without
                them, every batch has the largest length.
            batch_size: Rows of a batch; with `even="values"` their mean.
            even: `rows`: all batches of a pool have the same number of rows, give or take one.
                `values`: they have about the same number of values with padding, so batches of long
                rows have fewer rows. No batch has more values than `batch_size * max_length`.

        Raises:
            TypeError: `loader` is something else.
            ValueError: A column that is not ragged, a pool smaller than a batch, or another word
                for `even`.
        """
        super().__init__(loader, batch_size)
        if even not in ("rows", "values"):
            raise ValueError(f"even must be rows or values: {even}")
        ragged = loader._ragged  # noqa: SLF001 - internal to this package
        if column not in ragged:
            shown = ", ".join(ragged) or "none"
            raise ValueError(
                f"column {column!r} is not a ragged column that the loader reads, these are: "
                f"{shown}"
            )
        if loader.batch_size < batch_size:
            raise ValueError(
                f"a batch of the loader is too small for a pool: {loader.batch_size} rows are "
                f"fewer than {batch_size}"
            )
        taken = [name for name in ragged if name + LENGTH_SUFFIX in loader.columns]
        if taken:
            raise ValueError(
                f"a column is called {taken[0] + LENGTH_SUFFIX!r}, as the lengths of "
                f"{taken[0]!r} are"
            )
        loader._length_suffix = LENGTH_SUFFIX  # noqa: SLF001 - internal to this package
        self._column, self._even = column, even

    def _pool_batch_count(self, start: int) -> int:
        return -(-self._max_pool_row_count(start) // self.batch_size)

    def _cut_pool_into_batches(self, pool: Batch, epoch: int, start: int) -> list[Batch]:
        ragged = self.loader._ragged  # noqa: SLF001 - internal to this package
        lengths, count = (
            np.asarray(pool[self._column + LENGTH_SUFFIX]),
            self._pool_batch_count(start),
        )
        mixed = self._random_generator(epoch, start, self.loader.rank).permutation(len(lengths))
        ordered = mixed[np.argsort(-lengths[mixed], kind="stable")]
        if self._even == "values":
            step = np.array(
                [ragged[self._column].padded_width(int(length)) for length in lengths[ordered]],
                np.int64,
            )
            pieces = cut_into_balanced_batches(step, count)
        else:
            pieces = [len(part) for part in np.array_split(ordered, count)]
        ends = np.cumsum(pieces)
        # The same order on all ranks: each step then has rows of about one length everywhere.
        turns = (
            self._random_generator(epoch, start).permutation(count)
            if self.loader.shuffle
            else range(count)
        )
        chosen = [ordered[ends[turn] - pieces[turn] : ends[turn]] for turn in turns]
        return [self._take_rows_trimmed(pool, rows) for rows in chosen]

    def _take_rows_trimmed(self, pool: Batch, rows: Array) -> Batch:
        part = {name: values[rows] for name, values in pool.items()}
        for name, layout in self.loader._ragged.items():  # noqa: SLF001 - internal to this package
            longest = int(np.asarray(part[name + LENGTH_SUFFIX]).max(initial=0))
            part[name] = part[name][:, : layout.padded_width(longest)]
        return part


def cut_into_balanced_batches(widths: Array, count: int) -> list[int]:
    """Cuts rows into so many batches that the largest padded size is as small as possible.

    Args:
        widths: Padded length of each row, the largest first.
        count: Number of batches.

    Returns:
        Rows of each batch; some have none if there are fewer rows than batches.
    """
    if len(widths) <= count:
        return [1] * len(widths) + [0] * (count - len(widths))

    def cut_to_bound(bound: int) -> list[int]:
        found, at = [], 0
        while at < len(widths):
            found.append(min(len(widths) - at, max(1, bound // int(widths[at]))))
            at += found[-1]
        return found

    low, high = int(widths[0]), int(widths[0]) * -(-len(widths) // count)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut_to_bound(middle)) <= count else (middle + 1, high)
    found = cut_to_bound(low)
    while len(found) < count:
        largest = found.index(max(found))
        found[largest : largest + 1] = [found[largest] // 2, found[largest] - found[largest] // 2]
    return found
