# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The backend: collectives of torch.distributed as operations of the engine."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from farandole._native import engine
from farandole.common import basics
from farandole.common.counted_noun import format_counted_noun
from farandole.torch._handles import ENGINE_DTYPES
from farandole.torch.distributed._barriers import (
    BarrierMarkScope,
    BarrierWork,
    run_monitored_barrier,
)
from farandole.torch.distributed._groups import (
    count_and_name_group,
    current_world_store,
    start_opening_member_set,
)
from farandole.torch.distributed._point_to_point import PointToPoint
from farandole.torch.distributed._reductions import ReductionOperations
from farandole.torch.distributed._tensors import (
    copy_into,
    copy_parts_into,
    flat_length,
    join_flat,
    received_elements,
    to_flat_host,
)
from farandole.torch.distributed._work import PendingOperation

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch._C._distributed_c10d import Backend

    from farandole.torch.distributed._operations import Tensors

_UNSET_TIMEOUT: Final = timedelta(0)
"""Options of torch have this timeout or a shorter one if the caller gave none."""


class FarandoleBackend(ReductionOperations):
    """One group's collectives."""

    # torch's interface of a backend.

    def name(self) -> str:
        """Returns the backend's name."""
        return "farandole"

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Returns the backend's name, as C++ asks for it."""
        return "farandole"

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing: a group is formed by its members alone. torch calls this in a group of
        several backends.
        """

    @property
    def supports_splitting(self) -> bool:
        """Whether groups can be split: always."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """False: torch's coalescing manager is not needed, because the engine fuses operations."""
        return False

    @property
    def options(self) -> Backend.Options:
        """The options that torch passes to a group that is split from this one."""
        return self._options

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the limit of each operation that starts later."""
        self._limit = timeout
        self._options._timeout = timeout  # noqa: SLF001 - torch's name

    def _get_sequence_number_for_group(self) -> int:
        return self._operation_count

    def split(self, store: Any, ranks: list[int], options: Any) -> FarandoleBackend | None:
        """Makes a group of some of this group's members, for a group of several backends.

        Args:
            store: Ignored.
            ranks: Ranks in this group, in the order of the new group.
            options: Options of the new group, with its timeout.
        """
        del store
        if self._rank not in ranks:
            return None
        return self.split_members(ranks, options._timeout)  # noqa: SLF001 - torch's name

    def split_members(self, ranks: list[int], timeout: timedelta | None) -> FarandoleBackend:
        """Makes a group of some of this group's members, with this one.

        Args:
            ranks: Ranks in this group, in the order of the new group.
            timeout: Limit of its operations; by default, the limit of this group.
        """
        return make_member_backend(
            [self._members[rank] for rank in ranks],
            timeout if timeout is not None and timeout > _UNSET_TIMEOUT else self._limit,
        )

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Does nothing: the world is connected."""

    def shutdown(self) -> None:
        """Waits for all futures that were returned."""
        if self._messages is not None:
            self._messages.close()
        self._completer.close()

    def abort(self) -> None:
        """Leaves the world. Operations in progress fail."""
        basics.shutdown()

    # Movements.

    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
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
            self._member_set_number,
            self._is_waited_at_once(opts),
        )

        def finish_broadcast(_: list[Any]) -> None:
            if data.data_ptr() != tensor.data_ptr():
                copy_into(tensor, data)

        return self._submit_work(submission, data, finish_broadcast, [tensor])

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Any:
        """Gives every rank all ranks' tensors, which may differ in shape like the outputs."""
        (targets,), (source,) = outputs, inputs
        return self._allgather_flat([targets], [source], opts)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> Any:
        """Gives every rank all ranks' tensors, one after the other."""
        return self._allgather_flat([[output]], [source], opts)

    _allgather_base = all_gather_single

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Any:
        """Like `allgather`, for several tensors as one unit; `outputs` has a list per rank."""
        return self._allgather_flat(
            [list(targets) for targets in zip(*outputs, strict=True)], inputs, opts
        )

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        """Like `all_gather_single`, for several tensors as one unit."""
        return self._allgather_flat([[output] for output in outputs], inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _allgather_flat(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Any:
        """Allgathers each input into its outputs: one tensor for all ranks, or one per rank."""
        data = [to_flat_host(source) for source in inputs]
        name = self._next_name()
        if len(data) == 1:
            part = data[0]
            described = (
                ENGINE_DTYPES[part.dtype],
                part.shape,
                part.data_ptr(),
                self._member_set_number,
                self._is_waited_at_once(opts),
            )
            submission: tuple[Any, ...] = (engine.allgather, name, *described)
        else:
            members = [
                (f"{name}_{i}of{len(data)}", ENGINE_DTYPES[part.dtype], part.shape, part.data_ptr())
                for i, part in enumerate(data, start=1)
            ]
            submission = (engine.grouped_allgather, members, self._member_set_number)

        def finish_allgather(outcomes: list[Any]) -> None:
            for targets, part, outcome in zip(outputs, data, outcomes, strict=True):
                whole, rows = self._reorder_for_group(*received_elements(outcome, part.dtype))
                copy_parts_into(targets, whole, rows if len(targets) > 1 else [whole.numel()])

        return self._submit_work(
            submission,
            data,
            finish_allgather,
            [target for targets in outputs for target in targets],
        )

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Any:
        """Gives the root all ranks' tensors."""
        (source,) = inputs
        return self._gather_to_root(outputs[0] if opts.rootRank == self._rank else [], source, opts)

    def gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> Any:
        """Gives the root all ranks' tensors, one after the other."""
        return self._gather_to_root([output] if opts.rootRank == self._rank else [], source, opts)

    gather_into_tensor = gather_single

    def _gather_to_root(self, targets: Tensors, source: torch.Tensor, opts: Any) -> Any:
        data = to_flat_host(source)
        sends = [data.numel() if member == opts.rootRank else 0 for member in range(self._size)]
        return self._exchange_elements(data, sends, targets, None, opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Any:
        """Gives every rank its tensor of the root's list."""
        (output,) = outputs
        parts = inputs[0] if opts.rootRank == self._rank else []
        data = join_flat(parts) if parts else to_flat_host(output)[:0]
        sends = [flat_length(part) for part in parts] or [0] * self._size
        return self._exchange_elements(data, sends, [output], None, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
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
    ) -> Any:
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
                raise ValueError(
                    f"{rows} rows cannot be dealt out to "
                    f"{format_counted_noun(self._size, 'rank')} evenly"
                )
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
    ) -> Any:
        """Returns an all-to-all of flat elements into one tensor or one per member."""
        data, sends = self._reorder_for_engine(data, sends)
        name = self._next_name()
        described = (
            ENGINE_DTYPES[data.dtype],
            data.shape,
            data.data_ptr(),
            sends,
            self._member_set_number,
            self._is_waited_at_once(opts),
        )
        submission = (engine.alltoall, name, *described)

        def finish_exchange(outcomes: list[Any]) -> None:
            whole, rows = self._reorder_for_group(*received_elements(outcomes[0], data.dtype))
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

    def barrier(self, opts: Any) -> BarrierWork:
        """Returns when every member has called it."""
        timeout = opts.timeout if opts.timeout > _UNSET_TIMEOUT else self._limit
        pending = PendingOperation(
            (engine.barrier, self._next_name(), self._member_set_number), None, _discard_outcomes
        )
        return self._note_work(
            BarrierWork(
                pending,
                self._completer,
                timeout,
                self._operation_count,
                BarrierMarkScope(self._store, self._name, self._rank, self._members),
            )
        )

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks that did not come in time."""
        self.run_monitored_barrier(opts.timeout, wait_all_ranks)

    def run_monitored_barrier(self, timeout: timedelta | None, wait_all_ranks: bool) -> None:
        """Like `monitored_barrier`, with the timeout itself."""
        self._barrier_count += 1
        run_monitored_barrier(
            BarrierMarkScope(
                self._store, f"{self._name}.{self._barrier_count}", self._rank, self._members
            ),
            timeout if timeout is not None and timeout > _UNSET_TIMEOUT else self._limit,
            wait_all_ranks,
        )

    _barrier_count = 0

    @property
    def _point_to_point(self) -> PointToPoint:
        if self._messages is None:
            self._messages = PointToPoint(self._name, self._rank, self._members, self._store)
        return self._messages

    _messages: PointToPoint | None = None

    def send(self, tensors: Tensors, destination: int, tag: int) -> Any:
        """Sends a tensor to a member, which receives it with the same tag."""
        (tensor,) = tensors
        return self._note_work(self._point_to_point.send(tensor, destination, tag, self._limit))

    def recv(self, tensors: Tensors, source: int, tag: int) -> Any:
        """Receives a tensor from a member."""
        (tensor,) = tensors
        return self._note_work(self._point_to_point.receive(tensor, source, tag, self._limit))

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        """Receives a tensor from any member."""
        (tensor,) = tensors
        return self._note_work(self._point_to_point.receive_from_any(tensor, tag, self._limit))


def _discard_outcomes(_: list[Any]) -> None:
    """Stores no result."""


def make_member_backend(members: list[int], timeout: timedelta) -> FarandoleBackend:
    """Returns the backend of a group of some ranks, with this one.

    Args:
        members: The global ranks, in the order of the group.
        timeout: Limit of each operation, and of linking the members.

    Raises:
        ValueError: There is no default group of backend farandole.
    """
    opening = start_opening_member_set(tuple(sorted(members)), timeout.total_seconds())
    return FarandoleBackend(
        members.index(basics.rank()),
        members,
        opening,
        current_world_store(),
        count_and_name_group(members),
        timeout,
    )
