# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Writes Delta and Iceberg tables with Spark, and what Spark reads from each.

Runs in a process of its own, `python spark_tables.py HOME JARS`, with a pyspark for which both
projects have a release, and a directory of their jars. `HOME/tables.json` has the tables: where
each is, and its rows as Spark reads them.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_DELTA_VECTORS = "'delta.enableDeletionVectors'='true'"
_DELTA_CHECKPOINTS = "'delta.checkpointPolicy'='v2', 'delta.checkpointInterval'='1'"
_DELTA_NAMES = "'delta.columnMapping.mode'='name'"
_DELTA_IDS = "'delta.columnMapping.mode'='id'"
_ICEBERG_V2 = "'format-version'='2', 'write.delete.mode'='merge-on-read'"
_ICEBERG_V3 = "'format-version'='3', 'write.delete.mode'='merge-on-read'"
_PARTITIONED_FILES = (
    "CREATE TABLE files_to_add USING parquet PARTITIONED BY (s) LOCATION '{home}/files' AS "
    "SELECT id AS i, id / 4D AS a, array(float(id), float(-id)) AS v, int(id % 3) AS s "
    "FROM range(0, 30, 1, 1)"
)
_ADD_FILES = (
    "CALL ice.system.add_files(table => '{plain}', source_table => '`parquet`.`{home}/files`')"
)
_ROWS_OF_TYPES = (
    "INSERT INTO {t} SELECT id, date_add(DATE '2024-01-01', CAST(id % 2 AS INT)), "
    "CAST(id % 3 AS DECIMAL(5,2)) / 4, id % 2 = 0, timestamp_seconds(1704067200 + id % 3) "
    "FROM range(0, 24, 1, 1)"
)
_COLUMNS = "i BIGINT, a DOUBLE, s INT, v ARRAY<FLOAT>"
_ROWS = (
    "SELECT /*+ COALESCE(1) */ id, CAST(id AS DOUBLE) / 4, CAST(id % 7 AS INT), "
    "array(CAST(id AS FLOAT), CAST(-id AS FLOAT)) FROM range({first}, {last}, 1, 1)"
)

