# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Sparse allreduce: indices and values of all ranks, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from farandole.common.handles import member_ranks
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.util import Average, Sum
from farandole.torch._allgather import allgather_async
from farandole.torch._handles import synchronize

if TYPE_CHECKING:
    from collections.abc import Callable


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Starts the sum or average of sparse tensors.

    Entries of the same index are summed on this rank before they are sent. The result has separate
    entries for different ranks.

    Args:
        tensor: A tensor in coordinate format; equal shape, dtype and number of sparse dimensions on
            all ranks. Must not be changed until the result is taken.
        name: Names the operation across ranks.
        op: `Average` or `Sum`; Horovod takes anything but `Average` for `Sum`.
        process_set: The ranks that take part; this one must be a member.

    Returns:
        A function that waits and returns the sparse result, not coalesced; each call returns the
        same tensor.

    Raises:
        ValueError: When an argument is wrong, or an operation with this name is in progress.
        FarandoleInternalError: When the world is broken already.
    """
    if op not in (Average, Sum):
        raise ValueError(f"op must be Average or Sum for sparse tensors: {op!r}")
    if tensor.layout != torch.sparse_coo:
        raise ValueError(f"tensor must be sparse, in coordinate format: {tensor.layout}")
    members = len(member_ranks(process_set))
    own = tensor.detach().coalesce()
    indices = allgather_async(own.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(own.values(), f"{name}.values", process_set)
    results: list[torch.Tensor] = []

    def finish_sparse_allreduce() -> torch.Tensor:
        if not results:
            all_values = synchronize(values)
            all_indices = synchronize(indices)
            if op == Average:
                all_values = all_values / members
            results.append(
                torch.sparse_coo_tensor(
                    all_indices.t(), all_values, own.shape, check_invariants=False
                )
            )
        return results[0]

    return finish_sparse_allreduce
