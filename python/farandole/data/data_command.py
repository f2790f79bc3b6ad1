# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The functions of `farandole data`, with arguments that the command has parsed."""

# ruff: noqa: T201 - a command prints its results

from __future__ import annotations

import itertools
import json
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole._native import prepare as native
from farandole._native import store as native_store
from farandole.common.counted_noun import format_counted_noun
from farandole.data.datasets import open_dataset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from farandole.data import Pad

_MAX_SHOWN_ELEMENTS = 8
_PAD_OPTION_TYPES: dict[str, type[int | float]] = {
    "max_length": int,
    "value": float,
    "buckets": int,
}
"""Options of `--ragged`."""


def main(arguments: Sequence[str]) -> int:
    """Runs one command.

    Args:
        arguments: Its name, then `argument=value` for each value given.

    Returns:
        The exit status.
    """
    given: dict[str, list[str]] = defaultdict(list)
    for word in arguments[1:]:
        name, _, value = word.partition("=")
        given[name].append(value)
    commands = {"prepare": _run_prepare, "inspect": _run_inspect, "head": _run_head}
    try:
        return commands[arguments[0]](given)
    except (ImportError, OSError, ValueError) as error:
        print(f"farandole: {error}", file=sys.stderr)
        return 1


def _run_prepare(given: dict[str, list[str]]) -> int:
    from farandole.data.prepare import prepare_data  # noqa: PLC0415 - the other commands need no pyarrow

    single = {name: values[-1] for name, values in given.items()}
    fill = dict(_parse_fill(value) for value in given["fill"])
    done = prepare_data(
        given["source"],
        single["to"],
        feature_cols=_split_names(given["features"]) or None,
        label_cols=_split_names(given["labels"]),
        sample_weight_col=single.get("weight"),
        validation=_parse_validation(single.get("validation")),
        seed=int(single["seed"]),
        fill=fill or None,
        categories=dict(_parse_category(value) for value in given["categories"]),
        ragged=dict(_parse_ragged(value) for value in given["ragged"]) or None,
        validation_stratify=single.get("stratify"),
        validation_group=single.get("group"),
        validation_time=single.get("time"),
        allow_nan="allow-nan" in given,
        format=single.get("format"),  # pyright: ignore[reportArgumentType] - the command has checked it
        types=dict(value.split("=", 1) for value in given["type"]) or None,
        options={
            name: _parse_csv_option(value)
            for name, value in (text.split("=", 1) for text in given["csv"])
        }
        or None,
        sql=single.get("sql"),
        compression=single["compression"],  # pyright: ignore[reportArgumentType]
        row_group_rows=int(single["row-group-rows"]) if "row-group-rows" in single else None,
        reuse="again" not in given,
        statistics="statistics" in given,
    )
    summary: dict[str, Any] = {
        "index": done.index,
        "train_url": done.train_url,
        "val_url": done.val_url,
        "train_rows": done.train_rows,
        "val_rows": done.val_rows,
        "dropped": done.dropped,
        "reused": done.reused,
        "resumed": done.resumed,
    }
    if "json" in given:
        print(json.dumps(summary))
        return 0
    state = (
        " (prepared before)"
        if done.reused
        else f" ({format_counted_noun(done.resumed, 'partition')} done before)"
        if done.resumed
        else ""
    )
    print(f"training:   {done.train_rows:>12,} rows  {done.train_url}{state}")
    if done.val_url is not None:
        print(f"validation: {done.val_rows:>12,} rows  {done.val_url}")
    if done.dropped:
        print(f"left out:   {done.dropped:>12,} rows, by the validation column")
    print(f"train with: fit_on_parquet(dataset_idx={done.index})")
    return 0


