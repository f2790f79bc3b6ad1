# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Digests of what users give to estimators: values, tensors, functions, modules, and objects of any class.

A digest is the same in another process: it contains no address, no order of a set and no path of a file. A function is
represented by its code, its defaults and its closure, a class by its name, and an object by its class and its public
plain values.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_DEEPEST = 6
_SHORT = 60
_HEX = 16
_FRAMEWORKS = ("torch", "keras", "lightning", "pytorch_lightning", "torchmetrics", "tensorflow", "jax", "numpy")


def digest(value: Any) -> str:
    """A digest of any value, as 16 hexadecimal digits.

    Args:
        value: plain, or of any class; what cannot be looked into counts by its class.
    """
    return hashlib.sha256(json.dumps(_told(value, 0, ()), sort_keys=True).encode()).hexdigest()[:_HEX]


def short(value: Any) -> str:
    """A few words about a value, for people.

    Args:
        value: any.
    """
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{name}: {short(one)}" for name, one in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(short(one) for one in value) + "]"
    elif inspect.isroutine(value) or inspect.isclass(value):
        text = str(getattr(value, "__qualname__", value)).rpartition("<locals>.")[2]
    elif isinstance(value, functools.partial):
        text = f"partial({short(value.func)})"
    else:
        text = class_name(value)
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}..."


def class_name(value: Any) -> str:
    """The name of a value's class, without that of the function it was made in.

    Args:
        value: any.
    """
    return type(value).__qualname__.rpartition("<locals>.")[2]


def arrays(named: Mapping[str, Any]) -> str:
    """A digest of tensors by name: their shapes, types and values.

    Args:
        named: of torch, or of anything that NumPy takes.
    """
    whole = hashlib.sha256()
    for name, value in named.items():
        whole.update(f"{name} {_array(value)}\n".encode())
    return whole.hexdigest()[:_HEX]


def module(value: Any) -> list[Any]:
    """The architecture of a torch module: its parts by name, what they say of themselves, and the shapes they hold.

    Args:
        value: a `torch.nn.Module`.
    """
    parts = [[name, type(one).__qualname__, *_of_part(one)] for name, one in value.named_modules()]
    held = [[name, *_form(one)] for name, one in value.state_dict().items()]
    return [parts, held]


def _of_part(part: Any) -> list[Any]:
    """A module's own description; for a user's module, or one without a description, its plain public values."""
    words = part.extra_repr()
    if words and type(part).__module__.partition(".")[0] in _FRAMEWORKS:
        return [words]
    return [words, [list(one) for one in sorted(_plain(vars(part))) if one[0] != "training"]]


