# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fitted model as a file of `torch.export`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from farandole.spark.common.model.onnx import (
    ExportMismatchError,
    first_error_lines,
    require_equal_output,
    signature_input_names,
    synthetic_batch,
)
from farandole.spark.torch.saving.onnx import TracedTorchModel, traced_inputs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    Array = npt.NDArray[Any]


def export_program(
    model: TracedTorchModel,
    signature: Sequence[Mapping[str, Any]],
    outputs: Sequence[str],
    path: Path,
    rows: Sequence[Array] | None,
    *,
    tolerance: float,
) -> None:
    """Writes a model as a file of `torch.export`, and compares predictions of the file with the
    model's.

    Args:
        model: the model, in evaluation mode.
        signature: its inputs: `columns`, `shape` with -1 for the rows, `dtype`.
        outputs: names of its outputs.
        path: of the file.
        rows: arrays of the inputs, rows first; made up when omitted.
        tolerance: largest absolute and largest relative difference of an output.

    Raises:
        ExportMismatchError: the predictions differ.
        ValueError: the model cannot be exported.
    """
    batch, shapes = traced_inputs(signature)
    try:
        with torch.no_grad():
            program = torch.export.export(model, batch, dynamic_shapes=(shapes,))
        torch.export.save(program, path)
        _check_program_predictions(path, model, signature, outputs, rows, tolerance)
    except ExportMismatchError:
        raise
    except Exception as error:
        raise ValueError(
            f"torch.export cannot export {type(model.model).__name__}: {first_error_lines(error)}"
        ) from error


def _check_program_predictions(
    path: Path,
    model: TracedTorchModel,
    signature: Sequence[Mapping[str, Any]],
    outputs: Sequence[str],
    rows: Sequence[Array] | None,
    tolerance: float,
) -> None:
    """Refuses a file whose predictions differ from the model's."""
    program = torch.export.load(path)
    names = signature_input_names(signature)
    taken = dict(zip(names, _input_shapes(program), strict=True))
    batch = synthetic_batch(signature, names, taken) if rows is None else rows
    exported = program.module()
    for part in (batch, [one[:1] for one in batch]):
        tensors = [torch.from_numpy(one) for one in part]
        with torch.inference_mode():
            found, expected = exported(*tensors), model(*tensors)
        for name, mine, its in zip(outputs, expected, found, strict=True):
            require_equal_output("exported program", name, mine.numpy(), its.numpy(), tolerance)


def _input_shapes(program: torch.export.ExportedProgram) -> list[list[str]]:
    """Returns the shapes of a program's inputs, with symbols for open sizes."""
    inputs = set(program.graph_signature.user_inputs)
    return [
        [str(size) for size in node.meta["val"].shape]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in inputs
    ]
