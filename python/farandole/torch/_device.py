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

Spot: TypeAlias = tuple[int, int] | None
"""A GPU's number and the handle of a stream; `None` for host memory."""

_opened: dict[int, bool] = {}
"""Whether the engine works on the memory of a GPU, by its number."""
basics.on_init(_opened.clear)


def stream_of(ordinal: int) -> int:
    """Returns the handle of the stream that is current on a GPU."""
    return torch.cuda.current_stream(ordinal).cuda_stream


def ordinal_of(tensor: torch.Tensor) -> int | None:
    """Returns the number of the GPU that a tensor is on; `None` for host memory."""
    return None if tensor.is_cpu else tensor.get_device()


def is_captured(tensor: torch.Tensor) -> bool:
    """Returns whether the stream captures a CUDA graph: operations on the tensor are recorded
    and not executed.
    """
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def spot(tensor: torch.Tensor) -> Spot:
    """Returns the place of a tensor that `is_usable`."""
    ordinal = ordinal_of(tensor)
    return None if ordinal is None else (ordinal, stream_of(ordinal))


def spots(tensors: Sequence[torch.Tensor]) -> list[Spot] | None:
    """Returns the place of several tensors; `None` if all are in host memory."""
    ordinals = [ordinal_of(tensor) for tensor in tensors]
    streams = {ordinal: stream_of(ordinal) for ordinal in set(ordinals) if ordinal is not None}
    if not streams:
        return None
    return [None if ordinal is None else (ordinal, streams[ordinal]) for ordinal in ordinals]


def lend(keep: object, made: tuple[int, int] | list[Spot]) -> None:
    """Keeps the memory of an operation from others until the streams that are current now are done
    with it.

    torch reuses memory on the stream that it was made on as soon as the last reference is gone.
    That stream does not wait for an operation that another stream waits for.

    Args:
        keep: Tensors, and lists and tuples of such, of an operation that is about to be waited for.
        made: Where the operation was submitted.
    """
    for place in {made} if isinstance(made, tuple) else set(made):
        if place is not None and stream_of(place[0]) != place[1]:
            _record(keep, place[0], torch.cuda.current_stream(place[0]))


def _record(keep: object, ordinal: int, stream: torch.cuda.Stream) -> None:
    if isinstance(keep, torch.Tensor):
        if ordinal_of(keep) == ordinal:
            keep.record_stream(stream)
    elif isinstance(keep, (list, tuple)):
        for part in keep:
            _record(part, ordinal, stream)


def is_usable(tensor: torch.Tensor) -> bool:
    """Returns whether the engine uses a tensor's memory in place: on the host, or on a GPU that
    it can use.
    """
    if tensor.is_cpu:
        return True
    if not tensor.is_cuda:
        return False
    ordinal = tensor.get_device()
    opened = _opened.get(ordinal)
    if opened is None:
        opened = _opened[ordinal] = _open(ordinal)
    return opened


def _open(ordinal: int) -> bool:
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
