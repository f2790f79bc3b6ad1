# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Digests of the content of tables."""

from __future__ import annotations

import hashlib
from typing import Any

from farandole.data.lazy_pyarrow import pa


class _HashingSink:
    """A file that keeps only the hash of the written bytes."""

    closed = False

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self._at = 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self._at += len(memoryview(data).cast("B"))
        return self._at

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        """Does nothing: no rows are buffered."""


def table_digest(table: pa.Table) -> str:
    """Returns a hash of a table's rows, which distinguishes the table from others.

    Args:
        table: Any.
    """
    file = _HashingSink()
    with pa.ipc.new_stream(pa.PythonFile(file, mode="w"), table.schema.remove_metadata()) as stream:
        for batch in table.replace_schema_metadata(None).to_batches():
            stream.write_batch(batch)
    return f"table {file.digest.hexdigest()}"
