# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Models of PyTorch as text, as scripts send them about."""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from horovod.runner.common.util import codec

if TYPE_CHECKING:
    from collections.abc import Callable


def is_module_available(module_name: str) -> bool:
    """Returns whether a module can be imported."""
    return find_spec(module_name) is not None


def is_module_available_fn() -> Callable[[str], bool]:
    """`is_module_available`, as a function that travels."""
    return is_module_available


def save_into_bio(obj: Any, save_obj_fn: Callable[[Any, io.BytesIO], Any]) -> io.BytesIO:
    """Returns a file in memory with the object that a function wrote to it, positioned at its
    beginning.

    Args:
        obj: The object.
        save_obj_fn: Takes it and a file.
    """
    memory = io.BytesIO()
    save_obj_fn(obj, memory)
    memory.seek(0)
    return memory


def save_into_bio_fn() -> Callable[[Any, Callable[[Any, io.BytesIO], Any]], io.BytesIO]:
    """`save_into_bio`, as a function that travels."""
    return save_into_bio


def serialize_fn() -> Callable[[Any], str | bytes]:
    """Returns a function that makes text of a model."""

    def serialize(model: Any) -> str | bytes:
        import torch  # noqa: PLC0415 - where it runs

        if isinstance(model, torch.jit.ScriptModule):
            model = save_into_bio(model, torch.jit.save)
        return codec.dumps_base64(model)

    return serialize


def deserialize_fn() -> Callable[[str | bytes], Any]:
    """Returns a function that makes a model of such text; it runs code of the text's author."""

    def deserialize(model_bytes_base64: str | bytes) -> Any:
        import torch  # noqa: PLC0415 - where it runs

        model = codec.loads_base64(model_bytes_base64)
        return torch.jit.load(model) if isinstance(model, io.BytesIO) else model

    return deserialize
