# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reduce-scatter: every rank gets its part of the combination of all ranks' tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from farandole._native import engine
from farandole.common import gradient_convention
from farandole.common.exceptions import FarandoleUsageError
from farandole.common.handles import member_ranks
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.util import Average, Sum, allows_rounded_sums
from farandole.torch import _large_tensor_memory
from farandole.torch._allgather import grouped_allgather
from farandole.torch._gpu_tensors import gpu_and_stream_of, gpus_and_streams_of
from farandole.torch._handles import (
    describe_tensor,
    must_record_gradient,
    require_dimension,
    synchronize,
    table,
    to_engine_tensor,
)
from farandole.torch._reduce import TensorReduction
from farandole.torch.compression import Compression, Compressor

if TYPE_CHECKING:
    from collections.abc import Sequence


def _require_sum_or_average(op: int) -> int:
    if op not in (Average, Sum):
        raise FarandoleUsageError(f"op must be Average or Sum in a reducescatter: {op!r}")
    return op


def _input_and_own_part(
    tensor: torch.Tensor, process_set: ProcessSet
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the input, and memory for this rank's rows: the first members get the rows that
    are left over.
    """
    require_dimension("reducescatter", tensor)
    rows, extra_rows = divmod(tensor.shape[0], len(member_ranks(process_set)))
    source = to_engine_tensor(tensor)
    mine = rows + ((process_set.rank() or 0) < extra_rows)
    return source, _large_tensor_memory.uninitialized_tensor(
        (mine, *source.shape[1:]), source.dtype, source.device
    )


def _start_reducescatter(
    tensor: torch.Tensor, name: str | None, reduction: TensorReduction, caller_waits: bool
) -> int:
    arguments = reduction.engine_arguments
    source, target = _input_and_own_part(tensor, reduction.process_set)
    described = describe_tensor(
        table.operation_name("reducescatter", name, reduction.process_set), source
    )
    submission = (
        engine.reducescatter,
        *described,
        target.data_ptr(),
        *arguments,
        caller_waits,
        gpu_and_stream_of(source),
    )
    return table.submit_operation((source, target), lambda _: target.to(tensor.device), *submission)


def _start_grouped_reducescatter(
    tensors: Sequence[torch.Tensor], name: str | None, reduction: TensorReduction
) -> int:
    arguments = reduction.engine_arguments
    pairs = [_input_and_own_part(tensor, reduction.process_set) for tensor in tensors]
    names = table.group_member_names(
        "grouped_reducescatter", name, len(tensors), reduction.process_set
    )
    members = [
        (*describe_tensor(member, source), target.data_ptr())
        for member, (source, target) in zip(names, pairs, strict=True)
    ]

    def finish_grouped_reducescatter(_: object) -> list[torch.Tensor]:
        return [
            target.to(tensor.device) for tensor, (_, target) in zip(tensors, pairs, strict=True)
        ]

    return table.submit_operation(
        pairs,
        finish_grouped_reducescatter,
        engine.grouped_reducescatter,
        members,
        *arguments,
        gpus_and_streams_of([source for source, _ in pairs]),
    )


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a reduce-scatter.

    Args:
        tensor: A dense tensor of at least one dimension, of equal shape and dtype on all ranks.
            Must not be changed until `synchronize`.
        name: Names the operation across ranks; unnamed operations match in the order they are
            issued.
        op: `Average` or `Sum`.
        process_set: The ranks that take part; this one must be a member.
        prescale_factor: Multiplies every rank's tensor before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        A handle for `synchronize` and `poll`.

    Raises:
        ValueError: When an argument is wrong, or an operation with this name is in progress.
        FarandoleInternalError: When the world is broken already.
    """
    reduction = TensorReduction(
        _require_sum_or_average(op), prescale_factor, postscale_factor, process_set
    )
    return _start_reducescatter(tensor, name, reduction, caller_waits=False)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a reduce-scatter of several tensors as one unit; `synchronize` returns the list of
    results.

    Takes the arguments and raises the errors of `reducescatter_async`. The first member is named
    `<name>`, member `i` of `n` after it `<name>_<i>of<n>`.
    """
    reduction = TensorReduction(
        _require_sum_or_average(op), prescale_factor, postscale_factor, process_set
    )
    return _start_grouped_reducescatter(tensors, name, reduction)


class _ReducescatterFunction(torch.autograd.Function):
    """Reduce-scatter with a gradient: an allgather of the gradients of all ranks' parts."""

    @staticmethod
    def forward(
        ctx: Any,
        grouped: bool,
        name: str | None,
        reduction: TensorReduction,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.process_set = reduction.process_set
        ctx.factor = reduction.prescale * reduction.postscale
        count = len(member_ranks(reduction.process_set))
        if reduction.op == Average:
            ctx.factor /= count
        if gradient_convention.uses_horovod_gradients():
            ctx.factor *= count
        ctx.backward_name = None if name is None else f"{name}.backward"
        if grouped:
            return tuple(synchronize(_start_grouped_reducescatter(tensors, name, reduction)))
        return (synchronize(_start_reducescatter(tensors[0], name, reduction, caller_waits=True)),)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        wanted = [grad for grad, needs in zip(grads, needed, strict=True) if needs]
        whole = iter(grouped_allgather(wanted, ctx.backward_name, ctx.process_set))
        return None, None, None, *(next(whole) * ctx.factor if needs else None for needs in needed)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combines all ranks' tensors and returns this rank's part: consecutive rows. The first ranks
    get the rows that are left over.

    Differentiable: the gradient joins the gradients of all ranks' parts, times the factors and, for
    `Average`, divided by the number of ranks. Where gradients follow Horovod
    (`FARANDOLE_GRADIENT_CONVENTION`), it is larger by the number of ranks.

    Args:
        tensor: As for `reducescatter_async`.
        name: As for `reducescatter_async`.
        compression: Compresses the tensor for transport, for example `Compression.bf16`.
        op: `Average` or `Sum`.
        process_set: As for `reducescatter_async`.
        prescale_factor: Multiplies every rank's tensor before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        A tensor of the same dtype and device; no rows when there are fewer rows than ranks.

    Raises:
        ValueError: When an argument is wrong, or ranks disagree about the operation.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    rounds = allows_rounded_sums(compression)
    reduction = TensorReduction(
        _require_sum_or_average(op), prescale_factor, postscale_factor, process_set, rounds
    )
    compressed, ctx = compression.compress(tensor)
    if must_record_gradient(compressed):
        part = _ReducescatterFunction.apply(False, name, reduction, compressed)[0]
    else:
        part = synchronize(_start_reducescatter(compressed, name, reduction, caller_waits=True))
    return compression.decompress(part, ctx)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Combines several tensors and returns this rank's parts; else as `reducescatter`, also in
    its gradient.
    """
    rounds = allows_rounded_sums(compression)
    reduction = TensorReduction(
        _require_sum_or_average(op), prescale_factor, postscale_factor, process_set, rounds
    )
    pairs = [compression.compress(tensor) for tensor in tensors]
    compressed = [tensor for tensor, _ in pairs]
    if must_record_gradient(*compressed):
        parts = _ReducescatterFunction.apply(True, name, reduction, *compressed)
    else:
        parts = synchronize(_start_grouped_reducescatter(compressed, name, reduction))
    return [compression.decompress(part, ctx) for part, (_, ctx) in zip(parts, pairs, strict=True)]
