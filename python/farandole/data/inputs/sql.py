# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Rows of a query on files, tables and frames.

Apache DataFusion's own Python package runs the query. It comes as a wheel, streams its results
through the Arrow C interface, and spills to disk if its share of memory is not sufficient. Building
the same engine into our extension would take a quarter of an hour, so there is no crate for it
here.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from farandole.data.inputs.catalog_names import resolve_source_options
from farandole.data.inputs.frames import in_memory_table
from farandole.data.inputs.int96 import check_int96_files, read_int96_as_microseconds
from farandole.data.inputs.legacy_calendar import refuse_ambiguous_files
from farandole.data.inputs.source_units import RowSource, units_of_single_stream
from farandole.data.inputs.sources import open_files, table_as_plain_dataset, table_source
from farandole.data.inputs.tables import open_if_table
from farandole.data.lazy_pyarrow import pa

if TYPE_CHECKING:
    from collections.abc import Iterator

QUERY_MEMORY_BYTES = 256 << 20
"""Bytes that sorts, joins and groups may hold before they spill."""
DEFAULT_TABLE_NAME = "source"
"""The name of a source in a query if it has no other name."""
_NONDETERMINISTIC_FUNCTIONS = ("random(", "now(", "current_", "uuid(", "today(")


class _SpillDirectory:
    """A directory for the spilled rows of a query, which is removed with its last user.

    DataFusion's own directory could be entered by other users of the host.
    """

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="farandole-query-")
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def query_source(
    source: Any,
    sql: str,
    *,
    format: str | None = None,  # noqa: A002 - as pyarrow calls it
    types: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> RowSource:
    """Returns the rows of a query on a source.

    Args:
        source: As for `open_source`, the table `source`; or several by the names that the query has
            for them.
        sql: A select.
        format: Format of files.
        types: Types by column, for formats that have none.
        options: Options of CSV and JSON.
        storage_options: Options of all paths, as for a store.

    Returns:
        The query's columns, and one stream of its rows.

    Raises:
        ImportError: datafusion is not installed.
        ValueError: A query that does not fit.
    """
    try:
        import datafusion  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("sql= needs DataFusion: pip install 'farandole[sql]'") from error

    spill = _SpillDirectory()
    runtime = (
        datafusion.RuntimeEnvBuilder()
        .with_disk_manager_specified(spill.path)
        .with_fair_spill_pool(QUERY_MEMORY_BYTES)
    )
    context = datafusion.SessionContext(datafusion.SessionConfig(), runtime)
    prints = []
    for name, given_source in (
        source.items() if isinstance(source, Mapping) else [(DEFAULT_TABLE_NAME, source)]
    ):
        found = resolve_source_options(given_source, storage_options)
        prints.append((name, _register_table(context, name, found, format, types, options)))
    try:
        frame = context.sql(sql)
        schema = frame.schema()
    except Exception as error:
        raise ValueError(
            f"not a query of {', '.join(name for name, _ in prints)}: {error}"
        ) from error
    known = [text for _, text in prints if text is not None]
    fixed = len(known) == len(prints) and not any(
        moment in sql.lower() for moment in _NONDETERMINISTIC_FUNCTIONS
    )
    digest = hashlib.sha256(
        "\n".join([sql, *(f"{name} {text}" for name, text in prints)]).encode()
    ).hexdigest()

    units = units_of_single_stream(
        "the query", lambda columns: _stream_query(frame, columns, spill)
    )
    # Without ORDER BY, a query may return its rows in a different order each time.
    return RowSource(schema, f"query {digest}" if fixed else None, units, ordered=False)


def _register_table(
    context: Any,
    name: str,
    source: Any,
    kind: str | None,
    types: Mapping[str, Any] | None,
    options: Mapping[str, Any] | None,
) -> str | None:
    at_version = open_if_table(source)
    if at_version is not None:
        plain = table_as_plain_dataset(at_version)
        if plain is not None:
            refuse_ambiguous_files(plain)
            context.register_dataset(name, plain)
        else:
            rows = table_source(at_version)
            units = rows.units(rows.schema.names)
            batches = [batch for unit in units for batch in unit.batches()]
            context.register_record_batches(name, [batches])
        return at_version.fingerprint
    found = open_files(source, kind, types, options)
    if found is not None:
        dataset = read_int96_as_microseconds(found[0])
        check_int96_files(dataset)
        refuse_ambiguous_files(dataset)
        context.register_dataset(name, dataset)
        return found[1]
    table = in_memory_table(source)
    if table is None:
        raise TypeError(
            f"a query can read files, tables and frames: {name} is a {type(source).__name__}"
        )
    context.register_record_batches(name, [table.to_batches()])
    return None


def _stream_query(
    frame: Any, columns: list[str], spill: _SpillDirectory
) -> Iterator[pa.RecordBatch]:
    try:
        for batch in pa.RecordBatchReader.from_stream(frame):
            yield batch.select(columns)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"the query failed: {error} (it spills to {spill.path})") from error
