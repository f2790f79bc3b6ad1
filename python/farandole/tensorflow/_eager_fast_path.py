# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The fastest call of an eager op.

It does the same as TensorFlow's generated functions, but omits attributes that have their default
values: every attribute costs a small op more than half a microsecond. The needed parts are private
to TensorFlow. If they are missing, the generated functions are used.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

import tensorflow as tf

FAST_PATH_AVAILABLE = True
"""Whether this TensorFlow has the parts."""
eager_tensor: Any = type(None)
"""The type of tensors with a value; no tensor's where there is no short way."""

try:
    _pywrap: Any = importlib.import_module("tensorflow.python.pywrap_tfe")
    _context: Any = importlib.import_module("tensorflow.python.eager.context")
    _core: Any = importlib.import_module("tensorflow.python.eager.core")
    _ops: Any = importlib.import_module("tensorflow.python.framework.ops")
    _execute: Any = _pywrap.TFE_Py_FastPathExecute
    _status_error: Any = _core._NotOkStatusException  # noqa: SLF001 - what _execute raises
    _fallback_error: Any = _core._FallbackException  # noqa: SLF001
    _raise_status: Any = _ops.raise_from_not_ok_status
    _current_context, _executing_eagerly = _context.context, _context.executing_eagerly
    eager_tensor = _ops.EagerTensor
except (ImportError, AttributeError):
    FAST_PATH_AVAILABLE = False
    _current_context = _execute = _raise_status = _status_error = _fallback_error = cast(
        "Any", None
    )
    _executing_eagerly = tf.executing_eagerly


def is_eager(value: Any) -> bool:
    """Returns whether this is a tensor with a value, about to be used eagerly."""
    return type(value) is eager_tensor and _executing_eagerly()


def run_fast_path(op: str, tensor: Any, attributes: tuple[Any, ...]) -> Any:
    """Runs a native op on an eager tensor; returns `None` if TensorFlow refuses the fast path.

    Args:
        op: The op.
        tensor: Its input.
        attributes: Attribute names and values, alternating.
    """
    try:
        return _execute(_current_context(), op, None, tensor, *attributes)
    except _status_error as error:
        _raise_status(error, None)
    except _fallback_error:
        return None
