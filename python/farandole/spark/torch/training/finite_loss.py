# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checks the loss of every step without making the GPU wait."""

from __future__ import annotations

import time

import torch

from farandole.spark.common.runs.finite_loss import check_finite_loss

_CHECK_INTERVAL_SECONDS = 0.2


class FiniteLossCheck:
    """A check that ends the training at a loss that is not finite; it makes no collective call.

    On a CPU, every loss is read. A GPU stores the first bad loss, which is read a few times per
    second and at the end of an epoch.

    Args:
        wanted: whether losses are checked.
        rank: rank of this process.
        waits: whether losses are read later; default: only the losses of a GPU.
    """

    def __init__(self, *, wanted: bool, rank: int, waits: bool | None = None) -> None:
        self._wanted = wanted
        self._rank = rank
        self._defers_reads = waits
        self._epoch = 0
        self._last_check_time = time.monotonic()
        self._first_bad_loss: tuple[torch.Tensor, torch.Tensor] | None = None

    def begin_epoch(self, epoch: int) -> None:
        """Notes that an epoch begins.

        Args:
            epoch: counted from 0.
        """
        self._epoch = epoch
        self._first_bad_loss = None

    def check_step_loss(self, loss: torch.Tensor, step: int) -> None:
        """Takes the loss of a step.

        Args:
            loss: one number.
            step: counted from 0.

        Raises:
            NotFiniteError: it is not finite, or one before it was not.
        """
        if not self._wanted:
            return
        value = loss.detach().reshape(())
        if not (value.device.type != "cpu" if self._defers_reads is None else self._defers_reads):
            check_finite_loss(float(value), self._epoch, step, self._rank)
            return
        number = torch.full((), float(step), device=value.device)
        if self._first_bad_loss is None:
            self._first_bad_loss = value, number
        else:
            kept, at = self._first_bad_loss
            fine = torch.isfinite(kept)
            self._first_bad_loss = torch.where(fine, value, kept), torch.where(fine, number, at)
        if time.monotonic() - self._last_check_time >= _CHECK_INTERVAL_SECONDS:
            self.check_pending_losses()

    def check_pending_losses(self) -> None:
        """Asks the GPU.

        Raises:
            NotFiniteError: a loss of this epoch was not finite.
        """
        self._last_check_time = time.monotonic()
        if self._first_bad_loss is not None:
            loss, step = torch.stack([one.double() for one in self._first_bad_loss]).tolist()
            check_finite_loss(loss, self._epoch, int(step), self._rank)
