# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Digests of what users give to estimators: values, tensors, functions, modules, and objects of any
class.

A digest is the same in another process: it contains no address, no order of a set, no path and no
line of a file. A function is represented by its code, its defaults and its closure, a class by its
functions, plain values and bases, and an object by its class and its public plain values, functions
and objects of the user's classes. A collection with more than 10,000 elements is represented by its
length and 10,000 of them: the first ones, of a dict or a set those that sort first.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import heapq
import inspect
import itertools
import json
import re
import sys
import types
from typing import TYPE_CHECKING, Any

from farandole.spark.common.runs.code_digests import (
    is_array,
    is_code,
    is_module,
    is_object,
    is_users,
    local_name,
    of_class,
    of_function,
    of_wrapper,
    unwrapped,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_DEEPEST = 8
_SHORT = 60
_MOST = 10_000
"""The maximum number of elements of a collection that enter the digest."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_HEX = 16


def digest(value: Any) -> str:
    """Returns a digest of any value, as 16 hexadecimal digits.

    Args:
        value: plain, or of any class; what cannot be looked into counts by its class.
    """
    return hashlib.sha256(json.dumps(_Telling().whole(value), sort_keys=True).encode()).hexdigest()[
        :_HEX
    ]


def short(value: Any) -> str:
    """Returns a few words about a value, for people.

    Args:
        value: any.
    """
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
    elif isinstance(value, dict):
        text = (
            "{"
            + ", ".join(
                f"{name}: {short(one)}" for name, one in itertools.islice(value.items(), _SHORT)
            )
            + "}"
        )
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(short(one) for one in value[:_SHORT]) + "]"
    elif inspect.isroutine(value) or inspect.isclass(value):
        text = local_name(value) or str(value)
    elif isinstance(value, functools.partial):
        text = f"partial({short(value.func)})"
    else:
        text = class_name(value)
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}..."


def class_name(value: Any) -> str:
    """Returns the name of a value's class, without that of the function it was made in.

    Args:
        value: any.
    """
    return local_name(type(value))


def arrays(named: Mapping[str, Any]) -> str:
    """Returns a digest of tensors by name: their shapes, types and values.

    Args:
        named: of torch, or of anything that NumPy takes.
    """
    whole = hashlib.sha256()
    for name, value in named.items():
        whole.update(f"{name} {_array(value)}\n".encode())
    return whole.hexdigest()[:_HEX]


def module(value: Any) -> list[Any]:
    """Describes the architecture of a torch module: its parts by name, their classes, their texts
    and shapes.

    Args:
        value: a `torch.nn.Module`.
    """
    parts = [[name, type(one), *_of_part(one)] for name, one in value.named_modules()]
    held = [[name, *_form(one)] for name, one in value.state_dict().items()]
    return [parts, held]


def _of_part(part: Any) -> list[Any]:
    """Describes a module by its own text; a user's module, or one without text, by its values
    and functions.
    """
    words = part.extra_repr()
    if words and not is_users(type(part)):
        return [words]
    kinds = bool | int | float | str | types.FunctionType | functools.partial
    own = sorted(_of(vars(part), lambda one: isinstance(one, kinds) or is_object(one)), key=_first)
    return [words, [[name, one] for name, one in own if name != "training"]]


def _of(values: Mapping[str, Any], counts: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Public attributes that count."""
    return ((name, one) for name, one in values.items() if not name.startswith("_") and counts(one))


def _form(value: Any) -> list[str]:
    return [
        str(tuple(getattr(value, "shape", ()))),
        str(getattr(value, "dtype", type(value).__name__)),
    ]


def _array(value: Any) -> str:
    """Shape, type and a digest of the values of a tensor or an array."""
    if hasattr(value, "detach"):
        import torch  # noqa: PLC0415 - it is there, or there would be no tensor

        plain = value.detach().cpu().contiguous()
        content: Any = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else b""
    else:
        import numpy as np  # noqa: PLC0415 - as above

        # no copy, unless its rows are not one after the other
        plain = np.ascontiguousarray(value).reshape(-1)
        if plain.dtype.hasobject:
            content = repr(plain[:_MOST].tolist()).encode()
        else:
            content = plain.view(np.uint8) if plain.nbytes else b""
    return f"{_form(value)} {hashlib.sha256(content).hexdigest()}"


class _Telling:
    """Values as JSON that is the same in every process.

    Each function, class and object of a user's class is written once, and then named by a number.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._code: list[Any] = []

    def whole(self, value: Any) -> list[Any]:
        """Returns a value, and after it all functions, classes and objects that it leads to."""
        first = self._told(value, 0, (), named=False)
        return [first, [self._body(one) for one in self._code]]  # which finds more on the way

    def _body(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return of_function(value, functools.partial(self._told, depth=1, above=(), named=False))
        go = functools.partial(self._told, depth=1, above=(), named=True)
        return of_class(value, go) if inspect.isclass(value) else _object(value, go, named=True)

    def _told(self, value: Any, depth: int, above: tuple[int, ...], *, named: bool) -> Any:
        """Returns a value; torch modules in code or objects are written as a model is: without
        parameters.
        """
        if value is None or isinstance(value, bool | int | float | str):
            return value
        tell = next((tell for kinds, tell in _PLAIN if isinstance(value, kinds)), None)
        if tell is None and _is_told_once(value):
            return self._numbered(value)
        if depth > _DEEPEST or id(value) in above:
            return ["deep", class_name(value)]
        go = functools.partial(self._told, depth=depth + 1, above=(*above, id(value)), named=named)
        return _other(value, go, named=named) if tell is None else tell(value, go)

    def _numbered(self, value: Any) -> list[Any]:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._code)
            self._code.append(value)
        return ["code", self._numbers[id(value)]]


def _is_told_once(value: Any) -> bool:
    return is_users(value) if is_code(value) else is_object(value) and not is_module(value)


def _other(value: Any, go: Any, *, named: bool) -> Any:
    """Returns a value that has no entry in `_PLAIN`, and is written each time that it is found."""
    wrapper = of_wrapper(value, go)
    if wrapper is not None:
        return wrapper
    if is_code(value) or inspect.isroutine(value) or inspect.ismodule(value):
        # torch and NumPy have a name `dtype`, as arrays
        return ["named", local_name(value) or value.__name__]
    return _object(value, go, named=named)


def _mapping(value: dict[Any, Any], go: Any) -> Any:
    return {
        "dict": [
            [key, go(one)]
            for key, one in heapq.nsmallest(
                _MOST, ((_key(key), one) for key, one in value.items()), key=_first
            )
        ],
        **_more(value),
    }


def _set(value: set[Any], go: Any) -> Any:
    return {"set": [go(one) for one in heapq.nsmallest(_MOST, value, key=_key)], **_more(value)}


def _list(value: list[Any] | tuple[Any, ...], go: Any) -> Any:
    told = [go(one) for one in value[:_MOST]]
    return {"list": told, **_more(value)} if len(value) > _MOST else told


def _more(value: Any) -> dict[str, int]:
    """Returns the length of a collection that is too long to be told as a whole."""
    return {"length": len(value)} if len(value) > _MOST else {}


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


def _key(value: Any) -> str:
    """Returns a word to sort by, which is the same in another process."""
    if inspect.isroutine(value) or inspect.isclass(value):
        return local_name(value)
    if isinstance(value, frozenset | tuple):
        keys = [_key(one) for one in value]
        return str(keys if isinstance(value, tuple) else sorted(keys))
    return value if isinstance(value, str) else _ADDRESS.sub("", repr(value))


def _object(value: Any, go: Any, *, named: bool) -> Any:
    """Returns an object of any other class."""
    kind, torch = go(type(value)), sys.modules.get("torch")
    if is_module(value):
        held = dict(value.named_buffers()) if named else value.state_dict()
        return ["module", kind, go(module(value)), arrays(held)]
    if hasattr(value, "dtype") and (hasattr(value, "detach") or hasattr(value, "__array__")):
        return ["array", _array(value)]
    return ["object", kind, go(_kept(value, torch))]


def _kept(value: Any, torch: Any) -> dict[str, Any]:
    """Returns the arguments with which an object was created, as far as its class shows them."""
    if torch is not None and isinstance(value, torch.optim.Optimizer):
        return {"groups": optimizer(value)}
    if hasattr(value, "get_config"):  # of Keras
        try:
            return {**value.get_config(), "name": None}
        except Exception:  # noqa: BLE001 - the user's own class; then its plain values count
            return dict(_of(vars(value), lambda one: isinstance(one, bool | int | float | str)))
    if hasattr(value, "state_dict") and hasattr(value, "step"):  # a scheduler of torch
        return value.state_dict()
    if dataclasses.is_dataclass(value):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    return (
        {"name": value.name, "value": value.value}
        if isinstance(value, enum.Enum)
        else _public(value)
    )


def _public(value: Any) -> dict[str, Any]:
    """Returns the public attributes of an object that count, and what it wraps as a decorator."""
    own = getattr(value, "__dict__", {})
    wrapped = {"__wrapped__": own["__wrapped__"]} if "__wrapped__" in own else {}
    return wrapped | dict(_of(own, _counts))


def _counts(value: Any) -> bool:
    """Returns whether an attribute of an object says how it works.

    Numbers, words, arrays, collections, functions, and objects of the user's classes do.
    """
    plain = (
        bool
        | int
        | float
        | str
        | list
        | tuple
        | dict
        | set
        | types.FunctionType
        | functools.partial
    )
    if value is None or isinstance(value, plain) or is_array(value):
        return True
    return is_object(value) or unwrapped(value) is not None


def optimizer(value: Any) -> list[dict[str, Any]]:
    """Describes the arguments of a torch optimizer: the options of its groups, and the number of
    tensors in each.

    Args:
        value: a `torch.optim.Optimizer`.
    """
    return [
        {
            **{name: one for name, one in group.items() if name != "params"},
            "params": len(group["params"]),
        }
        for group in value.param_groups
    ]


_PLAIN: tuple[tuple[Any, Any], ...] = (
    (bytes | bytearray, lambda value, _go: ["bytes", hashlib.sha256(value).hexdigest()]),
    (list | tuple, _list),
    (dict, _mapping),
    (set | frozenset, _set),
    (
        functools.partial,
        lambda value, go: ["partial", go(value.func), go(value.args), go(value.keywords)],
    ),
    (types.MethodType, lambda value, go: ["method", go(value.__func__), go(value.__self__)]),
)
"""The description of values of built-in classes."""
