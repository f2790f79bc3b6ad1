# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Converts tensors of this backend for the engine, and results back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from farandole.common.util import Average, Max, Min, Product, Sum
from farandole.torch._handles import DTYPES, needs_copy

if TYPE_CHECKING:
    from collections.abc import Sequence

_REDUCTIONS = {
    ReduceOp.SUM: Sum,
    ReduceOp.AVG: Average,
    ReduceOp.MIN: Min,
    ReduceOp.MAX: Max,
    ReduceOp.PRODUCT: Product,
}


def reduction(op: Any) -> int:
    """Returns the engine's number of a reduction.

    Raises:
        ValueError: When the engine has none.
    """
    for theirs, ours in _REDUCTIONS.items():
        if op == theirs:
            return ours
    raise ValueError(f"reduction is not supported: {getattr(op, 'op', op)}")


def host(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as contiguous host memory: itself if it is that already, else a copy.

    From a GPU, too, also one whose memory the engine could work on.

    Raises:
        ValueError: When it is sparse.
    """
    if tensor.layout != torch.strided:
        raise ValueError(f"tensor must be dense: {tensor.layout}")
    if tensor.is_cpu and not needs_copy(tensor):
        return tensor.detach()
    return tensor.detach().resolve_conj().cpu().contiguous().resolve_neg()


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Like `host`, of a dtype the engine can reduce.

    Raises:
        ValueError: When it is sparse, or the engine has no dtype for it.
    """
    if tensor.dtype not in DTYPES:
        raise ValueError(f"dtype is not supported in a reduction: {tensor.dtype}")
    return host(tensor)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Like `host`, in one dimension; as bytes when the engine does not know the dtype."""
    data = host(tensor).reshape(-1)
    return data if data.dtype in DTYPES else data.view(torch.uint8)


def width(tensor: torch.Tensor) -> int:
    """Returns the number of elements of `flat`."""
    return tensor.numel() if tensor.dtype in DTYPES else tensor.numel() * tensor.element_size()


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns all tensors' elements end to end, as `flat`."""
    if len(tensors) == 1:
        return flat(tensors[0])
    return torch.cat([flat(tensor) for tensor in tensors])


def put(target: torch.Tensor, source: torch.Tensor) -> None:
    """Moves a flat result to the tensor it belongs in, past autograd.

    Raises:
        ValueError: When it has another size.
    """
    if source.dtype != target.dtype:
        source = source.view(target.dtype)
    if source.numel() != target.numel():
        raise ValueError(
            f"{source.numel()} elements were received for a tensor of shape {tuple(target.shape)}"
        )
    target.detach().copy_(source.view(target.shape))


def put_parts(targets: Sequence[torch.Tensor], whole: torch.Tensor, rows: Sequence[int]) -> None:
    """Moves consecutive parts of a flat result to the tensors they belong in."""
    start = 0
    for target, count in zip(targets, rows, strict=True):
        put(target, whole[start : start + count])
        start += count


def received(outcome: Any, dtype: torch.dtype) -> tuple[torch.Tensor, list[int]]:
    """Returns the flat tensor in memory the engine has filled, and the elements every member
    gave.
    """
    rows: list[int] = outcome.rows if outcome is not None else []
    if outcome is None or len(outcome) == 0:
        return torch.empty(0, dtype=dtype), rows
    return torch.frombuffer(outcome, dtype=dtype), rows
