# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`ParquetLoader`: an iterable of batches."""

from __future__ import annotations

import operator
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from farandole._native.reader import Dataset, Reader
from farandole._native.store import configure, full_path, options_of
from farandole.data.arrays import TEXTS, converter, nested, wrapper
from farandole.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader
from farandole.data.datasets import open_dataset
from farandole.data.learning import encoding_at
from farandole.data.memory import directory_for
from farandole.data.omitted import advised, is_refused, tell
from farandole.data.transform import Transform
from farandole.data.turns import Piece, Place, Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from farandole.data.ragged import Ragged

BYTE_BUDGET = 512 << 20
"""Bytes that one loader holds, by default."""

WEIGHTS = "_weights"
"""Key of the rows' weights in a batch, with `tail="pad"`."""

_STATE_VERSION = 1
_TAILS = {"keep": "keep", "pad": "pad", "drop_last": "drop", "drop": "drop", "join": "join"}


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
        path_or_dataset: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Dataset,
        batch_size: int,
        columns: Sequence[str] | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        size: int | None = None,
        tail: Literal["keep", "pad", "drop_last", "join"] = "keep",
        cast: Mapping[str, str] | None = None,
        fill: Mapping[str, float] | None = None,
        allow_nan: bool = False,
        framework: Literal["numpy", "torch"] = "numpy",
        byte_budget: int = BYTE_BUDGET,
        threads: int | None = None,
        inmemory_cache_all: bool = False,
        transformation_fn: Callable[[Any], Any] | None = None,
        transform_workers: int = 2,
        transform_pool: Literal["thread", "process", "dummy"] = "thread",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Opens the data set.

        Args:
            path_or_dataset: A directory of Parquet files, prepared by Farandole or by anybody; one
                file, a pattern such as `/data/2024-*/*.parquet`, or a list of files, directories
                and patterns; or what `Dataset.open` made.
            batch_size: Rows of one batch of this rank.
            columns: Columns to read; default: all numbers, and vectors of one length. Rank 0 logs a
                warning that names the others. Columns of strings and bytes are read if they are
                named: as NumPy arrays of objects, and by a `transformation_fn`.
            shuffle: Whether rows come in random order, or in the order of the files. Without it,
                every rank reads all files.
            seed: Of the shuffle; the same on every rank.
            rank: This rank; default: that of the running job (or of `torch.distributed`), or 0.
            size: How many ranks share the data; default: that of the running job, or 1.
            tail: What happens to the rows that do not fill a batch on every rank. `keep`: a shorter
                last batch, which may be empty on some ranks. `pad`: a last batch filled up with
                rows of weight 0; batches then have `"_weights"`. `drop_last`: they are left out.
                `join`: a shorter last batch, and no batch on ranks without rows: those have one
                batch less and call `join()`.
            cast: Types to convert to, by column: `{"features": "float32"}`; `"*"` stands for all
                other float columns.
            fill: Replacements of nulls, and of NaN in columns of floats, by column: `{"age": 0.0}`;
                `"*"` stands for all other columns that can hold it. Without it they are errors.
            allow_nan: Accepts NaN and infinities like other values.
            framework: Arrays of NumPy or tensors of torch.
            byte_budget: Bytes of decoded data, of data being fetched and of ready batches, held at
                once. It never changes the order. What a `transformation_fn` makes comes on top.
            threads: Decoding threads; default: 2. Storage over the network is fetched by threads of
                its own.
            inmemory_cache_all: Keeps decoded data in shared memory, for all loaders of this host
                that read the same columns: later epochs read no file. It needs as much memory as
                the decoded data set.
            transformation_fn: Called with every batch as a `pyarrow.RecordBatch`; returns a record
                batch, a table, or a dict of arrays.
            transform_workers: How many batches are transformed at a time.
            transform_pool: `thread`, `process` for functions that hold the interpreter's lock, or
                `dummy`: the thread that iterates.
            storage_options: Credentials and endpoints, as for a store; default: what a store of
                this process has for the place, else the provider's environment. They travel with a
                loader that is pickled.

        Raises:
            FileNotFoundError: There is no Parquet at this path.
            ValueError: Files that disagree, columns that do not exist or that no batch can hold,
                strings as tensors, a tail or framework that does not exist.
        """
        if tail not in _TAILS:
            raise ValueError(f"tail must be keep, pad, drop_last or join: {tail}")
        if isinstance(columns, str):
            raise ValueError(f"columns must be a list of names: {columns!r}")
        here, everywhere = _world() if rank is None or size is None else (rank, size)
        self._given = rank, size
        self.rank = here if rank is None else rank
        self.size = everywhere if size is None else size
        self.batch_size, self.seed = _whole("batch_size", batch_size, 1), _whole("seed", seed)
        self.shuffle, self.tail = shuffle, tail
        self.framework = framework
        self._columns = None if columns is None else list(columns)
        self._cast, self._fill = dict(cast or {}), dict(fill or {})
        self._allow_nan, self._budget = allow_nan, _whole("byte_budget", byte_budget)
        self._threads = None if threads is None else _whole("threads", threads, 1)
        self._cached = inmemory_cache_all
        self._transform = (
            None
            if transformation_fn is None
            else Transform(transformation_fn, transform_workers, transform_pool)
        )
        self._next = (0, 0)
        self._made = self._taken = self._next
        self._turns: Turns | None = None
        self._length_suffix = ""
        """Suffix of the columns with the lengths of ragged columns; without it there are no such
        columns.
        """
        self._paths: str | list[str] | None = None
        if isinstance(path_or_dataset, str | os.PathLike):
            self._paths = full_path(os.fspath(path_or_dataset))
        elif not isinstance(path_or_dataset, Dataset):
            self._paths = [full_path(os.fspath(path)) for path in path_or_dataset]
        if storage_options and self._paths is not None:
            from farandole.stores.options import StorageOptions  # noqa: PLC0415 - loaded with fsspec

            StorageOptions(
                (self._paths,) if isinstance(self._paths, str) else tuple(self._paths),
                storage_options,
            )
        self._open(path_or_dataset if isinstance(path_or_dataset, Dataset) else self._paths or "")
        if columns is None and self.rank == 0:
            tell(self.dataset, set(self.columns), self._what())

    def _what(self) -> str:
        """Returns the rows, in words."""
        return self.dataset.url

    def _lists(self) -> dict[str, Ragged]:
        """Returns the columns of lists of different lengths, as they are stored."""
        encoding = encoding_at(self.dataset.url) if self.dataset.prepared else None
        return {} if encoding is None else dict(encoding.ragged)

    def _open(self, given: str | Sequence[str] | Dataset) -> None:
        self.dataset = given if isinstance(given, Dataset) else open_dataset(given)
        self._convert = converter(self.framework)
        self._wrap = wrapper(self.framework)
        self._ragged = self._lists()
        if self._columns is None and self._ragged:
            self._columns = [
                one.name
                for one in self.dataset.columns
                if one.name in self._ragged
                or (one.dtype not in TEXTS and not is_refused(self.dataset, one.name))
            ]
        if self._columns is not None:
            self._ragged = {
                name: self._ragged[name] for name in self._columns if name in self._ragged
            }
        try:
            self._reader = self._make_reader(self.rank, self.size)
        except ValueError as error:
            raise advised(error) from None
        self._fields = self._reader.columns
        if self._ragged and self._transform is not None:
            raise ValueError(
                f"a transformation_fn gets no ragged columns: leave out {', '.join(self._ragged)}"
            )
        if self.tail == "pad" and any(field.name == WEIGHTS for field in self._fields):
            raise ValueError(
                f"a column is called {WEIGHTS}, as the weights of rows are with tail='pad'"
            )
        texts = [
            field.name
            for field in self._fields
            if field.dtype in TEXTS and field.name not in self._ragged
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
            byte_budget=self._budget,
            threads=self._threads,
            tail=_TAILS[self.tail],  # pyright: ignore[reportArgumentType]
            cast=self._cast or None,
            fill=self._fill or None,
            allow_nan=self._allow_nan,
            pad={name: one.padding() for name, one in self._ragged.items() if not one.nested}
            or None,
            cache=directory_for(self.dataset, self._columns) if self._cached else None,
        )

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are read."""
        return [field.name for field in self._fields]

    def signature(self) -> dict[str, tuple[str, tuple[int | None, ...]]]:
        """Name of NumPy's dtype and shape of one row, of each column of a batch; `object` for
        strings and bytes.

        The length of a ragged column is `None`.

        Raises:
            ValueError: There is a `transformation_fn`: only its results tell.
        """
        if self._transform is not None:
            raise ValueError(
                "a transformation_fn decides what its batches hold: apply it to the dataset instead"
            )
        kinds = dict.fromkeys(TEXTS, "object")
        columns: dict[str, tuple[str, tuple[int | None, ...]]] = {
            field.name: (kinds.get(field.dtype, field.dtype), field.shape) for field in self._fields
        }
        columns |= {name: (one.dtype, (None,)) for name, one in self._ragged.items()}
        return {**columns, WEIGHTS: ("float32", ())} if self.tail == "pad" else columns

    @property
    def epoch(self) -> int:
        """The number of the next iteration's epoch."""
        return self._next[0] if self._turns is None else self._turns.epoch

    def set_epoch(self, epoch: int) -> None:
        """Chooses which epoch the next iteration is."""
        self._start_at(_whole("epoch", epoch), 0)

    def _start_at(self, epoch: int, rows: int) -> None:
        self._next = self._made = self._taken = (epoch, rows)
        if self._turns is not None:
            self._turns.start_at(Place(epoch, rows))

    def __len__(self) -> int:
        """Batches of the next iteration: of a whole epoch, or of the rest of the resumed one."""
        if self._turns is not None:
            return self._turns.rounds_left()
        return self._reader.steps(self._next[1])

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the consumer: less than a kilobyte, the same on all ranks after
        the same batches.

        Taken after any batch, it makes another loader of the same data set continue with the row
        after it, also one of another `batch_size` or `size`. A batch counts as soon as it was
        handed out. A `State` of an elastic job that is given the loader, as in `TorchState(...,
        reader=loader)`, keeps it with every commit.
        """
        epoch, rows = self._taken
        state: dict[str, Any] = {
            "version": _STATE_VERSION,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }
        state["fingerprint"] = self.dataset.fingerprint
        if self._turns is not None:
            place = self._turns.place
            epoch, rows = (
                (place.epoch, place.start)
                if self._turns.epoch == place.epoch
                else (place.epoch + 1, 0)
            )
            if place.left:
                state["left"] = [tuple(piece) for piece in place.left]
        return {**state, "epoch": epoch, "rows": rows}

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
            )
        try:
            epoch, rows = _whole("epoch", state["epoch"]), _whole("rows", state["rows"])
            seed, shuffle = _whole("seed", state["seed"]), bool(state["shuffle"])
            left = tuple(_piece(piece) for piece in state.get("left", ()))
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a state of ParquetLoader: {error}") from error
        if rows > self.dataset.rows:
            raise ValueError(f"the state is of {rows} rows, the data set has {self.dataset.rows}")
        if left and self._turns is None:
            raise ValueError(
                "the state has rows of lost ranks: share the loader with a fault-tolerant "
                "optimizer first"
            )
        if (seed, shuffle) != (self.seed, self.shuffle):
            self.seed, self.shuffle = seed, shuffle
            self._reader = self._make_reader(self.rank, self.size)
        self._start_at(epoch, rows)
        if self._turns is not None:
            self._turns.start_at(Place(epoch, rows, left))

    def _nested(self) -> list[str]:
        """Returns the columns whose batches are nested: they have no rows that could be chosen."""
        return [name for name, one in self._ragged.items() if one.nested]

    def take_turns(self, books: Turns | None = None) -> Turns:
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
        if lists := self._nested():
            raise ValueError(
                f"in an elastic job, lists must be padded: prepare {', '.join(lists)} with Pad"
            )
        if isinstance(self, AsyncDataLoaderMixin):
            raise TypeError(
                "a loader that follows the world cannot create batches ahead in its own thread"
            )
        if self._turns is None:
            self.follow_world()  # which may have changed since the loader was made
            place, drops = Place(*self._taken), self.tail.startswith("drop")
            own = Turns(self.dataset.rows, self.batch_size, drops, self.rank, self.size, place)
            if books is not None and (books.total, books.batch, books.drops) != (
                own.total,
                own.batch,
                own.drops,
            ):
                raise ValueError(
                    f"other ranks read {books.total} rows in batches of {books.batch}: {own}"
                )
            self._turns = own if books is None else books
        return self._turns

    def follow_world(self) -> None:
        """Takes this rank and the number of ranks from the running job again, unless they were
        given.

        The next iteration continues after the last batch that was handed out. For elastic jobs: a
        `State` that has the loader calls it.
        """
        rank, size = self._given
        here, everywhere = _world()
        self.rank, self.size = here if rank is None else rank, everywhere if size is None else size
        self._reader = self._make_reader(self.rank, self.size)
        self._start_at(*self._taken)

    def _mark(self) -> tuple[int, int]:
        return self._made

    def _reached(self, mark: tuple[int, int]) -> None:
        self._taken = mark

    def _iterate(self) -> Iterator[dict[str, Any]]:
        """Reads an epoch; threads end with the iteration, also when it is left early."""
        if self._turns is not None:
            yield from self._read_turns(self._turns)
            return
        epoch, start = self._next
        self._next = (epoch + 1, 0)
        whole = self.size * self.batch_size
        left = self.dataset.rows - start
        steps = left // whole if self.tail.startswith("drop") else -(-left // whole)
        for done, batch in enumerate(self._batches(self._reader, epoch, start), 1):
            self._made = (epoch, start + done * whole) if done < steps else (epoch + 1, 0)
            yield batch

    def _read_turns(self, turns: Turns) -> Iterator[dict[str, Any]]:
        """Like `_iterate`, piece by piece, as the books say."""
        epoch = turns.begin()
        batches: Iterator[dict[str, Any]] = iter(())
        goes_on: Piece | None = None
        try:
            while (piece := turns.next(epoch)) is not None:
                base = piece._replace(offset=0, stride=1)
                if base != goes_on:
                    _close(batches)
                    batches = self._batches(
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
            _close(batches)

    def _batches(self, reader: Reader, epoch: int, start: int) -> Iterator[dict[str, Any]]:
        """Batches of a reader from a row of an epoch on."""
        batches = reader.epoch(epoch, start)
        weights = WEIGHTS if self.tail == "pad" else None
        try:
            if self._transform is None:
                fields = [field for field in self._fields if field.name not in self._ragged]
                for batch in batches:
                    made = self._convert(batch, fields, weights)
                    if self._ragged:
                        padded = {
                            name: one.read(batch, name)
                            for name, one in self._ragged.items()
                            if not one.nested
                        }
                        if self._length_suffix:
                            lengths = {
                                name: one.lengths(batch, name) for name, one in self._ragged.items()
                            }
                            padded |= {
                                name + self._length_suffix: counts
                                for name, counts in lengths.items()
                            }
                        made |= self._wrap(batch, padded, None)
                        lists = {
                            name: one.jagged(batch, name)
                            for name, one in self._ragged.items()
                            if one.nested
                        }
                        made |= {name: nested(rows, self.framework) for name, rows in lists.items()}
                    yield made
            else:
                every = partial(self._make_reader, 0, 1)
                for batch, result in self._transform.run(iter(batches), self._fields, every):
                    yield self._wrap(batch, result, weights)
        finally:
            batches.close()

    def _share(
        self, worker: int, workers: int, epoch: int, start: int, skip: int
    ) -> Iterator[dict[str, Any]]:
        """The batches of this rank number `worker`, `worker + workers`, ... from `start` on, for a
        worker process.

        As long as there are batches for all workers of all ranks, every worker reads as if it were
        a rank: no two decode the same rows. The rest at the end is less than a batch for every
        worker; it is dealt out batch by batch.
        """
        round_rows = workers * self.size * self.batch_size
        rounds = (self.dataset.rows - start) // round_rows
        if skip < rounds:
            reader = self._make_reader(self.rank * workers + worker, self.size * workers)
            batches = self._batches(reader, epoch, start + skip * round_rows)
            try:
                for _, batch in zip(range(rounds - skip), batches, strict=False):
                    yield batch
            finally:
                batches.close()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
        rest = start + rounds * round_rows + worker * self.size * self.batch_size
        if skip <= rounds and rest < self.dataset.rows and self._reader.steps(rest) > 0:
            batches = self._batches(self._reader, epoch, rest)
            try:
                yield from _first(batches)
            finally:
                batches.close()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

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
        is the next epoch.
        """
        from farandole.data.tf_dataset import tf_dataset  # noqa: PLC0415 - optional

        return tf_dataset(self)

    def close(self) -> None:
        """Ends the worker processes of `transformation_fn`; the loader can be used again."""
        if self._transform is not None:
            self._transform.close()

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process; the other one opens the data set again."""
        kept = {
            k: v
            for k, v in vars(self).items()
            if k not in ("dataset", "_reader", "_fields", "_convert", "_wrap")
        }
        url = self.dataset.url
        return {**kept, "_source": (url, self.dataset.fingerprint, options_of(url))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Opens the data set again."""
        url, fingerprint, options = state.pop("_source")
        vars(self).update(state)
        if options:
            configure(url, options)
        self._open(self._paths or url)
        if self.dataset.fingerprint != fingerprint:
            raise ValueError(f"the files have changed since the loader was pickled: {url}")


