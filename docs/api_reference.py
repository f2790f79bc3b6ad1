# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A Sphinx extension with one directive: `api` writes the reference of a module's public names from
its docstrings.

A name is public when the module's `__all__` lists it. The sources are parsed and not imported, so
the page of each framework builds without that framework. A public name without a docstring is a
warning, which fails `make docs`.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import griffe
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from docutils import nodes
    from sphinx.application import Sphinx

SOURCES = Path(__file__).parents[1] / "python"
WIDTH = 12
"""Backticks around the outermost directive; each directive inside of another has fewer."""
SECTIONS = {
    "parameters": "Args",
    "returns": "Returns",
    "yields": "Yields",
    "raises": "Raises",
    "attributes": "Attributes",
}

log = logging.getLogger(__name__)
Lines = list[str]


@cache
def package() -> griffe.Module:
    """Returns the parsed package, with its re-exported names followed to where they are defined."""
    loader = griffe.GriffeLoader(search_paths=[str(SOURCES)], docstring_parser=griffe.Parser.google)
    loaded = loader.load("farandole", try_relative_path=False)
    loader.resolve_aliases(implicit=False, external=False)
    return loaded


def target(member: Any) -> Any:
    """Returns the object that defines a name."""
    return member.final_target if member.is_alias else member


def docstring(thing: Any) -> Lines:
    """Returns a docstring as Markdown: the text as it is, each Google section as a list."""
    if not thing.docstring:
        return []
    lines: Lines = []
    for section in thing.docstring.parse("google", warnings=False):
        kind = section.kind.value
        if kind == "text":
            lines += [*section.value.splitlines(), ""]
        elif kind == "admonition":
            # `Example:` is the only one in the sources, and its content is code, in a fence or
            # without.
            code = section.value.description.splitlines()
            lines += [*(code if code[0].startswith("```") else ["```python", *code, "```"]), ""]
        elif kind in SECTIONS:
            lines += [f"**{SECTIONS[kind]}**", "", *entries(section.value), ""]
    return lines


def entries(items: Iterable[Any]) -> Iterator[str]:
    """One bullet for each entry of a section."""
    for item in items:
        name = getattr(item, "name", "") or ""
        label = name or (str(item.annotation) if type(item).__name__ == "DocstringRaise" else "")
        text = " ".join(item.description.split())
        yield f"- `{label}`: {text}" if label else f"- {text}"


def signature(function: Any, *, method: bool) -> str:
    """Returns the parameters and the result as the source writes them."""
    parts: list[str] = []
    star = False
    parameters = list(function.parameters)
    if method and parameters and parameters[0].name in {"self", "cls"}:
        parameters = parameters[1:]
    for position, parameter in enumerate(parameters):
        kind = parameter.kind
        if kind is griffe.ParameterKind.var_positional:
            star = True
        elif kind is griffe.ParameterKind.keyword_only and not star:
            star = True
            parts.append("*")
        stars = {
            griffe.ParameterKind.var_positional: "*",
            griffe.ParameterKind.var_keyword: "**",
        }.get(kind, "")
        text = f"{stars}{parameter.name}"
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None and not stars:
            text += (
                f" = {parameter.default}"
                if parameter.annotation is not None
                else f"={parameter.default}"
            )
        parts.append(text)
        following = parameters[position + 1] if position + 1 < len(parameters) else None
        positional = griffe.ParameterKind.positional_only
        if kind is positional and (following is None or following.kind is not positional):
            parts.append("/")
    result = f" -> {function.returns}" if function.returns is not None else ""
    return f"({', '.join(parts)}){result}"


def directive(kind: str, title: str, body: Lines, width: int) -> Lines:
    """Returns a directive of Sphinx's Python domain around `body`."""
    fence = "`" * width
    return [f"{fence}{{py:{kind}}} {title}", "", *body, fence, ""]


def documented(member: Any, title: str, kind: str, width: int, *, method: bool = False) -> Lines:
    """Returns a function or method."""
    thing = target(member)
    return directive(kind, title + signature(thing, method=method), docstring(thing), width)


