# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Files that Spark wrote, with all of its settings: each reader gives what Spark reads, or refuses
the column by name and file.
"""

import itertools

import pytest

from farandole.data import ParquetLoader, frame_loader, prepare_data

COLUMNS = {
    "day": "date'2024-02-29'",
    "old_day": "date'1500-01-01'",
    "last_day": "date'9999-12-31'",
    "moment": "timestamp'2024-01-01 12:00:00.123456'",
    "old_moment": "timestamp'1500-01-01 00:00:00'",
    "before_zones": "timestamp'1890-01-01 00:00:00'",
    "never": "timestamp'9999-12-31 23:59:59'",
    "local": "timestamp_ntz'1500-01-01 12:00:00.123456'",
    "small_decimal": "cast(1.25 as decimal(5,2))",
    "long_decimal": "cast(3333333333333333.33 as decimal(18,2))",
    "wide_decimal": "cast('12345678901234567890.12345' as decimal(38,5))",
    "decimals": "array(cast(1.25 as decimal(9,2)), cast(-7 as decimal(9,2)))",
    "long_decimals": "cast(array(1.25, 3333333333333333.33) as array<decimal(18,2)>)",
    "days": "array(date'2024-02-29', date'1969-12-31')",
    "old_days": "array(date'2024-02-29', date'1500-01-01')",
    "moments": "array(timestamp'2024-01-01 12:00:00.123456', timestamp'9999-12-31 00:00:00')",
    "tiny": "cast(-128 as tinyint)",
    "short": "cast(-32768 as smallint)",
    "long": "cast(9007199254740993 as bigint)",
    "single": "cast(0.1 as float)",
    "flag": "true",
    "flags": "array(true, false)",
}
SETTINGS = [
    {
        "spark.sql.parquet.outputTimestampType": unit,
        "spark.sql.parquet.datetimeRebaseModeInWrite": calendar,
        "spark.sql.parquet.int96RebaseModeInWrite": calendar,
        "spark.sql.parquet.writeLegacyFormat": legacy,
        "spark.sql.parquet.compression.codec": codec,
    }
    for unit, calendar, (legacy, codec) in itertools.product(
        ("INT96", "TIMESTAMP_MICROS", "TIMESTAMP_MILLIS"),
        ("CORRECTED", "LEGACY"),
        (("false", "snappy"), ("true", "gzip")),
    )
]
ORDINARY = ("INT96", "CORRECTED", "false")
OLD = {"old_day", "old_days", "old_moment", "before_zones"}


def spark_numbers(frame):
    """Returns the numbers of batches for what Spark reads, by column."""
    numbers = {
        "date": "cast(unix_date({}) as bigint)",
        "timestamp": "unix_micros({})",
        "timestamp_ntz": "timestampdiff(MICROSECOND, timestamp_ntz'1970-01-01 00:00:00', {})",
    }
    texts, converters = [], {}
    for name, kind in frame.dtypes:
        inner = kind.removeprefix("array<").removesuffix(">")
        word = numbers.get(inner, "{}")
        converters[name] = float if inner.startswith("decimal") else lambda one: one
        text = word.format(name)
        if inner != kind:
            text = f"transform({name}, x -> {word.format('x')})"
        texts.append(f"{text} as {name}")
    (row,) = frame.selectExpr(*texts).collect()
    return {
        name: [convert(one) for one in row[name]]
        if isinstance(row[name], list)
        else convert(row[name])
        for name, convert in converters.items()
    }


def written(spark, home, settings):
    """Writes all columns with some settings, and returns the directory."""
    saved = {name: spark.conf.get(name, None) for name in settings}
    chosen = ", ".join(f"{text} as {name}" for name, text in COLUMNS.items())
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        spark.sql(f"select {chosen}").coalesce(1).write.parquet(str(home))
    finally:
        for name, value in saved.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)
    return str(home)


def read_column(reader, path, name, store):
    if reader == "ParquetLoader":
        (batch,) = ParquetLoader(path, 9, columns=[name])
    elif reader == "prepare_data":
        prepared = prepare_data(path, store, feature_cols=[name], reuse=False)
        (batch,) = ParquetLoader(prepared.train_url, 9)
    else:
        (batch,) = frame_loader(path, 9, [name])
    return batch[name].tolist()[0]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            one,
            id="-".join(one.values()),
            marks=() if index == 2 else pytest.mark.slow,
        )
        for index, one in enumerate(SETTINGS)
    ],
)
def test_readers_give_what_spark_reads_with_all_settings(spark, settings, tmp_path):
    path = written(spark, tmp_path / "rows", settings)
    frame = spark.read.parquet(path)
    is_old = settings["spark.sql.parquet.datetimeRebaseModeInWrite"] == "LEGACY"
    faults, numbers = [], spark_numbers(frame)
    for name, reader in itertools.product(
        COLUMNS, ("ParquetLoader", "prepare_data", "frame_loader")
    ):
        expected = numbers[name]
        try:
            found = read_column(reader, path, name, str(tmp_path / "store"))
        except ValueError as error:
            if not (is_old and name in OLD):
                faults.append(f"{name}, {reader}: refused: {error}")
            elif name not in str(error) or "part-" not in str(error):
                faults.append(f"{name}, {reader}: names no column or file: {error}")
            continue
        if repr(found) != repr(expected) and name != "single":
            faults.append(f"{name}, {reader}: {found} instead of {expected}")
    assert not faults, "\n".join(faults)


def test_a_query_on_dates_of_the_old_calendar_is_refused(spark, tmp_path):
    settings = SETTINGS[6]
    assert settings["spark.sql.parquet.datetimeRebaseModeInWrite"] == "LEGACY"
    path = written(spark, tmp_path / "rows", settings)
    with pytest.raises(ValueError, match=r"column 'old_\w+' of .*part-.*calendar"):
        prepare_data(path, tmp_path / "store", sql="select day, long from source")


@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[-1]], ids=["corrected", "legacy"])
def test_a_spark_dataframe_has_the_same_numbers_with_all_settings_of_its_session(
    spark, settings, tmp_path
):
    frame = spark.read.parquet(written(spark, tmp_path / "rows", SETTINGS[4]))
    names = [name for name in COLUMNS if name != "single"]
    numbers = spark_numbers(frame)
    expected = {name: numbers[name] for name in names}
    saved = {name: spark.conf.get(name, None) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        (batch,) = frame_loader(frame, 9, names, cache=tmp_path / "cache")
    finally:
        for name, value in saved.items():
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)
    found = {name: batch[name].tolist()[0] for name in names}
    assert found == expected
