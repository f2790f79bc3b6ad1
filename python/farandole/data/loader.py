# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`ParquetLoader`: an iterable of batches."""

from __future__ import annotations

import operator
import sys
from contextlib import closing
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from farandole._native.reader import Dataset, Reader
from farandole._native.store import full_path
from farandole.common.logs import start_logging_for_urls
from farandole.data.arrays import (
    VARIABLE_WIDTH_DTYPES,
    make_batch_converter,
    make_result_converter,
    to_nested_column,
)
from farandole.data.batch_transform import BatchTransform
from farandole.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader, close_iterator
from farandole.data.data_memory_budget import choose_cache_directory, default_byte_budget
from farandole.data.datasets import open_parquet, refuse_types_for_table
from farandole.data.encoding_learning import read_encoding
from farandole.data.inputs.catalog_names import resolve_source_options
from farandole.data.inputs.tables import is_table, open_if_table, open_table
from farandole.data.loader_arguments import native_reader_types, numeric_fill_by_column
from farandole.data.row_assignment import RowAssignment, RowPiece, UnassignedRows
from farandole.data.skipped_columns import (
    is_unreadable_column,
    warn_of_skipped_columns,
    with_column_advice,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from farandole.data.inputs.table_snapshot import TableSnapshot
    from farandole.data.ragged import RaggedColumn

WEIGHTS_KEY = "_weights"
"""Key of the rows' weights in a batch, with `tail="pad"`."""

_STATE_VERSION = 1
_READER_TAILS = {"keep": "keep", "pad": "pad", "drop_last": "drop", "drop": "drop", "join": "join"}


class ParquetLoader(BaseDataLoader):
    """One rank's batches of a data set; every iteration is the next epoch.

    The order of an epoch is a function of the data set, the seed and the number of the epoch: where
    `size * batch_size` is equal, all ranks together see the same batches at every size. All ranks
    have the same number of batches.

    Batches are dicts of writable tensors or arrays that share one piece of memory, which lives as
    long as any of them.
    """

    def __init__(
        self,
        path_or_dataset: str
        | os.PathLike[str]
        | Sequence[str | os.PathLike[str]]
        | Dataset
        | TableSnapshot,
        batch_size: int,
        columns: Sequence[str] | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        size: int | None = None,
        tail: Literal["keep", "pad", "drop_last", "join"] = "keep",
        cast: Mapping[str, str] | None = None,
        fill: Mapping[str, float] | float | None = None,
        allow_nan: bool = False,
        framework: Literal["numpy", "torch"] = "numpy",
        byte_budget: int | None = None,
        threads: int | None = None,
        inmemory_cache_all: bool = False,
        transformation_fn: Callable[[Any], Any] | None = None,
        transform_workers: int = 2,
        transform_pool: Literal["thread", "process", "dummy"] = "thread",
        storage_options: Mapping[str, Any] | None = None,
        types: Mapping[str, Any] | None = None,
    ) -> None:
        """Opens the data set.

        Args:
            path_or_dataset: A directory of Parquet files, prepared by Farandole or by anybody; one
                file, a pattern such as `/data/2024-*/*.parquet`, or a list of files, directories
                and patterns; a Delta or Iceberg table, by its path, as an object of deltalake or
                pyiceberg, or at a version that `open_table` chose; a table of Unity Catalog,
                `uc://catalog.schema.table`, or files in a volume, `uc://catalog.schema.volume/path`;
                or what `Dataset.open` made.
            batch_size: Rows of one batch of this rank.
            columns: Columns to read; default: all numbers, and vectors of one length. Rank 0 logs a
                warning that names the others. Columns of strings and bytes are read if they are
                named: as NumPy arrays of objects, and by a `transformation_fn`.
            shuffle: Whether rows come in random order, or in the order of the files. Without it,
                every rank reads all files.
            seed: Seed of the shuffle; the same on every rank.
            rank: This rank; default: the rank in the running job (or in `torch.distributed`), or 0.
            size: Number of ranks that share the data; default: the size of the running job, or 1.
            tail: Treatment of the rows that do not fill a batch on every rank. `keep`: a shorter
                last batch, which may be empty on some ranks. `pad`: a last batch filled up with
                rows of weight 0; batches then have `"_weights"`. `drop_last`: they are left out.
                `join`: a shorter last batch, and no batch on ranks without rows: those have one
                batch less and call `join()`.
            cast: Types to convert to, by column: `{"features": "float32"}`; `"*"` stands for all
                other float columns.
            fill: Replacements of nulls, and of NaN in columns of floats, by column: `{"age": 0.0}`;
                `"*"`, or a number alone, stands for all other columns that can hold it. Without it
                they are errors.
            allow_nan: Accepts NaN and infinities like other values.
            framework: Arrays of NumPy or tensors of torch.
            byte_budget: Bytes of decoded data, of data being fetched and of ready batches, held at
                once; default: 512 MiB, or a quarter of the memory that the host and the cgroups of
                this process allow, if that is less, and at least 128 MiB. It never changes the
                order. Results of a `transformation_fn` are not counted.
            threads: Decoding threads; default: 2. Storage over the network is fetched by threads of
                its own.
            inmemory_cache_all: Keeps decoded data in shared memory, for all loaders of this host
                that read the same columns: later epochs read no file. It needs as much memory as
                the decoded data set.
            transformation_fn: Called with every batch as a `pyarrow.RecordBatch`; returns a record
                batch, a table, or a dict of arrays.
            transform_workers: Number of batches that are transformed at a time.
            transform_pool: `thread`, `process` for functions that hold the interpreter's lock, or
                `dummy`: the thread that iterates.
            storage_options: Credentials and endpoints, as for a store; default: the options of a
                store of this process with the same location, else the provider's environment. A
                pickled loader contains them.
            types: Types of columns whose values are in the names of directories, `string` or a
                type of numbers of NumPy or Arrow: `{"code": "string"}` keeps the zeros of
                `code=01001`. Without it, columns of numbers are int64 or float64.

        Raises:
            FileNotFoundError: There is no Parquet at this path.
            ValueError: Files that disagree, columns that do not exist or that no batch can hold,
                strings as tensors, a tail or framework that does not exist.
        """
        if tail not in _READER_TAILS:
            raise ValueError(f"tail must be keep, pad, drop_last or join: {tail}")
        if isinstance(columns, str):
            raise ValueError(f"columns must be a list of names: {columns!r}")
        self._given = rank, size
        self.rank, self.size = resolve_rank_and_size(rank, size)
        self.batch_size, self.seed = (
            _whole_number("batch_size", batch_size, 1),
            _whole_number("seed", seed),
        )
        self.shuffle, self.tail = shuffle, tail
        self.framework = framework
        self._columns = None if columns is None else list(columns)
        self._types = native_reader_types(types)
        self._cast, self._fill = dict(cast or {}), numeric_fill_by_column(fill)
        self._allow_nan = allow_nan
        self._budget = None if byte_budget is None else _whole_number("byte_budget", byte_budget)
        self._threads = None if threads is None else _whole_number("threads", threads, 1)
        self._cached = inmemory_cache_all
        self._transform = (
            None
            if transformation_fn is None
            else BatchTransform(transformation_fn, transform_workers, transform_pool)
        )
        self._next_position = (0, 0)
        self._produced_at = self._consumed_at = self._next_position
        self._assignment: RowAssignment | None = None
        self._length_suffix = ""
        """Suffix of the columns with the lengths of ragged columns; without it there are no such
        columns.
        """
        self._paths: str | list[str] | None = None
        self._table: TableSnapshot | None = None
        """A table at the version that all copies of this loader read."""
        if is_table(path_or_dataset):
            self._table = open_table(path_or_dataset)
        elif not isinstance(path_or_dataset, Dataset):
            found = resolve_source_options(path_or_dataset, storage_options)
            if not is_table(found):  # as the name of an Iceberg table
                found = full_path(found) if isinstance(found, str) else list(map(full_path, found))
                self._paths = found
                start_logging_for_urls([found] if isinstance(found, str) else found)
            self._table = open_if_table(found)
        if self._table is not None:
            refuse_types_for_table(self._table, types)
        self._open_dataset(
            path_or_dataset if isinstance(path_or_dataset, Dataset) else self._paths or ""
        )
        if columns is None and self.rank == 0:
            warn_of_skipped_columns(self.dataset, set(self.columns), self._source_description())

    def _source_description(self) -> str:
        """Returns the source of the rows, for messages."""
        return self.dataset.url

    def _stored_ragged_columns(self) -> dict[str, RaggedColumn]:
        """Returns the columns of lists of different lengths, as they are stored."""
        encoding = read_encoding(self.dataset.url) if self.dataset.is_prepared else None
        return {} if encoding is None else dict(encoding.ragged)

    def _open_dataset(self, given: str | Sequence[str] | Dataset) -> None:
        if self._table is not None:
            self.dataset = self._table.open_dataset()
        elif isinstance(given, Dataset):
            self.dataset = given
        else:
            start_logging_for_urls((given,) if isinstance(given, str) else given)
            self.dataset = open_parquet(given, self._types)
        self._convert = make_batch_converter(self.framework)
        self._wrap = make_result_converter(self.framework)
        self._ragged = self._stored_ragged_columns()
        if self._columns is None and self._ragged:
            self._columns = [
                field.name
                for field in self.dataset.columns
                if field.name in self._ragged
                or (
                    field.dtype not in VARIABLE_WIDTH_DTYPES
                    and not is_unreadable_column(self.dataset, field.name)
                )
            ]
        if self._columns is not None:
            self._ragged = {
                name: self._ragged[name] for name in self._columns if name in self._ragged
            }
        try:
            self._reader = self._make_reader(self.rank, self.size)
        except ValueError as error:
            raise with_column_advice(error) from None
        self._fields = self._reader.columns
        if self._ragged and self._transform is not None:
            raise ValueError(
                f"a transformation_fn gets no ragged columns: leave out {', '.join(self._ragged)}"
            )
        if self.tail == "pad" and any(field.name == WEIGHTS_KEY for field in self._fields):
            raise ValueError(
                f"a column is called {WEIGHTS_KEY}, as the weights of rows are with tail='pad'"
            )
        texts = [
            field.name
            for field in self._fields
            if field.dtype in VARIABLE_WIDTH_DTYPES and field.name not in self._ragged
        ]
        if texts and self.framework == "torch" and self._transform is None:
            raise ValueError(
                'tensors cannot hold strings: a transformation_fn, or framework="numpy", can '
                f"read {', '.join(texts)}"
            )

    def _make_reader(self, rank: int, size: int) -> Reader:
        return Reader(
            self.dataset,
            columns=self._columns,
            batch_size=self.batch_size,
            rank=rank,
            size=size,
            seed=self.seed,
            shuffle=self.shuffle,
            byte_budget=default_byte_budget() if self._budget is None else self._budget,
            threads=self._threads,
            tail=_READER_TAILS[self.tail],  # pyright: ignore[reportArgumentType]
            cast=self._cast or None,
            fill=self._fill or None,
            allow_nan=self._allow_nan,
            pad={
                name: layout.native_padding_argument()
                for name, layout in self._ragged.items()
                if not layout.nested
            }
            or None,
            cache=choose_cache_directory(self.dataset, self._columns) if self._cached else None,
        )

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are read."""
        return [field.name for field in self._fields]

    def signature(self) -> dict[str, tuple[str, tuple[int | None, ...]]]:
        """Returns the NumPy dtype's name and the shape of one row for each column of a batch;
        `object` for strings and bytes.

        The length of a ragged column is `None`.

        Raises:
            ValueError: There is a `transformation_fn`, which decides the columns.
        """
        if self._transform is not None:
            raise ValueError(
                "a transformation_fn decides what its batches hold: apply it to the dataset instead"
            )
        kinds = dict.fromkeys(VARIABLE_WIDTH_DTYPES, "object")
        columns: dict[str, tuple[str, tuple[int | None, ...]]] = {
            field.name: (kinds.get(field.dtype, field.dtype), field.shape) for field in self._fields
        }
        columns |= {name: (layout.dtype, (None,)) for name, layout in self._ragged.items()}
        return {**columns, WEIGHTS_KEY: ("float32", ())} if self.tail == "pad" else columns

    @property
    def epoch(self) -> int:
        """The number of the next iteration's epoch."""
        return self._next_position[0] if self._assignment is None else self._assignment.epoch

    def set_epoch(self, epoch: int) -> None:
        """Chooses which epoch the next iteration is."""
        self._set_start_position(_whole_number("epoch", epoch), 0)

    def _set_start_position(self, epoch: int, rows: int) -> None:
        self._next_position = self._produced_at = self._consumed_at = (epoch, rows)
        if self._assignment is not None:
            self._assignment.reset_to_position(UnassignedRows(epoch, rows))

    def __len__(self) -> int:
        """Batches of the next iteration: of a whole epoch, or of the rest of the resumed one."""
        if self._assignment is not None:
            return self._assignment.rounds_left()
        return self._reader.step_count(self._next_position[1])

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the consumer: less than a kilobyte, the same on all ranks after
        the same batches.

        Taken after any batch, it makes another loader of the same data set continue with the row
        after it, also one of another `batch_size` or `size`. A batch counts as soon as it was
        handed out. A `State` of an elastic job that is given the loader, as in `TorchState(...,
        reader=loader)`, keeps it with every commit.
        """
        epoch, rows = self._consumed_at
        state: dict[str, Any] = {
            "version": _STATE_VERSION,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }
        state["fingerprint"] = self.dataset.fingerprint
        if self._table is not None:
            state["table_version"] = self._table.version
        if self._assignment is not None:
            position = self._assignment.position
            epoch, rows = (
                (position.epoch, position.start)
                if self._assignment.epoch == position.epoch
                else (position.epoch + 1, 0)
            )
            if position.lost_pieces:
                state["left"] = [tuple(piece) for piece in position.lost_pieces]
        return {**state, "epoch": epoch, "rows": rows}

    def _describe_versions(self, state: Mapping[str, Any]) -> str:
        version = state.get("table_version")
        if self._table is None or version in (None, self._table.version):
            return ""
        return (
            f". The table is at version {self._table.version} here, and the state at version "
            f"{version}: open_table(..., version={version}) opens that version"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue where a state was taken.

        Args:
            state: From `state_dict`; its seed and shuffling replace this loader's.

        Raises:
            ValueError: A state of another data set, or that this version cannot read.
        """
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"not a state of this version of ParquetLoader: version {state.get('version')}"
            )
        lacking = sorted({"epoch", "rows", "seed", "shuffle", "fingerprint"} - set(state))
        if lacking:
            raise ValueError(f"not a state of ParquetLoader, it lacks {', '.join(lacking)}")
        if state["fingerprint"] != self.dataset.fingerprint:
            raise ValueError(
                "the state belongs to another data set, or the files have changed: "
                f"{state['fingerprint']} there, {self.dataset.fingerprint} in {self.dataset.url}"
                f"{self._describe_versions(state)}"
            )
        try:
            epoch, rows = (
                _whole_number("epoch", state["epoch"]),
                _whole_number("rows", state["rows"]),
            )
            seed, shuffle = _whole_number("seed", state["seed"]), bool(state["shuffle"])
            lost_pieces = tuple(_parse_piece(piece) for piece in state.get("left", ()))
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a state of ParquetLoader: {error}") from error
        if rows > self.dataset.rows:
            raise ValueError(f"the state is of {rows} rows, the data set has {self.dataset.rows}")
        if lost_pieces and self._assignment is None:
            raise ValueError(
                "the state has rows of lost ranks: share the loader with a fault-tolerant "
                "optimizer first"
            )
        if (seed, shuffle) != (self.seed, self.shuffle):
            self.seed, self.shuffle = seed, shuffle
            self._reader = self._make_reader(self.rank, self.size)
        self._set_start_position(epoch, rows)
        if self._assignment is not None:
            self._assignment.reset_to_position(UnassignedRows(epoch, rows, lost_pieces))

    def _nested_columns(self) -> list[str]:
        """Returns the columns whose batches are nested: they have no rows that could be chosen."""
        return [name for name, layout in self._ragged.items() if layout.nested]

    def take_turns(self, books: RowAssignment | None = None) -> RowAssignment:
        """Records which rank gets which rows, for a fault-tolerant optimizer:
        `optimizer.share(reader=loader)`.

        Args:
            books: The records of the other ranks, if this rank is new.

        Raises:
            ValueError: With `tail="join"`, where rank and size were given, and where the other
                ranks read otherwise.
            TypeError: A subclass makes batches ahead in a thread.
        """
        if self.tail == "join":
            raise ValueError("tail='join' cannot be used in an elastic job")
        if self._given != (None, None):
            raise ValueError(
                "a loader that follows the world takes rank and size from the world: do not pass "
                "them"
            )
        if lists := self._nested_columns():
            raise ValueError(
                f"in an elastic job, lists must be padded: prepare {', '.join(lists)} with Pad"
            )
        if isinstance(self, AsyncDataLoaderMixin):
            raise TypeError(
                "a loader that follows the world cannot create batches ahead in its own thread"
            )
        if self._assignment is None:
            self.follow_world()  # which may have changed since the loader was made
            position, drops = UnassignedRows(*self._consumed_at), self.tail.startswith("drop")
            own = RowAssignment(
                self.dataset.rows, self.batch_size, drops, self.rank, self.size, position
            )
            if books is not None and (books.total, books.batch, books.drops) != (
                own.total,
                own.batch,
                own.drops,
            ):
                raise ValueError(
                    f"other ranks read {books.total} rows in batches of {books.batch}: {own}"
                )
            self._assignment = own if books is None else books
        return self._assignment

    def follow_world(self) -> None:
        """Takes this rank and the number of ranks from the running job again, unless they were
        given.

        The next iteration continues after the last batch that was handed out. For elastic jobs: a
        `State` that has the loader calls it.
        """
        self.rank, self.size = resolve_rank_and_size(*self._given)
        self._reader = self._make_reader(self.rank, self.size)
        self._set_start_position(*self._consumed_at)

    def _iterate(self) -> Iterator[dict[str, Any]]:
        """Reads an epoch; threads end with the iteration, also when it is left early."""
        if self._assignment is not None:
            yield from self._read_assigned_pieces(self._assignment)
            return
        epoch, start = self._next_position
        self._next_position = (epoch + 1, 0)
        whole = self.size * self.batch_size
        remaining_rows = self.dataset.rows - start
        steps = (
            remaining_rows // whole if self.tail.startswith("drop") else -(-remaining_rows // whole)
        )
        for done, batch in enumerate(self._read_batches(self._reader, epoch, start), 1):
            self._produced_at = (epoch, start + done * whole) if done < steps else (epoch + 1, 0)
            yield batch

    def _read_assigned_pieces(self, turns: RowAssignment) -> Iterator[dict[str, Any]]:
        """Reads like `_iterate`, piece by piece, as the row assignment determines."""
        epoch = turns.advance_to_next_epoch()
        batches: Iterator[dict[str, Any]] = iter(())
        goes_on: RowPiece | None = None
        try:
            while (piece := turns.next_piece(epoch)) is not None:
                base = piece._replace(offset=0, stride=1)
                if base != goes_on:
                    close_iterator(batches)
                    batches = self._read_batches(
                        self._make_reader(piece.rank, piece.size), piece.epoch, piece.start
                    )
                goes_on = base._replace(start=base.start + base.size * base.batch)
                batch = next(batches)
                if (piece.offset, piece.stride) != (0, 1):
                    batch = {
                        name: values[piece.offset :: piece.stride] for name, values in batch.items()
                    }
                yield batch
        finally:
            close_iterator(batches)

    def _read_batches(self, reader: Reader, epoch: int, start: int) -> Generator[dict[str, Any]]:
        """Batches of a reader from a row of an epoch on."""
        batches = reader.read_epoch(epoch, start)
        weights = WEIGHTS_KEY if self.tail == "pad" else None
        try:
            if self._transform is None:
                fields = [field for field in self._fields if field.name not in self._ragged]
                for batch in batches:
                    made = self._convert(batch, fields, weights)
                    if self._ragged:
                        padded = {
                            name: layout.read_padded(batch, name)
                            for name, layout in self._ragged.items()
                            if not layout.nested
                        }
                        if self._length_suffix:
                            lengths = {
                                name: layout.row_lengths(batch, name)
                                for name, layout in self._ragged.items()
                            }
                            padded |= {
                                name + self._length_suffix: counts
                                for name, counts in lengths.items()
                            }
                        made |= self._wrap(batch, padded, None)
                        lists = {
                            name: layout.read_jagged(batch, name)
                            for name, layout in self._ragged.items()
                            if layout.nested
                        }
                        made |= {
                            name: to_nested_column(rows, self.framework)
                            for name, rows in lists.items()
                        }
                    yield made
            else:
                every = partial(self._make_reader, 0, 1)
                for batch, result in self._transform.transform_batches(
                    iter(batches), self._fields, every
                ):
                    yield self._wrap(batch, result, weights)
        finally:
            batches.close()

    def _batches_of_worker_process(
        self, worker: int, workers: int, epoch: int, start: int, skip: int
    ) -> Iterator[dict[str, Any]]:
        """Yields the batches of this rank number `worker`, `worker + workers`, ... from `start` on,
        for a worker process.

        As long as there are batches for all workers of all ranks, every worker reads as if it were
        a rank: no two decode the same rows. The rest at the end is less than a batch for every
        worker; it is dealt out batch by batch.
        """
        round_rows = workers * self.size * self.batch_size
        rounds = (self.dataset.rows - start) // round_rows
        if skip < rounds:
            reader = self._make_reader(self.rank * workers + worker, self.size * workers)
            with closing(self._read_batches(reader, epoch, start + skip * round_rows)) as batches:
                yield from islice(batches, rounds - skip)
        rest = start + rounds * round_rows + worker * self.size * self.batch_size
        if skip <= rounds and rest < self.dataset.rows and self._reader.step_count(rest) > 0:
            with closing(self._read_batches(self._reader, epoch, rest)) as batches:
                yield from islice(batches, 1)

    def as_torch_dataset(self) -> Any:
        """Returns a `torch.utils.data.IterableDataset` of whole batches, for `DataLoader(...,
        batch_size=None)`.

        In a `DataLoader` with workers, batches are as many and as large as without, and every row
        comes once; their rows are others, since every worker reads as if it were a rank. Every
        iteration is the next epoch, with workers as without.
        """
        from farandole.data.torch_dataset import TorchDataset  # noqa: PLC0415 - optional

        return TorchDataset(self)

    def as_tf_dataset(self) -> Any:
        """Returns the loader as a `tf.data.Dataset` of whole batches, as dicts; every iteration
        is the next epoch. TensorFlow reads ahead, so batches of a `GlobalBatchLoader` come as pairs
        with their `loss_factor`, and `state_dict()` is ahead of the batches that were returned.
        """
        from farandole.data.tf_dataset import tf_dataset  # noqa: PLC0415 - optional

        return tf_dataset(self)

    def close(self) -> None:
        """Ends the worker processes of `transformation_fn`; the loader can be used again."""
        if self._transform is not None:
            self._transform.close()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without the parts that belong to this process; the other process opens
        the data set again.
        """
        attributes = {
            k: v
            for k, v in vars(self).items()
            if k not in ("dataset", "_reader", "_fields", "_convert", "_wrap")
        }
        url = self.dataset.url
        from farandole.stores.store_options import StorageOptions  # noqa: PLC0415 - loaded with fsspec

        source = (url, self.dataset.fingerprint, StorageOptions.for_url(url))
        return {**attributes, "_source": source}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Opens the data set again."""
        url, fingerprint, _ = state.pop("_source")
        vars(self).update(state)
        self._open_dataset(self._paths or url)
        if self.dataset.fingerprint != fingerprint:
            raise ValueError(f"the files have changed since the loader was pickled: {url}")


