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


def uninitialized_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Returns a tensor of arbitrary content."""
    return _prepare_large_memory(torch.empty(shape, dtype=dtype, device=device))


def uninitialized_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor of arbitrary content, with the shape, order and device of another."""
    return _prepare_large_memory(torch.empty_like(tensor, dtype=dtype))


def cast_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Casts a tensor to another dtype, like `Tensor.to`."""
    wants_grad = torch.is_grad_enabled() and tensor.requires_grad
    if wants_grad or not _is_large(tensor):
        return tensor.to(dtype)
    return uninitialized_like(tensor.detach(), dtype).copy_(tensor.detach())


def _is_large(tensor: torch.Tensor) -> bool:
    # A tensor that a compiler traces has no memory. It is of a subclass, or traced right now.
    return (
        tensor.device.type == "cpu"
        and type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.nbytes >= engine.LARGE_MEMORY
        and not torch.compiler.is_compiling()
    )


def _prepare_large_memory(tensor: torch.Tensor) -> torch.Tensor:
    if _is_large(tensor):
        # A tensor that a function transformation wraps has no memory either.
        with suppress(RuntimeError):
            engine.advise_large_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor
