# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reads the schema that petastorm pickles into a data set, without unpickling it.

The opcodes are interpreted here, and they only build descriptions: a name stays a name, a call
stays a name with its arguments. Nothing is imported, called or changed. The descriptions then have
to be those of a `Unischema` of fields with the known types and codecs.
"""

from __future__ import annotations

import pickle
import pickletools
import re
from collections import OrderedDict
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from petastorm.codecs import (
    SPARK_TYPE_NAMES,
    CompressedImageCodec,
    CompressedNdarrayCodec,
    NdarrayCodec,
    ScalarCodec,
    SparkTypeDescription,
)
from petastorm.unischema import Unischema, UnischemaField

if TYPE_CHECKING:
    from collections.abc import Callable

_FORMER_PACKAGES = ("av.experimental.deepdrive.dataset_toolkit", "av.ml.dataset_toolkit")
"""Names of petastorm before it was published."""
_LITERALS = re.compile(
    r"(BIN)?INT[12]?|LONG[14]?|(BIN)?FLOAT|(SHORT_)?(BIN)?(UNICODE|STRING|BYTES)8?"
)
"""Opcodes whose argument is the value."""
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_DTYPES: dict[tuple[str, str], Any] = {
    **{
        ("numpy", np.dtype(name).name): np.dtype(name).type
        for name in [*np.typecodes["AllInteger"], *np.typecodes["Float"]]
    },
    **dict.fromkeys([("numpy", "bool_"), ("numpy", "bool"), ("builtins", "bool")], np.bool_),
    **dict.fromkeys([("numpy", "str_"), ("numpy", "unicode_"), ("builtins", "str")], np.str_),
    **dict.fromkeys([("numpy", "bytes_"), ("numpy", "string_"), ("builtins", "bytes")], np.bytes_),
    ("builtins", "int"): np.int64,
    ("builtins", "float"): np.float64,
    ("builtins", "unicode"): np.str_,
    ("numpy", "datetime64"): np.datetime64,
    ("numpy", "object_"): np.object_,
    ("decimal", "Decimal"): Decimal,
}
_ARRAY_CODECS: dict[str, Any] = {
    "NdarrayCodec": NdarrayCodec,
    "CompressedNdarrayCodec": CompressedNdarrayCodec,
}


_MAX_PICKLE_BYTES = 1 << 20
"""Largest pickle of a schema, in bytes: thousands of fields."""
_MAX_ARGUMENTS = 64
"""Largest number of arguments of a call; a schema's calls have up to six."""
_MAX_SHOWN_CHARACTERS = 80
_MAX_DTYPE_CHARACTERS = 32
_DAMAGE = (
    ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError,
    SyntaxError,
)  # fmt: skip
"""Errors of a pickle that is no schema."""


def read_pickled_schema(data: bytes, source: str) -> Unischema:
    """Returns the schema of a data set.

    Args:
        data: The pickle.
        source: The file that contains it, for messages.

    Raises:
        pickle.UnpicklingError: A pickle of anything else, such as a codec of another module; the
            message names it and the file.
    """
    try:
        if len(data) > _MAX_PICKLE_BYTES:
            raise ValueError(f"it has {len(data)} bytes, a schema has at most {_MAX_PICKLE_BYTES}")
        return _build_schema(_describe_pickle(data))
    except _DAMAGE as error:
        raise pickle.UnpicklingError(
            f"the schema that {source} contains is damaged, or has classes that are not "
            f"petastorm's own, and is not unpickled: {error}"
        ) from error


