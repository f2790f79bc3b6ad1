# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Moving statistics of batch norms: padding does not move them, and ranks average them.

Each rank moves the statistics of its batch norms by its own rows. Ranks average them at the end of
an epoch, so all ranks validate the model that is saved.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

import farandole.torch as hvd
from farandole.torch.sync_batch_norm import SyncBatchNorm, exclude_padding_rows

if TYPE_CHECKING:
    from collections.abc import Iterator


MIN_BATCH_NORM_ROWS = 2
"""Rows that a batch norm of one rank needs in training."""


def min_batch_rows_for_norms(module: torch.nn.Module) -> int:
    """Returns how many rows a batch of a rank must have, with padding.

    A batch norm over all ranks needs no padding on a rank with one row. If a model reorders rows
    before such a layer, padding could not be distinguished from rows that count.

    Args:
        module: the model.
    """
    kinds = [
        isinstance(layer, SyncBatchNorm)
        for layer in module.modules()
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - the class that BatchNorm1d to 3d have in common
    ]
    return 1 if kinds and all(kinds) else MIN_BATCH_NORM_ROWS


@contextlib.contextmanager
def ignore_padding_in_buffers(module: torch.nn.Module, valid: int, count: int) -> Iterator[None]:
    """Lets a forward pass leave buffers as the rows that count make them.

    Batch norms of all ranks leave out the padding. Buffers of other layers keep the values from
    before the forward pass.

    Args:
        module: the model.
        valid: rows of the batch that count.
        count: rows of the batch, with padding.
    """
    if not module.training or count == valid:
        yield
        return
    kept = [(buffer, buffer.clone()) for buffer in _unsynchronized_buffers(module)]
    with exclude_padding_rows(valid, count):
        yield
    for buffer, before in kept:
        buffer.data.copy_(before)


def _unsynchronized_buffers(module: torch.nn.Module) -> list[torch.Tensor]:
    return [
        buffer
        for layer in module.modules()
        if not isinstance(layer, SyncBatchNorm)
        for buffer in layer.buffers(recurse=False)
    ]


def average_moving_statistics(module: torch.nn.Module) -> None:
    """Gives all ranks the mean of their moving statistics; a collective call.

    Args:
        module: the model.
    """
    moving = [
        buffer
        for layer in module.modules()
        for name, buffer in layer.named_buffers(recurse=False)
        if name in ("running_mean", "running_var") and not isinstance(layer, SyncBatchNorm)
    ]
    if hvd.size() == 1 or not moving:
        return
    mine = torch.cat([buffer.detach().reshape(-1).double().cpu() for buffer in moving])
    mean = hvd.allreduce(mine, op=hvd.Average, name="farandole.statistics")
    parts = mean.split([buffer.numel() for buffer in moving])
    with torch.no_grad():
        for buffer, part in zip(moving, parts, strict=True):
            buffer.copy_(part.reshape(buffer.shape))
