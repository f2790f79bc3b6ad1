# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""SQL expressions instead of a Python function on batches."""

from __future__ import annotations

import threading
from typing import Any

from farandole.data.lazy_pyarrow import pa

_BATCH_TABLE_NAME = "batch"
_THREAD_LOCALS = threading.local()


class SqlExpressions:
    """A `transformation_fn` of SQL: Apache DataFusion's Rust evaluates it, without the
    interpreter's lock.

    Example:
        ```python
        columns = SqlExpressions("(age - 40) / 12.0 as age", "case when income > 5e4 then 1 else 0 end rich", "label")
        loader = ParquetLoader(path, 4096, transformation_fn=columns, transform_workers=2)
        ```
    """  # noqa: E501

    def __init__(self, *expressions: str, where: str | None = None) -> None:
        """Stores the part of the query after `select`.

        Args:
            expressions: A column of the result each; `*` stands for all columns of the batch.
            where: Condition of the rows that are kept; batches then have different lengths.

        Raises:
            ImportError: datafusion is not installed.
            ValueError: No expressions.
        """
        _import_datafusion()
        if not expressions or not all(expression.strip() for expression in expressions):
            raise ValueError(f"SQL expressions are needed: {expressions!r}")
        self.expressions, self.where = expressions, where

    @property
    def query(self) -> str:
        """The complete query."""
        filter_clause = "" if self.where is None else f" where {self.where}"
        return f"select {', '.join(self.expressions)} from {_BATCH_TABLE_NAME}{filter_clause}"  # noqa: S608 - the user's own, of one batch

    def __call__(self, batch: pa.RecordBatch) -> pa.Table:
        """Evaluates them on a batch.

        Raises:
            ValueError: A query that does not fit the batch, or that failed.
        """
        context = getattr(_THREAD_LOCALS, "context", None)
        if context is None:
            # Rows keep their order where one task does all of the work.
            config = _import_datafusion().SessionConfig().with_target_partitions(1)
            context = _THREAD_LOCALS.context = _import_datafusion().SessionContext(config)
        context.register_record_batches(_BATCH_TABLE_NAME, [[batch]])
        try:
            return pa.table(context.sql(self.query))
        except Exception as error:
            raise ValueError(f"{self.query!r} failed: {error}") from error
        finally:
            context.deregister_table(_BATCH_TABLE_NAME)


def _import_datafusion() -> Any:
    try:
        import datafusion  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "SqlExpressions needs DataFusion: pip install 'farandole[sql]'"
        ) from error
    return datafusion