# By name: the options of the table, then statements. `{t}` is the table, `{rows}` are more rows of
# the four columns. Each statement ends a version of the table.
_COMMON: dict[str, list[str]] = {
    "plain": ["INSERT INTO {t} {rows}", "INSERT INTO {t} {rows}"],
    "added": [
        "INSERT INTO {t} {rows}",
        "ALTER TABLE {t} ADD COLUMNS (b DOUBLE)",
        "INSERT INTO {t} SELECT i + 100, a, s, v, CAST(i AS DOUBLE) + 0.5 FROM {t}",
    ],
    "added_list": [
        "INSERT INTO {t} {rows}",
        "ALTER TABLE {t} ADD COLUMNS (w ARRAY<INT>, c STRING)",
    ],
    "deleted_rows": [
        "INSERT INTO {t} {rows}",
        "DELETE FROM {t} WHERE i % 3 = 1 OR i BETWEEN 20 AND 29",
    ],
    "deleted_twice": [
        "INSERT INTO {t} {rows}",
        "DELETE FROM {t} WHERE i % 5 = 1",
        "INSERT INTO {t} {rows}",
        "DELETE FROM {t} WHERE i % 5 IN (2, 3)",
    ],
    "deleted_nulls": [
        "INSERT INTO {t} {rows}",
        "INSERT INTO {t} SELECT 1000 + i, NULL, NULL, v FROM {t} WHERE i < 9",
        "INSERT INTO {t} SELECT 2000 + i, double('NaN'), s, v FROM {t} WHERE i < 9",
        "DELETE FROM {t} WHERE a IS NULL OR isnan(a)",
    ],
    "all_of_a_file_deleted": [
        "INSERT INTO {t} {rows}",
        "INSERT INTO {t} {rows}",
        "DELETE FROM {t} WHERE i < 40",
    ],
    "updated": ["INSERT INTO {t} {rows}", "UPDATE {t} SET a = -1, s = 99 WHERE i % 4 = 0"],
}
_EVOLVED: dict[str, list[str]] = {
    "renamed": [
        "INSERT INTO {t} {rows}",
        "ALTER TABLE {t} RENAME COLUMN a TO z",
        "INSERT INTO {t} {rows}",
    ],
    "swapped": [
        "INSERT INTO {t} {rows}",
        "ALTER TABLE {t} ADD COLUMNS (b DOUBLE)",
        "INSERT INTO {t} SELECT i + 100, a, s, v, CAST(i AS DOUBLE) + 0.5 FROM {t}",
        "ALTER TABLE {t} RENAME COLUMN a TO x",
        "ALTER TABLE {t} RENAME COLUMN b TO a",
        "ALTER TABLE {t} RENAME COLUMN x TO b",
        "INSERT INTO {t} SELECT i + 200, b, s, v, a FROM {t} WHERE i < 100",
    ],
    "dropped_and_added_again": [
        "INSERT INTO {t} {rows}",
        "ALTER TABLE {t} DROP COLUMN a",
        "ALTER TABLE {t} ADD COLUMNS (a DOUBLE)",
        "INSERT INTO {t} SELECT i + 100, s, v, 0.25 FROM {t}",
    ],
    "renamed_and_deleted": [
        "INSERT INTO {t} {rows}",
        "ALTER TABLE {t} RENAME COLUMN a TO z",
        "DELETE FROM {t} WHERE i % 2 = 0",
        "ALTER TABLE {t} ADD COLUMNS (b DOUBLE)",
        "INSERT INTO {t} SELECT i + 100, z, s, v, 1.5 FROM {t}",
        "DELETE FROM {t} WHERE z > 20",
    ],
    "strange_names": [
        "INSERT INTO {t} {rows}",
        "ALTER TABLE {t} ADD COLUMNS (`a b.c` DOUBLE)",
        "INSERT INTO {t} SELECT i + 100, a, s, v, 2.5 FROM {t}",
    ],
}
_WIDENED: dict[str, list[str]] = {
    "widened": [
        "INSERT INTO {t} {rows}",
        "ALTER TABLE {t} ALTER COLUMN s TYPE BIGINT",
        "ALTER TABLE {t} ALTER COLUMN v.element TYPE DOUBLE",
        "INSERT INTO {t} SELECT i + 100, a, s + 4294967296, v FROM {t}",
        "DELETE FROM {t} WHERE i % 3 = 0",
    ],
}
_DELTA_ONLY: dict[str, tuple[str, list[str]]] = {
    "partitioned": (
        f"PARTITIONED BY (s) TBLPROPERTIES ({_DELTA_NAMES}, {_DELTA_VECTORS})",
        [
            "INSERT INTO {t} (i, a, s, v) {rows}",
            "ALTER TABLE {t} RENAME COLUMN s TO part",
            "DELETE FROM {t} WHERE i % 3 = 0",
        ],
    ),
    "partitioned_by_null_text": (
        f"PARTITIONED BY (p) TBLPROPERTIES ({_DELTA_VECTORS})",
        [
            (
                "INSERT INTO {t} SELECT id, CASE id % 3 WHEN 0 THEN 'x y/%41=z' WHEN 1 THEN '01' END "  # noqa: E501
                "FROM range(0, 12, 1, 1)"
            ),
            "DELETE FROM {t} WHERE i = 4",
        ],
    ),
    "defaults": (
        f"TBLPROPERTIES ('delta.feature.allowColumnDefaults'='supported', {_DELTA_VECTORS})",
        [
            "INSERT INTO {t} {rows}",
            "ALTER TABLE {t} ADD COLUMNS (b DOUBLE)",
            "ALTER TABLE {t} ALTER COLUMN b SET DEFAULT 7.5",
            "INSERT INTO {t} (i, a, s, v) SELECT i + 100, a, s, v FROM {t}",
        ],
    ),
    "partitioned_by_types": (
        f"PARTITIONED BY (k, n, q, z) TBLPROPERTIES ({_DELTA_VECTORS})",
        [_ROWS_OF_TYPES, "DELETE FROM {t} WHERE i IN (5, 6)"],
    ),
    "clone": (
        f"TBLPROPERTIES ({_DELTA_VECTORS})",
        [
            "INSERT INTO {t} {rows}",
            "DELETE FROM {t} WHERE i < 4",
            "CREATE TABLE {t2} SHALLOW CLONE {t}",
            "INSERT INTO {t2} {rows}",
            "DELETE FROM {t2} WHERE i % 10 = 7",
        ],
    ),
    "checkpoint_v2": (
        f"TBLPROPERTIES ({_DELTA_CHECKPOINTS}, {_DELTA_VECTORS})",
        ["INSERT INTO {t} {rows}", "INSERT INTO {t} {rows}", "DELETE FROM {t} WHERE i % 7 = 0"],
    ),
}
_ICEBERG_ONLY: dict[str, tuple[str, list[str]]] = {
    "partitioned": (
        f"PARTITIONED BY (s) TBLPROPERTIES ({_ICEBERG_V2})",
        [
            "INSERT INTO {t} {rows}",
            "ALTER TABLE {t} RENAME COLUMN s TO part",
            "DELETE FROM {t} WHERE i % 3 = 0",
        ],
    ),
    "partitions_evolved": (
        f"PARTITIONED BY (bucket(4, i)) TBLPROPERTIES ({_ICEBERG_V3})",
        [
            "INSERT INTO {t} {rows}",
            "ALTER TABLE {t} ADD PARTITION FIELD s",
            "INSERT INTO {t} {rows}",
            "ALTER TABLE {t} DROP PARTITION FIELD bucket(4, i)",
            "INSERT INTO {t} {rows}",
            "DELETE FROM {t} WHERE i % 3 = 0",
        ],
    ),
    "added_files": (
        "PARTITIONED BY (s) TBLPROPERTIES ('format-version'='2')",
        [
            _PARTITIONED_FILES,
            _ADD_FILES,
            "ALTER TABLE {t} RENAME COLUMN a TO z",
            "INSERT INTO {t} {rows}",
            "DELETE FROM {t} WHERE i = 7",
        ],
    ),
    "partitioned_by_types": (
        f"PARTITIONED BY (k, n, q, z) TBLPROPERTIES ({_ICEBERG_V2})",
        [_ROWS_OF_TYPES, "DELETE FROM {t} WHERE i IN (5, 6)"],
    ),
    "reordered": (
        f"TBLPROPERTIES ({_ICEBERG_V2})",
        [
            "INSERT INTO {t} {rows}",
            "ALTER TABLE {t} ALTER COLUMN s FIRST",
            "INSERT INTO {t} SELECT s, i + 100, a, v FROM {t}",
        ],
    ),
    "upgraded": (
        f"TBLPROPERTIES ({_ICEBERG_V2})",
        [
            "INSERT INTO {t} {rows}",
            "DELETE FROM {t} WHERE i % 5 = 1",
            "ALTER TABLE {t} SET TBLPROPERTIES ('format-version'='3')",
            "DELETE FROM {t} WHERE i % 5 = 2",
        ],
    ),
}


