# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors

"""Shuffled batches from Parquet, read by Rust threads."""

from collections.abc import Sequence
from typing import Literal, final

from typing_extensions import Buffer

def partition_values(path: str) -> dict[str, str | None]:
    """Names and values from the directories of a path, `column=value`; `None` is null."""

def partition_dtype(values: list[str]) -> Literal["int64", "float64", "utf8"]:
    """The dtype of a column of values from names of directories.

    int64 if each value is an optional `-` and digits, and fits; else float64 if each is such a
    number with or without a fraction, and none has more than 15 digits; else utf8.
    """

@final
class DatasetField:
    """One column of a data set."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str:
        """NumPy's name of the element (`"float32"`, `"bool"`), or `"utf8"` or `"binary"`."""
    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row: `()` for a scalar, `(64,)` for a vector."""
    @property
    def nullable(self) -> bool: ...

@final
class Dataset:
    """A directory of Parquet files: prepared by us (with a manifest), or by any program (read by
    its footers).
    """

    @staticmethod
    def open_url(url: str, types: dict[str, str] | None = None) -> Dataset:
        """All files of a directory; `types` has dtypes of columns of names of directories."""
    @staticmethod
    def open_files(
        url: str,
        files: list[tuple[str, dict[str, str | None]]],
        types: dict[str, str] | None = None,
    ) -> Dataset:
        """Some files below a directory, with the values that all rows of a file have in some
        columns, and the dtypes of these columns.
        """
    @staticmethod
    def open_table(
        url: str,
        files: list[tuple[str, dict[str, str | None], bytes]],
        columns: Sequence[object],
    ) -> Dataset:
        """Files of a table below a directory. Each file has its path, the values of columns that it
        lacks, and the positions of its deleted rows as little-endian integers of 64 bits. `columns`
        has a `farandole.data.inputs.table_snapshot.TableColumn` for each column.
        """
    def write_link_manifest(self, at: str) -> None:
        """Writes a manifest to the directory `at` by which these files, where they are, open
        without a look at each.
        """
    @property
    def url(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> list[DatasetField]: ...
    @property
    def row_groups(self) -> list[tuple[int, int, int, int]]:
        """Number of the file, number in the file, rows and bytes of each row group, in the order of
        the rows; bytes are encoded, but not compressed.
        """
    @property
    def fingerprint(self) -> str: ...
    @property
    def is_prepared(self) -> bool:
        """Whether there was a manifest."""

@final
class Reader:
    """A rank's part of a data set, epoch by epoch.

    The order of an epoch is a function of (data set, seed, epoch) alone: where `size * batch_size`
    is equal, global batches hold the same rows at every `size`. All ranks have the same number of
    steps.

    With `shuffle=False` rows come in file order, dealt out row by row: every rank then reads all
    files. Where the order does not matter, `shuffle=True` reads each byte once.
    """

    def __new__(
        cls,
        dataset: Dataset,
        *,
        columns: list[str] | None = None,
        batch_size: int,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        byte_budget: int = 536870912,
        threads: int | None = None,
        tail: Literal["keep", "pad", "drop", "join"] = "keep",
        cast: dict[str, str] | None = None,
        fill: dict[str, float] | None = None,
        allow_nan: bool = True,
        pad: dict[str, tuple[bytes, int, int, bool]] | None = None,
        cache: str | None = None,
    ) -> Reader:
        """Chooses columns and checks the request.

        Args:
            dataset: What to read.
            columns: Which columns, in this order; `None`: every column of numbers that a batch can
                hold.
            batch_size: Rows of one batch of this rank.
            rank: This rank.
            size: How many ranks share the data set.
            seed: Of the shuffle; the same on every rank.
            shuffle: File order when false.
            byte_budget: Bytes of decoded data held at once.
            threads: Reading threads; `None`: 2.
            tail: Rows that do not fill a batch on every rank: a shorter last batch (it may be empty
                on some ranks), a last batch filled up with rows of weight 0, none, or a shorter one
                on those ranks that have rows left.
            cast: Element types to convert to while batches are put together: `{"features":
                "float32"}`. The key `"*"` stands for all other float columns.
            fill: What nulls, and NaN among floats, become, by column; `"*"` stands for all other
                columns.
            allow_nan: Takes NaN that is not filled, and infinities, as values like any others.
            pad: How the rows of ragged columns, which are stored as bytes, become rows of one
                length: the bytes of the value that fills a row, how many values are kept, of what
                the lengths are multiples, and whether every batch has the largest.
            cache: A directory where decoded data is kept for all readers of this host that read the
                same columns.
        """
    @property
    def columns(self) -> list[DatasetField]:
        """The columns of a batch, after `cast`."""
    def step_count(self, start_row: int = 0) -> int:
        """Batches of one epoch, the same on every rank."""
    def read_epoch(
        self, epoch: int, start_row: int = 0, max_steps: int | None = None
    ) -> EpochBatches:
        """Starts reading; `start_row` rows of the epoch (of all ranks together) are skipped, to
        resume. After `max_steps` batches it ends, and no rows of later ones are fetched.
        """

@final
class EpochBatches:
    """Batches in order. Threads end when it is exhausted, closed or dropped."""

    def __iter__(self) -> EpochBatches: ...
    def __next__(self) -> Batch: ...
    def __len__(self) -> int: ...
    def close(self) -> None: ...

@final
class Batch(Buffer):
    """Rows of all columns, in the same order; as a buffer, all its bytes, each column at its
    offset.
    """

    @property
    def rows(self) -> int:
        """Rows in every column, padding included."""
    @property
    def valid_rows(self) -> int:
        """Rows that are no padding; they come first."""
    @property
    def names(self) -> list[str]: ...
    @property
    def column_offsets(self) -> list[int]:
        """First byte of each column, multiples of 64."""
    def column(self, name: str) -> BatchColumn:
        """A column of numbers."""
    def text_buffers(self, name: str) -> tuple[memoryview, memoryview]:
        """A column of texts or bytes, without a copy.

        The first view has the byte where each value begins, and where the last one ends, as int64;
        the second one has all values. If rows are padded, these are `rows` times `length(name)`
        padded ones, and the first view is that of the rows without padding.
        """
    def padded_length(self, name: str) -> int | None:
        """Number of values of each row of a padded column; `None` for other columns."""
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def row_weights(self) -> BatchColumn:
        """float32, one per row: 1, or 0 for padding."""

@final
class BatchColumn(Buffer):
    """One column of one batch: a writable contiguous buffer that starts at a multiple of 64 bytes.

    `torch.frombuffer(column, dtype=...).view(column.shape)` and `numpy.frombuffer(column,
    dtype=column.dtype)` take it without a copy. Empty buffers are refused by torch: look at
    `shape[0]` first.
    """

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, ...)."""
    @property
    def nbytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
