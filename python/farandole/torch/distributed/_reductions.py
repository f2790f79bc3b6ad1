# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A group's reductions.

The engine sums, averages, multiplies, and finds extremes. Every other reduction, such as the bits
of whole numbers, is made from the tensors of all ranks, on each rank in the order of the ranks.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from farandole._native import engine
from farandole.common.util import Average, Sum
from farandole.torch._handles import ENGINE_DTYPES
from farandole.torch.distributed._operations import GroupOperations, Tensors
from farandole.torch.distributed._tensors import (
    bitwise_reduction,
    copy_into,
    engine_reduction,
    received_elements,
    scale_before_sum,
    to_reducible_host,
)

if TYPE_CHECKING:
    from collections.abc import Callable


class ReductionOperations(GroupOperations):
    """The operations that combine the tensors of all ranks."""

    def allreduce(self, tensors: Tensors, opts: Any) -> Any:
        """Overwrites the tensor with the combination of all ranks' tensors."""
        if len(tensors) != 1:
            return self.allreduce_coalesced(tensors, opts)
        (tensor,) = tensors
        if tensor.layout == torch.sparse_coo:
            return self.allreduce_sparse(tensors, opts)
        return self._reduce_into(tensor, tensor, opts)

    def allreduce_sparse(self, tensors: Tensors, opts: Any) -> Any:
        """Overwrites a sparse tensor with the sum of all ranks' tensors, coalesced.

        Raises:
            ValueError: The operation is not a sum, or ranks have different shapes.
        """
        (tensor,) = tensors
        if opts.reduceOp != ReduceOp.SUM:
            raise ValueError(
                f"all_reduce of a sparse tensor can only sum: {reduction_name(opts.reduceOp)}"
            )
        own = tensor.detach().coalesce().cpu()
        shape = torch.tensor([[*tensor.shape, tensor.sparse_dim()]])
        # An engine's tensor has at least one element a row, also without dense dimensions.
        parts = [
            shape,
            own.indices().t().contiguous(),
            own.values().reshape(len(own.values()), math.prod(own.values().shape[1:])).contiguous(),
        ]
        name = self._next_name()
        members = [
            (f"{name}_{i}of3", ENGINE_DTYPES[part.dtype], part.shape, part.data_ptr())
            for i, part in enumerate(parts, start=1)
        ]

        def finish_sparse_sum(outcomes: list[Any]) -> None:
            shapes, indices, values = (
                received_elements(outcome, part.dtype)[0].view(-1, part.shape[1])
                for outcome, part in zip(outcomes, parts, strict=True)
            )
            if not (shapes == shape).all():
                raise ValueError(
                    "all_reduce of sparse tensors needs one shape and one number of sparse "
                    f"dimensions on all ranks: {shapes.tolist()}"
                )
            total = torch.sparse_coo_tensor(
                indices.t(),
                values.view(-1, *own.values().shape[1:]),
                own.shape,
                check_invariants=False,
            )
            with torch.no_grad():  # a detached tensor would get indices of its own
                tensor.copy_(total.coalesce())

        submission = (engine.grouped_allgather, members, self._member_set_number)
        return self._submit_work(submission, parts, finish_sparse_sum, tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Any:
        """Like `allreduce`, for several tensors as one unit."""
        if not tensors:
            raise ValueError("all_reduce needs at least one tensor")
        if lacks_engine_reduction(opts.reduceOp):
            return self._combine_works(
                [self._reduce_into(tensor, tensor, opts) for tensor in tensors]
            )
        op = engine_reduction(opts.reduceOp)
        data = [to_reducible_host(tensor) for tensor in tensors]
        base = self._next_name()
        members = [
            (
                f"{base}_{i}of{len(data)}",
                ENGINE_DTYPES[part.dtype],
                part.shape,
                part.data_ptr(),
                part.data_ptr(),
            )
            for i, part in enumerate(data, start=1)
        ]

        def finish_allreduce(_: list[Any]) -> None:
            for tensor, part in zip(tensors, data, strict=True):
                if part.data_ptr() != tensor.data_ptr():
                    copy_into(tensor, part)

        submission = (engine.grouped_allreduce, members, op, 1.0, 1.0, self._member_set_number)
        return self._submit_work(submission, data, finish_allreduce, tensors)

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        """Like `allreduce`, but overwrites the root's tensor only."""
        (tensor,) = tensors
        return self._reduce_into(tensor if opts.rootRank == self._rank else None, tensor, opts)

    def _reduce_into(self, target: torch.Tensor | None, tensor: torch.Tensor, opts: Any) -> Any:
        def store_result(result: torch.Tensor) -> None:
            if target is not None and result.data_ptr() != target.data_ptr():
                copy_into(target, result)

        if (fold := bitwise_reduction(opts.reduceOp, tensor.dtype)) is not None:
            return self._allgather_and_fold(
                to_reducible_host(tensor).reshape(-1), fold, store_result, [tensor]
            )
        op = engine_reduction(opts.reduceOp)
        data = scale_before_sum(to_reducible_host(tensor), opts.reduceOp)
        result = torch.empty_like(data) if target is None else data
        submission = self._reduction_submission(
            engine.allreduce, data, result, op, caller_waits=not opts.asyncOp
        )
        return self._submit_work(
            submission, (data, result), lambda _: store_result(result), [tensor]
        )

    def _reduction_submission(
        self,
        operation: Callable[..., int],
        data: torch.Tensor,
        result: torch.Tensor,
        op: int,
        *,
        caller_waits: bool,
    ) -> tuple[Any, ...]:
        """Returns the engine's function for a reduction, and its arguments."""
        tensor = (ENGINE_DTYPES[data.dtype], data.shape, data.data_ptr(), result.data_ptr())
        number = self._member_set_number
        return (operation, self._next_name(), *tensor, op, 1.0, 1.0, number, caller_waits)

    def _allgather_and_fold(
        self,
        data: torch.Tensor,
        fold: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        store_result: Callable[[torch.Tensor], None],
        outputs: Tensors,
    ) -> Any:
        """Combines the flat tensors of all ranks by a function of two."""
        name = self._next_name()
        submission = (
            engine.allgather,
            name,
            ENGINE_DTYPES[data.dtype],
            data.shape,
            data.data_ptr(),
            self._member_set_number,
            False,
        )

        def finish_fold(outcomes: list[Any]) -> None:
            whole, rows = received_elements(outcomes[0], data.dtype)
            if len(set(rows)) > 1:
                raise ValueError(f"ranks have tensors of different sizes: {rows} elements")
            store_result(functools.reduce(fold, self._rows_by_rank(whole)))

        return self._submit_work(submission, data, finish_fold, outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Any:
        """Combines all ranks' lists of tensors; this rank gets the one at its position."""
        (output,), (parts,) = outputs, inputs
        if any(part.numel() != output.numel() for part in parts):
            raise ValueError("reduce_scatter needs tensors of one size")
        return self._reduce_scatter(
            output, torch.cat([to_reducible_host(part).reshape(-1) for part in parts]), opts
        )

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> Any:
        """Combines all ranks' tensors; this rank gets its part of the first dimension."""
        return self._reduce_scatter(output, to_reducible_host(source).reshape(-1), opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        """Like `reduce_scatter_single`, for several pairs of tensors as one unit."""
        if (
            lacks_engine_reduction(opts.reduceOp)
            or engine_reduction(opts.reduceOp) not in (Average, Sum)
            or self._engine_order is not None
        ):
            return self._combine_works(
                [
                    self.reduce_scatter_single(output, source, opts)
                    for output, source in zip(outputs, inputs, strict=True)
                ]
            )
        data = [
            self._rows_per_member(to_reducible_host(source).reshape(-1), out)
            for source, out in zip(inputs, outputs, strict=True)
        ]
        results = [torch.empty(part.shape[1:], dtype=part.dtype) for part in data]
        base = self._next_name()
        members = [
            (
                f"{base}_{i}of{len(data)}",
                ENGINE_DTYPES[part.dtype],
                part.shape,
                part.data_ptr(),
                result.data_ptr(),
            )
            for i, (part, result) in enumerate(zip(data, results, strict=True), start=1)
        ]

        def finish_reduce_scatter(_: list[Any]) -> None:
            for output, result in zip(outputs, results, strict=True):
                copy_into(output, result)

        op = engine_reduction(opts.reduceOp)
        submission = (engine.grouped_reducescatter, members, op, 1.0, 1.0, self._member_set_number)
        return self._submit_work(submission, (data, results), finish_reduce_scatter, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> Any:
        data = self._rows_per_member(source, output)
        if (fold := bitwise_reduction(opts.reduceOp, data.dtype)) is not None:
            return self._allgather_and_fold(
                data.reshape(-1),
                fold,
                lambda whole: copy_into(output, self._rows_by_rank(whole)[self._rank]),
                [output],
            )
        op = engine_reduction(opts.reduceOp)
        data = scale_before_sum(data, opts.reduceOp)
        if op not in (Average, Sum):
            return self._allreduce_then_take_part(output, data.clone(), op)
        order = self._engine_order
        if order is not None:
            data = data[order]
        result = torch.empty_like(data[0])
        submission = self._reduction_submission(
            engine.reducescatter, data, result, op, caller_waits=not opts.asyncOp
        )
        return self._submit_work(
            submission, (data, result), lambda _: copy_into(output, result), [output]
        )

    def _allreduce_then_take_part(self, output: torch.Tensor, data: torch.Tensor, op: int) -> Any:
        """Reduces everything everywhere: the engine scatters sums and averages only."""
        submission = self._reduction_submission(
            engine.allreduce, data, data, op, caller_waits=False
        )
        return self._submit_work(
            submission, data, lambda _: copy_into(output, data[self._rank]), [output]
        )

    def _rows_by_rank(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the flat tensors of all members, which may be empty, as one row for each."""
        return whole.view(self._size, whole.numel() // self._size)

    def _rows_per_member(self, source: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Returns a flat input as one row per member."""
        if source.numel() != output.numel() * self._size:
            raise ValueError(
                f"reduce_scatter needs {self._size} times as many elements as it returns: "
                f"{source.numel()} for {output.numel()}"
            )
        return source.view(self._size, output.numel())


def reduction_name(op: Any) -> str:
    """Returns the name of a reduction."""
    return str(getattr(op, "op", op)).removeprefix("RedOpType.")


def lacks_engine_reduction(op: Any) -> bool:
    """Returns whether the engine has no such reduction of its own."""
    composed = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR, ReduceOp.PREMUL_SUM)
    return any(op == one for one in composed)
