# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Digests of what users give to estimators: values, tensors, functions, modules, and objects of any
class.

A digest is the same in another process: it contains no address, no order of a set, no path and no
line of a file. A function is represented by its code, its defaults and its closure, a class by its
functions, plain values and bases, and an object by its class and its public plain values, functions
and objects of the user's classes. A collection with more than 10,000 elements is represented by its
length and its first 10,000 elements; a dict or a set is sorted first.
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
    describe_class,
    describe_function,
    describe_wrapper,
    is_array,
    is_python_defined,
    is_torch_module,
    is_user_defined,
    is_user_object,
    name_without_scope,
    unwrap_user_function,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_MAX_DEPTH = 8
_MAX_SUMMARY_CHARACTERS = 60
_MAX_ELEMENTS = 10_000
"""The maximum number of elements of a collection that enter the digest."""
_ADDRESS_PATTERN = re.compile(r" at 0x[0-9a-f]+")
_DIGEST_CHARACTERS = 16


def value_digest(value: Any) -> str:
    """Returns a digest of any value, as 16 hexadecimal digits.

    Args:
        value: plain, or of any class; what cannot be looked into counts by its class.
    """
    return hashlib.sha256(
        json.dumps(_ValueDescriber().describe_all(value), sort_keys=True).encode()
    ).hexdigest()[:_DIGEST_CHARACTERS]


def brief_description(value: Any) -> str:
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
                f"{name}: {brief_description(one)}"
                for name, one in itertools.islice(value.items(), _MAX_SUMMARY_CHARACTERS)
            )
            + "}"
        )
    elif isinstance(value, list | tuple):
        text = (
            "[" + ", ".join(brief_description(one) for one in value[:_MAX_SUMMARY_CHARACTERS]) + "]"
        )
    elif inspect.isroutine(value) or inspect.isclass(value):
        text = name_without_scope(value) or str(value)
    elif isinstance(value, functools.partial):
        text = f"partial({brief_description(value.func)})"
    else:
        text = class_name(value)
    return (
        text
        if len(text) <= _MAX_SUMMARY_CHARACTERS
        else f"{text[: _MAX_SUMMARY_CHARACTERS - 3]}..."
    )


def class_name(value: Any) -> str:
    """Returns the name of a value's class, without the name of the enclosing function.

    Args:
        value: any.
    """
    return name_without_scope(type(value))


def arrays_digest(named: Mapping[str, Any]) -> str:
    """Returns a digest of tensors by name: their shapes, types and values.

    Args:
        named: of torch, or of anything that NumPy takes.
    """
    whole = hashlib.sha256()
    for name, value in named.items():
        whole.update(f"{name} {_describe_array(value)}\n".encode())
    return whole.hexdigest()[:_DIGEST_CHARACTERS]


def describe_module(value: Any) -> list[Any]:
    """Describes the architecture of a torch module: its parts by name, their classes, their texts
    and shapes.

    Args:
        value: a `torch.nn.Module`.
    """
    parts = [[name, type(one), *_describe_submodule(one)] for name, one in value.named_modules()]
    held = [[name, *_shape_and_type(one)] for name, one in value.state_dict().items()]
    return [parts, held]


def _describe_submodule(part: Any) -> list[Any]:
    """Describes a module by its own text; a user's module, or one without text, by its values
    and functions.
    """
    words = part.extra_repr()
    if words and not is_user_defined(type(part)):
        return [words]
    kinds = bool | int | float | str | types.FunctionType | functools.partial
    own = sorted(
        _public_items(vars(part), lambda one: isinstance(one, kinds) or is_user_object(one)),
        key=_pair_name,
    )
    return [words, [[name, one] for name, one in own if name != "training"]]


def _public_items(
    values: Mapping[str, Any], counts: Callable[[Any], bool]
) -> Iterator[tuple[str, Any]]:
    """Yields the public attributes that count."""
    return ((name, one) for name, one in values.items() if not name.startswith("_") and counts(one))


