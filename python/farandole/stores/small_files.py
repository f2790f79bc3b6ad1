# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Small files of JSON in a store: the only reader of markers, records, leases and descriptions.

The file may be damaged, or written by a stranger. Therefore its bytes, its depth, and the number
of its values and names are limited. A file beyond a limit, and a file with other content than
expected, is a `DamagedFileError`, whose message begins with `damaged:` and the file.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole._native import store as native

MAX_SMALL_FILE_BYTES: Final = 16 << 20
MAX_TABLE_FILE_BYTES: Final = 1 << 30
"""Bytes of a file that has a row for each epoch, or for each value of a column."""
MAX_JSON_DEPTH: Final = 64
MAX_NAMES_PER_OBJECT: Final = 100_000
MAX_JSON_VALUES: Final = 5_000_000


class DamagedFileError(ValueError):
    """A file of a store has not the expected content."""


def read_json(store: native.Store, name: str, max_bytes: int = MAX_SMALL_FILE_BYTES) -> Any | None:
    """Returns the content of a file of JSON; `None` if there is no such file.

    Args:
        store: the directory.
        name: path of the file below it.
        max_bytes: maximum size of the file.

    Raises:
        DamagedFileError: the file is no JSON, or is beyond a limit.
        OSError: the file cannot be read. It may exist.
    """
    data = read_small_file(store, name, max_bytes)
    if data is None:
        return None
    made = parse_json(data, f"{store.url}/{name}")
    if made is None:
        raise DamagedFileError(f"damaged: {store.url}/{name}: null")
    return made


def read_small_file(
    store: native.Store, name: str, max_bytes: int = MAX_SMALL_FILE_BYTES
) -> bytes | None:
    """Returns the bytes of a file; `None` if there is no such file.

    Args:
        store: the directory.
        name: path of the file below it.
        max_bytes: maximum size of the file.

    Raises:
        DamagedFileError: the file is larger.
        OSError: the file cannot be read. It may exist.
    """
    try:
        size = store.size(name)
        if size <= max_bytes:
            return store.read(name)
    except FileNotFoundError:
        return None
    raise DamagedFileError(
        f"damaged: {store.url}/{name}: it has {size} bytes, and at most {max_bytes} are expected"
    )


def read_json_lines(store: native.Store, name: str) -> tuple[list[Any], list[str]]:
    """Returns the lines of a file of JSON lines, and the faults of lines that are damaged.

    Args:
        store: the directory.
        name: path of the file below it.

    Raises:
        DamagedFileError: the file is too large.
        OSError: the file cannot be read. It may exist.
    """
    data = read_small_file(store, name, MAX_TABLE_FILE_BYTES) or b""
    found, faults = [], []
    for number, line in enumerate(data.splitlines(), start=1):
        if line:
            try:
                found.append(parse_json(line, f"{store.url}/{name}, line {number}"))
            except DamagedFileError as error:
                faults.append(str(error))
    return found, faults


def parse_json(data: bytes | str, source_name: str) -> Any:
    """Returns the content of JSON text.

    Args:
        data: the text.
        source_name: name of the text, for the message.

    Raises:
        DamagedFileError: the text is no JSON, or is beyond a limit.
    """
    text = data.encode() if isinstance(data, str) else data
    # Counted before the text is read, because a list of empty lists takes 30 times its text.
    values = sum(map(text.count, (b",", b"[", b"{")))
    if values > MAX_JSON_VALUES:
        raise DamagedFileError(f"damaged: {source_name}: it has more than {MAX_JSON_VALUES} values")
    with raise_as_damaged_file(source_name):
        made = json.loads(text)
    _check_limits(made, source_name)
    return made


@contextlib.contextmanager
def raise_as_damaged_file(source_name: str) -> Iterator[None]:
    """Turns the errors of a reader about unexpected content into `DamagedFileError`.

    Args:
        source_name: name of the content, for the message.

    Raises:
        DamagedFileError: the content is not the expected one.
    """
    try:
        yield
    except DamagedFileError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise DamagedFileError(
            f"damaged: {source_name}: {type(error).__name__}: {error}"
        ) from error
    except (RecursionError, MemoryError) as error:
        raise DamagedFileError(f"damaged: {source_name}: {type(error).__name__}") from error


def _check_limits(value: Any, source_name: str) -> None:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        containers = [one for one in level if isinstance(one, dict | list)]
        if not containers:
            return
        level = []
        for container in containers:
            if isinstance(container, dict) and len(container) > MAX_NAMES_PER_OBJECT:
                raise DamagedFileError(
                    f"damaged: {source_name}: an object has {len(container)} names"
                )
            level.extend(container.values() if isinstance(container, dict) else container)
    raise DamagedFileError(f"damaged: {source_name}: it is deeper than {MAX_JSON_DEPTH} levels")