def _whole(name: str, value: Any, least: int = 0) -> int:
    """Returns an argument that counts something."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number: {value!r}") from None
    if not least <= number < 1 << 64:
        raise ValueError(f"{name} must be at least {least} and below 2**64: {number}")
    return number


def _piece(told: Any) -> Piece:
    """Returns a piece of a state, checked."""
    piece = Piece(*told)
    least = Piece(0, 0, 0, 1, 1, 0, 1)
    piece = Piece(
        *(_whole(name, *pair) for name, *pair in zip(Piece._fields, piece, least, strict=True))
    )
    if piece.rank >= piece.size:
        raise ValueError(f"rank {piece.rank} of {piece.size}")
    return piece


def _close(batches: Iterator[Any]) -> None:
    """Ends the threads of an iteration."""
    close = getattr(batches, "close", None)
    if close is not None:
        close()


def _first(batches: Iterator[Any]) -> Iterator[Any]:
    """The first batch, if there is one."""
    for batch in batches:
        yield batch
        return


def _world() -> tuple[int, int]:
    """Rank and size of the running job: of Farandole, or else of `torch.distributed`."""
    from farandole._native import engine  # noqa: PLC0415 - only a loader without its own rank asks

    if engine.is_initialized():
        world = engine.world()
        return world.rank, world.size
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
