# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Loads the native ops and connects them to this process's engine. If that fails, the Python ops
are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import warnings
from pathlib import Path
from typing import Any

import tensorflow as tf

from farandole._native import door

LIBRARY_PATH = Path(__file__).with_name("libfarandole_tensorflow.so")
"""The library with the ops."""


library: Any = None
"""The library as ctypes sees it; none while the native ops are not in use."""


class _NativeOpsUnusableError(RuntimeError):
    """The reason why the native ops cannot be used."""


def _connect_native_ops() -> Any:
    """Returns the generated functions of the native ops.

    Raises:
        _UnusableError: When this TensorFlow cannot carry them.
    """
    if not LIBRARY_PATH.exists():
        raise _NativeOpsUnusableError(f"{LIBRARY_PATH} is missing")
    # First of all: TensorFlow makes functions of those ops that appear while it opens the file
    # itself.
    ops = tf.load_op_library(str(LIBRARY_PATH))
    loaded = ctypes.CDLL(str(LIBRARY_PATH), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    for name in ("farandole_tensorflow_problem", "farandole_tensorflow_register_xla"):
        getattr(loaded, name).restype = ctypes.c_char_p
    problem = loaded.farandole_tensorflow_problem()
    if problem is not None:
        raise _NativeOpsUnusableError(problem.decode())
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    version = loaded.farandole_tensorflow_connect(
        ctypes.c_void_p(pointer(door.engine_table_capsule(), b"farandole.door"))
    )
    if version != 0:
        raise _NativeOpsUnusableError(
            f"{LIBRARY_PATH} was built for version {version} of the engine's door"
        )
    _run_probe_op(ops)
    global library  # noqa: PLW0603 - one library, as there is one engine
    library = loaded
    return ops


def _run_probe_op(ops: Any) -> None:
    """Runs an op whose callback comes after its kernel has returned.

    The op runs in a separate session without GPUs: a script must still be able to choose devices
    and threads, and TensorFlow refuses the choice once an op has run eagerly.

    Raises:
        _NativeOpsUnusableError: When the op does not complete, or has a wrong result.
    """
    v1 = tf.compat.v1
    config = v1.ConfigProto(device_count={"GPU": 0}, use_per_session_threads=True)
    graph = tf.Graph()
    with graph.as_default():
        doubled = ops.farandole_probe(tensor=tf.constant([21], tf.int64))
    try:
        with v1.Session(graph=graph, config=config) as session:
            result = session.run(doubled)
    except tf.errors.OpError as error:
        raise _NativeOpsUnusableError(f"the probe failed: {error}") from error
    if result.tolist() != [42]:
        raise _NativeOpsUnusableError(f"the probe returned {result!r}")


def _exclude_from_autograph() -> None:
    """Lets AutoGraph call this package's functions unconverted, like TensorFlow's functions."""
    with contextlib.suppress(ImportError, AttributeError):
        from tensorflow.python.autograph.core import config  # noqa: PLC0415 - private: functions work without, too

        rules: Any = config
        rules.CONVERSION_RULES = (config.DoNotConvert("farandole"), *config.CONVERSION_RULES)


def _load_native_or_fallback_ops() -> Any:
    try:
        return _connect_native_ops()
    except (_NativeOpsUnusableError, OSError, tf.errors.OpError, AttributeError) as error:
        from farandole.tensorflow import _fallback  # noqa: PLC0415 - only where the native ops cannot serve

        warnings.warn(
            f"TensorFlow {tf.__version__} does not support the native ops ({error}): Python "
            "functions are used "
            "instead, which are slower and cannot be saved in a SavedModel",
            RuntimeWarning,
            stacklevel=3,
        )
        return _fallback


_exclude_from_autograph()
ops: Any = _load_native_or_fallback_ops()
"""`farandole_allreduce`, ...: what `tf.load_op_library` makes of the native ops, or their Python
stand-ins.
"""
