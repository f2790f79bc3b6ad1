# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fitted model as an ONNX file, by torch's own exporter."""

from __future__ import annotations

import logging
import warnings
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from farandole.spark.common.model.onnx import (
    first_error_lines,
    signature_input_names,
    synthetic_input,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from farandole.spark.torch.columns.model_calls import ModelCall

    Array = npt.NDArray[Any]

_TRACED_ROWS = 3
"""Rows of the batch that is traced; the check takes more."""
_MAX_INLINE_WEIGHT_BYTES = 1 << 30
"""Bytes of weights in one file, which holds 2 GiB."""


def export_onnx(
    model: torch.nn.Module,
    signature: Sequence[Mapping[str, Any]],
    outputs: Sequence[str],
    path: Path,
    function: Callable[..., Any] | None,
    opset: int | None,
    call: ModelCall,
) -> Callable[[Sequence[Array]], list[Array]]:
    """Writes a model as ONNX.

    Args:
        model: a module.
        signature: its inputs: `columns`, `shape` with -1 for the rows, `dtype`.
        outputs: names of its outputs.
        path: of the file.
        function: makes outputs of the model and its inputs; `None` calls the model.
        opset: version of ONNX's operators; `None` is the exporter's.
        call: the call of the model.

    Returns:
        The function that predicts arrays of the inputs.

    Raises:
        ValueError: the model cannot be exported.
    """
    traced = TracedTorchModel(deepcopy(model).cpu(), function, call).eval()
    write_onnx(traced, signature, outputs, path, opset, name=type(model).__name__)

    def predict_arrays(batch: Sequence[Array]) -> list[Array]:
        with torch.inference_mode():
            return [one.numpy() for one in traced(*map(torch.from_numpy, batch))]

    return predict_arrays


class TracedTorchModel(torch.nn.Module):
    """The model as `transform` calls it: outputs are a tuple, floats, one row of each per row.

    Args:
        model: a module on the CPU.
        function: makes outputs of the model and its inputs; `None` calls the model.
        call: the call of the model.
    """

    def __init__(
        self, model: torch.nn.Module, function: Callable[..., Any] | None, call: ModelCall
    ) -> None:
        super().__init__()
        self.model, self._function, self._model_call = model, function, call

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the outputs."""
        own = self.model if self._function is None else partial(self._function, self.model)
        value = self._model_call.call_model(own, inputs)
        return tuple(one.float() for one in self._model_call.output_tensors(value))


def write_onnx(
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
    batch, shapes = traced_inputs(signature)
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
                input_names=signature_input_names(signature),
                output_names=list(outputs),
                external_data=_weight_bytes(model) > _MAX_INLINE_WEIGHT_BYTES,
                verbose=False,
                **options,
            )
    except Exception as error:
        raise ValueError(
            f"torch cannot export {name} to ONNX: {first_error_lines(error)}"
        ) from error
    finally:
        quiet.setLevel(level)


def traced_inputs(
    signature: Sequence[Mapping[str, Any]],
) -> tuple[tuple[torch.Tensor, ...], tuple[dict[int, Any], ...]]:
    """Returns the inputs that an exporter traces a model with, and the sizes of each that stay
    open.

    Args:
        signature: signature of the model.
    """
    batch = tuple(torch.from_numpy(synthetic_input(one, _TRACED_ROWS)) for one in signature)
    rows = torch.export.Dim("rows")
    # Lengths of ragged inputs have no name in common: the exporter finds out which of them the
    # model needs to be equal.
    shapes = tuple(
        {0: rows} | ({1: torch.export.Dim.DYNAMIC} if one.get("ragged") else {})
        for one in signature
    )
    return batch, shapes


def _weight_bytes(model: torch.nn.Module) -> int:
    return sum(one.numel() * one.element_size() for one in [*model.parameters(), *model.buffers()])