def _plain(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if not name.startswith("_") and isinstance(value, bool | int | float | str):
            yield name, value


def _form(value: Any) -> list[str]:
    return [str(tuple(getattr(value, "shape", ()))), str(getattr(value, "dtype", type(value).__name__))]


def _array(value: Any) -> str:
    """Shape, type and a digest of the values of a tensor or an array."""
    if hasattr(value, "detach"):
        import torch  # noqa: PLC0415 - it is there, or there would be no tensor

        plain = value.detach().cpu().contiguous()
        content = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    else:
        import numpy as np  # noqa: PLC0415 - as above

        content = np.ascontiguousarray(value).tobytes()
    return f"{_form(value)} {hashlib.sha256(content).hexdigest()}"


def _told(value: Any, depth: int, above: tuple[int, ...]) -> Any:
    """A value as JSON that is the same in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth > _DEEPEST or id(value) in above:
        return ["deep", type(value).__qualname__]
    go = functools.partial(_told, depth=depth + 1, above=(*above, id(value)))
    tell = next((tell for kinds, tell in _PLAIN if isinstance(value, kinds)), None)
    if tell is not None:
        return tell(value, go)
    if inspect.isclass(value) or inspect.isroutine(value):
        return ["named", getattr(value, "__qualname__", "")]
    if inspect.ismodule(value):  # torch and NumPy have what their arrays have: a name `dtype`
        return ["named", value.__name__]
    return _object(value, go)


def _mapping(value: dict[Any, Any], go: Any) -> Any:
    return {"dict": sorted(([str(key), go(one)] for key, one in value.items()), key=lambda pair: pair[0])}


def _set(value: set[Any], go: Any) -> Any:
    return {"set": sorted(json.dumps(go(one), sort_keys=True) for one in value)}


def _function(value: types.FunctionType, go: Any) -> Any:
    """A function: its code, its defaults, what its closure holds, and the plain values and functions it names."""
    if value.__module__.partition(".")[0] in _FRAMEWORKS:
        return ["named", value.__qualname__]
    cells = []
    for cell in value.__closure__ or ():
        try:
            cells.append(go(cell.cell_contents))
        except ValueError:  # not filled yet
            cells.append("empty")
    used = []
    for name in sorted(_names(value.__code__) - {"__file__", "__name__", "__doc__"}):
        found = value.__globals__.get(name)
        own = isinstance(found, types.FunctionType) and found.__module__ == value.__module__
        if own or isinstance(found, bool | int | float | str | tuple):
            used.append([name, go(found)])
    return ["function", _code(value.__code__), go(value.__defaults__), go(value.__kwdefaults__), cells, used]


def _names(code: types.CodeType) -> set[str]:
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return set(code.co_names).union(*(_names(one) for one in inner))


def _code(code: types.CodeType) -> list[Any]:
    """The code itself, without its place and its comments."""
    constants = [_code(one) if isinstance(one, types.CodeType) else _constant(one) for one in code.co_consts]
    return [code.co_code.hex(), constants, list(code.co_names), list(code.co_varnames)]


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _object(value: Any, go: Any) -> Any:
    """An object of any other class."""
    name, torch = type(value).__qualname__, sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        return ["module", name, module(value), arrays(value.state_dict())]
    if hasattr(value, "dtype") and (hasattr(value, "detach") or hasattr(value, "__array__")):
        return ["array", _array(value)]
    return ["object", name, go(_kept(value, torch))]


def _kept(value: Any, torch: Any) -> dict[str, Any]:
    """The arguments with which an object was created, as far as its class shows them."""
    if torch is not None and isinstance(value, torch.optim.Optimizer):
        return {"groups": optimizer(value)}
    if hasattr(value, "get_config"):  # of Keras
        try:
            return {**value.get_config(), "name": None}
        except Exception:  # noqa: BLE001 - the user's own class; then its plain values count
            return dict(_plain(vars(value)))
    if hasattr(value, "state_dict") and hasattr(value, "step"):  # a scheduler of torch
        return value.state_dict()
    if dataclasses.is_dataclass(value):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    public = {key: one for key, one in getattr(value, "__dict__", {}).items() if not key.startswith("_")}
    return {key: one for key, one in public.items() if _counts(one)}


def _counts(value: Any) -> bool:
    """Whether an attribute of an object says how it works: numbers, words and functions do."""
    return value is None or isinstance(value, bool | int | float | str | types.FunctionType | functools.partial)


def optimizer(value: Any) -> list[dict[str, Any]]:
    """What a torch optimizer was made with: the options of its groups, and how many tensors each has.

    Args:
        value: a `torch.optim.Optimizer`.
    """
    return [
        {**{name: one for name, one in group.items() if name != "params"}, "params": len(group["params"])}
        for group in value.param_groups
    ]


_PLAIN: tuple[tuple[Any, Any], ...] = (
    (bytes | bytearray, lambda value, _go: ["bytes", hashlib.sha256(value).hexdigest()]),
    (list | tuple, lambda value, go: [go(one) for one in value]),
    (dict, _mapping),
    (set | frozenset, _set),
    (functools.partial, lambda value, go: ["partial", go(value.func), go(value.args), go(value.keywords)]),
    (types.MethodType, lambda value, go: ["method", go(value.__func__), go(value.__self__)]),
    (types.FunctionType, _function),
)
"""How values of Python's own classes are told."""
