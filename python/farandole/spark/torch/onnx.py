# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fitted model as an ONNX file, by torch's own exporter, and the proof that both predict the same."""

# ruff: noqa: PLC0415 - the packages are loaded when they are asked for

from __future__ import annotations

import importlib.util
import logging
import tempfile
import warnings
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from farandole.spark.torch.tensors import outputs_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_ROWS = 3
"""Rows of the batch that is traced; the check takes more."""
_MORE_ROWS = 8
_LENGTH = 5
"""Of lists, in a made-up batch of a ragged input."""


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
        ImportError: a package is missing; the message says which extra brings it.
        ValueError: the model cannot be exported, or the exported one predicts something else.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f'to_onnx needs the packages {", ".join(_PACKAGES)}: pip install "farandole[onnx]"', name=missing[0]
        )
    traced = _Model(deepcopy(model).cpu(), function, len(outputs)).eval()
    names = ["_".join(one["columns"]) for one in signature]
    _refuse(names, outputs, signature)
    batch = tuple(_batch(one, _ROWS, _LENGTH) for one in signature)
    target = Path(path)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        made = Path(folder) / target.name
        _export(traced, batch, signature, names, outputs, made, opset)
        _check(traced, signature, names, rows, made, tolerance)
        for part in sorted(Path(folder).iterdir(), key=lambda one: one == made):
            part.replace(target.parent / part.name)  # the file itself comes last, weights beside it first


class _Model(torch.nn.Module):
    """The model as `transform` calls it: outputs are a tuple, floats, one row of each per row."""

    def __init__(self, model: torch.nn.Module, function: Callable[..., Any] | None, outputs: int) -> None:
        super().__init__()
        self.model, self._function, self._outputs = model, function, outputs

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        value = self.model(*inputs) if self._function is None else self._function(self.model, *inputs)
        return tuple(one.float() for one in outputs_of(value, self._outputs))


def _export(
    model: _Model,
    batch: tuple[torch.Tensor, ...],
    signature: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    outputs: Sequence[str],
    path: Path,
    opset: int | None,
) -> None:
    rows = torch.export.Dim("rows")
    # Lengths of ragged inputs have no name in common: the exporter finds out which of them the model needs to be equal.
    shapes = tuple({0: rows} | ({1: torch.export.Dim.DYNAMIC} if one.get("ragged") else {}) for one in signature)
    options: dict[str, Any] = {} if opset is None else {"opset_version": opset}
    quiet = logging.getLogger("torch.onnx")
    level = quiet.level
    quiet.setLevel(logging.ERROR)  # it warns of packages that this model does not use
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="# The axis name")  # all inputs have the same rows
            torch.onnx.export(
                model,
                batch,
                str(path),
                dynamo=True,
                dynamic_shapes=(shapes,),
                input_names=list(names),
                output_names=list(outputs),
                external_data=_size(model) > 1 << 30,  # one file holds 2 GiB
                verbose=False,
                **options,
            )
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"torch cannot export {type(model.model).__name__} to ONNX: {reason[0] if reason else type(error).__name__}"
        ) from error
    finally:
        quiet.setLevel(level)


def _refuse(names: Sequence[str], outputs: Sequence[str], signature: Sequence[Mapping[str, Any]]) -> None:
    """Raises for what ONNX or its runtime does not have."""
    every = [*names, *outputs]
    twice = sorted({name for name in every if every.count(name) > 1})
    if twice:
        raise ValueError(f"inputs and outputs of an ONNX model need different names: {', '.join(twice)}")
    for name, one in zip(names, signature, strict=True):
        if one["dtype"] == "bfloat16":
            raise ValueError(f"ONNX Runtime takes no bfloat16 input: {name}")


def _check(
    model: _Model,
    signature: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    rows: Sequence[torch.Tensor] | None,
    path: Path,
    tolerance: float,
) -> None:
    try:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        taken = {one.name: one.shape for one in session.get_inputs()}  # without inputs that the model ignores
        batch = _made_up(signature, names, taken) if rows is None else tuple(rows)
        for part in (batch, tuple(one[:1] for one in batch)):
            given = {name: one.numpy() for name, one in zip(names, part, strict=True) if name in taken}
            found = cast("list[npt.NDArray[Any]]", session.run(None, given))
            with torch.inference_mode():
                wanted: list[npt.NDArray[Any]] = [one.numpy() for one in model(*part)]
            for output, mine, its in zip(session.get_outputs(), wanted, found, strict=True):
                _compare(output.name, mine, its, tolerance)
    except _DiffersError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise ValueError(f"ONNX Runtime cannot run the exported model: {reason[0] if reason else error!r}") from error


class _DiffersError(ValueError):
    """The exported model predicts something else."""


def _compare(name: str, mine: npt.NDArray[Any], its: npt.NDArray[Any], tolerance: float) -> None:
    import numpy as np

    if mine.shape != its.shape:
        raise _DiffersError(
            f"the ONNX model gives another shape for {name}: {list(its.shape)}, torch {list(mine.shape)}"
        )
    if not np.allclose(mine, its, rtol=tolerance, atol=tolerance, equal_nan=True):
        worst = float(np.nanmax(np.abs(mine.astype("float64") - its.astype("float64"))))
        raise _DiffersError(
            f"the ONNX model does not predict what the model predicts: {name} differs by up to {worst:.3g}, tolerance "
            f"{tolerance:g}; nothing was written"
        )


def _made_up(
    signature: Sequence[Mapping[str, Any]], names: Sequence[str], taken: Mapping[str, Sequence[Any]]
) -> tuple[torch.Tensor, ...]:
    """Another number of rows than was traced, and a length of its own for each length that may differ from others."""
    symbols: list[Any] = []
    batch: list[torch.Tensor] = []
    for name, one in zip(names, signature, strict=True):
        symbol = taken[name][1] if one.get("ragged") and name in taken else name
        if symbol not in symbols:
            symbols.append(symbol)
        batch.append(_batch(one, _MORE_ROWS, _LENGTH + 2 * (1 + symbols.index(symbol))))
    return tuple(batch)


def _batch(one: Mapping[str, Any], rows: int, length: int) -> torch.Tensor:
    """Made-up values: of integers 0 and 1, which are indices of any table."""
    lengths = [length] if one.get("ragged") else list(one["shape"][1:])
    dtype = getattr(torch, one["dtype"])
    made = torch.rand([rows, *lengths], generator=torch.Generator().manual_seed(rows))
    return (made * 2).to(dtype) if not dtype.is_floating_point else made.to(dtype)


def _size(model: torch.nn.Module) -> int:
    return sum(one.numel() * one.element_size() for one in [*model.parameters(), *model.buffers()])
