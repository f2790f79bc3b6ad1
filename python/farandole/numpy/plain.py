# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Plain values from one rank to all, and from all to all, without pickle, for the ranks of
estimators.

A message is a JSON text, a zero byte, and the bytes that the text refers to. JSON writes no zero
byte. A message can contain only values without code, so receiving one runs no code.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.common import basics
from farandole.common.process_sets import global_process_set
from farandole.numpy._bytes import allgather_bytes, broadcast_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

_NUMBERS = "biufc"
"""Kinds of NumPy's types that arrays may have."""
_DTYPE = re.compile(rf"[<>|=][{_NUMBERS}][0-9]{{1,2}}")
"""Their names. NumPy also parses lists of types and Python literals."""
_SIDES = 1 << 63
"""NumPy has no array with a longer side."""


def _no_other(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} is not a plain value")


def broadcast_plain(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the root's value on every rank.

    Args:
        value: What to send; ignored on other ranks. See `pack`.
        root_rank: The rank that sends.
        name: Names the operation across ranks; unnamed ones match in the order they are issued.

    Returns:
        `value` itself on the root, a copy elsewhere.

    Raises:
        TypeError: On the root, when the value is not plain.
        ValueError: When an argument is wrong, or another rank sent something else.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    is_root = basics.rank() == root_rank
    data = broadcast_bytes(
        pack(value) if is_root else None, root_rank, _named(name), global_process_set
    )
    return value if is_root else unpack(data)


def allgather_plain(value: Any, name: str | None = None) -> list[Any]:
    """Returns the values of all ranks, in the order of ranks.

    Args:
        value: This rank's value. See `pack`.
        name: Names the operation across ranks; unnamed ones match in the order they are issued.

    Returns:
        One value per rank; this rank's own is a copy too.

    Raises:
        TypeError: When the value is not plain.
        ValueError: When another rank sent something else.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    return [unpack(data) for data in allgather_bytes(pack(value), _named(name), global_process_set)]


def _named(name: str | None) -> str | None:
    return None if name is None else f"plain.{name}"


def pack(value: Any, other: Callable[[Any], Any] = _no_other) -> bytes:
    """Writes a plain value.

    Args:
        value: `None`, booleans, numbers, strings, bytes, arrays of numbers, and dicts, lists and
            tuples of these.
        other: Maps other objects to plain values, which `unpack`'s `other` maps back.

    Raises:
        TypeError: It holds something else; the message says what and where.
    """
    parts: list[bytes] = []
    text = json.dumps(_written(value, parts, "value", other), separators=(",", ":")).encode()
    return b"".join([text, b"\0", *parts])


def unpack(data: bytes | bytearray | memoryview, other: Callable[[Any], Any] = _no_other) -> Any:
    """Inverts `pack`. Runs no code, whatever the bytes are.

    Args:
        data: What `pack` returned.
        other: The inverse of `pack`'s `other`.

    Raises:
        ValueError: They are something else, or cut off.
    """
    text, found, rest = bytes(data).partition(b"\0")
    if not found:
        raise ValueError("the message of a peer is not a plain value")
    taken = 0

    def take(count: int) -> bytes:
        nonlocal taken
        if not 0 <= count <= len(rest) - taken:
            raise ValueError("the message of a peer is truncated")
        taken += count
        return rest[taken - count : taken]

    try:
        return _read(json.loads(text), take, other)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"the message of a peer is not a plain value: {error}") from error


def _written(value: Any, parts: list[bytes], place: str, other: Callable[[Any], Any]) -> Any:
    """Returns the value as JSON. Types that JSON does not have become an object with one key,
    their kind.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_written(one, parts, f"{place}[{at}]", other) for at, one in enumerate(value)]
    if isinstance(value, tuple):
        return {
            "tuple": [_written(one, parts, f"{place}[{at}]", other) for at, one in enumerate(value)]
        }
    if isinstance(value, dict):
        pairs = ((key, one, f"{place}[{key!r}]") for key, one in value.items())
        return {
            "dict": [
                [_written(key, parts, at, other), _written(one, parts, at, other)]
                for key, one, at in pairs
            ]
        }
    if (
        isinstance(value, bytes | np.generic | np.ndarray)
        and (told := _moved(value, parts)) is not None
    ):
        return told
    try:
        return {"other": _written(other(value), parts, place, _no_other)}
    except TypeError as error:
        raise TypeError(
            f"{place} is a {type(value).__name__}, which is not a plain value"
        ) from error


def _moved(value: Any, parts: list[bytes]) -> Any:
    """Bytes and numbers go after the text, which tells how many they are."""
    if isinstance(value, bytes):
        parts.append(value)
        return {"bytes": len(value)}
    if value.dtype.kind not in _NUMBERS:
        return None
    array = np.ascontiguousarray(value)
    parts.append(array.tobytes())
    return {"array": [array.dtype.str, list(np.shape(value)), isinstance(value, np.generic)]}


def _read(told: Any, take: Callable[[int], bytes], other: Callable[[Any], Any]) -> Any:
    if isinstance(told, list):
        return [_read(one, take, other) for one in told]
    if not isinstance(told, dict):
        return told
    ((kind, inner),) = told.items()
    if kind == "tuple":
        return tuple(_read(one, take, other) for one in inner)
    if kind == "dict":
        return {_read(key, take, other): _read(one, take, other) for key, one in inner}
    return other(_read(inner, take, _no_other)) if kind == "other" else _taken(kind, inner, take)


def _taken(kind: str, told: Any, take: Callable[[int], bytes]) -> Any:
    if kind == "bytes":
        return take(told)
    if kind != "array":
        raise ValueError(f"the message of a peer is not a plain value: {kind!r}")
    name, shape, is_scalar = told
    if not _DTYPE.fullmatch(name) or not all(
        type(side) is int and 0 <= side < _SIDES for side in shape
    ):
        raise ValueError(f"the message of a peer holds an array of {name} and shape {shape}")
    dtype = np.dtype(name)
    array = np.frombuffer(bytearray(take(math.prod(shape) * dtype.itemsize)), dtype).reshape(shape)
    return array[()] if is_scalar else array
