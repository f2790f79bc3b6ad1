# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checks the loss of every step without making the GPU wait."""

from __future__ import annotations

import time

import torch

from farandole.spark.common.runs.finite import check

_SECONDS = 0.2


class LossWatch:
    """Ends training at a loss that is not finite; a collective of none.

    On a CPU every loss is read. A GPU keeps the first bad one to itself, and is asked a few times
    per second, and when an epoch ends.

    Args:
        wanted: whether it looks at all.
        rank: of this process.
        waits: whether losses are read later; as suits their device when omitted.
    """

    def __init__(self, *, wanted: bool, rank: int, waits: bool | None = None) -> None:
        self._wanted = wanted
        self._rank = rank
        self._waits = waits
        self._epoch = 0
        self._asked = time.monotonic()
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None

    def begin(self, epoch: int) -> None:
        """An epoch begins.

        Args:
            epoch: counted from 0.
        """
        self._epoch = epoch
        self._first = None

    def look(self, loss: torch.Tensor, step: int) -> None:
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
        if not (value.device.type != "cpu" if self._waits is None else self._waits):
            check(float(value), self._epoch, step, self._rank)
            return
        number = torch.full((), float(step), device=value.device)
        if self._first is None:
            self._first = value, number
        else:
            kept, at = self._first
            fine = torch.isfinite(kept)
            self._first = torch.where(fine, value, kept), torch.where(fine, number, at)
        if time.monotonic() - self._asked >= _SECONDS:
            self.read()

    def read(self) -> None:
        """Asks the GPU.

        Raises:
            NotFiniteError: a loss of this epoch was not finite.
        """
        self._asked = time.monotonic()
        if self._first is not None:
            loss, step = torch.stack([one.double() for one in self._first]).tolist()
            check(loss, self._epoch, int(step), self._rank)
