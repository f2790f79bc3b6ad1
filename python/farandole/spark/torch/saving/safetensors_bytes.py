# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Tensors as bytes in the format of safetensors, which contains no code."""

# ruff: noqa: PLC0415 - the library is loaded where models are saved or loaded

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

_HELD_DTYPES = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool,
    }
)  # fmt: skip


def can_store_as_safetensors(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether the format can hold all of them.

    Args:
        tensors: by name.
    """
    return all(
        one.dtype in _HELD_DTYPES and one.layout is torch.strided and not one.is_quantized
        for one in tensors.values()
    )


def _safetensors_functions() -> Any:
    """Returns safetensors' functions for torch.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import safetensors
        import safetensors.torch as library
    except ModuleNotFoundError as error:
        raise ImportError(
            "saved PyTorch models need safetensors, which is not installed: "
            "pip install 'farandole[torch]'",
            name=error.name,
        ) from error
    return SimpleNamespace(
        save=library.save,
        load=library.load,
        load_file=library.load_file,
        SafetensorError=safetensors.SafetensorError,
    )


def dump_tensors(
    tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> bytes:
    """Returns tensors as bytes.

    Args:
        tensors: tensors by name for which `can_store_as_safetensors` returns true.
        metadata: text by name in the header of the bytes.
    """
    save = _safetensors_functions().save
    plain: dict[str, torch.Tensor] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        one = tensor.detach().cpu().contiguous()
        place = one.untyped_storage().data_ptr()
        # The library refuses tensors that share memory, such as tied weights.
        plain[name] = one.clone() if place in places else one
        places.add(place)
    return save(plain, metadata)


def load_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """Returns the bytes as tensors.

    Args:
        data: what `dump_tensors`, or another program, made.

    Raises:
        ValueError: they are none, or cut off.
    """
    library = _safetensors_functions()
    try:
        return library.load(data)
    # The library leaves some checks of types and shapes to torch.
    except (
        library.SafetensorError,
        ArithmeticError,
        AssertionError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(f"not a whole file of tensors: {error}") from error


def map_tensors(path: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file as private mappings of it, by name. Pages that are not changed
    are shared with all processes that map the file.

    Args:
        path: of a file with the bytes of `dump_tensors`.
    """
    return _safetensors_functions().load_file(path)
