# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The parts of an export to ONNX that all frameworks share: names, rows, the file, and the check of
its predictions.

The file is first written into a temporary directory. It is moved to its path only if ONNX Runtime
makes the same predictions as the model.
"""

# ruff: noqa: PLC0415, SLF001 - packages are loaded on demand; private names of this package

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from farandole.data.lazy_pyarrow import pa
from farandole.spark.common.model.output_columns import rename_columns_to_numbers
from farandole.stores import durable_writes

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt
    from pyspark.sql import DataFrame

    from farandole.spark.common.model.base import FarandoleModel

    Array = npt.NDArray[Any]
    Signature = Sequence[Mapping[str, Any]]

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_MAX_CHECKED_ROWS = 64
"""Rows of a DataFrame that an exported model is checked with."""
_SYNTHETIC_ROWS = 8
"""Rows of a made-up batch; another number than the exporter has seen."""
_SYNTHETIC_LIST_LENGTH = 5
"""Length of the lists in a made-up batch of a ragged input."""
_log = logging.getLogger("farandole")


class ExportMismatchError(ValueError):
    """The exported model predicts something else."""


def require_exportable_signature(
    model: FarandoleModel, outputs: Sequence[str], *, extras: str = "onnx", more: Sequence[str] = ()
) -> Any:
    """Returns the signature of a model, after the checks of an export that are possible in
    advance.

    Args:
        model: the fitted model.
        outputs: names of its outputs.
        extras: extras of Farandole that install the packages.
        more: packages that are needed in addition to ONNX's own.

    Raises:
        ImportError: a package is missing; the message says which extra installs it.
        ValueError: the model has no signature, or ONNX or its runtime does not support the
            signature.
    """
    packages = (*more, *ONNX_PACKAGES)
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f'to_onnx needs the packages {", ".join(packages)}: pip install "farandole[{extras}]"',
            name=missing[0],
        )
    known = require_signature(model, outputs)
    for name, one in zip(signature_input_names(known), known, strict=True):
        if one["dtype"] == "bfloat16":
            raise ValueError(f"ONNX Runtime takes no bfloat16 input: {name}")
    return known


def require_signature(model: FarandoleModel, outputs: Sequence[str]) -> Any:
    """Returns the signature of a model, of which an exporter can make inputs.

    Args:
        model: the fitted model.
        outputs: names of its outputs.

    Raises:
        ValueError: the model has no signature, or it has names twice or nested tensors.
    """
    known = model.getSignature()
    if known is None:
        raise ValueError(
            "an export needs the model's signature, which fit gives to it: setSignature sets it"
        )
    every = [*signature_input_names(known), *outputs]
    twice = sorted({name for name in every if every.count(name) > 1})
    if twice:
        raise ValueError(
            f"inputs and outputs of an exported model need different names: {', '.join(twice)}"
        )
    for name, one in zip(signature_input_names(known), known, strict=True):
        if one.get("nested"):
            raise ValueError(f"an exported model has no nested tensors: {name}")
    return known


def signature_input_names(signature: Signature) -> list[str]:
    """Returns the names of a model's inputs, which are the joined names of their columns.

    Args:
        signature: signature of the model.
    """
    return ["_".join(one["columns"]) for one in signature]


def collect_check_arrays(model: FarandoleModel, rows: DataFrame) -> list[Array]:
    """Returns a model's inputs for the first rows of a DataFrame.

    Args:
        model: that will predict them.
        rows: the DataFrame.

    Raises:
        ValueError: there is no row, or the model does not take the columns.
    """
    predictor = model._create_predictor(rows)
    return predictor.batch_inputs(collect_check_rows(model, rows), model.getModel())


def collect_check_rows(model: FarandoleModel, rows: DataFrame) -> pa.RecordBatch:
    """Returns the first rows of a DataFrame, whose columns go by number.

    Args:
        model: that will predict them.
        rows: the DataFrame.

    Raises:
        ValueError: there is no row, or the model does not take the columns.
    """
    from farandole.spark.job.session_adapter import SparkSessionAdapter

    model._check_feature_columns(rows)
    packed = (
        rename_columns_to_numbers(rows)
        .limit(_MAX_CHECKED_ROWS)
        .mapInArrow(_serialize_batches, "batch binary")
    )
    found = SparkSessionAdapter.from_active_session().collect_rows(
        packed, "farandole: rows to check a model with"
    )
    batches = [batch for row in found for batch in pa.ipc.open_stream(row.batch)]
    if not batches:
        raise ValueError("the DataFrame has no row to check the model with")
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _serialize_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields each batch as bytes, because Spark's own rows would make Python objects of vectors."""
    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        yield pa.RecordBatch.from_arrays(
            [pa.array([sink.getvalue().to_pybytes()], pa.binary())], names=["batch"]
        )


