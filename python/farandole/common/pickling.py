# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Pickling of functions and objects by value, which keeps the names of their source files.

Since its release 3.1.3 cloudpickle writes `<dynamic-code>` for the file of each function, so that
equal functions have equal bytes. Then tracebacks of workers have no source lines, and TensorFlow
cannot read the source that `tf.function` compiles. Functions that are pickled here keep the file
name.
"""

import io
import types
from typing import Any

import cloudpickle

# cloudpickle's replacement for a file's name; versions before 3.1.3 write the name.
_DYNAMIC_CODE_FILENAME = "<dynamic-code>"
_CLOUDPICKLE_DISPATCH_TABLE: Any = cloudpickle.Pickler.dispatch_table


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    make, arguments = _CLOUDPICKLE_DISPATCH_TABLE[types.CodeType](code)
    return make, tuple(
        code.co_filename if argument == _DYNAMIC_CODE_FILENAME else argument
        for argument in arguments
    )


class Pickler(cloudpickle.Pickler):
    """A cloudpickle pickler that keeps the files of functions. `torch.save` finds it by this name
    in its `pickle_module`.
    """

    dispatch_table = _CLOUDPICKLE_DISPATCH_TABLE.new_child({types.CodeType: _reduce_code})


def pickle_by_value(value: Any) -> bytes:
    """Pickles a value; `cloudpickle.loads` and `pickle.loads` read it.

    Args:
        value: Anything that cloudpickle takes.

    Raises:
        pickle.PicklingError: When it cannot be pickled; `TypeError` and others for what refuses it.
    """
    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()