# Tables in which Flink or another engine has deleted rows by their values: partitioned or not, and
# what the deleted rows are. Spark writes more rows before and after; it writes no such deletes.
_EQUALITY: dict[str, tuple[str, list[Any]]] = {
    "by_one_column": ("", [("delete", ["a"], [[0.75], [1.0]]), "INSERT INTO {t} {rows}"]),
    "by_two_columns": ("", [("delete", ["s", "a"], [[3, 0.75], [4, 0.75], [5, 3.0]])]),
    "by_null": (
        "",
        [
            "INSERT INTO {t} SELECT 1000, NULL, NULL, array(CAST(1 AS FLOAT), CAST(1 AS FLOAT))",
            ("delete", ["s"], [[None], [2]]),
        ],
    ),
    "by_renamed_column": (
        "",
        [
            ("delete", ["a"], [[0.25]]),
            "ALTER TABLE {t} RENAME COLUMN a TO z",
            "INSERT INTO {t} {rows}",
            ("delete", ["z"], [[0.5], [20.25]]),
        ],
    ),
    "and_positions": ("", ["DELETE FROM {t} WHERE i % 4 = 0", ("delete", ["s"], [[1], [2]])]),
    "and_inserted_again": (
        "",
        [("delete", ["a"], [[0.0], [0.25]]), "INSERT INTO {t} SELECT 0, 0.25, 9, array(1f, 2f)"],
    ),
}


