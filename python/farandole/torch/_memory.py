# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Memory for results.

Large tensors on the CPU get large pages, where Linux gives them on request: the first use of 64 MiB
took 33 ms with small pages and 8 ms with large ones.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from farandole._native import engine

if TYPE_CHECKING:
    from collections.abc import Sequence


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of arbitrary content."""
    return _prepared(torch.empty(shape, dtype=dtype, device=device))


def empty_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of arbitrary content, of the shape, order and device of another."""
    return _prepared(torch.empty_like(tensor, dtype=dtype))


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this dtype, as `Tensor.to` gives it; `tensor` has another one."""
    wants_grad = torch.is_grad_enabled() and tensor.requires_grad
    if wants_grad or not _is_large(tensor):
        return tensor.to(dtype)
    return empty_like(tensor.detach(), dtype).copy_(tensor.detach())


def _is_large(tensor: torch.Tensor) -> bool:
    # Tensors that a compiler traces are of a subclass, or seen by it, and have no memory.
    return (
        tensor.device.type == "cpu"
        and type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.nbytes >= engine.LARGE_MEMORY
        and not torch.compiler.is_compiling()
    )


def _prepared(tensor: torch.Tensor) -> torch.Tensor:
    if _is_large(tensor):
        # Nor have those that a function transformation wraps.
        with suppress(RuntimeError):
            engine.prepare_memory(tensor.data_ptr(), tensor.nbytes)
    return tensor
