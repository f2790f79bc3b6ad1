# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The files of a state whose tensors are divided by rows among processes.

A part is a file in the format of safetensors, without code, of at most about `MAX_PART_BYTES`. It
contains rows of tensors; its metadata give the first row of each, and the rows of the whole tensor.
A reader takes any rows from the parts, so another number of processes can read them. The caller
keeps the list of parts with their digests in the run's checkpoint, which the run has signed.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from farandole._native import store as native
from farandole.spark.torch.saving import safetensors_bytes
from farandole.stores import durable_writes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from farandole.stores.remote_store import RemoteStore

PARTS_DIRECTORY = "parts"
"""Directory of all parts in the directory of a run."""
MAX_PART_BYTES = 64 << 20
"""Size of a file from which the next rows go to another file."""
_HEADER_PREFIX_BYTES = 8
_ROWS_KEY = "farandole_rows"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

PartEntry = dict[str, Any]
"""Path, size and SHA-256 of a part."""


class TensorRows(NamedTuple):
    """Some rows of a tensor.

    Attributes:
        name: Name of the tensor.
        first: Number of the first row.
        total: Rows of the whole tensor.
        values: The rows, `(rows, ...)`.
    """

    name: str
    first: int
    total: int
    values: torch.Tensor


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with at least one dimension: a number is one row."""
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def write_state_parts(
    store: RemoteStore, directory: str, rank: int, tensors: Iterable[TensorRows]
) -> list[PartEntry]:
    """Writes rows of tensors to the directory of a run.

    Args:
        store: Store of the run.
        directory: Directory of the parts.
        rank: Number of this process, in the names of its parts.
        tensors: The rows; rows of one tensor may come in several entries.

    Returns:
        The entries of the parts.
    """
    entries: list[PartEntry] = []
    for number, rows in enumerate(_group_rows_by_part(tensors)):
        data = safetensors_bytes.dump_tensors(
            {each.name: each.values for each in rows},
            {_ROWS_KEY: json.dumps({each.name: [each.first, each.total] for each in rows})},
        )
        name = f"rank-{rank:05d}-{number:05d}.safetensors"
        store.write_part(directory, name, data)
        digest = hashlib.sha256(data).hexdigest()
        entries.append({"name": f"{directory}/{name}", "bytes": len(data), "sha256": digest})
    return entries


def _group_rows_by_part(tensors: Iterable[TensorRows]) -> Iterator[list[TensorRows]]:
    waiting: list[TensorRows] = []
    size = 0
    for each in _split_large_tensors(tensors):
        if any(each.name == other.name for other in waiting) or size >= MAX_PART_BYTES:
            yield waiting
            waiting, size = [], 0
        waiting.append(each)
        size += each.values.nbytes
    if waiting:
        yield waiting


def _split_large_tensors(tensors: Iterable[TensorRows]) -> Iterator[TensorRows]:
    for each in tensors:
        rows = len(each.values)
        row_bytes = max(1, each.values.nbytes // max(1, rows))
        step = max(1, MAX_PART_BYTES // row_bytes)
        for begin in range(0, rows, step):
            yield each._replace(first=each.first + begin, values=each.values[begin : begin + step])


@dataclass(frozen=True)
class _StoredRows:
    """The position of a tensor's rows in a file."""

    path: str
    offset: int
    first: int
    total: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.first + self.shape[0]

    @property
    def row_bytes(self) -> int:
        return torch.Size(self.shape[1:]).numel() * self.dtype.itemsize


class StatePartReader:
    """Reads rows of tensors from the parts of a state.

    Args:
        store: Store of the run.
        parts: Entries of all parts.
    """

    def __init__(self, store: RemoteStore, parts: Sequence[PartEntry]) -> None:
        self._run = native.Store(str(store.run_path))
        self._parts = list(parts)
        self._rows: dict[str, list[_StoredRows]] = {}

    def find_damaged_part(self, first: int = 0, step: int = 1) -> str | None:
        """Returns the name of a part that is missing or has another content; `None` if there is
        none.

        Args:
            first: Number of the first part to examine.
            step: Distance to the next part.
        """
        for part in self._parts[first::step]:
            data = durable_writes.read_if_present(self._run, part["name"])
            if data is None or hashlib.sha256(data).hexdigest() != part["sha256"]:
                return str(part["name"])
        return None

    def read_headers(self) -> None:
        """Reads where the rows of each tensor are. Call it after `find_damaged_part`."""
        for part in self._parts:
            prefix = self._run.read_range(part["name"], 0, _HEADER_PREFIX_BYTES)
            begin = _HEADER_PREFIX_BYTES + struct.unpack("<Q", prefix)[0]
            header = json.loads(self._run.read_range(part["name"], _HEADER_PREFIX_BYTES, begin))
            rows = json.loads(header.pop("__metadata__")[_ROWS_KEY])
            for name, entry in header.items():
                offset = begin + entry["data_offsets"][0]
                first, total = rows[name]
                dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
                stored = _StoredRows(part["name"], offset, first, total, dtype, shape)
                self._rows.setdefault(name, []).append(stored)

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._rows)

    def row_shape(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Returns shape and type of a whole tensor."""
        stored = self._rows[name][0]
        return torch.Size((stored.total, *stored.shape[1:])), stored.dtype

    def read_rows(self, name: str, first: int, total: int, target: torch.Tensor) -> None:
        """Reads rows of a tensor.

        Args:
            name: Name of the tensor.
            first: Number of the first row.
            total: Rows of the whole tensor.
            target: Takes the rows, `(rows, ...)`.

        Raises:
            ValueError: The parts do not contain these rows in this shape and type.
        """
        end, found = first + len(target), 0
        expected = torch.Size((total, *target.shape[1:])), target.dtype
        if name not in self._rows or self.row_shape(name) != expected:
            raise ValueError(f"no tensor {name!r} of shape {tuple(expected[0])} and {expected[1]}")
        for stored in self._rows[name]:
            begin, stop = max(first, stored.first), min(end, stored.end)
            if begin >= stop:
                continue
            offset = stored.offset + (begin - stored.first) * stored.row_bytes
            data = self._run.read_range(
                stored.path, offset, offset + (stop - begin) * stored.row_bytes
            )
            rows = target[begin - first : stop - first]
            if data:
                rows.copy_(torch.frombuffer(bytearray(data), dtype=stored.dtype).view(rows.shape))
            found += stop - begin
        if found != len(target):
            raise ValueError(f"rows {first} to {end} of {name!r} are not complete: {found}")


def delete_unused_parts(
    store: RemoteStore, in_use: str | None, unpack: Callable[[bytes], dict[str, Any]]
) -> None:
    """Deletes the parts that no checkpoint of the run uses.

    Args:
        store: Store of the run.
        in_use: Directory of parts that are in use, too.
        unpack: Returns the content of a checkpoint.
    """
    run = native.Store(str(store.run_path))
    if not run.exists(PARTS_DIRECTORY):
        return
    used = {in_use}
    for name, _, _, is_directory in run.list_directory():
        if is_directory or not name.startswith(store.checkpoint_filename):
            continue
        try:
            used.add(unpack(run.read(name)).get("sharded", {}).get("directory"))
        except Exception:  # noqa: BLE001 - a checkpoint that cannot be read may use any parts
            return
    for name, _, _, is_directory in run.list_directory(PARTS_DIRECTORY):
        directory = f"{PARTS_DIRECTORY}/{name}"
        if is_directory and directory not in used:
            run.delete_all(directory)