def _parse_fill(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    return (name, value) if equals else ("*", text)


def _parse_category(text: str) -> tuple[str, int | None]:
    name, equals, count = text.partition("=")
    if equals and not (count.isdigit() and int(count)):
        raise ValueError(
            f"--categories takes COLUMN or COLUMN=COUNT, a whole number from 1 on: {text}"
        )
    return name, int(count) if equals else None


def _parse_ragged(text: str) -> tuple[str, Pad]:
    from farandole.data import Pad  # noqa: PLC0415 - as above

    name, _, option_text = text.partition("=")
    options: dict[str, Any] = {}
    for part in filter(None, option_text.split(",")):
        key, colon, value = part.partition(":")
        if key not in _PAD_OPTION_TYPES or not colon:
            raise ValueError(
                f"--ragged takes COLUMN=OPTION:VALUE,... with the options "
                f"{', '.join(_PAD_OPTION_TYPES)}: "
                f"{text}"
            )
        try:
            options[key] = _PAD_OPTION_TYPES[key](value)
        except ValueError:
            raise ValueError(f"{key} of --ragged must be a number: {text}") from None
    return name, Pad(**options)


def _split_names(values: Iterable[str]) -> list[str]:
    return [name for value in values for name in value.split(",") if name]


def _parse_validation(text: str | None) -> float | str | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _parse_csv_option(text: str) -> Any:
    constants: dict[str, Any] = {"true": True, "false": False, "\\t": "\t"}
    if text.lower() in constants:
        return constants[text.lower()]
    if text.isdigit():
        return int(text)
    return text.split(",") if "," in text.strip(",") else text


def _run_inspect(given: dict[str, list[str]]) -> int:
    url = given["url"][-1]
    text = native.read_manifest(url)
    problems: list[str] = []
    if text is not None:
        summary = json.loads(text)
    else:
        opened = open_dataset(url)
        columns = [
            {"name": column.name, "element": column.dtype, "shape": list(column.shape)}
            for column in opened.columns
        ]
        summary = {"fingerprint": opened.fingerprint, "rows": opened.rows, "columns": columns}
    if "verify" in given:
        files, size, problems = native.verify_checksums(url)
        summary["verified"] = {"files": files, "bytes": size, "problems": problems}
    if "json" in given:
        print(
            json.dumps(
                {"url": native_store.Store(url).url, "prepared": text is not None, **summary}
            )
        )
        return 1 if problems else 0
    print(native_store.Store(url).url)
    print(
        f"{summary['rows']:,} rows, {'prepared' if text is not None else 'not prepared'}, "
        f"{summary['fingerprint']}"
    )
    if "files" in summary:
        groups = sum(len(file["groups"]) for file in summary["files"])
        files = format_counted_noun(len(summary["files"]), "file")
        row_groups = format_counted_noun(groups, "row group")
        print(f"{files}, {row_groups}, {summary['bytes']:,} bytes")
    rows: list[tuple[str, ...]] = [("column", "type", "shape", "role", "least", "most")]
    for column in summary["columns"]:
        shape = " x ".join(str(length) for length in column["shape"])
        extremes = [_format_cell(column.get(name)) for name in ("min", "max")]
        rows.append((column["name"], column["element"], shape, column.get("role", ""), *extremes))
    _print_table(rows)
    if "verify" in given:
        for problem in problems:
            print(problem)
        files = format_counted_noun(summary["verified"]["files"], "file")
        print(f"verified {files}: {len(problems)} damaged")
    return 1 if problems else 0


def _run_head(given: dict[str, list[str]]) -> int:
    url, count = given["url"][-1], int(given["rows"][-1])
    rows = list(_first_rows(url, count))
    if "json" in given:
        for row in rows:
            print(json.dumps(row, default=str))
        return 0
    names = list(rows[0]) if rows else []
    _print_table(
        [tuple(names), *(tuple(_format_cell(row[name]) for name in names) for row in rows)]
    )
    return 0


def _first_rows(url: str, count: int) -> Iterator[dict[str, Any]]:
    """Returns the first rows, with vectors and ragged columns as lists."""
    from farandole.data.encoding_learning import read_encoding  # noqa: PLC0415 - as above
    from farandole.data.inputs.sources import open_source  # noqa: PLC0415 - as above

    text = native.read_manifest(url)
    if text is None:
        open_dataset(url)  # raises an error that names the fault
        source = open_source(url, format="parquet")
        shapes: dict[str, tuple[str, list[int]]] = {}
    else:
        manifest = json.loads(text)
        base = manifest.get("base") or native_store.Store(url).url
        enough = itertools.accumulate((file["rows"] for file in manifest["files"]), initial=0)
        first = [
            file["path"]
            for file, before in zip(manifest["files"], enough, strict=False)
            if before < count
        ]
        source = open_source([f"{base}/{path}" for path in first], format="parquet")
        shapes = {
            column["name"]: (column["element"], column["shape"])
            for column in manifest["columns"]
            if column["shape"]
        }
        encoding = read_encoding(url)
        shapes |= {
            name: (layout.dtype, [-1])
            for name, layout in ({} if encoding is None else encoding.ragged).items()
        }
    for unit in source.units(source.schema.names):
        for batch in unit.batches():
            for row in batch.slice(0, count).to_pylist():
                yield {
                    name: _nested_list_from_bytes(value, *shapes[name])
                    if name in shapes and isinstance(value, bytes)
                    else value
                    for name, value in row.items()
                }
            count -= min(count, batch.num_rows)
            if count == 0:
                return


def _nested_list_from_bytes(value: bytes, element: str, shape: list[int]) -> Any:
    values = np.frombuffer(value, np.dtype(element).newbyteorder("<"))
    return values.reshape(-1, *shape[1:]).tolist()


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        more = ", ..." if len(value) > _MAX_SHOWN_ELEMENTS else ""
        return (
            f"[{', '.join(_format_cell(element) for element in value[:_MAX_SHOWN_ELEMENTS])}{more}]"
        )
    return str(value)


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
