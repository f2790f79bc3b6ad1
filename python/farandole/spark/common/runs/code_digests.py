# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Describes functions and classes for digests: their code, and the names that it uses.

Code of Python's library, of frameworks and of Farandole counts by its name, so that an update of a
package makes no other run. All other code counts by its instructions, without comments, docstrings,
line numbers and paths. A decorator of a framework, such as `torch.no_grad()`, counts by the
function that it wraps and the plain values that it holds.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FRAMEWORK_PACKAGES = frozenset(
    {
        "torch", "keras", "lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics",
        "tensorflow", "jax",
        "numpy", "farandole", "pyspark", "py4j",
    }
)  # fmt: skip
_ARRAY_PACKAGES = frozenset({"numpy", "torch", "tensorflow", "jax", "jaxlib"})
_INSTALL_DIRECTORIES = ("site-packages", "dist-packages")
_IGNORED_MEMBERS = frozenset({"__annotate__", "__annotate_func__"})
_PLAIN_TYPES = (bool, int, float, str, bytes, tuple, list, dict, set, frozenset)
_FIRST_LINE_NAME = "__firstlineno__"
_MAX_WRAPPERS = 32
"""The maximum number of decorators of one function that are followed."""


def name_without_scope(value: Any) -> str:
    """Returns the name of a function or class, without the name of the enclosing function.

    Args:
        value: a function or a class.
    """
    return str(getattr(value, "__qualname__", "")).rpartition("<locals>.")[2]


def is_user_defined(value: Any) -> bool:
    """Returns whether a function, a class or an object's class is neither of Python's library nor
    of a framework.

    Args:
        value: a function, a class, or an object.
    """
    package = _module_name(value).partition(".")[0]
    return package not in _FRAMEWORK_PACKAGES and package not in sys.stdlib_module_names


def is_user_object(value: Any) -> bool:
    """Returns whether a value is an object of a class of the user's own modules.

    Args:
        value: any.
    """
    return (
        not is_python_defined(value)
        and is_user_defined(value)
        and _is_user_module(_module_name(value))
    )


def is_torch_module(value: Any) -> bool:
    """Returns whether a value is a torch module.

    Args:
        value: any.
    """
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_python_defined(value: Any) -> bool:
    """Returns whether a value is a function or a class that Python code defines.

    Args:
        value: any.
    """
    return isinstance(value, types.FunctionType) or inspect.isclass(value)


def _module_name(value: Any) -> str:
    """Returns the module of a function's code, of a class or of an object's class."""
    if isinstance(value, types.FunctionType):  # `functools.wraps` changes `__module__`
        return str(value.__globals__.get("__name__") or value.__module__ or "")
    return str(getattr(value if inspect.isclass(value) else type(value), "__module__", None) or "")


def is_array(value: Any) -> bool:
    """Returns whether a value is a tensor or an array of a framework.

    Args:
        value: any.
    """
    return (
        type(value).__module__.partition(".")[0] in _ARRAY_PACKAGES
        and hasattr(value, "dtype")
        and hasattr(value, "shape")
    )


def unwrap_user_function(value: Any) -> Any:
    """Returns the user's function inside decorators of Python's library or of a framework;
    otherwise `None`.

    Args:
        value: any.
    """
    found = _decorator_layers(value)
    return None if found is None else found[-1]


def describe_wrapper(value: Any, go: Callable[[Any], Any]) -> list[Any] | None:
    """Describes a function that is wrapped by decorators of Python's library or of a framework, and
    the plain values in these decorators.

    Args:
        value: any value.
        go: describes a nested value.

    Returns:
        The description; `None` for any other value.
    """
    found = _decorator_layers(value)
    if found is None:
        return None
    return [
        "wrapped",
        go(found[-1]),
        [go(one) for layer in found[:-1] for one in _plain_closure_values(layer)],
    ]


def _decorator_layers(value: Any) -> list[Any] | None:
    """Decorators that are not the user's, from the outermost on, and the values in them."""
    found = [value]
    while (
        len(found) <= _MAX_WRAPPERS
        and not isinstance(value, types.MethodType)
        and not is_user_defined(value)
    ):
        value = getattr(value, "__dict__", {}).get("__wrapped__")
        if value is None:
            return None
        found.append(value)
        if isinstance(value, functools.partial):
            return found
    return found if len(found) > 1 and is_user_defined(value) else None


def _plain_closure_values(value: Any) -> Iterator[Any]:
    for cell in getattr(value, "__closure__", None) or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if held is None or isinstance(held, bool | int | float | str | bytes):
            yield held


def describe_function(value: types.FunctionType, go: Callable[..., Any]) -> list[Any]:
    """Describes a function: its code, defaults and closure, and the values that its code names.

    Args:
        value: the function.
        go: describes a nested value; `named=True` is for a value that the code names.
    """
    cells = []
    for cell in value.__closure__ or ():
        try:
            cells.append(go(cell.cell_contents))
        except ValueError:  # not filled yet
            cells.append("empty")
    code = _describe_code(value.__code__, value.__doc__)
    used = [[name, go(one, named=True)] for name, one in _referenced_values(value)]
    return ["function", code, go(value.__defaults__), go(value.__kwdefaults__), cells, used]


