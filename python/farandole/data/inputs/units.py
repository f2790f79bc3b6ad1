# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Units of a source of rows: each is a stream of record batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa

MAX_BATCH_ROWS = 65536
"""Rows of a record batch, at most."""


@dataclass(frozen=True)
class SourceUnit:
    """A stream of record batches that can be read again, unless it is a stream itself."""

    name: str
    batches: Callable[[], Iterator[pa.RecordBatch]]
    is_one_partition: bool = False
    """Whether it is one partition, however many rows it has."""


@dataclass(frozen=True)
class RowSource:
    """The found data: its columns, and how to read some of them."""

    schema: pa.Schema
    fingerprint: str | None
    """The identity of the data; `None` if no later call can ask for the same data."""
    units: Callable[[list[str]], list[SourceUnit]]
    """Streams of these columns; refuses files that disagree about them."""
    ordered: bool = True
    """Whether a stream has the same rows in the same order each time it is read."""
    is_rereadable: bool = True
    """Whether rows can be read more than once."""