def _whole_number(name: str, value: Any, minimum: int = 0) -> int:
    """Returns an argument that counts something."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number: {value!r}") from None
    if not minimum <= number < 1 << 64:
        raise ValueError(f"{name} must be at least {minimum} and below 2**64: {number}")
    return number


def _parse_piece(values: Any) -> RowPiece:
    """Returns a piece of a state, checked."""
    piece = RowPiece(*values)
    minimums = RowPiece(0, 0, 0, 1, 1, 0, 1)
    piece = RowPiece(
        *(
            _whole_number(name, *pair)
            for name, *pair in zip(RowPiece._fields, piece, minimums, strict=True)
        )
    )
    if piece.rank >= piece.size:
        raise ValueError(f"rank {piece.rank} of {piece.size}")
    return piece


def resolve_rank_and_size(rank: int | None, size: int | None) -> tuple[int, int]:
    """Returns the given rank and size, or for `None` the value of the running job, of Farandole or
    else of `torch.distributed`.
    """
    if rank is not None and size is not None:
        return rank, size
    from farandole._native import engine  # noqa: PLC0415 - only a loader without its own rank asks

    own_rank, world_size = 0, 1
    dist: Any = sys.modules.get("torch.distributed")
    if engine.is_initialized():
        own_rank, world_size = engine.world().rank, engine.world().size
    elif dist is not None and dist.is_available() and dist.is_initialized():
        own_rank, world_size = dist.get_rank(), dist.get_world_size()
    return own_rank if rank is None else rank, world_size if size is None else size