def table_cells() -> dict[str, tuple[str, str, list[str]]]:
    """Returns the tables: by name the format, the options and the statements."""
    cells = {}
    for name, steps in _COMMON.items():
        cells[f"delta-{name}"] = ("delta", f"TBLPROPERTIES ({_DELTA_VECTORS})", steps)
        cells[f"iceberg2-{name}"] = ("iceberg", f"TBLPROPERTIES ({_ICEBERG_V2})", steps)
        cells[f"iceberg3-{name}"] = ("iceberg", f"TBLPROPERTIES ({_ICEBERG_V3})", steps)
    for name, steps in _EVOLVED.items():
        for mode, options in (("name", _DELTA_NAMES), ("id", _DELTA_IDS)):
            told = f"TBLPROPERTIES ({options}, {_DELTA_VECTORS})"
            cells[f"delta_{mode}-{name}"] = ("delta", told, steps)
        cells[f"iceberg2-{name}"] = ("iceberg", f"TBLPROPERTIES ({_ICEBERG_V2})", steps)
        cells[f"iceberg3-{name}"] = ("iceberg", f"TBLPROPERTIES ({_ICEBERG_V3})", steps)
    for name, steps in _WIDENED.items():
        told = f"TBLPROPERTIES ('delta.enableTypeWidening'='true', {_DELTA_VECTORS})"
        cells[f"delta-{name}"] = ("delta", told, steps)
        cells[f"iceberg2-{name}"] = ("iceberg", f"TBLPROPERTIES ({_ICEBERG_V2})", steps)
        told = "TBLPROPERTIES ('delta.enableTypeWidening'='true')"
        cells[f"delta_rewritten-{name}"] = ("delta", told, steps)
    for name, (partitions, steps) in _EQUALITY.items():
        told = f"{partitions} TBLPROPERTIES ({_ICEBERG_V2})"
        cells[f"iceberg_equality-{name}"] = ("iceberg", told, ["INSERT INTO {t} {rows}", *steps])
    cells |= {f"delta-{name}": ("delta", *cell) for name, cell in _DELTA_ONLY.items()}
    cells |= {f"iceberg-{name}": ("iceberg", *cell) for name, cell in _ICEBERG_ONLY.items()}
    return cells


@contextlib.contextmanager
def spark_session(home: Path, jars: str) -> Iterator[SparkSession]:
    """Starts Spark with both formats."""
    from pyspark.sql import SparkSession

    extensions = (
        "io.delta.sql.DeltaSparkSessionExtension,"
        "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
    )
    options = {
        "spark.driver.extraClassPath": f"{jars}/*",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "1",
        "spark.default.parallelism": "1",
        "spark.sql.warehouse.dir": f"{home}/warehouse",
        "spark.local.dir": f"{home}/local",
        "spark.sql.extensions": extensions,
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.catalog.ice": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.ice.type": "hadoop",
        "spark.sql.catalog.ice.warehouse": f"{home}/iceberg",
        "spark.databricks.delta.snapshotPartitions": "1",
    }
    builder = SparkSession.builder.master("local[1]")
    for key, value in options.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()