@dataclass(frozen=True)
class _PickledName:
    """Name of a class or function."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"[:_MAX_SHOWN_CHARACTERS]


@dataclass
class _PickledObject:
    """A call, with what the pickle adds to the result."""

    name: _PickledName
    arguments: tuple[Any, ...]
    state: Any = None
    items: list[tuple[Any, Any]] = field(default_factory=list)


def _describe_pickle(data: bytes) -> Any:
    """Returns the description of the pickled value.

    Args:
        data: The pickle.

    Raises:
        ValueError: An opcode that no schema has, or a damaged pickle.
    """
    machine = _PickleMachine()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "STOP":
            return machine.pop()
        if _LITERALS.fullmatch(opcode.name):
            machine.stack.append(argument)
        elif opcode.name in _CONSTANTS:
            machine.stack.append(_CONSTANTS[opcode.name])
        else:
            step = machine.steps.get(opcode.name)
            if step is None:
                raise ValueError(f"the pickle has the opcode {opcode.name}")
            step(argument)
    raise ValueError("the pickle has no end")


class _PickleMachine:
    """The stack and the memo of a pickle that is described."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        push = self.stack.append
        self.steps: dict[str, Callable[[Any], None]] = {
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
            "MARK": lambda _: self.marks.append(len(self.stack)),
            "EMPTY_LIST": lambda _: push([]),
            "EMPTY_DICT": lambda _: push({}),
            "LIST": lambda _: push(self.pop_to_mark()),
            "TUPLE": lambda _: push(tuple(self.pop_to_mark())),
            "TUPLE1": lambda _: push(self.pop_many(1)),
            "TUPLE2": lambda _: push(self.pop_many(2)),
            "TUPLE3": lambda _: push(self.pop_many(3)),
            "DICT": lambda _: push(dict(_as_pairs(self.pop_to_mark()))),
            "APPEND": lambda _: self.append_values(self.pop_many(1)),
            "APPENDS": lambda _: self.append_values(self.pop_to_mark()),
            "SETITEM": lambda _: self.set_items(self.pop_many(2)),
            "SETITEMS": lambda _: self.set_items(self.pop_to_mark()),
            "GLOBAL": lambda argument: push(_PickledName(*argument.split(" ", 1))),
            "STACK_GLOBAL": lambda _: push(_as_name(*self.pop_many(2))),
            "REDUCE": lambda _: push(_describe_call(*self.pop_many(2))),
            "NEWOBJ": lambda _: push(_describe_call(*self.pop_many(2))),
            "BUILD": lambda _: self.set_state(self.pop()),
            "MEMOIZE": lambda _: self.memo.update({len(self.memo): self.stack[-1]}),
            **dict.fromkeys(
                ("PUT", "BINPUT", "LONG_BINPUT"),
                lambda number: self.memo.update({number: self.stack[-1]}),
            ),
            **dict.fromkeys(
                ("GET", "BINGET", "LONG_BINGET"), lambda number: push(self.memo[number])
            ),
        }

    def pop(self) -> Any:
        if self.marks and self.marks[-1] == len(self.stack):
            raise ValueError("the pickle is damaged")
        return self.stack.pop()

    def pop_many(self, count: int) -> tuple[Any, ...]:
        return tuple(reversed([self.pop() for _ in range(count)]))

    def pop_to_mark(self) -> list[Any]:
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def append_values(self, values: Any) -> None:
        if not isinstance(self.stack[-1], list):
            raise TypeError("the pickle appends to something that is no list")
        self.stack[-1].extend(values)

    def set_items(self, values: Any) -> None:
        top = self.stack[-1]
        if isinstance(top, dict):
            top.update(_as_pairs(values))
        elif isinstance(top, _PickledObject):
            top.items += _as_pairs(values)
        else:
            raise TypeError("the pickle sets items of something that is no dict")

    def set_state(self, state: Any) -> None:
        if not isinstance(self.stack[-1], _PickledObject):
            raise TypeError("the pickle sets the state of something that is no object")
        self.stack[-1].state = state


def _as_name(module: Any, name: Any) -> _PickledName:
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError("the pickle has a class whose name is no string")
    return _PickledName(module, name)


def _show_value(value: Any) -> str:
    """Returns a value for a message: a string, or the type of anything else, which may be huge."""
    return repr(value)[:_MAX_SHOWN_CHARACTERS] if isinstance(value, str) else type(value).__name__


def _show_class(value: Any) -> str:
    """Returns the class of an object, or the type of another value, for a message."""
    if isinstance(value, _PickledObject):
        return str(value.name)
    return str(value) if isinstance(value, _PickledName) else type(value).__name__


def _as_pairs(values: Any) -> list[tuple[str, Any]]:
    names, members = list(values[::2]), list(values[1::2])
    if not all(isinstance(name, str) for name in names):
        raise TypeError("the pickle has a dict whose keys are not all strings")
    return list(zip(names, members, strict=True))


def _describe_call(name: Any, arguments: Any) -> _PickledObject:
    """Returns the description of an object; functions of pickle itself are replaced by the class
    that they would create.
    """
    if not isinstance(name, _PickledName) or not isinstance(arguments, tuple):
        raise TypeError("the pickle calls something that is no class by its name")
    if len(arguments) > _MAX_ARGUMENTS:
        raise ValueError(f"the pickle calls {name} with {len(arguments)} arguments")
    match (name.module, name.name, *arguments):
        case ("copyreg" | "copy_reg", "_reconstructor", _PickledName() as made, base, state):
            is_tuple = isinstance(base, _PickledName) and base.name == "tuple"
            if is_tuple and not (isinstance(state, tuple) and len(state) <= _MAX_ARGUMENTS):
                raise TypeError(f"the pickle has a {made} that is no tuple of a few values")
            return _PickledObject(made, state if is_tuple else ())
        case ("copyreg" | "copy_reg", "__newobj__", _PickledName() as made, *rest):
            return _PickledObject(made, tuple(rest))
        case ("pyspark.serializers", "_restore", "UnischemaField", _, tuple() as values):
            # Spark changed how named tuples are pickled.
            return _PickledObject(_PickledName("petastorm.unischema", "UnischemaField"), values)
    return _PickledObject(name, arguments)


