# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`StreamLoader`: batches of rows that come in time order and may never end.

Every rank reads the whole stream and keeps its own rows, so ranks agree on the number of batches
without communication. Windows of rows are shuffled. The rows of a window do not depend on the
number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from farandole.common.argument_checks import check_whole_number
from farandole.common.counted_noun import format_counted_noun
from farandole.data.arrays import make_result_converter
from farandole.data.batch_transform import (
    ResultShapeRecord,
    _check_result_arrays,
    column_from_arrow,
)
from farandole.data.columns import refuse_missing_columns
from farandole.data.data_loader_base import BaseDataLoader
from farandole.data.inputs.frames import is_ray_shard, ray_tables
from farandole.data.inputs.sources import open_source
from farandole.data.lazy_pyarrow import pa
from farandole.data.loader import resolve_rank_and_size

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    Batch = dict[str, Any]

_STATE_VERSION = 1


class StreamLoader(BaseDataLoader):
    """One rank's batches of a stream of Arrow record batches.

    In each step, all ranks together take the next `size * batch_size` rows of the stream. If the
    stream ends, the last step has fewer rows, and some ranks may have none. The iteration ends,
    too, and the next one begins the stream again.
    """

    def __init__(
        self,
        source: Callable[[int], Any] | Any,
        batch_size: int,
        columns: Sequence[str] | None = None,
        *,
        steps_per_epoch: int | None = None,
        shuffle_rows: int = 0,
        seed: int = 0,
        rank: int | None = None,
        size: int | None = None,
        framework: Literal["numpy", "torch"] = "numpy",
        transformation_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        """Stores the arguments; reading starts with the first iteration.

        Args:
            source: A function that takes the number of a row and returns an iterable of record
                batches or tables which begins with this row; it must return the same rows each
                time. Or any source of `farandole.data.prepare_data`, which is read in order; to
                resume, rows before the place are read again. Queries, Iceberg tables and Ray data
                sets have no order: one rank alone can read them. Or this rank's shard of a Ray data
                set, from `ray.train.get_dataset_shard`: its rows are all for this rank, and a state
                can be resumed only where a pass over them begins.
            batch_size: Rows of one batch of this rank.
            columns: Columns to read; default: all.
            steps_per_epoch: Batches of one iteration. The next one continues after them. Without
                it, an iteration lasts until the stream ends.
            shuffle_rows: Rows of a window that is shuffled, a multiple of `size * batch_size`; 0:
                in the order of the stream.
            seed: Seed of the shuffle; the same on every rank.
            rank: This rank; default: the rank in the running job, or 0; for a shard, 0.
            size: Number of ranks that share the stream; default: the size of the running job, or 1;
                for a shard, 1.
            framework: Arrays of NumPy or tensors of torch.
            transformation_fn: Called with every batch as a `pyarrow.RecordBatch`; returns a record
                batch, a table, or a dict of arrays. On a rank without rows it is called with one
                row, and the result is dropped. If its first result has no rows, it is called with
                the whole window, to learn the shape of the rows.

        Raises:
            ValueError: A number out of range, a column that the source does not have, a source for
                several ranks whose rows may come in a different order each time, or a shard that
                several ranks are to share.
            TypeError: A source that holds no rows.
        """
        for name, value, minimum in (
            ("batch_size", batch_size, 1),
            ("steps_per_epoch", 1 if steps_per_epoch is None else steps_per_epoch, 1),
            ("shuffle_rows", shuffle_rows, 0),
        ):
            check_whole_number(name, value, minimum)
        if isinstance(columns, str):
            raise ValueError(f"columns must be a list of names: {columns!r}")
        shard = is_ray_shard(source)
        if shard and (rank, size) not in ((None, None), (0, 1)):
            raise ValueError(
                "a shard of a Ray data set is one rank's already: pass no rank and no size: "
                f"{rank}, {size}"
            )
        self.rank, self.size = (0, 1) if shard else resolve_rank_and_size(rank, size)
        self.batch_size, self.seed = batch_size, seed
        self._columns = None if columns is None else list(columns)
        self._steps = steps_per_epoch
        self._round = self.size * batch_size
        if shuffle_rows % self._round:
            raise ValueError(
                f"shuffle_rows must be a multiple of size * batch_size, which is {self._round}: "
                f"{shuffle_rows}"
            )
        self._window = shuffle_rows
        self._read: Callable[[int], Any]
        if shard:
            self._read = _ray_shard_reader(source)
        else:
            self._read = (
                source if callable(source) else _source_reader(source, self._columns, self.size)
            )
        self._transform = transformation_fn
        self._shapes = ResultShapeRecord()
        self._wrap = make_result_converter(framework)
        self._start = (0, 0, 0)
        """Start of the next iteration: the pass, the first row of the window, and rows already
        taken from it.
        """
        self._done = 0
        """Steps of the iteration that were done before it was resumed."""
        self._rounds: Generator[tuple[tuple[int, int, int], Batch | None]] | None = None
        self._produced_at = self._consumed_at = (*self._start, 0)

    def __len__(self) -> int:
        """Batches of the next iteration.

        Raises:
            TypeError: Only the stream knows.
        """
        if self._steps is None:
            raise TypeError("a stream has no length: set steps_per_epoch")
        return self._steps - self._done

    def _iterate(self) -> Iterator[Batch]:
        first = done = self._done
        self._done = 0
        rounds = self._rounds = self._rounds or self._read_passes()
        ends = 0
        while self._steps is None or done < self._steps:
            try:
                position, batch = next(rounds)
            # a generator that has raised is over: the next iteration reads again from here
            except BaseException:
                if self._rounds is rounds:
                    self._rounds, self._start = None, self._produced_at[:3]
                raise
            # the stream has ended, perhaps with the last batch of the iteration before
            if batch is None:
                ends += 1
                if ends > 1 or done > first:
                    return
                continue
            done += 1
            self._produced_at = (*position, done % self._steps if self._steps else 0)
            yield batch

    def _read_passes(self) -> Generator[tuple[tuple[int, int, int], Batch | None]]:
        """Batches, each with the place after it; between two passes over the stream, none."""
        number, start, taken = self._start
        while True:
            yield from self._read_pass(number, start, taken)
            number, start, taken = number + 1, 0, 0
            self._produced_at = self._consumed_at = (number, 0, 0, 0)
            yield (number, 0, 0), None

    def _read_pass(
        self, number: int, start: int, taken: int
    ) -> Iterator[tuple[tuple[int, int, int], Batch]]:
        for window in _cut_windows(self._read_tables(start), self._window or self._round):
            rows = window.num_rows
            order = np.arange(rows)
            if self._window:
                order = np.random.default_rng([self.seed, number, start]).permutation(rows)
            while taken < rows:
                rows_of_all = order[taken : taken + self._round]
                mine = rows_of_all[self.rank :: self.size]
                taken = min(rows, taken + self._round)
                position = (number, start, taken) if taken < rows else (number, start + rows, 0)
                if len(mine):
                    yield position, self._make_batch(window.take(mine), window)
                else:  # a row of another rank has the same types and shapes
                    single_row = self._make_batch(window.take(rows_of_all[:1]), window)
                    yield position, {name: values[:0] for name, values in single_row.items()}
            start, taken = start + rows, 0

    def _read_tables(self, start: int) -> Iterator[pa.Table]:
        for part in self._read(start):
            table = pa.Table.from_batches([part]) if isinstance(part, pa.RecordBatch) else part
            if not isinstance(table, pa.Table):
                raise TypeError(
                    f"a stream must return pyarrow record batches or tables: {type(part).__name__}"
                )
            refuse_missing_columns(self._columns or (), table.column_names, "the stream")
            yield table if self._columns is None else table.select(self._columns)

    def _make_batch(self, table: pa.Table, window: pa.Table) -> Batch:
        if (transform := self._transform) is not None:

            def transform_window() -> Generator[dict[str, Any]]:
                yield _check_result_arrays(transform(_to_record_batch(window)))

            result = self._shapes.with_known_shapes(
                _check_result_arrays(transform(_to_record_batch(table))), transform_window
            )
            return self._wrap(None, result, None)  # pyright: ignore[reportArgumentType]
        arrays = {
            name: column_from_arrow(name, table.column(name), "the stream")
            for name in table.column_names
        }
        return self._wrap(None, arrays, None)  # pyright: ignore[reportArgumentType] - used for weights alone

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the consumer, the same on every rank after the same number of
        batches.

        It fits another number of ranks and another batch size, if `shuffle_rows` is the same.
        """
        number, start, taken, done = self._consumed_at
        return {
            "version": _STATE_VERSION,
            "pass": number,
            "row": start,
            "taken": taken,
            "steps": done,
            "seed": self.seed,
            "shuffle_rows": self._window,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue where a state was taken.

        Args:
            state: From `state_dict`; its seed replaces this loader's.

        Raises:
            ValueError: A state with other windows, or that this version cannot read.
        """
        if state.get("version") != _STATE_VERSION or "shuffle_rows" not in state:
            raise ValueError(f"not a state of StreamLoader: version {state.get('version')}")
        if state["shuffle_rows"] != self._window:
            raise ValueError(
                f"the state has shuffle_rows={state['shuffle_rows']}, this loader {self._window}"
            )
        self.close()
        self.seed = int(state["seed"])
        self._start = (int(state["pass"]), int(state["row"]), int(state["taken"]))
        self._done = int(state["steps"]) % self._steps if self._steps else 0
        self._produced_at = self._consumed_at = (*self._start, self._done)

    def close(self) -> None:
        """Ends reading. The next iteration continues at the position of the consumer."""
        if self._rounds is not None:
            self._rounds.close()
        self._rounds = None
        self._start = self._consumed_at[:3]


def _source_reader(
    source: Any, columns: list[str] | None, size: int
) -> Callable[[int], Iterator[Any]]:
    """Returns a function that reads a source of `prepare_data` from any row on."""
    opened = open_source(source)
    if size > 1 and not opened.ordered:
        kind = type(source)
        raise ValueError(
            f"the source, {kind.__module__}.{kind.__qualname__}, may return its rows in a "
            "different "
            "order on each of the "
            f"{format_counted_noun(size, 'rank')}, so some rows would be lost and others "
            "repeated: use frame_loader, or "
            "a "
            "function that returns "
            "the same rows each time"
        )
    names = opened.schema.names if columns is None else columns
    refuse_missing_columns(names, opened.schema.names, "the source")
    read = False

    def read_batches(start: int) -> Iterator[Any]:
        nonlocal read
        if read and not opened.is_rereadable:
            raise ValueError("the stream can be read once: pass a function that opens it again")
        if start and not opened.ordered:
            raise ValueError(
                "the source returns its rows in a different order each time, so it cannot be "
                "resumed"
            )
        read = True
        for unit in opened.units(names):
            for batch in unit.batches():
                if start < batch.num_rows:
                    yield batch.slice(start)
                start = max(0, start - batch.num_rows)

    return read_batches


def _ray_shard_reader(shard: Any) -> Callable[[int], Iterator[pa.Table]]:
    """Returns one rank's rows of a Ray data set, whose order Ray may change with each pass."""

    def read_tables(start: int) -> Iterator[pa.Table]:
        if start:
            raise ValueError(
                "a shard of a Ray data set begins with its first row, so this state cannot be "
                "resumed"
            )
        return ray_tables(shard)

    return read_tables


def _to_record_batch(table: pa.Table) -> pa.RecordBatch:
    parts = table.combine_chunks().to_batches()
    return parts[0] if parts else pa.RecordBatch.from_pylist([], schema=table.schema)


def _cut_windows(tables: Iterator[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Tables of so many rows, and the rest."""
    held: list[pa.Table] = []
    count = 0
    for table in tables:
        rest = table
        while count + rest.num_rows >= rows:
            held.append(rest.slice(0, rows - count))
            rest = rest.slice(rows - count)
            yield pa.concat_tables(held)
            held, count = [], 0
        if rest.num_rows:
            held.append(rest)
            count += rest.num_rows
    if count:
        yield pa.concat_tables(held)
