# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""PowerSGD: gradients as products of two thin matrices (Vogels, Karimireddy, Jaggi, 2019)."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

from farandole.torch.compress._base import Compressor, NamedGradients, ReductionGenerator

if TYPE_CHECKING:
    from farandole.torch.compress._exchange import Exchange


class PowerSGD(Compressor):
    """Low-rank approximation of matrices by one step of the power method, with error feedback.

    A gradient of shape (n, ...) is a matrix M of n rows and m columns. With the last step's right
    factor Q, all ranks sum M Q and orthogonalise it to P, then sum transpose(M) P to the next Q;
    the result is P transpose(Q). The error of the product is added to the next gradient. Vectors,
    and matrices that would not become smaller, are sent uncompressed. Ranks get the same bits as
    long as their processors multiply matrices alike.

    Args:
        rank: Columns of the factors.
        error_feedback: Whether the error of the product is added to the next gradient.
        warm_start: Whether a step begins with the last step's Q instead of a random one.
        min_compression: Smallest ratio of the size of a matrix to the size of its factors.
    """

    def __init__(
        self,
        rank: int = 4,
        *,
        error_feedback: bool = True,
        warm_start: bool = True,
        min_compression: float = 2.0,
    ) -> None:
        if rank < 1:
            raise ValueError(f"rank must be positive: {rank!r}")
        self._rank = rank
        self._feeds_back = error_feedback
        self._warm = warm_start
        self._min_compression = min_compression
        self._residuals: dict[str, torch.Tensor] = {}
        self._rights: dict[str, torch.Tensor] = {}
        self._steps: dict[str, int] = {}

    def rounds(self, size: int) -> int:
        """Largest number of operations of a reduction."""
        del size
        return 2

    def reduce(self, gradients: NamedGradients, exchange: Exchange) -> ReductionGenerator:
        """Sums gradients over all ranks."""
        matrices = {
            name: self._gradient_matrix(name, gradient)
            for name, gradient in gradients
            if self._is_worth_compressing(gradient)
        }
        others = [(name, gradient) for name, gradient in gradients if name not in matrices]
        right_factors = {
            name: self._right_factor(name, matrix) for name, matrix in matrices.items()
        }
        left_factors = [matrix @ right_factors[name] for name, matrix in matrices.items()]
        plain = [gradient.reshape(-1).float() for _, gradient in others]
        # One operation for all: the left factors, and the tensors that are not compressed.
        total = yield exchange.allreduce(
            torch.cat([part.reshape(-1) for part in (*left_factors, *plain)])
        )
        parts = iter(total.split([part.numel() for part in (*left_factors, *plain)]))
        orthogonal = [
            _orthogonalise_columns(next(parts).view_as(left_factor)) for left_factor in left_factors
        ]
        results = {
            name: next(parts).view(gradient.shape).to(gradient.dtype, copy=True)
            for name, gradient in others
        }
        if matrices:
            factors = [
                matrix.T @ left_factor
                for matrix, left_factor in zip(matrices.values(), orthogonal, strict=True)
            ]
            summed = yield exchange.allreduce(torch.cat([factor.reshape(-1) for factor in factors]))
            summed_factors = summed.split([factor.numel() for factor in factors])
            shapes = dict(gradients)
            for (name, matrix), left_factor, flat, own in zip(
                matrices.items(), orthogonal, summed_factors, factors, strict=True
            ):
                right_factor = flat.view_as(own)
                if self._feeds_back:
                    # Each rank keeps the error of the product for its own part of the sum.
                    lost = torch.sub(matrix, left_factor @ own.T)
                    self._residuals[name] = torch.nan_to_num_(lost, 0.0, 0.0, 0.0)
                self._rights[name] = right_factor.clone()
                results[name] = (
                    (left_factor @ right_factor.T).view(shapes[name].shape).to(shapes[name].dtype)
                )
        return [results[name] for name, _ in gradients]

    def _is_worth_compressing(self, gradient: torch.Tensor) -> bool:
        """Returns whether the factors are much smaller than the matrix."""
        if gradient.dim() < 2 or gradient.numel() == 0:  # noqa: PLR2004 - a matrix has two
            return False
        rows, columns = gradient.shape[0], gradient.numel() // gradient.shape[0]
        return (rows + columns) * min(
            self._rank, rows, columns
        ) * self._min_compression < gradient.numel()

    def _gradient_matrix(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        matrix = gradient.reshape(gradient.shape[0], -1).float()
        residual = self._residuals.get(name)
        if residual is None or residual.shape != matrix.shape:
            return matrix
        return matrix + residual

    def _right_factor(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        columns = matrix.shape[1]
        rank = min(self._rank, *matrix.shape)
        last = self._rights.get(name)
        if last is not None and self._warm and last.shape == (columns, rank):
            last = _orthogonalise_columns(last)
            if last.any(0).all():
                return last
        # A column that has become zero would stay zero: use random numbers again. They are the same
        # on all ranks: the seed is from the name and the step, not from the process's generator.
        step = self._steps[name] = self._steps.get(name, 0) + 1
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{step}".encode()))
        return torch.randn(columns, rank, generator=generator).to(matrix.device)


def _orthogonalise_columns(columns: torch.Tensor) -> torch.Tensor:
    """Makes columns orthonormal in order, each minus its projections on earlier ones; dependent
    ones become zero.
    """
    columns = columns.clone()
    for i in range(columns.shape[1]):
        column = columns[:, i]
        length = column.norm()
        for _ in range(2):  # twice, because of rounding errors
            if i:
                before = columns[:, :i]
                column -= before @ (before.T @ column)
        remainder = column.norm()
        if remainder > length * 1e-6:
            column /= remainder
        else:
            column.zero_()
    return columns
