# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The parts of an export to ONNX that all frameworks share: names, rows, the file, and the check of
its predictions.

A file is written into a directory of its own. It gets its name only if ONNX Runtime makes the same
predictions as the model.
"""

# ruff: noqa: PLC0415, SLF001 - the packages are loaded when they are asked for; of one house

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from farandole.spark.common.model.outputs import numbered
from farandole.stores import durable

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from farandole.spark.common.model.base import FarandoleModel

    Array = npt.NDArray[Any]
    Signature = Sequence[Mapping[str, Any]]

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_CHECKED = 64
"""Rows of a DataFrame that an exported model is checked with."""
_MADE_UP = 8
"""Rows of a made-up batch; another number than the exporter has seen."""
_LENGTH = 5
"""Length of the lists in a made-up batch of a ragged input."""


class DiffersError(ValueError):
    """The exported model predicts something else."""


def exportable(
    model: FarandoleModel, outputs: Sequence[str], *, extras: str = "onnx", more: Sequence[str] = ()
) -> Any:
    """Returns the signature of a model that can be exported, as far as that is known before.

    Args:
        model: the fitted model.
        outputs: names of its outputs.
        extras: of Farandole, which bring the packages.
        more: packages that are needed beyond ONNX's own.

    Raises:
        ImportError: a package is missing; the message says which extra brings it.
        ValueError: the model has no signature, or one that ONNX or its runtime does not have.
    """
    known = model.getSignature()
    if known is None:
        raise ValueError(
            "to_onnx needs the model's signature, which fit gives to it: setSignature sets it"
        )
    packages = (*more, *PACKAGES)
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f'to_onnx needs the packages {", ".join(packages)}: pip install "farandole[{extras}]"',
            name=missing[0],
        )
    every = [*names_of(known), *outputs]
    twice = sorted({name for name in every if every.count(name) > 1})
    if twice:
        raise ValueError(
            f"inputs and outputs of an ONNX model need different names: {', '.join(twice)}"
        )
    for name, one in zip(names_of(known), known, strict=True):
        if one["dtype"] == "bfloat16":
            raise ValueError(f"ONNX Runtime takes no bfloat16 input: {name}")
        if one.get("nested"):
            raise ValueError(f"ONNX has no nested tensors: {name}")
    return known


def names_of(signature: Signature) -> list[str]:
    """Returns the names of a model's inputs: those of their columns.

    Args:
        signature: of the model.
    """
    return ["_".join(one["columns"]) for one in signature]


def some_rows(model: FarandoleModel, rows: DataFrame) -> pa.RecordBatch:
    """Returns the first rows of a DataFrame, whose columns go by number.

    Args:
        model: that will predict them.
        rows: the DataFrame.

    Raises:
        ValueError: there is no row, or the model does not take the columns.
    """
    import pyarrow as pa

    from farandole.spark.job.session import Cluster

    model._check_columns(rows)
    packed = numbered(rows).limit(_CHECKED).mapInArrow(_packed, "batch binary")
    found = Cluster.active().collect(packed, "farandole: rows to check a model with")
    batches = [batch for row in found for batch in pa.ipc.open_stream(row.batch)]
    if not batches:
        raise ValueError("the DataFrame has no row to check the model with")
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _packed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Each batch as bytes: Spark's own rows would make Python objects of vectors."""
    import pyarrow as pa

    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        yield pa.RecordBatch.from_arrays(
            [pa.array([sink.getvalue().to_pybytes()], pa.binary())], names=["batch"]
        )


@contextlib.contextmanager
def placed(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A place beside a path for a file that takes the path when the context ends without an error.

    It then survives a loss of power, and at every moment before, the file that had the path does.

    Args:
        path: of the file. Other files that are written beside it, such as weights, come along.
    """
    target = Path(path)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        made = Path(folder) / target.name
        yield made
        durable.synchronize(Path(folder).absolute())
        for part in sorted(Path(folder).iterdir(), key=lambda one: one == made):
            # the file itself comes last, weights beside it first
            part.replace(target.parent / part.name)
        durable.Disk().sync(target.parent)


def batch_of(one: Mapping[str, Any], rows: int, length: int = _LENGTH) -> Array:
    """Made-up values of an input: of integers 0 and 1, which are indices of any table.

    Args:
        one: the input, as in a signature.
        rows: how many.
        length: of lists, if it is ragged.
    """
    lengths = [length] if one.get("ragged") else list(one["shape"][1:])
    made, dtype = np.random.default_rng(rows).random([rows, *lengths]), np.dtype(one["dtype"])
    return made.astype(dtype) if dtype.kind == "f" else (made * 2).astype(np.int64).astype(dtype)


def check(
    path: Path,
    signature: Signature,
    rows: Sequence[Array] | None,
    predict: Callable[[Sequence[Array]], Sequence[Array]],
    tolerance: float,
) -> None:
    """Refuses a file with which ONNX Runtime predicts something else than the model.

    Args:
        path: of the file.
        signature: of the model.
        rows: arrays of the inputs, rows first; made up when omitted.
        predict: the model's outputs for arrays of its inputs.
        tolerance: most absolute and most relative difference of an output.

    Raises:
        DiffersError: it predicts something else.
        ValueError: ONNX Runtime cannot run it.
    """
    try:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        names = names_of(signature)
        # without inputs that the model ignores
        taken = {one.name: one.shape for one in session.get_inputs()}
        batch = _made_up(signature, names, taken) if rows is None else rows
        for part in (batch, [one[:1] for one in batch]):
            given = {name: one for name, one in zip(names, part, strict=True) if name in taken}
            found = cast("list[Array]", session.run(None, given))
            for output, mine, its in zip(session.get_outputs(), predict(part), found, strict=True):
                _compare(output.name, mine, its, tolerance)
    except DiffersError:
        raise
    except Exception as error:
        raise ValueError(f"ONNX Runtime cannot run the exported model: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Returns the first two lines of an error's message, or its class if it has none.

    The error is the one that all others were raised from: those give only general advice.

    Args:
        error: any. Keras names the layer in the first line, and what is wrong in the second.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


def _compare(name: str, mine: Array, its: Array, tolerance: float) -> None:
    if mine.shape != its.shape:
        raise DiffersError(
            f"the ONNX model gives another shape for {name}: {list(its.shape)}, the model "
            f"{list(mine.shape)}"
        )
    if not np.allclose(mine, its, rtol=tolerance, atol=tolerance, equal_nan=True):
        worst = float(np.nanmax(np.abs(mine.astype("float64") - its.astype("float64"))))
        raise DiffersError(
            f"the ONNX model does not predict what the model predicts: {name} differs by up to "
            f"{worst:.3g}, tolerance {tolerance:g}; nothing was written"
        )


def _made_up(
    signature: Signature, names: Sequence[str], taken: Mapping[str, Sequence[Any]]
) -> list[Array]:
    """Another number of rows than was traced, and a length of its own for each length that may
    differ from others.
    """
    symbols: list[Any] = []
    batch: list[Array] = []
    for name, one in zip(names, signature, strict=True):
        symbol = taken[name][1] if one.get("ragged") and name in taken else name
        if symbol not in symbols:
            symbols.append(symbol)
        batch.append(batch_of(one, _MADE_UP, _LENGTH + 2 * (1 + symbols.index(symbol))))
    return batch
