# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Models as bytes, in Keras's own format.

A `.keras` file contains the configuration, the weights and the optimizer's state. It names classes
and functions but does not contain them. Only a Python lambda is stored with its code, and Keras
loads such a file only with `safe_mode=False`.
"""

from __future__ import annotations

import io
import json
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import keras
from keras.src.saving import serialization_lib

from farandole.common import scratch_directories

if TYPE_CHECKING:
    from collections.abc import Mapping

_METADATA_FILE = "metadata.json"
_NOTE_KEY = "farandole"


class _TensorFlowStandIn:
    """A stand-in for Keras's lazy TensorFlow module, available only after another import of it.

    On every backend, Keras imports TensorFlow to ask whether a saved object has a TensorFlow type.
    The import takes seconds in every process. Before TensorFlow is imported, no object has such a
    type.
    """

    def __init__(self, lazy: Any) -> None:
        self._lazy = lazy

    @property
    def available(self) -> bool:
        """Whether TensorFlow is imported: without it, no object can be of its types."""
        return "tensorflow" in sys.modules and self._lazy.available

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lazy, name)


# of the type: to ask it would import
if hasattr(type(getattr(serialization_lib, "tf", None)), "available"):
    serialization_lib.tf = _TensorFlowStandIn(serialization_lib.tf)  # pyright: ignore[reportAttributeAccessIssue]


def pack_model(model: Any) -> bytes:
    """Serialises a model, compiled or not.

    Args:
        model: built.
    """
    with scratch_directories.temporary_directory() as folder:
        path = folder / "model.keras"
        model.save(path)
        return path.read_bytes()


def unpack_model(
    data: bytes,
    custom_objects: Mapping[str, Any] | None = None,
    *,
    safe_mode: bool = True,
    compiled: bool = True,
) -> Any:
    """Inverts `pack_model`.

    Args:
        data: a `.keras` file.
        custom_objects: classes and functions by name, besides Keras's own and registered ones.
        safe_mode: whether lambdas are refused; without it the file's code runs.
        compiled: whether the model is compiled again; predictions need no compiled model.
    """
    with scratch_directories.temporary_directory() as folder:
        path = folder / "model.keras"
        path.write_bytes(data)
        known = dict(custom_objects or {})
        return keras.saving.load_model(
            path, custom_objects=known, compile=compiled, safe_mode=safe_mode
        )


def load_weights_and_optimizer(model: Any, data: bytes) -> None:
    """Loads weights and the optimizer's state from a `.keras` file, without running its code.

    Args:
        model: of the same architecture, compiled with the same optimizer and built.
        data: a result of `pack_model` for such a model.

    Raises:
        ValueError: the file is of another model or optimizer.
    """
    with scratch_directories.temporary_directory() as folder:
        path = folder / "model.keras"
        path.write_bytes(data)
        model.load_weights(path)


def add_metadata_note(data: bytes, note: Mapping[str, Any]) -> bytes:
    """Puts plain values among a file's metadata, where Keras leaves them alone.

    Args:
        data: a `.keras` file.
        note: what JSON can write.
    """
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            if info.filename == _METADATA_FILE:
                content = json.dumps({**json.loads(content), _NOTE_KEY: note}).encode()
            new.writestr(info, content)
    return out.getvalue()


def read_metadata_note(data: bytes) -> dict[str, Any]:
    """Returns the note that `add_metadata_note` put into a file; empty if there is none.

    Args:
        data: a `.keras` file.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return json.loads(file.read(_METADATA_FILE)).get(_NOTE_KEY, {})
