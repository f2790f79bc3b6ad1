# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Objects as text: pickled by cloudpickle, in base 64."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import cloudpickle


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:
    """Returns an object as text, or as bytes.

    Args:
        obj: What cloudpickle takes.
        to_ascii: Whether the result is text.
    """
    encoded = base64.b64encode(cloudpickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))
    return encoded.decode("ascii") if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    """Returns the object; runs code of the text's author."""
    return cloudpickle.loads(base64.b64decode(encoded))