@contextlib.contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path beside a path. When the context ends without an error, the file is
    moved to the path.

    The new file then survives a loss of power. Until then, the old file at the path stays complete.
    Files that are written beside the temporary path, such as weights, must have names that begin
    with its name, which is a new one each time. So they do not replace those of the old file, which
    are deleted last.

    Args:
        path: path of the file.
    """
    target = Path(path)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        made = Path(folder) / f"{target.stem}-{secrets.token_hex(4)}{target.suffix}"
        yield made
        durable_writes.fsync_directory_tree(Path(folder).absolute())
        for part in sorted(Path(folder).iterdir()):
            if part != made:
                part.replace(target.parent / part.name)
        durable_writes.DurableFileOperations().fsync_path(target.parent)
        old = _find_weight_files(target)
        made.replace(target)
        durable_writes.DurableFileOperations().fsync_path(target.parent)
        for weights in old:
            try:
                weights.unlink()
            except OSError as error:
                _log.warning("the old weights beside %s could not be deleted: %s", target, error)


def _find_weight_files(target: Path) -> list[Path]:
    """Returns the files beside an ONNX file that it refers to, and that have names of an export to
    its path.
    """
    pattern = rf"{re.escape(target.stem)}(-[0-9a-f]{{8}})?{re.escape(target.suffix)}\.data"
    beside = {one.name for one in target.parent.iterdir() if re.fullmatch(pattern, one.name)}
    if not beside:
        return []
    import onnx

    try:
        graph = onnx.load(target, load_external_data=False).graph
    except Exception:  # noqa: BLE001 - absent, or no ONNX file: then it refers to none
        return []
    places = {entry.value for one in graph.initializer for entry in one.external_data}
    return [target.parent / name for name in sorted(beside & places)]


def synthetic_input(
    one: Mapping[str, Any], rows: int, length: int = _SYNTHETIC_LIST_LENGTH
) -> Array:
    """Returns made-up values of an input. Integers are 0 and 1, which are valid indices of any
    table.

    Args:
        one: the input, as in a signature.
        rows: number of rows.
        length: length of the lists of a ragged input.
    """
    lengths = [length] if one.get("ragged") else list(one["shape"][1:])
    made, dtype = np.random.default_rng(rows).random([rows, *lengths]), np.dtype(one["dtype"])
    return made.astype(dtype) if dtype.kind == "f" else (made * 2).astype(np.int64).astype(dtype)


def check_onnx_predictions(
    path: Path,
    signature: Signature,
    rows: Sequence[Array] | None,
    predict: Callable[[Sequence[Array]], Sequence[Array]],
    tolerance: float,
) -> None:
    """Raises an error if ONNX Runtime's predictions from a file differ from the model's.

    Args:
        path: path of the file.
        signature: signature of the model.
        rows: arrays of the inputs, rows first; made up when omitted.
        predict: returns the model's outputs for arrays of its inputs.
        tolerance: largest absolute and largest relative difference of an output.

    Raises:
        ExportMismatchError: the predictions differ.
        ValueError: ONNX Runtime cannot run the file.
    """
    try:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        names = signature_input_names(signature)
        # without inputs that the model ignores
        taken = {one.name: one.shape for one in session.get_inputs()}
        batch = synthetic_batch(signature, names, taken) if rows is None else rows
        for part in (batch, [one[:1] for one in batch]):
            given = {name: one for name, one in zip(names, part, strict=True) if name in taken}
            found = cast("list[Array]", session.run(None, given))
            for output, mine, its in zip(session.get_outputs(), predict(part), found, strict=True):
                require_equal_output("ONNX model", output.name, mine, its, tolerance)
    except ExportMismatchError:
        raise
    except Exception as error:
        raise ValueError(
            f"ONNX Runtime cannot run the exported model: {first_error_lines(error)}"
        ) from error


def first_error_lines(error: BaseException) -> str:
    """Returns the first two lines of an error's message, or its class if it has none.

    The message is from the first error of the chain of causes: the later errors give only general
    advice.

    Args:
        error: any error. Keras names the layer in the first line and the problem in the second.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


def require_equal_output(what: str, name: str, mine: Array, its: Array, tolerance: float) -> None:
    """Refuses an exported model whose output differs from the model's.

    Args:
        what: the exported model, for the message.
        name: of the output.
        mine: output of the model.
        its: output of the exported model.
        tolerance: largest absolute and largest relative difference.

    Raises:
        ExportMismatchError: the outputs differ.
    """
    if mine.shape != its.shape:
        raise ExportMismatchError(
            f"the {what} gives another shape for {name}: {list(its.shape)}, the model "
            f"{list(mine.shape)}"
        )
    if not np.allclose(mine, its, rtol=tolerance, atol=tolerance, equal_nan=True):
        worst = float(np.nanmax(np.abs(mine.astype("float64") - its.astype("float64"))))
        raise ExportMismatchError(
            f"the {what} does not predict what the model predicts: {name} differs by up to "
            f"{worst:.3g}, tolerance {tolerance:g}; nothing was written"
        )


def synthetic_batch(
    signature: Signature, names: Sequence[str], taken: Mapping[str, Sequence[Any]]
) -> list[Array]:
    """Returns made-up inputs with another number of rows than the traced ones, and with a different
    length for each length that can vary independently.

    Args:
        signature: signature of the model.
        names: names of its inputs.
        taken: shapes of the inputs that the exported model takes, with symbols for open sizes.
    """
    symbols: list[Any] = []
    batch: list[Array] = []
    for name, one in zip(names, signature, strict=True):
        symbol = taken[name][1] if one.get("ragged") and name in taken else name
        if symbol not in symbols:
            symbols.append(symbol)
        batch.append(
            synthetic_input(
                one, _SYNTHETIC_ROWS, _SYNTHETIC_LIST_LENGTH + 2 * (1 + symbols.index(symbol))
            )
        )
    return batch
