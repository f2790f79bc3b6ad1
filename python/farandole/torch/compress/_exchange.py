# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The communication of compressors: by Farandole's engine, or by a group of torch.distributed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from farandole._native import engine
from farandole.common import basics
from farandole.common.handles import member_ranks, process_set_number
from farandole.common.util import Sum, engine_op_number
from farandole.torch._gpu_tensors import gpu_and_stream_of
from farandole.torch._handles import ENGINE_DTYPES, table, to_engine_tensor, wrap_collected_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole.common.process_sets import ProcessSet


class Waiting:
    """An operation in progress.

    Args:
        wait: Waits for it and returns its result.
        future: Returns a future that completes with the operation, if possible.
        result: The result, for the waiters of the future.
    """

    def __init__(
        self,
        wait: Callable[[], Any],
        future: Callable[[], Any] | None = None,
        result: torch.Tensor | None = None,
    ) -> None:
        self._wait = wait
        self.future = future
        self.result = result

    def wait(self) -> Any:
        """Waits for the operation and returns its result; once."""
        return self._wait()


class Exchange(ABC):
    """Some ranks that reduce gradients together, seen from one of them.

    Attributes:
        size: Number of ranks.
        rank: Number of this rank among them.
    """

    size: int
    rank: int

    @abstractmethod
    def allreduce(self, tensor: torch.Tensor, *, rounds: bool = False) -> Waiting:
        """Starts a sum over all ranks that overwrites a contiguous tensor; the result is that
        tensor.

        Args:
            tensor: The tensor to sum.
            rounds: Whether partial sums of 16-bit floats may be rounded between hosts.
        """

    @abstractmethod
    def allgather(self, tensor: torch.Tensor) -> Waiting:
        """Starts sending a flat tensor to all; the result is a matrix with a row from each rank."""

    @abstractmethod
    def alltoall(self, rows: torch.Tensor) -> Waiting:
        """Starts sending a row of a contiguous matrix to each rank; the result has a row from
        each.
        """


class EngineExchange(Exchange):
    """The ranks of a process set.

    Args:
        name: Names the operations across ranks.
        process_set: The ranks.
    """

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        members = member_ranks(process_set)
        self.size, self.rank = len(members), members.index(basics.rank())
        self._set = process_set_number(process_set)
        self._name = name
        self._round = 0

    def _describe_operation(self, tensor: torch.Tensor) -> tuple[str, int, tuple[int, ...], int]:
        self._round += 1
        name = f"compress.{self._name}.{self._round}"
        return name, ENGINE_DTYPES[tensor.dtype], tensor.shape, tensor.data_ptr()

    def allreduce(self, tensor: torch.Tensor, *, rounds: bool = False) -> Waiting:
        """Starts a sum over all ranks that overwrites a contiguous tensor; the result is that
        tensor.
        """
        source = to_engine_tensor(tensor)

        def finish_allreduce(_: list[Any]) -> torch.Tensor:
            return tensor if source is tensor else tensor.copy_(source)

        op = engine_op_number(Sum, rounds)
        arguments = (
            *self._describe_operation(source),
            source.data_ptr(),
            op,
            1.0,
            1.0,
            self._set,
            False,
            gpu_and_stream_of(source),
        )
        return self._submit_operation(source, finish_allreduce, engine.allreduce, *arguments)

    def allgather(self, tensor: torch.Tensor) -> Waiting:
        """Starts sending a flat tensor to all; the result is a matrix with a row from each rank."""
        source = to_engine_tensor(tensor)
        arguments = (*self._describe_operation(source), self._set, False, gpu_and_stream_of(source))
        return self._submit_operation(
            source, self._make_rows_finish(tensor), engine.allgather, *arguments
        )

    def alltoall(self, rows: torch.Tensor) -> Waiting:
        """Starts sending a row of a contiguous matrix to each rank; the result has a row from
        each.
        """
        source = to_engine_tensor(rows)
        described = self._describe_operation(source)
        return self._submit_operation(
            source,
            self._make_rows_finish(rows),
            engine.alltoall,
            *described,
            None,
            self._set,
            False,
            gpu_and_stream_of(source),
        )

    def _make_rows_finish(self, like: torch.Tensor) -> Callable[[list[Any]], torch.Tensor]:
        def finish_rows(outcomes: list[Any]) -> torch.Tensor:
            whole = wrap_collected_rows(outcomes[0], like, like.device)
            return whole.view(self.size, whole.numel() // self.size)

        return finish_rows

    def _submit_operation(
        self,
        keep: Any,
        finish: Callable[[list[Any]], torch.Tensor],
        call: Callable[..., int],
        *arguments: Any,
    ) -> Waiting:
        number = table.submit_operation(keep, finish, call, *arguments)
        return Waiting(lambda: table.synchronize(number))


class GroupExchange(Exchange):
    """The ranks of a group of torch.distributed, with any backend.

    Args:
        group: The group; the default one when `None`.
    """

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist  # noqa: PLC0415 - slow to import, and only for those who use it

        self._dist = dist
        self.group: Any = dist.group.WORLD if group is None else group
        self.size, self.rank = self.group.size(), self.group.rank()

    def allreduce(self, tensor: torch.Tensor, *, rounds: bool = False) -> Waiting:
        """Starts a sum over all ranks that overwrites a contiguous tensor; the result is that
        tensor.
        """
        del rounds  # That is up to the backend.
        return self._waiting_for_tensor(
            self._dist.all_reduce(tensor, group=self.group, async_op=True), tensor
        )

    def allgather(self, tensor: torch.Tensor) -> Waiting:
        """Starts sending a flat tensor to all; the result is a matrix with a row from each rank."""
        rows = torch.empty((self.size, tensor.numel()), dtype=tensor.dtype, device=tensor.device)
        work = self._dist.all_gather_into_tensor(
            rows.view(-1), tensor, group=self.group, async_op=True
        )
        return self._waiting_for_tensor(work, rows)

    def alltoall(self, rows: torch.Tensor) -> Waiting:
        """Starts sending a row of a contiguous matrix to each rank; the result has a row from
        each.
        """
        received = torch.empty_like(rows)
        return self._waiting_for_tensor(
            self._dist.all_to_all_single(received, rows, group=self.group, async_op=True), received
        )

    def _waiting_for_tensor(self, work: Any, result: torch.Tensor) -> Waiting:
        def wait_for_work() -> torch.Tensor:
            work.wait()
            return result

        return Waiting(wait_for_work, work.get_future, result)