def _shape_and_type(value: Any) -> list[str]:
    return [
        str(tuple(getattr(value, "shape", ()))),
        str(getattr(value, "dtype", type(value).__name__)),
    ]


def _describe_array(value: Any) -> str:
    """Returns shape, type and a digest of the values of a tensor or an array."""
    if hasattr(value, "detach"):
        import torch  # noqa: PLC0415 - it is there, or there would be no tensor

        plain = value.detach().cpu().contiguous()
        content: Any = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else b""
    else:
        import numpy as np  # noqa: PLC0415 - as above

        # no copy, unless its rows are not one after the other
        plain = np.ascontiguousarray(value).reshape(-1)
        if plain.dtype.hasobject:
            content = repr(plain[:_MAX_ELEMENTS].tolist()).encode()
        else:
            content = plain.view(np.uint8) if plain.nbytes else b""
    return f"{_shape_and_type(value)} {hashlib.sha256(content).hexdigest()}"


class _ValueDescriber:
    """Describer of values as JSON that is the same in every process.

    Each function, class and object of a user's class is written once, and then named by a number.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._code: list[Any] = []

    def describe_all(self, value: Any) -> list[Any]:
        """Returns the description of a value, followed by the descriptions of all functions,
        classes and objects that the value refers to.
        """
        first = self._describe_value(value, 0, (), named=False)
        return [
            first,
            [self._describe_definition(one) for one in self._code],
        ]  # which finds more on the way

    def _describe_definition(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return describe_function(
                value, functools.partial(self._describe_value, depth=1, above=(), named=False)
            )
        go = functools.partial(self._describe_value, depth=1, above=(), named=True)
        return (
            describe_class(value, go)
            if inspect.isclass(value)
            else _describe_object(value, go, named=True)
        )

    def _describe_value(
        self, value: Any, depth: int, above: tuple[int, ...], *, named: bool
    ) -> Any:
        """Returns the description of a value. Torch modules in code or objects are described like a
        model: without parameters.
        """
        if value is None or isinstance(value, bool | int | float | str):
            return value
        tell = next((tell for kinds, tell in _BUILTIN_DESCRIBERS if isinstance(value, kinds)), None)
        if tell is None and _is_described_by_reference(value):
            return self._describe_reference(value)
        if depth > _MAX_DEPTH or id(value) in above:
            return ["deep", class_name(value)]
        go = functools.partial(
            self._describe_value, depth=depth + 1, above=(*above, id(value)), named=named
        )
        return (
            _describe_without_builtin_rule(value, go, named=named)
            if tell is None
            else tell(value, go)
        )

    def _describe_reference(self, value: Any) -> list[Any]:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._code)
            self._code.append(value)
        return ["code", self._numbers[id(value)]]


def _is_described_by_reference(value: Any) -> bool:
    return (
        is_user_defined(value)
        if is_python_defined(value)
        else is_user_object(value) and not is_torch_module(value)
    )


def _describe_without_builtin_rule(value: Any, go: Any, *, named: bool) -> Any:
    """Returns a value that has no entry in `_BUILTIN_DESCRIBERS`, at each of its occurrences."""
    wrapper = describe_wrapper(value, go)
    if wrapper is not None:
        return wrapper
    if is_python_defined(value) or inspect.isroutine(value) or inspect.ismodule(value):
        # torch and NumPy have a name `dtype`, as arrays
        return ["named", name_without_scope(value) or value.__name__]
    return _describe_object(value, go, named=named)


def _describe_mapping(value: dict[Any, Any], go: Any) -> Any:
    return {
        "dict": [
            [key, go(one)]
            for key, one in heapq.nsmallest(
                _MAX_ELEMENTS, ((_sort_key(key), one) for key, one in value.items()), key=_pair_name
            )
        ],
        **_length_if_truncated(value),
    }


def _describe_set(value: set[Any], go: Any) -> Any:
    return {
        "set": [go(one) for one in heapq.nsmallest(_MAX_ELEMENTS, value, key=_sort_key)],
        **_length_if_truncated(value),
    }


def _describe_list(value: list[Any] | tuple[Any, ...], go: Any) -> Any:
    told = [go(one) for one in value[:_MAX_ELEMENTS]]
    return {"list": told, **_length_if_truncated(value)} if len(value) > _MAX_ELEMENTS else told


def _length_if_truncated(value: Any) -> dict[str, int]:
    """Returns the length of a collection that is too long for a complete description."""
    return {"length": len(value)} if len(value) > _MAX_ELEMENTS else {}


def _pair_name(pair: tuple[str, Any]) -> str:
    return pair[0]


def _sort_key(value: Any) -> str:
    """Returns a word to sort by, which is the same in another process."""
    if inspect.isroutine(value) or inspect.isclass(value):
        return name_without_scope(value)
    if isinstance(value, frozenset | tuple):
        keys = [_sort_key(one) for one in value]
        return str(keys if isinstance(value, tuple) else sorted(keys))
    return value if isinstance(value, str) else _ADDRESS_PATTERN.sub("", repr(value))


def _describe_object(value: Any, go: Any, *, named: bool) -> Any:
    """Returns an object of any other class."""
    kind, torch = go(type(value)), sys.modules.get("torch")
    if is_torch_module(value):
        held = dict(value.named_buffers()) if named else value.state_dict()
        return ["module", kind, go(describe_module(value)), arrays_digest(held)]
    if hasattr(value, "dtype") and (hasattr(value, "detach") or hasattr(value, "__array__")):
        return ["array", _describe_array(value)]
    return ["object", kind, go(_constructor_arguments(value, torch))]


def _constructor_arguments(value: Any, torch: Any) -> dict[str, Any]:
    """Returns the constructor arguments that an object's class exposes; else its public
    attributes.
    """
    if torch is not None and isinstance(value, torch.optim.Optimizer):
        return {"groups": describe_optimizer(value)}
    if hasattr(value, "get_config"):  # of Keras
        try:
            return {**value.get_config(), "name": None}
        except Exception:  # noqa: BLE001 - the user's own class; then its plain values count
            return dict(
                _public_items(vars(value), lambda one: isinstance(one, bool | int | float | str))
            )
    if hasattr(value, "state_dict") and hasattr(value, "step"):  # a scheduler of torch
        return value.state_dict()
    if dataclasses.is_dataclass(value):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    return (
        {"name": value.name, "value": value.value}
        if isinstance(value, enum.Enum)
        else _public_attributes(value)
    )


def _public_attributes(value: Any) -> dict[str, Any]:
    """Returns the relevant public attributes of an object, and the function that a decorator
    wraps.
    """
    own = getattr(value, "__dict__", {})
    wrapped = {"__wrapped__": own["__wrapped__"]} if "__wrapped__" in own else {}
    return wrapped | dict(_public_items(own, _is_relevant_attribute))


def _is_relevant_attribute(value: Any) -> bool:
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
    return is_user_object(value) or unwrap_user_function(value) is not None


def describe_optimizer(value: Any) -> list[dict[str, Any]]:
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


_BUILTIN_DESCRIBERS: tuple[tuple[Any, Any], ...] = (
    (bytes | bytearray, lambda value, _go: ["bytes", hashlib.sha256(value).hexdigest()]),
    (list | tuple, _describe_list),
    (dict, _describe_mapping),
    (set | frozenset, _describe_set),
    (
        functools.partial,
        lambda value, go: ["partial", go(value.func), go(value.args), go(value.keywords)],
    ),
    (types.MethodType, lambda value, go: ["method", go(value.__func__), go(value.__self__)]),
)
"""The description of values of built-in classes."""