def delete_by_values(
    spark: SparkSession, path: str, names: list[str], rows: list[list[Any]]
) -> None:
    """Deletes rows of an Iceberg table by their values, as Flink does."""
    context: Any = spark.sparkContext
    jvm = context._jvm  # Iceberg's own library
    iceberg = jvm.org.apache.iceberg
    table = iceberg.hadoop.HadoopTables(context._jsc.hadoopConfiguration()).load(path)
    schema = table.schema().select(names)
    gateway = context._gateway
    ids = gateway.new_array(gateway.jvm.int, len(names))
    for index, name in enumerate(names):
        ids[index] = schema.findField(name).fieldId()
    factory = (
        iceberg.data.GenericFileWriterFactory.Builder(table)
        .dataFileFormat(iceberg.FileFormat.PARQUET)
        .deleteFileFormat(iceberg.FileFormat.PARQUET)
        .equalityFieldIds(ids)
        .equalityDeleteRowSchema(schema)
        .build()
    )
    files = iceberg.io.OutputFileFactory.builderFor(table, 1, len(rows)).build()
    writer = factory.newEqualityDeleteWriter(files.newOutputFile(), table.spec(), None)
    for row in rows:
        record = iceberg.data.GenericRecord.create(schema)
        for name, value in zip(names, row, strict=True):
            record.setField(name, value)
        writer.write(record)
    writer.close()
    table.newRowDelta().addDeletes(writer.toDeleteFile()).commit()


def batch_value(value: Any) -> Any:
    """Returns a value as batches have it: days, microseconds, and floats for decimals."""
    if isinstance(value, dt.datetime):
        return (value.astimezone(dt.UTC) - _EPOCH) // dt.timedelta(microseconds=1)
    if isinstance(value, dt.date):
        return (value - _EPOCH.date()).days
    return float(value) if isinstance(value, decimal.Decimal) else value


def write_table(spark: SparkSession, home: Path, name: str, cell: Any) -> dict[str, Any]:
    """Writes one table and returns its place, and its rows as Spark reads them."""
    kind, options, steps = cell
    safe = name.replace("-", "_")
    path = f"{home}/delta/{safe}" if kind == "delta" else f"{home}/iceberg/db/{safe}"
    table = f"delta.`{path}`" if kind == "delta" else f"ice.db.{safe}"
    columns = _COLUMNS
    if name.endswith("null_text"):
        columns = "i BIGINT, p STRING"
    elif name.endswith("by_types"):
        columns = "i BIGINT, k DATE, n DECIMAL(5,2), q BOOLEAN, z TIMESTAMP"
    words = {"{t2}": f"delta.`{path}_clone`", "{t}": table, "{home}": str(home)}
    words["{plain}"] = f"db.{safe}"
    spark.sql(f"CREATE TABLE {table} ({columns}) USING {kind} {options}")
    states = []
    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            _, names, values = step
            delete_by_values(spark, path, names, values)
            spark.sql(f"REFRESH TABLE {table}")
        else:
            rows = _ROWS.format(first=40 * number, last=40 * number + 40)
            for word, text in {**words, "{rows}": rows}.items():
                step = step.replace(word, text)  # noqa: PLW2901 - filled in
            spark.sql(step)
        states.append(len(spark.table(table).collect()))
    if name.endswith("clone"):
        table, path = words["{t2}"], f"{path}_clone"
    read = spark.table(table)
    return {
        "path": path,
        "columns": read.columns,
        "rows": [[batch_value(value) for value in row] for row in read.collect()],
        "row_counts": states,
    }


def write_tables(home: Path, jars: str, prefix: str = "") -> None:
    """Writes all tables, or those whose names begin so, and `tables.json`. A table that cannot be
    written is an error.
    """
    with spark_session(home, jars) as spark:
        told = {}
        for name, cell in table_cells().items():
            if not name.startswith(prefix):
                continue
            told[name] = write_table(spark, home, name, cell)
    (home / "tables.json").write_text(json.dumps(told))


if __name__ == "__main__":
    write_tables(Path(sys.argv[1]), *sys.argv[2:])
