# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Compares the tensors of ranks, before some ranks send them to others.

Tensors that should be equal on all senders may differ: parameters that are not reduced, noise of
each rank, or rounding errors. A taker that got a part from each sender would then have a mixture.
So the senders compare digests first.
"""

from __future__ import annotations

import hashlib
from functools import cache
from itertools import compress, zip_longest
from typing import TYPE_CHECKING, Final

import torch

from farandole.common import basics
from farandole.common.exceptions import FarandoleUsageError
from farandole.common.util import Max
from farandole.torch._allgather import allgather
from farandole.torch._allreduce import allreduce_async_
from farandole.torch._handles import synchronize
from farandole.torch.functions import allgather_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farandole.torch._state_transfer import TransferRoles

_WORD_BYTES: Final = 4
"""Bytes of a word. A weighted sum of longer words would lose their first bits."""
_WORDS_PER_SUM: Final = 1 << 18
"""Words that are summed up at a time; more than two, because a sum has two words."""
_INT64_MIN: Final = torch.iinfo(torch.int64).min


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor in place, or a copy if the tensor is not contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.numel() == 1:
        # one element counts as contiguous with every stride, but has no other view
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


def tensor_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a digest of the bytes of a tensor, on its device: a sum of its words, weighted by
    position.
    """
    sums = [
        _weighted_word_sum(part)
        for part in tensor_bytes(tensor).split(_WORD_BYTES * _WORDS_PER_SUM)
    ]
    return sums[0] if len(sums) == 1 else tensor_digest(torch.stack(sums))


def _weighted_word_sum(part: torch.Tensor) -> torch.Tensor:
    if part.numel() % _WORD_BYTES:
        part = torch.nn.functional.pad(part, (0, -part.numel() % _WORD_BYTES))
    if part.storage_offset() % _WORD_BYTES or part.data_ptr() % _WORD_BYTES:
        part = part.clone()
    return (
        part.view(torch.int32)
        * _word_weights(_WORDS_PER_SUM, part.device)[: part.numel() // _WORD_BYTES]
    ).sum()


@cache
def _word_weights(count: int, device: torch.device) -> torch.Tensor:
    """Returns odd pseudo-random numbers, the same on all ranks."""
    mixed = torch.arange(1, count + 1) * (0x9E3779B97F4A7C15 - (1 << 64))
    mixed = (mixed ^ (mixed >> 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    return ((mixed ^ (mixed >> 27)) | 1).to(device)


def split_equal_tensors(
    name: str, tensors: Sequence[torch.Tensor], roles: TransferRoles
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Splits tensors into equal ones, with the same bytes on all senders, and others. All ranks get
    the same split.

    If one sender sends everything anyway, nothing is compared.

    Args:
        name: Names the operation across ranks.
        tensors: The tensors to compare; on ranks that do not send, only their number is used.
        roles: The ranks that send and the ranks that take.

    Raises:
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    if not tensors or not roles.sends_pieces_in_parts or len(roles.senders) == 1:
        return list(tensors), []
    digests = torch.full((2, len(tensors)), _INT64_MIN, dtype=torch.int64)
    if basics.rank() in roles.senders:
        with torch.no_grad():
            digests[0] = torch.stack([tensor_digest(tensor).cpu() for tensor in tensors])
        digests[1] = ~digests[0]  # the maximum of these is the complement of the minimum
    synchronize(allreduce_async_(digests, op=Max, name=name))
    are_equal = digests[0] == ~digests[1]
    return list(compress(tensors, are_equal)), list(compress(tensors, ~are_equal))


def fingerprint_bytes(data: bytes) -> int:
    """Returns a number of 64 bits for these bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def describe_parameters(param_groups: Sequence[dict[str, list[torch.Tensor]]]) -> list[str]:
    """Describes the parameters of an optimizer for `require_same_model`."""
    return [
        describe_named_tensor(f"parameter {index} of group {number}", parameter)
        for number, group in enumerate(param_groups)
        for index, parameter in enumerate(group["params"])
    ]


def describe_named_tensor(name: str, tensor: torch.Tensor) -> str:
    """Describes one tensor for `require_same_model`."""
    return f"{name} with shape {tuple(tensor.shape)} and {tensor.dtype}"


def require_same_model(lines: Sequence[str], source: int, takers: Sequence[int]) -> None:
    """Compares the models of all ranks, before the first transfer.

    Args:
        lines: Descriptions of this rank's tensors, in the order of the transfer.
        source: The rank with which the others are compared.
        takers: The ranks that must have the same model as `source`.

    Raises:
        ValueError: On all ranks, if one of the takers has another model.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    own = torch.tensor([fingerprint_bytes("\n".join(lines).encode())], dtype=torch.int64)
    everywhere = allgather(own, name="tolerant.model").tolist()
    misfits = [rank for rank in takers if everywhere[rank] != everywhere[source]]
    if not misfits:
        return
    of_all = allgather_object(list(lines), name="tolerant.models")
    first = misfits[0]
    pairs = zip_longest(of_all[source], of_all[first], fillvalue="no other parameter")
    expected, found = next(pair for pair in pairs if pair[0] != pair[1])
    raise FarandoleUsageError(
        "parameters must have the same names, shapes, data types and groups on all ranks; those "
        "of rank "
        f"{source} differ from those of ranks: {', '.join(map(str, misfits))}. Rank {source} has "
        f"{expected}, where rank {first} has {found}"
    )
