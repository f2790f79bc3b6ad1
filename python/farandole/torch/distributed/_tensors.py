# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Converts tensors of this backend for the engine, and results back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from farandole.common.util import Average, Max, Min, Product, Sum
from farandole.torch._handles import ENGINE_DTYPES, needs_engine_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ENGINE_REDUCTIONS = {
    ReduceOp.SUM: Sum,
    ReduceOp.AVG: Average,
    ReduceOp.MIN: Min,
    ReduceOp.MAX: Max,
    ReduceOp.PRODUCT: Product,
    ReduceOp.PREMUL_SUM: Sum,
}
_BITWISE_REDUCTIONS = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def engine_reduction(op: Any) -> int:
    """Returns the engine's number of a reduction.

    Raises:
        ValueError: When the engine has none.
    """
    for theirs, ours in _ENGINE_REDUCTIONS.items():
        if op == theirs:
            return ours
    raise ValueError(f"reduction is not supported: {getattr(op, 'op', op)}")


def bitwise_reduction(
    op: Any, dtype: torch.dtype
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Returns the function of two tensors of a reduction of bits; `None` for other reductions.

    Raises:
        ValueError: When the dtype has no bits to combine.
    """
    for theirs, function in _BITWISE_REDUCTIONS.items():
        if op == theirs:
            if dtype.is_floating_point or dtype.is_complex:
                raise ValueError(f"{getattr(op, 'op', op)} needs whole numbers or bool: {dtype}")
            return function
    return None


def scale_before_sum(data: torch.Tensor, op: Any) -> torch.Tensor:
    """Returns the tensor times the factor of a `PREMUL_SUM`, or the tensor itself for other
    reductions.

    Raises:
        ValueError: When the dtype cannot hold the products.
    """
    if op != ReduceOp.PREMUL_SUM:
        return data
    factor = op.__getstate__()[1]
    scaled = data * (factor.cpu() if isinstance(factor, torch.Tensor) else factor)
    if torch.is_floating_point(scaled) != torch.is_floating_point(data):
        raise ValueError(f"PREMUL_SUM of {data.dtype} needs a factor of whole numbers: {factor}")
    return scaled.to(data.dtype)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor` as contiguous host memory: the tensor itself if possible, else a copy.

    A tensor on a GPU is always copied, also if the engine could use its memory.

    Raises:
        ValueError: When the tensor is sparse.
    """
    if tensor.layout != torch.strided:
        raise ValueError(f"tensor must be dense: {tensor.layout}")
    if tensor.is_cpu and not needs_engine_copy(tensor):
        return tensor.detach()
    return tensor.detach().resolve_conj().cpu().contiguous().resolve_neg()


def to_reducible_host(tensor: torch.Tensor) -> torch.Tensor:
    """Like `to_host`, for a dtype that the engine can reduce.

    Raises:
        ValueError: When the tensor is sparse, or the engine does not support the dtype.
    """
    if tensor.dtype not in ENGINE_DTYPES:
        raise ValueError(f"dtype is not supported in a reduction: {tensor.dtype}")
    return to_host(tensor)


def to_flat_host(tensor: torch.Tensor) -> torch.Tensor:
    """Like `to_host`, in one dimension; as bytes if the engine does not support the dtype."""
    data = to_host(tensor).reshape(-1)
    return data if data.dtype in ENGINE_DTYPES else data.view(torch.uint8)


def flat_length(tensor: torch.Tensor) -> int:
    """Returns the number of elements of the result of `to_flat_host`."""
    return (
        tensor.numel() if tensor.dtype in ENGINE_DTYPES else tensor.numel() * tensor.element_size()
    )


def join_flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns all tensors' elements end to end, like `to_flat_host`."""
    if len(tensors) == 1:
        return to_flat_host(tensors[0])
    return torch.cat([to_flat_host(tensor) for tensor in tensors])


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies a flat result into a tensor, without autograd.

    Raises:
        ValueError: When the result has another size.
    """
    if source.dtype != target.dtype:
        source = source.view(target.dtype)
    if source.numel() != target.numel():
        raise ValueError(
            f"{source.numel()} elements were received for a tensor of shape {tuple(target.shape)}"
        )
    target.detach().copy_(source.view(target.shape))


def copy_parts_into(
    targets: Sequence[torch.Tensor], whole: torch.Tensor, rows: Sequence[int]
) -> None:
    """Copies consecutive parts of a flat result into tensors."""
    start = 0
    for target, count in zip(targets, rows, strict=True):
        copy_into(target, whole[start : start + count])
        start += count


def received_elements(outcome: Any, dtype: torch.dtype) -> tuple[torch.Tensor, list[int]]:
    """Returns the flat tensor that the engine has filled, and the number of elements from every
    member.
    """
    rows: list[int] = outcome.rows if outcome is not None else []
    if outcome is None or len(outcome) == 0:
        return torch.empty(0, dtype=dtype), rows
    return torch.frombuffer(outcome, dtype=dtype), rows
