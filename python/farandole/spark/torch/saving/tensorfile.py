# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Tensors as bytes in the format of safetensors, which contains no code.

Eight bytes (little endian) give the length of a JSON header; the header gives type, shape and place
of each tensor in the bytes after it.
"""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME_BY_DTYPE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPE_BY_NAME = {name: dtype for dtype, name in _NAME_BY_DTYPE.items()}
_HEADER_ALIGNMENT = 8
_MAX_DIMENSIONS = 64
"""As many as torch knows."""


def can_hold_tensors(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether the format can hold all of them.

    Args:
        tensors: by name.
    """
    return all(
        one.dtype in _NAME_BY_DTYPE and one.layout is torch.strided and not one.is_quantized
        for one in tensors.values()
    )


def dump_tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Returns tensors as bytes.

    Args:
        tensors: tensors by name for which `can_hold_tensors` returns true.
    """
    header: dict[str, object] = {}
    parts: list[bytes] = []
    start = 0
    # Wide types first, so that each tensor starts at a multiple of its element's size.
    for name, tensor in sorted(
        tensors.items(), key=lambda item: (-item[1].element_size(), item[0])
    ):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        end = start + len(data)
        header[name] = {
            "dtype": _NAME_BY_DTYPE[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        parts.append(data)
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return b"".join([struct.pack("<Q", len(text)), text, *parts])


def load_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """Returns the bytes as tensors.

    Args:
        data: what `dump_tensors`, or the library of that name, made.

    Raises:
        ValueError: they are none, or cut off.
    """
    try:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        return {
            name: _decode_tensor(memoryview(data)[8 + length :], one)
            for name, one in header.items()
            if name != "__metadata__"
        }
    except (
        struct.error,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
        ValueError,
    ) as error:
        raise ValueError(f"not a whole file of tensors: {error}") from error


def _decode_tensor(data: memoryview, one: dict[str, Any]) -> torch.Tensor:
    dtype, shape, (start, end) = (
        _DTYPE_BY_NAME[str(one["dtype"])],
        one["shape"],
        one["data_offsets"],
    )
    # Check before memory is allocated: a shape may claim terabytes, or not be a shape.
    if len(shape) > _MAX_DIMENSIONS or not all(
        type(side) is int and 0 <= side < 1 << 63 for side in shape
    ):
        raise ValueError(f"not the shape of a tensor: {str(shape)[:100]}")
    size = math.prod(shape) * dtype.itemsize
    if end - start != size or not 0 <= start <= end <= len(data):
        raise ValueError(f"shape {shape} at {start} to {end} of {len(data)} bytes")
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data[start:end]), dtype=dtype).reshape(shape)
