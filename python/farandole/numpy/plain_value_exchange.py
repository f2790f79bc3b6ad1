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

_NUMERIC_KINDS = "biufc"
"""Kinds of NumPy's types that arrays may have."""
_DTYPE_PATTERN = re.compile(rf"[<>|=][{_NUMERIC_KINDS}][0-9]{{1,2}}")
"""Their names. NumPy also parses lists of types and Python literals."""
_MAX_DIMENSION_SIZE = 1 << 63
"""NumPy has no array with a longer side."""


def _reject_unplain_object(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} is not a plain value")


def broadcast_plain(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the root's value on every rank.

    Args:
        value: Value to send; ignored on other ranks. See `pack`.
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
        pack_plain(value) if is_root else None,
        root_rank,
        _plain_operation_name(name),
        global_process_set,
    )
    return value if is_root else unpack_plain(data)


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
    return [
        unpack_plain(data)
        for data in allgather_bytes(
            pack_plain(value), _plain_operation_name(name), global_process_set
        )
    ]


def _plain_operation_name(name: str | None) -> str | None:
    return None if name is None else f"plain.{name}"


def pack_plain(value: Any, other: Callable[[Any], Any] = _reject_unplain_object) -> bytes:
    """Writes a plain value.

    Args:
        value: `None`, booleans, numbers, strings, bytes, arrays of numbers, and dicts, lists and
            tuples of these.
        other: Maps other objects to plain values, which `unpack`'s `other` maps back.

    Raises:
        TypeError: It holds something else; the message says what and where.
    """
    parts: list[bytes] = []
    text = json.dumps(
        _plain_value_to_json(value, parts, "value", other), separators=(",", ":")
    ).encode()
    return b"".join([text, b"\0", *parts])


def unpack_plain(
    data: bytes | bytearray | memoryview, other: Callable[[Any], Any] = _reject_unplain_object
) -> Any:
    """Inverts `pack_plain`. Runs no code, even for bytes of an attacker.

    Args:
        data: Result of `pack`.
        other: The inverse of `pack`'s `other`.

    Raises:
        ValueError: They are something else, or cut off.
    """
    text, found, rest = bytes(data).partition(b"\0")
    if not found:
        raise ValueError("the message of a peer is not a plain value")
    taken = 0

    def take_binary_bytes(count: int) -> bytes:
        nonlocal taken
        if not 0 <= count <= len(rest) - taken:
            raise ValueError("the message of a peer is truncated")
        taken += count
        return rest[taken - count : taken]

    try:
        return _plain_value_from_json(json.loads(text), take_binary_bytes, other)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"the message of a peer is not a plain value: {error}") from error


def _plain_value_to_json(
    value: Any, parts: list[bytes], path: str, other: Callable[[Any], Any]
) -> Any:
    """Returns the value as JSON. Types that JSON does not have become an object with one key,
    their kind.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [
            _plain_value_to_json(entry, parts, f"{path}[{at}]", other)
            for at, entry in enumerate(value)
        ]
    if isinstance(value, tuple):
        return {
            "tuple": [
                _plain_value_to_json(entry, parts, f"{path}[{at}]", other)
                for at, entry in enumerate(value)
            ]
        }
    if isinstance(value, dict):
        pairs = ((key, entry, f"{path}[{key!r}]") for key, entry in value.items())
        return {
            "dict": [
                [
                    _plain_value_to_json(key, parts, at, other),
                    _plain_value_to_json(entry, parts, at, other),
                ]
                for key, entry, at in pairs
            ]
        }
    if (
        isinstance(value, bytes | np.generic | np.ndarray)
        and (encoded := _append_binary_part(value, parts)) is not None
    ):
        return encoded
    try:
        return {"other": _plain_value_to_json(other(value), parts, path, _reject_unplain_object)}
    except TypeError as error:
        raise TypeError(
            f"{path} is a {type(value).__name__}, which is not a plain value"
        ) from error


def _append_binary_part(value: Any, parts: list[bytes]) -> Any:
    """Appends bytes and numbers to the parts after the text; the text contains their length."""
    if isinstance(value, bytes):
        parts.append(value)
        return {"bytes": len(value)}
    if value.dtype.kind not in _NUMERIC_KINDS:
        return None
    array = np.ascontiguousarray(value)
    parts.append(array.tobytes())
    return {"array": [array.dtype.str, list(np.shape(value)), isinstance(value, np.generic)]}


def _plain_value_from_json(
    encoded: Any, take: Callable[[int], bytes], other: Callable[[Any], Any]
) -> Any:
    if isinstance(encoded, list):
        return [_plain_value_from_json(entry, take, other) for entry in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((kind, inner),) = encoded.items()
    if kind == "tuple":
        return tuple(_plain_value_from_json(entry, take, other) for entry in inner)
    if kind == "dict":
        return {
            _plain_value_from_json(key, take, other): _plain_value_from_json(entry, take, other)
            for key, entry in inner
        }
    return (
        other(_plain_value_from_json(inner, take, _reject_unplain_object))
        if kind == "other"
        else _read_binary_part(kind, inner, take)
    )


def _read_binary_part(kind: str, encoded: Any, take: Callable[[int], bytes]) -> Any:
    if kind == "bytes":
        return take(encoded)
    if kind != "array":
        raise ValueError(f"the message of a peer is not a plain value: {kind!r}")
    name, shape, is_scalar = encoded
    if not _DTYPE_PATTERN.fullmatch(name) or not all(
        type(side) is int and 0 <= side < _MAX_DIMENSION_SIZE for side in shape
    ):
        raise ValueError(f"the message of a peer holds an array of {name} and shape {shape}")
    dtype = np.dtype(name)
    array = np.frombuffer(bytearray(take(math.prod(shape) * dtype.itemsize)), dtype).reshape(shape)
    return array[()] if is_scalar else array
