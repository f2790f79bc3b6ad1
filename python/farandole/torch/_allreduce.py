# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Allreduce: every rank gets the combination of all ranks' tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.util import allows_rounded_sums, resolve_op_argument
from farandole.torch._handles import synchronize
from farandole.torch._reduce import (
    TensorReduction,
    reduce_tensor,
    reduce_tensors,
    start_allreduce,
    start_grouped_allreduce,
)
from farandole.torch.compression import Compression, Compressor, is_used_by_reduction_only

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce into a new tensor.

    Args:
        tensor: Any dense tensor; equal shape and dtype on all ranks. Must not be changed until
            `synchronize`.
        average: Deprecated; use `op`.
        name: Names the operation across ranks; unnamed operations match in the order they are
            issued.
        op: `Average` (the default), `Sum`, `Adasum`, `Min`, `Max` or `Product`.
        prescale_factor: Multiplies every rank's tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part; this one must be a member.

    Returns:
        A handle for `synchronize` and `poll`.

    Raises:
        ValueError: When an argument is wrong, or an operation with this name is in progress.
        FarandoleInternalError: When the world is broken already.
    """
    reduction = TensorReduction(
        resolve_op_argument(op, average), prescale_factor, postscale_factor, process_set
    )
    return start_allreduce(tensor, name, reduction, in_place=False, caller_waits=False)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce that overwrites `tensor`, which must be contiguous; else as
    `allreduce_async`.
    """
    reduction = TensorReduction(
        resolve_op_argument(op, average), prescale_factor, postscale_factor, process_set
    )
    return start_allreduce(tensor, name, reduction, in_place=True, caller_waits=False)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combines all ranks' tensors into a new one, the same on every rank.

    Differentiable but for `Adasum`. For `Average` and `Sum` the gradient is allreduced by the same
    operation; for `Min` and `Max` it goes in equal parts to the ranks that hold the extreme, for
    `Product` it is the product of the others. Where gradients follow Horovod
    (`FARANDOLE_GRADIENT_CONVENTION`), every op reduces gradients by the op itself.

    Args:
        tensor: As for `allreduce_async`.
        average: Deprecated; use `op`.
        name: As for `allreduce_async`.
        compression: Compresses the tensor for transport, for example `Compression.bf16`.
        op: As for `allreduce_async`.
        prescale_factor: Multiplies every rank's tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: As for `allreduce_async`.

    Returns:
        A tensor of the same shape, dtype and device.

    Raises:
        ValueError: When an argument is wrong, or ranks disagree about the operation.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    rounds = allows_rounded_sums(compression)
    reduction = TensorReduction(
        resolve_op_argument(op, average), prescale_factor, postscale_factor, process_set, rounds
    )
    compressed, ctx = compression.compress(tensor)
    reduced = reduce_tensor(
        compressed, name, reduction, is_used_by_reduction_only(compression, ctx)
    )
    return compression.decompress(reduced, ctx)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Like `allreduce`, but overwrites `tensor`, which must be contiguous, and returns it. No
    gradient.
    """
    reduction = TensorReduction(
        resolve_op_argument(op, average), prescale_factor, postscale_factor, process_set
    )
    return synchronize(start_allreduce(tensor, name, reduction, in_place=True, caller_waits=True))


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce of several tensors as one unit; `synchronize` returns the list of
    results.

    Tensors may differ in shape, dtype and device. Takes the arguments and raises the errors of
    `allreduce_async`. The first member is named `<name>`, member `i` of `n` after it
    `<name>_<i>of<n>`.
    """
    reduction = TensorReduction(
        resolve_op_argument(op, average), prescale_factor, postscale_factor, process_set
    )
    return start_grouped_allreduce(tensors, name, reduction, in_place=False)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce that overwrites several contiguous tensors; else as
    `grouped_allreduce_async`.
    """
    reduction = TensorReduction(
        resolve_op_argument(op, average), prescale_factor, postscale_factor, process_set
    )
    return start_grouped_allreduce(tensors, name, reduction, in_place=True)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Combines several tensors over all ranks as one unit into new ones; else as `allreduce`,
    also in its gradient.
    """
    rounds = allows_rounded_sums(compression)
    reduction = TensorReduction(
        resolve_op_argument(op, average), prescale_factor, postscale_factor, process_set, rounds
    )
    pairs = [compression.compress(tensor) for tensor in tensors]
    are_private = all(is_used_by_reduction_only(compression, ctx) for _, ctx in pairs)
    reduced = reduce_tensors([compressed for compressed, _ in pairs], name, reduction, are_private)
    return [
        compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)
    ]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Like `grouped_allreduce`, but overwrites the tensors, which must be contiguous, and
    returns them. No gradient.
    """
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    return synchronize(handle)