def _check_class(value: Any, module: str, *names: str) -> _PickledObject:
    """Returns the value if it is an object of one of these classes of petastorm or Spark."""
    if isinstance(value, _PickledObject):
        package, _, rest = value.name.module.rpartition(".")
        own = f"petastorm.{rest}" if package in _FORMER_PACKAGES else value.name.module
        if own == module and value.name.name in names:
            return value
    expected = f"{module}.{names[0]}" if len(names) == 1 else f"a class of {module}"
    raise ValueError(f"expected {expected}, found {_show_class(value)}")


def _build_schema(description: Any) -> Unischema:
    state = _check_class(description, "petastorm.unischema", "Unischema").state
    name, fields = state["_name"], state["_fields"]
    if isinstance(fields, _PickledObject):
        _check_class(fields, "collections", OrderedDict.__name__)
        pairs = fields.arguments[0] if fields.arguments else []
        given = _as_pairs([value for pair in pairs for value in _as_pair(pair)])
        fields = dict(given + fields.items)
    if not isinstance(name, str):
        raise TypeError(f"the name of the schema is {_show_value(name)}")
    return Unischema(name, [_build_field(value) for value in fields.values()])


def _as_pair(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:  # noqa: PLR2004
        raise TypeError("the pickle has fields that are no pairs of a name and a field")
    return value[0], value[1]


def _build_field(description: Any) -> UnischemaField:
    arguments = _check_class(description, "petastorm.unischema", "UnischemaField").arguments
    name, dtype, shape, codec, nullable = arguments
    if not isinstance(name, str) or not isinstance(nullable, bool | None):
        raise TypeError(
            f"a field has the name {_show_value(name)} and the nullability {_show_value(nullable)}"
        )
    if not isinstance(shape, tuple) or not all(isinstance(size, int | None) for size in shape):
        raise TypeError(f"field {_show_value(name)} has the shape {_show_value(shape)}")
    return UnischemaField(
        name, _find_dtype(dtype), shape, codec and _build_codec(codec), bool(nullable)
    )


def _find_dtype(description: Any) -> Any:
    if isinstance(description, _PickledObject) and str(description.name) == "numpy.dtype":
        code = description.arguments[0]
        if not isinstance(code, str) or len(code) > _MAX_DTYPE_CHARACTERS:
            raise TypeError(f"a type of NumPy is {_show_value(code)}")
        return np.dtype(code).type
    if isinstance(description, _PickledName):
        module = description.module.replace("__builtin__", "builtins")
        if (module, description.name) in _DTYPES:
            return _DTYPES[module, description.name]
    raise ValueError(f"expected a type of NumPy, found {_show_class(description)}")


def _build_codec(description: Any) -> Any:
    names = (*_ARRAY_CODECS, "CompressedImageCodec", "ScalarCodec")
    made = _check_class(description, "petastorm.codecs", *names)
    state = made.state or {}
    match made.name.name:
        case "ScalarCodec":
            return ScalarCodec(_describe_spark_type(state["_spark_type"]))
        case "CompressedImageCodec":
            image_format, quality = state["_image_codec"], state.get("_quality", 80)
            if not isinstance(image_format, str) or not isinstance(quality, int):
                raise TypeError(
                    f"an image codec has the format {_show_value(image_format)} and the quality "
                    f"{_show_value(quality)}"
                )
            return CompressedImageCodec(image_format.removeprefix("."), quality)
    return _ARRAY_CODECS[made.name.name]()


def _describe_spark_type(description: Any) -> SparkTypeDescription:
    if isinstance(description, _PickledName):  # the class where an instance was meant
        description = _PickledObject(description, ())
    made = _check_class(description, "pyspark.sql.types", *SPARK_TYPE_NAMES)
    options = dict(made.state or {})
    nested = {"elementType": options.pop("elementType")} if "elementType" in options else {}
    for name, value in options.items():
        if not isinstance(value, int | str | None):
            raise TypeError(f"{made.name} has {_show_value(name)} of type {type(value).__name__}")
    nested = {name: _describe_spark_type(value) for name, value in nested.items()}
    return SparkTypeDescription(made.name.name, options | nested)
