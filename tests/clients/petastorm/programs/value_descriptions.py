# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Values of rows and batches as JSON, equal for equal values, dtypes and shapes."""

import hashlib

import numpy as np


def describe(value):
    """Returns a description of a value; of a named tuple or a dict, by name."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        # petastorm puts fields that are chosen by patterns in a random order.
        return {name: describe(value[name]) for name in sorted(value)}
    if isinstance(value, list | tuple):
        return [describe(each) for each in value]
    kind = type(value).__module__.split(".")[0]
    if kind in ("torch", "tensorflow"):
        return ["tensor", *_describe_array(value.numpy())]
    if isinstance(value, np.ndarray):
        return ["array", *_describe_array(value)]
    if isinstance(value, np.generic):
        return ["scalar", value.dtype.str, str(value)]
    return [type(value).__name__, str(value)]


def _describe_array(array):
    array = np.asarray(array)
    if array.dtype.kind == "O":
        return ["object", list(array.shape), [str(each) for each in array.ravel()]]
    values = np.ascontiguousarray(array)
    first = [str(each) for each in values.ravel()[:4]]
    return [array.dtype.str, list(array.shape), first, hashlib.sha256(values.tobytes()).hexdigest()]
