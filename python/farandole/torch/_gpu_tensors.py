# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Tensors on GPUs: which of them the engine uses in place, and the streams that compute their
values.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from farandole._native import engine
from farandole.common import basics
from farandole.common.exceptions import FarandoleEnvironmentError

if TYPE_CHECKING:
    from collections.abc import Sequence

DeviceLocation: TypeAlias = tuple[int, int] | None
"""A GPU's number and the handle of a stream; `None` for host memory."""

_usable_by_ordinal: dict[int, bool] = {}
"""Whether the engine works on the memory of a GPU, by its number."""
basics.call_on_each_init(_usable_by_ordinal.clear)


def current_stream_handle(ordinal: int) -> int:
    """Returns the handle of the stream that is current on a GPU."""
    return torch.cuda.current_stream(ordinal).cuda_stream


def gpu_ordinal_of(tensor: torch.Tensor) -> int | None:
    """Returns the number of the GPU that a tensor is on; `None` for host memory."""
    return None if tensor.is_cpu else tensor.get_device()


def is_in_cuda_graph_capture(tensor: torch.Tensor) -> bool:
    """Returns whether the stream captures a CUDA graph: operations on the tensor are recorded
    and not executed.
    """
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def gpu_and_stream_of(tensor: torch.Tensor) -> DeviceLocation:
    """Returns the location of a tensor that `is_usable_in_place`."""
    ordinal = gpu_ordinal_of(tensor)
    return None if ordinal is None else (ordinal, current_stream_handle(ordinal))


def gpus_and_streams_of(tensors: Sequence[torch.Tensor]) -> list[DeviceLocation] | None:
    """Returns the locations of several tensors; `None` if all are in host memory."""
    ordinals = [gpu_ordinal_of(tensor) for tensor in tensors]
    streams = {
        ordinal: current_stream_handle(ordinal) for ordinal in set(ordinals) if ordinal is not None
    }
    if not streams:
        return None
    return [None if ordinal is None else (ordinal, streams[ordinal]) for ordinal in ordinals]


def keep_memory_for_streams(keep: object, made: tuple[int, int] | list[DeviceLocation]) -> None:
    """Prevents reuse of an operation's memory until the current streams have finished with it.

    As soon as the last reference is gone, torch reuses memory on the stream that allocated it.
    That stream does not wait for an operation for which another stream waits.

    Args:
        keep: Tensors, or lists and tuples of tensors, of an operation that will be awaited.
        made: Locations at which the operation was submitted.
    """
    for location in {made} if isinstance(made, tuple) else set(made):
        if location is not None and current_stream_handle(location[0]) != location[1]:
            _record_tensors(keep, location[0], torch.cuda.current_stream(location[0]))


def _record_tensors(keep: object, ordinal: int, stream: torch.cuda.Stream) -> None:
    if isinstance(keep, torch.Tensor):
        if gpu_ordinal_of(keep) == ordinal:
            keep.record_stream(stream)
    elif isinstance(keep, (list, tuple)):
        for part in keep:
            _record_tensors(part, ordinal, stream)


def is_usable_in_place(tensor: torch.Tensor) -> bool:
    """Returns whether the engine uses a tensor's memory in place: on the host, or on a GPU that
    it can use.
    """
    if tensor.is_cpu:
        return True
    if not tensor.is_cuda:
        return False
    ordinal = tensor.get_device()
    opened = _usable_by_ordinal.get(ordinal)
    if opened is None:
        opened = _usable_by_ordinal[ordinal] = _enable_gpu_for_engine(ordinal)
    return opened


def _enable_gpu_for_engine(ordinal: int) -> bool:
    """Lets the engine use a GPU; returns false if torch copies tensors to the host instead."""
    if torch.version.hip is not None:
        return False
    packages = [folder for folder in sys.path if (Path(folder) / "nvidia").is_dir()]
    try:
        return engine.open_device(ordinal, packages)
    except FarandoleEnvironmentError as error:
        sys.stderr.write(
            f"farandole: warning: tensors on GPU {ordinal} are copied to the host by torch: "
            f"{error}\n"
        )
        return False
