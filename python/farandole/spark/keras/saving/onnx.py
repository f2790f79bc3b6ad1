# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fitted Keras model as an ONNX file, and the proof that both predict the same.

torch's exporter writes the file for every backend of Keras: a separate process loads the model on
Keras's torch backend. So one exporter is enough for all backends. The check compares ONNX Runtime
with the model on its own backend, so the check also finds layers that compute something else on
torch.
"""

# ruff: noqa: PLC0415 - torch is loaded in the process that exports

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from farandole.common import pickling, scratch_directories
from farandole.spark.common.model.onnx import first_error_lines
from farandole.spark.keras.keras_inputs import arrange_model_argument, flat_outputs, output_keys
from farandole.spark.keras.saving import model_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    Array = npt.NDArray[Any]

_EXPORT_TIMEOUT_SECONDS = 3600
"""Seconds that an export may take."""
_EXPORT_COMMAND = (
    "import sys; from farandole.spark.keras.saving.onnx import main; sys.exit(main(sys.argv[1]))"
)


def export_onnx(
    model: Any,
    custom_objects: Mapping[str, Any],
    signature: Sequence[Mapping[str, Any]],
    keys: Sequence[str] | None,
    labels: Sequence[str],
    outputs: Sequence[str],
    path: Path,
    *,
    opset: int | None,
) -> None:
    """Writes a model as ONNX.

    Args:
        model: of Keras, on any backend.
        custom_objects: classes and functions by name that loading the model needs.
        signature: its inputs: `columns`, `shape` with -1 for the rows, `dtype`.
        keys: names of the inputs, for a model that takes a dict.
        labels: label columns, one per output.
        outputs: names of its outputs.
        path: of the file.
        opset: version of ONNX's operators; `None` is the exporter's.

    Raises:
        ValueError: the model cannot be exported.
        TimeoutError: the export takes more than an hour.
    """
    told = {
        "signature": signature,
        "keys": keys,
        "labels": labels,
        "outputs": outputs,
        "opset": opset,
    }
    with scratch_directories.temporary_directory() as folder:
        (folder / "model").write_bytes(model_bytes.pack_model(model))
        (folder / "objects").write_bytes(pickling.pickle_by_value(dict(custom_objects)))
        (folder / "told").write_text(
            json.dumps({**told, "name": type(model).__name__, "path": str(path.absolute())})
        )
        _run_export_process(folder, type(model).__name__)


def _run_export_process(folder: Path, name: str) -> None:
    """Exports in a process whose Keras runs on torch, on the CPU."""
    places = os.pathsep.join(one or str(Path.cwd()) for one in sys.path)
    env = {
        **os.environ,
        "KERAS_BACKEND": "torch",
        "KERAS_TORCH_DEVICE": "cpu",
        "PYTHONPATH": places,
    }
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter
            # no modules of the current directory
            [sys.executable, "-P", "-c", _EXPORT_COMMAND, str(folder)],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_EXPORT_TIMEOUT_SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TimeoutError(
            f"the export of {name} to ONNX has not ended after {_EXPORT_TIMEOUT_SECONDS} s and "
            f"was stopped; "
            "nothing was written"
        ) from None
    if done.returncode:
        error = folder / "error"
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise ValueError(
            error.read_text()
            if error.exists()
            else f"the process that exports the model failed: {last}"
        )


def main(folder: str) -> int:
    """Exports the model of a directory, in the process whose Keras runs on torch.

    Args:
        folder: directory into which `export_onnx` has written the model, its objects and the
            settings of the export.

    Returns:
        Exit status of the process; the reason of a failure is in the directory.
    """
    place = Path(folder)
    try:
        _write_onnx_on_torch_backend(place, json.loads((place / "told").read_text()))
    except Exception as error:  # noqa: BLE001 - whatever it is, the driver says it
        (place / "error").write_text(
            str(error) if isinstance(error, ValueError) else first_error_lines(error)
        )
        return 1
    return 0


def _write_onnx_on_torch_backend(place: Path, told: Mapping[str, Any]) -> None:
    import torch

    from farandole.spark.torch.saving.onnx import write_onnx

    objects = cloudpickle.loads((place / "objects").read_bytes())
    try:
        model = model_bytes.unpack_model(
            (place / "model").read_bytes(), objects, safe_mode=False, compiled=False
        )
    except Exception as error:
        raise ValueError(
            f"{told['name']} does not load on Keras's torch backend: {first_error_lines(error)}"
        ) from error

    class TracedKerasModel(torch.nn.Module):
        """The model as `transform` calls it: outputs are a tuple, halves are floats."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            value = self.model(arrange_model_argument(inputs, told["keys"]), training=False)
            found = flat_outputs(value, output_keys(value, told["labels"]), len(told["labels"]))
            return tuple(
                one.float() if one.dtype in (torch.float16, torch.bfloat16) else one
                for one in found
            )

    write_onnx(
        TracedKerasModel().eval(),
        told["signature"],
        told["outputs"],
        Path(told["path"]),
        told["opset"],
        name=told["name"],
    )
