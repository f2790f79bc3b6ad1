# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The interface of compressors: they make gradients smaller, reduce them in that form, and
restore them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from farandole.torch.compress._exchange import Exchange, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable

NamedGradients: TypeAlias = Sequence[tuple[str, torch.Tensor]]
"""Gradients of one unit with names that stay the same from step to step."""
ReductionGenerator: TypeAlias = Generator[Waiting, Any, list[torch.Tensor]]
"""A reduction that yields each operation it has started, is sent its result, and returns the
reduced gradients.
"""


class Compressor(ABC):
    """Reduces gradients over all ranks in a smaller form. It has a state, so each optimizer or
    model needs its own.

    To write a compressor, override `reduce`, or `encode` and `add` of `VectorCompressor`.
    """

    def rounds(self, size: int) -> int:
        """Largest number of operations that `reduce` yields for `size` ranks."""
        del size
        return 1

    @abstractmethod
    def reduce(self, gradients: NamedGradients, exchange: Exchange) -> ReductionGenerator:
        """Sums gradients over all ranks.

        A generator: yields each operation it has started, gets the operation's result, and returns
        the sums, tensors of the gradients' shapes and dtypes. It must not change the gradients,
        except as the result.

        Args:
            gradients: Dense gradients of one unit, the same names and shapes in the same order on
                all ranks.
            exchange: The ranks.
        """
        yield from ()
        raise NotImplementedError

    def start(
        self, gradients: NamedGradients, exchange: Exchange, average: bool
    ) -> Callable[[], list[torch.Tensor]]:
        """Starts a reduction.

        Args:
            gradients: As for `reduce`.
            exchange: The ranks.
            average: Whether the sums are divided by the number of ranks.

        Returns:
            A function that waits for the reduction and returns the reduced gradients. Call it once.
        """
        running = self.reduce(gradients, exchange)
        first, done = _advance_reduction(running, None)

        def finish_reduction() -> list[torch.Tensor]:
            waiting, result = first, done
            while waiting is not None:
                waiting, result = _advance_reduction(running, waiting.wait())
            if average:
                for tensor in result:
                    tensor.div_(exchange.size)
            return result

        return finish_reduction


def _advance_reduction(
    running: ReductionGenerator, outcome: Any
) -> tuple[Waiting | None, list[torch.Tensor]]:
    """Advances to the next operation, or to the end."""
    try:
        return running.send(outcome), []
    except StopIteration as end:
        return None, end.value


class VectorCompressor(Compressor):
    """A compressor of flat vectors of float32, whose payloads are decoded and summed in the order
    of ranks.

    With more than two ranks each rank sums one part of the vector and sends the sum, encoded again,
    to all, if the payload of a part depends on that part alone (`splits`). Otherwise every rank
    sends everything to every rank.

    Args:
        error_feedback: Whether the error of a payload is added to the next gradient.
    """

    splits = True
    """Whether the payload of a part depends on that part alone."""
    alignment = 1
    """The size of a part of a vector is a multiple of this."""

    def __init__(self, *, error_feedback: bool = True) -> None:
        self._feeds_back = error_feedback
        self._residuals: dict[str, torch.Tensor] = {}

    def rounds(self, size: int) -> int:
        """Returns the number of operations of a reduction."""
        return 2 if self._part_count(size) > 1 else 1

    def _part_count(self, size: int) -> int:
        """Returns the number of parts of a vector, each summed by one rank; two ranks sum all."""
        return size if self.splits and size > 2 else 1  # noqa: PLR2004

    @abstractmethod
    def encode(self, vector: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Encodes a flat, contiguous vector of float32 as a payload: a flat tensor whose length
        depends only on the length of the vector.

        With a residual, encodes the sum of vector and residual, and writes the error of the payload
        to the residual.
        """

    @abstractmethod
    def add(self, payload: torch.Tensor, into: torch.Tensor) -> None:
        """Decodes a payload and adds it to a flat vector of float32."""

    def reduce(self, gradients: NamedGradients, exchange: Exchange) -> ReductionGenerator:
        """Sums gradients over all ranks, all as one vector."""
        parts = self._part_count(exchange.size)
        vector, starts = _flatten_and_pad_gradients(gradients, parts * self.alignment)
        width = vector.numel() // parts
        name = gradients[0][0]
        payloads = [
            self.encode(part, self._residual_for(f"{name}/{i}", part))
            for i, part in enumerate(vector.split(width or 1))
        ]
        if not payloads:
            return [gradient.clone() for _, gradient in gradients]
        if parts == 1:
            received = yield exchange.allgather(payloads[0])
            total = self._sum_payloads(received, width, vector.device)
        else:
            received = yield exchange.alltoall(torch.stack(payloads))
            mine = self._sum_payloads(received, width, vector.device)
            residual = self._residual_for(f"{name}/sum", mine)
            sums = yield exchange.allgather(self.encode(mine, residual))
            total = torch.zeros_like(vector)
            for payload, part in zip(sums, total.split(width), strict=True):
                self.add(payload, part)
        return [
            total[start : start + gradient.numel()].view(gradient.shape).to(gradient.dtype)
            for (_, gradient), start in zip(gradients, starts, strict=True)
        ]

    def _sum_payloads(
        self, payloads: torch.Tensor, width: int, device: torch.device
    ) -> torch.Tensor:
        total = torch.zeros(width, dtype=torch.float32, device=device)
        for payload in payloads:
            self.add(payload, total)
        return total

    def _residual_for(self, name: str, like: torch.Tensor) -> torch.Tensor | None:
        if not self._feeds_back:
            return None
        residual = self._residuals.get(name)
        if residual is None or residual.shape != like.shape or residual.device != like.device:
            residual = self._residuals[name] = torch.zeros_like(like)
        return residual


def _flatten_and_pad_gradients(
    gradients: NamedGradients, multiple: int
) -> tuple[torch.Tensor, list[int]]:
    """Returns all gradients end to end as float32, padded by zeros to a multiple, and where each
    begins.
    """
    starts, end = [], 0
    for _, gradient in gradients:
        starts.append(end)
        end += gradient.numel()
    vector = torch.zeros(
        -(-end // multiple) * multiple, dtype=torch.float32, device=gradients[0][1].device
    )
    for start, (_, gradient) in zip(starts, gradients, strict=True):
        vector[start : start + gradient.numel()].view(gradient.shape).copy_(gradient)
    return vector, starts
