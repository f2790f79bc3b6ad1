# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The backend: collectives of torch.distributed as operations of the engine.

Operations are named by their number in the group, because ranks start the operations of a group in
one order. If they do not, the engine raises an error that shows what each rank submitted.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._C._distributed_c10d import Backend

from farandole._native import engine
from farandole.common import basics
from farandole.common.handles import process_set_number
from farandole.common.util import Average, Sum
from farandole.torch._handles import ENGINE_DTYPES
from farandole.torch.distributed._groups import agree_on_process_sets
from farandole.torch.distributed._tensors import (
    copy_into,
    copy_parts_into,
    engine_reduction,
    flat_length,
    join_flat,
    received_elements,
    to_flat_host,
    to_reducible_host,
)
from farandole.torch.distributed._work import BackgroundCompleter, FarandoleWork, PendingOperation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farandole.common.process_sets import ProcessSet

Tensors = list[torch.Tensor]


class FarandoleBackend(Backend):
    """One group's collectives.

    Args:
        rank: This process's number in the group.
        size: Number of members.
        process_set: The members, in the order of the group.
        name: Keeps the names of this group's operations apart.
    """

    def __init__(self, rank: int, size: int, process_set: ProcessSet, name: str) -> None:
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._set = process_set_number(process_set)
        self._members = process_set.ranks or list(range(size))
        self._name = f"torch.distributed.{name}"
        self._options = Backend.Options("farandole")
        self._operation_numbers = itertools.count()
        self._completer = BackgroundCompleter()

    # torch's interface of a backend.

    def name(self) -> str:
        """Returns the backend's name."""
        return "farandole"

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Returns the backend's name, as C++ asks for it."""
        return "farandole"

    @property
    def supports_splitting(self) -> bool:
        """Whether groups can be split: always, because a split informs ranks of other groups."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """False: torch's coalescing manager is not needed, because the engine fuses operations."""
        return False

    @property
    def options(self) -> Backend.Options:
        """The options that torch passes to a group that is split from this one."""
        return self._options

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Takes part in creating a group without this process."""
        del device
        agree_on_process_sets(None)

    def split(self, store: Any, ranks: list[int], options: Any) -> FarandoleBackend | None:
        """Makes a group of some of this group's members, by torch's `split_group`; all members call
        it.

        Raises:
            ValueError: When this is not the group of all ranks, or the ranks are not in ascending
                order.
        """
        del store
        if self._set != 0 or ranks != sorted(ranks):
            raise ValueError(
                f"split_group needs the default group and ranks in ascending order: {ranks}"
            )
        process_set = agree_on_process_sets(ranks if self._rank in ranks else None)
        if process_set is None:
            return None
        return FarandoleBackend(
            ranks.index(self._rank), len(ranks), process_set, options.group_name
        )

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Does nothing: the world is connected."""

    def shutdown(self) -> None:
        """Waits for all futures that were returned."""
        self._completer.close()

    def abort(self) -> None:
        """Leaves the world. Operations in progress fail."""
        basics.shutdown()

    # Reductions.

    def allreduce(self, tensors: Tensors, opts: Any) -> FarandoleWork:
        """Overwrites the tensor with the combination of all ranks' tensors."""
        if len(tensors) != 1:
            return self.allreduce_coalesced(tensors, opts)
        return self._reduce_into(tensors[0], tensors[0], opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> FarandoleWork:
        """Like `allreduce`, for several tensors as one unit."""
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

        submission = (engine.grouped_allreduce, members, op, 1.0, 1.0, self._set)
        return self._submit_work(submission, data, finish_allreduce, tensors)

    def reduce(self, tensors: Tensors, opts: Any) -> FarandoleWork:
        """Like `allreduce`, but overwrites the root's tensor only."""
        (tensor,) = tensors
        return self._reduce_into(tensor if opts.rootRank == self._rank else None, tensor, opts)

    def _reduce_into(
        self, target: torch.Tensor | None, tensor: torch.Tensor, opts: Any
    ) -> FarandoleWork:
        op = engine_reduction(opts.reduceOp)
        data = to_reducible_host(tensor)
        result = torch.empty_like(data) if target is None else data
        name = self._next_name()
        submission = (
            engine.allreduce,
            name,
            ENGINE_DTYPES[data.dtype],
            data.shape,
            data.data_ptr(),
            result.data_ptr(),
            op,
            1.0,
            1.0,
            self._set,
            not opts.asyncOp,
        )

        def finish_reduce(_: list[Any]) -> None:
            if target is not None and result.data_ptr() != target.data_ptr():
                copy_into(target, result)

        return self._submit_work(submission, (data, result), finish_reduce, [tensor])

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> FarandoleWork:
        """Combines all ranks' lists of tensors; this rank gets the one at its position."""
        (output,), (parts,) = outputs, inputs
        if any(part.numel() != output.numel() for part in parts):
            raise ValueError("reduce_scatter needs tensors of one size")
        return self._reduce_scatter(
            output, torch.cat([to_reducible_host(part).reshape(-1) for part in parts]), opts
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any
    ) -> FarandoleWork:
        """Combines all ranks' tensors; this rank gets its part of the first dimension."""
        return self._reduce_scatter(output, to_reducible_host(source).reshape(-1), opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> FarandoleWork:
        """Like `reduce_scatter_single`, for several pairs of tensors as one unit."""
        op = self._scatterable_op(opts)
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

        submission = (engine.grouped_reducescatter, members, op, 1.0, 1.0, self._set)
        return self._submit_work(submission, (data, results), finish_reduce_scatter, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any
    ) -> FarandoleWork:
        op = engine_reduction(opts.reduceOp)
        data = self._rows_per_member(source, output)
        if op not in (Average, Sum):
            return self._reduce_then_take(output, data.clone(), op)
        result = torch.empty_like(data[0])
        name = self._next_name()
        submission = (
            engine.reducescatter,
            name,
            ENGINE_DTYPES[data.dtype],
            data.shape,
            data.data_ptr(),
            result.data_ptr(),
            op,
            1.0,
            1.0,
            self._set,
            not opts.asyncOp,
        )

        return self._submit_work(
            submission, (data, result), lambda _: copy_into(output, result), [output]
        )

    def _reduce_then_take(self, output: torch.Tensor, data: torch.Tensor, op: int) -> FarandoleWork:
        """Reduces everything everywhere: the engine scatters sums and averages only."""
        name = self._next_name()
        address = data.data_ptr()
        submission = (
            engine.allreduce,
            name,
            ENGINE_DTYPES[data.dtype],
            data.shape,
            address,
            address,
            op,
            1.0,
            1.0,
            self._set,
            False,
        )
        return self._submit_work(
            submission, data, lambda _: copy_into(output, data[self._rank]), [output]
        )

    def _rows_per_member(self, source: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Returns a flat input as one row per member."""
        if source.numel() != output.numel() * self._size:
            raise ValueError(
                f"reduce_scatter needs {self._size} times as many elements as it returns: "
                f"{source.numel()} for {output.numel()}"
            )
        return source.view(self._size, output.numel())

    def _scatterable_op(self, opts: Any) -> int:
        op = engine_reduction(opts.reduceOp)
        if op not in (Average, Sum):
            raise ValueError("a coalesced reduce_scatter is a sum or an average")
        return op

    # Movements.

    def broadcast(self, tensors: Tensors, opts: Any) -> FarandoleWork:
        """Overwrites the tensor by the root's."""
        (tensor,) = tensors
        data = to_flat_host(tensor)
        name = self._next_name()
        address, root = data.data_ptr(), self._members[opts.rootRank]
        submission = (
            engine.broadcast,
            name,
            ENGINE_DTYPES[data.dtype],
            data.shape,
            address,
            address,
            root,
            self._set,
            not opts.asyncOp,
        )

        def finish_broadcast(_: list[Any]) -> None:
            if data.data_ptr() != tensor.data_ptr():
                copy_into(tensor, data)

        return self._submit_work(submission, data, finish_broadcast, [tensor])

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> FarandoleWork:
        """Gives every rank all ranks' tensors, which may differ in shape like the outputs."""
        (targets,), (source,) = outputs, inputs
        return self._allgather_flat([targets], [source], opts)

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any
    ) -> FarandoleWork:
        """Gives every rank all ranks' tensors, one after the other."""
        return self._allgather_flat([[output]], [source], opts)

    _allgather_base = all_gather_single

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any
    ) -> FarandoleWork:
        """Like `allgather`, for several tensors as one unit; `outputs` has a list per rank."""
        return self._allgather_flat(
            [list(targets) for targets in zip(*outputs, strict=True)], inputs, opts
        )

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> FarandoleWork:
        """Like `all_gather_single`, for several tensors as one unit."""
        return self._allgather_flat([[output] for output in outputs], inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _allgather_flat(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> FarandoleWork:
        """Allgathers each input into its outputs: one tensor for all ranks, or one per rank."""
        data = [to_flat_host(source) for source in inputs]
        name = self._next_name()
        if len(data) == 1:
            part = data[0]
            described = (
                ENGINE_DTYPES[part.dtype],
                part.shape,
                part.data_ptr(),
                self._set,
                not opts.asyncOp,
            )
            submission: tuple[Any, ...] = (engine.allgather, name, *described)
        else:
            members = [
                (f"{name}_{i}of{len(data)}", ENGINE_DTYPES[part.dtype], part.shape, part.data_ptr())
                for i, part in enumerate(data, start=1)
            ]
            submission = (engine.grouped_allgather, members, self._set)

        def finish_allgather(outcomes: list[Any]) -> None:
            for targets, part, outcome in zip(outputs, data, outcomes, strict=True):
                whole, rows = received_elements(outcome, part.dtype)
                copy_parts_into(targets, whole, rows if len(targets) > 1 else [whole.numel()])

        return self._submit_work(
            submission,
            data,
            finish_allgather,
            [target for targets in outputs for target in targets],
        )

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> FarandoleWork:
        """Gives the root all ranks' tensors."""
        (source,) = inputs
        return self._gather_to_root(outputs[0] if opts.rootRank == self._rank else [], source, opts)

    def gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> FarandoleWork:
        """Gives the root all ranks' tensors, one after the other."""
        return self._gather_to_root([output] if opts.rootRank == self._rank else [], source, opts)

    gather_into_tensor = gather_single

    def _gather_to_root(self, targets: Tensors, source: torch.Tensor, opts: Any) -> FarandoleWork:
        data = to_flat_host(source)
        sends = [data.numel() if member == opts.rootRank else 0 for member in range(self._size)]
        return self._exchange_elements(data, sends, targets, None, opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> FarandoleWork:
        """Gives every rank its tensor of the root's list."""
        (output,) = outputs
        parts = inputs[0] if opts.rootRank == self._rank else []
        data = join_flat(parts) if parts else to_flat_host(output)[:0]
        sends = [flat_length(part) for part in parts] or [0] * self._size
        return self._exchange_elements(data, sends, [output], None, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> FarandoleWork:
        """Sends a tensor to every rank and gets one from each."""
        sends = [flat_length(part) for part in inputs]
        return self._exchange_elements(
            join_flat(inputs), sends, outputs, [flat_length(out) for out in outputs], opts
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        receives: list[int],
        sends: list[int],
        opts: Any,
    ) -> FarandoleWork:
        """Sends rows to every rank and gets rows from each; equal numbers if none are given."""
        data = to_flat_host(source)
        expected = self._split_elements(output, receives)
        return self._exchange_elements(
            data, self._split_elements(source, sends), [output], expected, opts
        )

    alltoall_base = all_to_all_single

    def _split_elements(self, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
        """Returns the number of elements of the flat tensor for each member."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % self._size:
                raise ValueError(f"{rows} rows cannot be dealt out to {self._size} ranks evenly")
            splits = [rows // self._size] * self._size
        if sum(splits) != rows or len(splits) != self._size:
            raise ValueError(
                f"splits must be {self._size} numbers with the sum {rows}: {list(splits)}"
            )
        row = math.prod(tensor.shape[1:]) * (flat_length(tensor) // max(tensor.numel(), 1))
        return [count * row for count in splits]

    def _exchange_elements(
        self,
        data: torch.Tensor,
        sends: list[int],
        targets: Tensors,
        expected: list[int] | None,
        opts: Any,
    ) -> FarandoleWork:
        """Returns an all-to-all of flat elements into one tensor or one per member."""
        name = self._next_name()
        described = (
            ENGINE_DTYPES[data.dtype],
            data.shape,
            data.data_ptr(),
            sends,
            self._set,
            not opts.asyncOp,
        )
        submission = (engine.alltoall, name, *described)

        def finish_exchange(outcomes: list[Any]) -> None:
            whole, rows = received_elements(outcomes[0], data.dtype)
            if expected is not None and rows != expected:
                raise ValueError(
                    f"elements received from each rank differ: expected {expected}, received {rows}"
                )
            if len(targets) == self._size > 1:
                copy_parts_into(targets, whole, rows)
            elif targets:
                copy_into(targets[0], whole)

        return self._submit_work(submission, data, finish_exchange, targets)

    # The rest.

    def barrier(self, opts: Any) -> FarandoleWork:
        """Returns when every member has called it."""
        del opts
        return FarandoleWork(self._submit_barrier(), [], self._completer)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """A barrier with a deadline. The engine's stall report names the missing ranks."""
        del wait_all_ranks
        FarandoleWork(self._submit_barrier(), [], self._completer).wait(opts.timeout)

    def _submit_barrier(self) -> PendingOperation:
        return PendingOperation(
            (engine.barrier, self._next_name(), self._set), None, lambda _: None
        )

    def send(self, tensors: Tensors, destination: int, tag: int) -> NoReturn:
        """Raises an error: the engine has collectives only."""
        del tensors, destination, tag
        raise NotImplementedError(
            "farandole has no point-to-point operations: use all_to_all_single"
        )

    def recv(self, tensors: Tensors, source: int, tag: int) -> NoReturn:
        """Raises an error: the engine has collectives only."""
        self.send(tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> NoReturn:
        """Raises an error: the engine has collectives only."""
        self.send(tensors, -1, tag)

    def _next_name(self) -> str:
        return f"{self._name}.{next(self._operation_numbers)}"

    def _submit_work(
        self,
        submission: tuple[Any, ...],
        keep: Any,
        finish: Callable[[list[Any]], None],
        outputs: Tensors,
    ) -> FarandoleWork:
        return FarandoleWork(PendingOperation(submission, keep, finish), outputs, self._completer)
