# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Memory for results.

Large tensors on the CPU get large pages, where Linux gives them on request: the first use of 64 MiB
took 33 ms with small pages and 8 ms with large ones.
"""

from __future__ import annotations

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
    if tensor.device.type != "cpu" or (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor.to(dtype)
    return empty_like(tensor.detach(), dtype).copy_(tensor.detach())


def _prepared(tensor: torch.Tensor) -> torch.Tensor:
    is_large = tensor.device.type == "cpu" and tensor.nbytes >= engine.LARGE_MEMORY
    # Tensors of a tracer are of a subclass, or seen by a compiler, and have no memory.
    if is_large and type(tensor) is torch.Tensor and not torch.compiler.is_compiling():
        engine.prepare_memory(tensor.data_ptr(), tensor.nbytes)
    return tensor
