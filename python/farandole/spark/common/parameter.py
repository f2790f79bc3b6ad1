# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Parameters of Spark ML, each stated once, as an attribute of its class.

    class Example(Parameters):
        batch_size: Parameter[int] = Parameter("Rows per step.", check.at_least(1), default=32)

The class derives everything else from this attribute: the constructor's keyword with its type (in
editors like a dataclass field), the default, the check of every value, `setBatchSize` and
`getBatchSize`, `explainParam`, `help`, and the reference in the documentation.

A value is checked when it is set, by the constructor, a setter, `setParams` or a param map of
`fit`. A wrong value is a `ValueError` or `TypeError` that names the parameter.
"""

# ruff: noqa: N802, SLF001 - names are Spark ML's

from __future__ import annotations

import copy
import inspect
import textwrap
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, dataclass_transform

from pyspark.ml.param import Param, Params

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole.common.argument_checks import Check

T = TypeVar("T")
_MAX_DOC_COLUMNS = 100


class Parameter(Param[T]):
    """A `Param` with the name of its attribute, with a default, and with a setter and a getter in
    its class: `batch_size` has `setBatchSize` and `getBatchSize`.

    Args:
        doc: Description of the parameter.
        check: Checks a value, and returns it in its canonical form.
        default: Value of the parameter if none is set.
        horovod_name: Another name of setter and getter, without `set` and `get`.
    """

    def __init__(
        self, doc: str, check: Check, *, default: T | None, horovod_name: str | None = None
    ) -> None:
        super().__init__(Params._dummy(), "", doc, None)
        self.check = check
        self.default = default
        self._horovod_name = horovod_name

    def __set_name__(self, owner: type, name: str) -> None:
        """Takes the name of the attribute, and gives the class a setter and a getter unless it has
        its own.
        """
        self.name = name
        self.typeConverter = partial(self.check, name)
        spark_name = "".join(word[:1].upper() + word[1:] for word in name.split("_"))
        setter, getter = _create_accessors(name)
        for title in filter(None, (spark_name, self._horovod_name)):
            for method, accessor in ((f"set{title}", setter), (f"get{title}", getter)):
                if not hasattr(owner, method):
                    setattr(owner, method, accessor)

    @property
    def doc_with_default(self) -> str:
        """The parameter's documentation, with its default if there is one."""
        return self.doc if self.default is None else f"{self.doc} Default: `{self.default!r}`."

    if TYPE_CHECKING:
        # For type checkers: the constructor takes a value, and the attribute is the parameter.
        def __get__(self, instance: Any, owner: Any = None) -> Param[T]: ...  # noqa: D105
        def __set__(self, instance: Any, value: T | None) -> None: ...  # noqa: D105


def _create_accessors(name: str) -> tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]:
    """Returns the setter and the getter of one parameter; a setter returns its object, so that
    calls can be chained.
    """

    def setter(self: Params, value: Any) -> Params:
        return self._set(**{name: value})

    def getter(self: Params) -> Any:
        return self.getOrDefault(name)

    setter.__doc__ = f"Sets `{name}` and returns the object itself."
    getter.__doc__ = f"The value of `{name}`, or its default."
    return setter, getter


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(Parameter,))
class DeclaredParams(Params):
    """The base of classes that state parameters. The constructor takes each by name; `None`
    stands for its default.
    """

    if TYPE_CHECKING:
        # A type checker does not know the setters and getters.
        def __getattr__(self, name: str) -> Any: ...  # noqa: D105

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self._setDefault(
            **{
                parameter.name: copy.copy(parameter.default)
                for parameter in declared_parameters(type(self))
            }
        )
        # A default must not count as set: it would win over a param map.
        self.setParams(**{name: value for name, value in given.items() if value is not None})

    def __init_subclass__(cls, **more: Any) -> None:
        """Gives the class a constructor whose signature and documentation list its parameters."""
        super().__init_subclass__(**more)
        if getattr(cls.__init__, "__wrapped__", cls.__init__) is DeclaredParams.__init__:
            cls.__init__ = _build_constructor(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses a value in the place of a parameter, which would be lost."""
        if isinstance(getattr(type(self), name, None), Parameter) and not isinstance(value, Param):
            raise AttributeError(f"{name} is a parameter: use setParams({name}=...)")
        super().__setattr__(name, value)

    def _set(self, **kwargs: Any) -> Self:
        """Like pyspark's, but `None` stands for the default, as in the constructor."""
        for name in [name for name, value in kwargs.items() if value is None]:
            parameter = self.getParam(name)
            if isinstance(parameter, Parameter) and parameter.default is not None:
                self.clear(parameter)
                del kwargs[name]
        return super()._set(**kwargs)

    def setParams(self, **params: Any) -> Self:
        """Sets several parameters by name and returns the object itself.

        Args:
            **params: Values by parameter name.

        Returns:
            The object.

        Raises:
            TypeError: A name is no parameter.
        """
        unknown = [name for name in params if not self.hasParam(name)]
        if unknown:
            raise TypeError(f"no parameter of {type(self).__name__}: {', '.join(sorted(unknown))}")
        return self._set(**params)


def declared_parameters(kind: type) -> list[Parameter[Any]]:
    """Returns the parameters of a class, in the order of their statements; base classes come
    first.
    """
    found: dict[str, Parameter[Any]] = {}
    for base in reversed(kind.__mro__):
        found |= {name: value for name, value in vars(base).items() if isinstance(value, Parameter)}
    return list(found.values())


def _optional_type(annotation: str) -> str:
    """Returns the type of a keyword: `Parameter[int]` takes `int | None`."""
    text = annotation.removeprefix("Parameter[").removesuffix("]")
    return text if text == "Any" else f"{text} | None"


def _build_constructor(kind: type[DeclaredParams]) -> Callable[..., None]:
    """Returns the constructor of a class, with a keyword for each parameter."""

    def __init__(self: DeclaredParams, **given: Any) -> None:  # noqa: N807 - it becomes one
        DeclaredParams.__init__(self, **given)

    types = {
        name: text
        for base in reversed(kind.__mro__)
        for name, text in inspect.get_annotations(base).items()
    }
    keywords = {
        parameter.name: _optional_type(str(types.get(parameter.name, "Any")))
        for parameter in declared_parameters(kind)
    }
    lines = [
        textwrap.fill(
            f"{parameter.name}: {parameter.doc_with_default}",
            _MAX_DOC_COLUMNS,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
        )
        for parameter in declared_parameters(kind)
    ]
    __init__.__doc__ = "\n".join(["Sets parameters.", "", "Args:", *lines])
    __init__.__qualname__, __init__.__module__ = f"{kind.__qualname__}.__init__", kind.__module__
    __init__.__wrapped__ = DeclaredParams.__init__  # pyright: ignore[reportFunctionMemberAccess]
    __init__.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
        [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=text
                )
                for name, text in keywords.items()
            ),
        ],
        return_annotation=None,
    )
    return __init__
