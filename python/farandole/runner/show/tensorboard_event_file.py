# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A history as TensorBoard's event file.

The file is a sequence of records: length (8 bytes), masked CRC-32C of the length, the record,
masked CRC-32C of it. A record is a protocol-buffer message `Event` with a time, a step and a
summary of named numbers.
"""

from __future__ import annotations

import math
import struct
from functools import cache
from typing import TYPE_CHECKING

from farandole.runner.show.history import entry_scores

if TYPE_CHECKING:
    from farandole.runner.show.history import Entry

FILE_VERSION = b"brain.Event:2"
"""Version in the first event of a file."""
_CRC32C_POLYNOMIAL = 0x82F63B78


def encode_scalar_events(history: list[Entry]) -> bytes:
    """Returns the whole file: `train/loss`, `val/loss`, `train/<metric>` and `val/<metric>` of
    every epoch.

    Args:
        history: one entry per epoch.
    """
    seconds = 0.0
    parts = [encode_tensorboard_event(0.0, 0, version=FILE_VERSION)]
    for entry in history:
        seconds += entry.get("seconds", 0.0)
        for name, value in entry_scores(entry).items():
            tag = f"val/{name[4:]}" if name.startswith("val_") else f"train/{name}"
            summary = _encode_summary(tag, value)
            parts.append(encode_tensorboard_event(seconds, entry["epoch"] + 1, summary=summary))
    return b"".join(parts)


def encode_tensorboard_event(
    seconds: float, step: int, *, version: bytes = b"", summary: bytes = b""
) -> bytes:
    """Returns an event, as a file has it.

    Args:
        seconds: its time.
        step: its place on the axis of steps.
        version: version of the file, in its first event.
        summary: encoded `Summary`, in all other events.
    """
    event = b"\x09" + struct.pack("<d", seconds) + b"\x10" + _encode_varint(step)
    if version:
        event += b"\x1a" + _encode_varint(len(version)) + version
    if summary:
        event += b"\x2a" + _encode_varint(len(summary)) + summary
    length = struct.pack("<Q", len(event))
    return length + _masked_crc(length) + event + _masked_crc(event)


def _encode_summary(tag: str, value: float) -> bytes:
    name = tag.encode()
    try:
        number = struct.pack("<f", value)
    except OverflowError:  # a loss in double precision that has run away
        number = struct.pack("<f", math.copysign(math.inf, value))
    body = b"\x0a" + _encode_varint(len(name)) + name + b"\x15" + number
    return b"\x0a" + _encode_varint(len(body)) + body


def _encode_varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - seven bits a byte
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _crc_table()[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@cache
def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_CRC32C_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table