def describe_class(value: type, go: Callable[[Any], Any]) -> list[Any]:
    """Describes a class: its functions, plain values and objects of the user's classes, and its
    bases.

    Args:
        value: the class.
        go: describes a nested value.
    """
    members = [
        [name, go(one)] for name, one in sorted(_class_members(value), key=lambda one: one[0])
    ]
    return ["class", name_without_scope(value), members, [go(one) for one in value.__bases__]]


def _class_members(value: type) -> Iterator[tuple[str, Any]]:
    for name, one in vars(value).items():
        inner = _member_functions(one)
        if name not in _IGNORED_MEMBERS and inner:
            yield name, inner
        elif not name.startswith("__") and (
            one is None or isinstance(one, type) or _affects_behaviour(one, value.__module__)
        ):
            yield name, one


def _member_functions(value: Any) -> list[Any]:
    """Returns the functions of a member of a class: of methods, properties, and what wraps them."""
    if isinstance(value, property):
        return [one for one in (value.fget, value.fset, value.fdel) if one is not None]
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    elif isinstance(value, functools.cached_property | functools.partialmethod):
        value = value.func
    followed = (
        isinstance(value, types.FunctionType | functools.partial)
        or unwrap_user_function(value) is not None
    )
    return [value] if followed else []


def _referenced_values(value: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the global values, functions and classes that a function names, by name. From a module
    of the user, it yields the members that the function names.
    """
    known, own = value.__globals__, _module_name(value)
    for name in sorted(_global_names(value.__code__) & known.keys()):
        found = known[name]
        if isinstance(found, types.ModuleType):
            if _is_user_module(found.__name__):
                for inner in sorted(_code_names(value.__code__) & vars(found).keys()):
                    if _affects_behaviour(one := vars(found)[inner], own):
                        yield f"{name}.{inner}", one
        elif not name.startswith("__") and _affects_behaviour(found, own):
            yield name, found


def _affects_behaviour(value: Any, module: str) -> bool:
    """Returns whether an object that a function names belongs to the function's behaviour."""
    if (
        isinstance(value, (*_PLAIN_TYPES, functools.partial))
        or is_array(value)
        or is_torch_module(value)
    ):
        return True
    if isinstance(value, types.MethodType):
        return _affects_behaviour(value.__func__, module)
    if is_user_defined(value):
        other = _module_name(value)
        return other == module or _is_user_module(other)
    inner = unwrap_user_function(value)
    return inner is not None and _affects_behaviour(inner, module)


def _is_user_module(module: str) -> bool:
    """Returns whether a module is the user's own. Installed packages change only with their
    versions.
    """
    if module == "__main__":
        return True
    package = module.partition(".")[0]
    if package in _FRAMEWORK_PACKAGES or package in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not any(one in file for one in _INSTALL_DIRECTORIES)


def _global_names(code: types.CodeType) -> set[str]:
    mine = {
        str(one.argval)
        for one in dis.get_instructions(code)
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return mine.union(*(_global_names(one) for one in _nested_code(code)))


def _code_names(code: types.CodeType) -> set[str]:
    return set(code.co_names).union(*(_code_names(one) for one in _nested_code(code)))


def _nested_code(code: types.CodeType) -> list[types.CodeType]:
    return [one for one in code.co_consts if isinstance(one, types.CodeType)]


def _describe_code(code: types.CodeType, doc: str | None = None) -> list[Any]:
    """Returns the code itself, without its place, its comments and its docstring."""
    constants = [
        _describe_code(one) if isinstance(one, types.CodeType) else _describe_constant(one)
        for one in code.co_consts
    ]
    if doc is not None and constants and code.co_consts[0] == doc:
        constants[0] = _describe_constant(None)
    if (
        _FIRST_LINE_NAME in code.co_names
    ):  # the body of a class, which stores the number of its line
        return [
            _class_body_instructions(code),
            [one for one in constants if isinstance(one, list)],
            list(code.co_names),
        ]
    return [code.co_code.hex(), constants, list(code.co_names), list(code.co_varnames)]


def _class_body_instructions(code: types.CodeType) -> list[str]:
    """Returns the instructions of a class's body, except the instructions that store its line
    number.
    """
    steps = [(one.opname, one.argval) for one in dis.get_instructions(code)]
    store = next((at for at, (_, argument) in enumerate(steps) if argument == _FIRST_LINE_NAME), 0)
    kept = steps[: max(store - 1, 0)] + steps[store + 1 :]
    return [
        f"{name} {'' if isinstance(one, types.CodeType) else _describe_constant(one)}"
        for name, one in kept
    ]


def _describe_constant(value: Any) -> str:
    if isinstance(value, str):
        return repr(value.rpartition("<locals>.")[2])
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
