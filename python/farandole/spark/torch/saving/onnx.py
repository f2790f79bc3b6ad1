# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fitted model as an ONNX file, by torch's own exporter, and the proof that both predict the
same.
"""

from __future__ import annotations

import logging
import warnings
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from farandole.spark.common.model.onnx import batch_of, check, names_of, placed, reason
from farandole.spark.torch.columns.tensors import outputs_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    Array = npt.NDArray[Any]

_ROWS = 3
"""Rows of the batch that is traced; the check takes more."""
_MOST = 1 << 30
"""Bytes of weights in one file, which holds 2 GiB."""


def export(
    model: torch.nn.Module,
    signature: Sequence[Mapping[str, Any]],
    outputs: Sequence[str],
    path: str | os.PathLike[str],
    rows: Sequence[torch.Tensor] | None = None,
    *,
    function: Callable[..., Any] | None = None,
    opset: int | None = None,
    tolerance: float = 1e-4,
) -> None:
    """Writes a model as ONNX, if ONNX Runtime then predicts the same.

    Args:
        model: a module on the CPU.
        signature: its inputs: `columns`, `shape` with -1 for the rows, `dtype`.
        outputs: names of its outputs.
        path: of the file, which appears as a whole.
        rows: batches to check with, one tensor per input, rows first; made up when omitted.
        function: makes outputs of the model and its inputs; `None` calls the model.
        opset: version of ONNX's operators; default: the exporter's.
        tolerance: most absolute and most relative difference of an output.

    Raises:
        ValueError: the model cannot be exported, or the exported one predicts something else.
    """
    traced = _Model(deepcopy(model).cpu(), function, len(outputs)).eval()

    def predict(batch: Sequence[Array]) -> list[Array]:
        with torch.inference_mode():
            return [one.numpy() for one in traced(*map(torch.from_numpy, batch))]

    with placed(path) as made:
        write(traced, signature, outputs, made, opset, name=type(model).__name__)
        check(
            made,
            signature,
            None if rows is None else [one.numpy() for one in rows],
            predict,
            tolerance,
        )


class _Model(torch.nn.Module):
    """The model as `transform` calls it: outputs are a tuple, floats, one row of each per row."""

    def __init__(
        self, model: torch.nn.Module, function: Callable[..., Any] | None, outputs: int
    ) -> None:
        super().__init__()
        self.model, self._function, self._outputs = model, function, outputs

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        value = (
            self.model(*inputs) if self._function is None else self._function(self.model, *inputs)
        )
        return tuple(one.float() for one in outputs_of(value, self._outputs))


def write(
    model: torch.nn.Module,
    signature: Sequence[Mapping[str, Any]],
    outputs: Sequence[str],
    path: Path,
    opset: int | None,
    *,
    name: str,
) -> None:
    """Lets the torch exporter write a file, in which the number of rows stays open.

    Args:
        model: takes the inputs as arguments and returns a tuple of outputs.
        signature: its inputs.
        outputs: names of its outputs.
        path: of the file.
        opset: version of ONNX's operators; default: the exporter's.
        name: of the model, for messages.

    Raises:
        ValueError: the model cannot be exported.
    """
    batch = tuple(torch.from_numpy(batch_of(one, _ROWS)) for one in signature)
    rows = torch.export.Dim("rows")
    # Lengths of ragged inputs have no name in common: the exporter finds out which of them the
    # model needs to be equal.
    shapes = tuple(
        {0: rows} | ({1: torch.export.Dim.DYNAMIC} if one.get("ragged") else {})
        for one in signature
    )
    options: dict[str, Any] = {} if opset is None else {"opset_version": opset}
    quiet = logging.getLogger("torch.onnx")
    level = quiet.level
    quiet.setLevel(logging.ERROR)  # it warns of packages that this model does not use
    try:
        with warnings.catch_warnings():
            # all inputs have the same rows
            warnings.filterwarnings("ignore", message="# The axis name")
            torch.onnx.export(
                model,
                batch,
                str(path),
                dynamo=True,
                dynamic_shapes=(shapes,),
                input_names=names_of(signature),
                output_names=list(outputs),
                external_data=_size(model) > _MOST,
                verbose=False,
                **options,
            )
    except Exception as error:
        raise ValueError(f"torch cannot export {name} to ONNX: {reason(error)}") from error
    finally:
        quiet.setLevel(level)


def _size(model: torch.nn.Module) -> int:
    return sum(one.numel() * one.element_size() for one in [*model.parameters(), *model.buffers()])