class Stated(NamedTuple):
    """A parameter of Spark ML, as the sources state it: `batch_size: Parameter[int] =
    Parameter("Rows.", ...)`.
    """

    name: str
    kind: str
    doc: str
    default: str

    @property
    def keyword(self) -> str:
        """The keyword of the constructor."""
        return f"{self.name}: {self.kind} | None = None"

    @property
    def row(self) -> str:
        """The row of a table."""
        cells = f"`{self.name}`", f"`{self.kind}`", f"`{self.default}`", self.doc
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def stated(attribute: Any) -> Stated | None:
    """Returns the parameter that an attribute states, if it is one."""
    kind = str(attribute.annotation or "")
    if not kind.startswith("Parameter["):
        return None
    call = ast.parse(str(attribute.value), mode="eval").body
    if not isinstance(call, ast.Call):
        return None
    defaults = [ast.unparse(one.value) for one in call.keywords if one.arg == "default"]
    return Stated(
        attribute.name, kind[len("Parameter[") : -1], ast.literal_eval(call.args[0]), *defaults
    )


def of_parameters(cls: Any) -> list[Stated]:
    """Returns the parameters of a class, those of its base classes first."""
    found: dict[str, Stated] = {}
    for base in (*reversed(cls.mro()), cls):
        for member in base.members.values():
            if member.is_attribute and (one := stated(member)) is not None:
                found[one.name] = one
    return list(found.values())


def of_class(cls: Any, title: str, width: int) -> Lines:
    """Returns a class: its constructor, its parameters, its public attributes and methods,
    inherited ones included.
    """
    body = docstring(cls)
    init = cls.all_members.get("__init__")
    call = signature(target(init), method=True) if init is not None else ""
    parameters = of_parameters(cls)
    if parameters:
        call = f"(*, {', '.join(one.keyword for one in parameters)})"
    elif init is not None:
        body += docstring(target(init))
    members: Lines = []
    for name, member in sorted({**cls.inherited_members, **cls.members}.items()):
        thing = target(member)
        if name.startswith("_") or not thing.path.startswith("farandole."):
            continue
        if thing.is_function and thing.has_docstring:
            kind = (
                "classmethod"
                if "classmethod" in thing.labels
                else "staticmethod"
                if "staticmethod" in thing.labels
                else "method"
            )
            members += documented(member, name, kind, width - 1, method=kind != "staticmethod")
        elif thing.is_attribute and thing.has_docstring:
            kind = "property" if "property" in thing.labels else "attribute"
            members += directive(kind, name, docstring(thing), width - 1)
    if parameters:
        body += ["", "| parameter | type | default | meaning |", "| --- | --- | --- | --- |"]
        body += [*(one.row for one in parameters), ""]
        body += [
            (
                "Each parameter has a setter and a getter in Spark ML's form: `setBatchSize`, "
                "`getBatchSize`."
            ),
            "",
        ]
    kind = (
        "exception"
        if any("Error" in str(base) or "Exception" in str(base) for base in cls.bases)
        else "class"
    )
    return directive(kind, title + (call if kind == "class" else ""), body + members, width)


def of_module(path: str) -> Lines:
    """Returns the page of one module: its docstring, then each name of its `__all__`."""
    module = package() if path == "farandole" else package()[path.removeprefix("farandole.")]
    lines = directive("module", path, [], WIDTH) + docstring(module)
    modules: Lines = []
    for name in sorted(str(name) for name in module.exports or []):
        member = module[name]
        thing = target(member)
        title = f"{path}.{name}"
        if not thing.has_docstring:
            log.warning(
                "public name without a docstring: %s", title, type="api", subtype="docstring"
            )
        if thing.is_module:
            modules.append(f"- `{title}`")
        elif thing.is_class:
            lines += of_class(thing, name, WIDTH)
        elif thing.is_function:
            lines += documented(member, name, "function", WIDTH)
        else:
            lines += directive(
                "data", name, docstring(thing) or [f"The same as `{thing.value}`."], WIDTH
            )
    return lines + (["Modules:", "", *modules, ""] if modules else [])


class Api(SphinxDirective):
    """Writes the reference of the module that is its argument."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns the reference as nodes of the page."""
        self.env.note_dependency(str(SOURCES / self.arguments[0].replace(".", "/") / "__init__.py"))
        return self.parse_text_to_nodes(
            "\n".join(of_module(self.arguments[0])), allow_section_headings=True
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive."""
    app.add_directive("api", Api)
    return {"parallel_read_safe": True}
