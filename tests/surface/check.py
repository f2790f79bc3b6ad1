# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Compares modules with Horovod's table: `python -m tests.surface.check horovod.torch
farandole.mxnet ...`.

Prints a JSON list of differences, `[module, name, what]`, so that a test can run it in a process
that has loaded no other framework. `--sources` reads our sources instead of importing them, for
what cannot be installed.
"""

import ast
import importlib
import inspect
import json
import sys
from pathlib import Path

FACTS = Path(__file__).with_name("facts.json")
SOURCES = Path(__file__).parents[2] / "python"
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
NONE = inspect.Parameter.empty


def facts():
    """The table."""
    return json.loads(FACTS.read_text())


def differences(name, told):
    """Yields names that a module lacks and arguments that differ; additional ones are permitted."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith(("horovod", "farandole")):
            yield "*", "no such module"
            return
        raise
    for entry, wanted in told.items():
        if not hasattr(module, entry):
            yield entry, "is missing"
        elif isinstance(wanted, dict):
            yield from of_class(module, entry, wanted)
        elif wanted is not None:
            yield from of_function(module, entry, getattr(module, entry), wanted, bound=False)


def of_class(module, entry, told):
    """Yields members that a class lacks, and methods whose arguments differ."""
    found = getattr(module, entry)
    if not inspect.isclass(found):  # a function that returns what the class would have made
        yield from of_function(module, entry, found, told.get("__init__", []), bound=False)
        return
    for method, wanted in told.items():
        name = f"{entry}.{method}"
        if not has(found, method):
            yield name, "is missing"
        elif wanted is not None:
            static = isinstance(inspect.getattr_static(found, method), staticmethod | classmethod)
            yield from of_function(module, name, getattr(found, method), wanted, bound=not static)


def has(kind, name):
    """Returns whether instances of a class have an attribute: an annotation is enough."""
    return hasattr(kind, name) or any(
        name in vars(base).get("__annotations__", {}) for base in kind.__mro__
    )


def of_function(module, name, found, told, *, bound):
    """The difference between the arguments of a function and those it should take, if there is
    one.
    """
    if told and all(argument.startswith("*") for argument in told):
        return  # it hands on whatever it gets: what it takes is said elsewhere
    try:
        parameters = list(inspect.signature(found).parameters.values())[1 if bound else 0 :]
    except (TypeError, ValueError):
        yield name, f"is {found!r}, not a function"
        return
    if problem := difference(module, parameters, told):
        ours = ", ".join(str(one.replace(annotation=one.empty)) for one in parameters)
        yield name, f"{problem}; ours: ({ours}), Horovod's: ({', '.join(told)})"


def difference(module, parameters, told):
    """The first thing in which a call of Horovod's function cannot rely on ours; optional
    arguments more are free.
    """
    variable = {one.kind for one in parameters if one.kind in VARIABLE}
    named = {one.name: one for one in parameters if one.kind not in VARIABLE}
    places = [
        one.name
        for one in parameters
        if one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD}
    ]
    asked, keywords = set(), False
    for place, argument in enumerate(told):
        name, given, default = argument.partition("=")
        if name.startswith("*"):
            keywords = True
            kind = VARIABLE[1] if name.startswith("**") else VARIABLE[0]
            if name != "*" and kind not in variable:
                return f"takes no {name}"
            continue
        asked.add(name)
        if name not in named:
            return f"has no argument {name}"
        if not keywords and (place >= len(places) or places[place] != name):
            return f"argument {place + 1} is not {name}"
        ours = named[name].default
        if given and (ours is NONE or not same(module, ours, default)):
            return f"the default of {name} is {'missing' if ours is NONE else repr(ours)}"
    needed = [one.name for one in named.values() if one.default is NONE and one.name not in asked]
    return f"needs {needed[0]}" if needed else None


def same(module, value, told):
    """Returns whether a default is what the text says: a literal, or a name that the module or
    `common.util` has.
    """
    try:
        return ast.literal_eval(told) == value
    except (ValueError, SyntaxError):
        pass
    if told.startswith("_"):
        return True  # nobody could pass it
    parts = told.split(".")
    for place in (module, importlib.import_module("farandole.common.util")):
        # `hvd.global_process_set` is `global_process_set` where the module is hvd
        for skipped in (0, 1):
            found = place
            for part in parts[skipped:]:
                found = getattr(found, part, NONE)
            if len(parts) > skipped and found is not NONE and (found is value or found == value):
                return True
    return False


def of_sources(name, told):
    """Like `differences`, by reading a module's source."""
    from tests.surface import extract

    base = SOURCES.joinpath(*name.split("."))
    paths = [path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()]
    if not paths:
        yield "*", "no such module"
        return
    tree = ast.parse(paths[0].read_text())
    ours = extract.of_module(tree, "farandole", exports=True)
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for base in map(ast.unparse, kind.bases):
            ours[kind.name] = {**(ours.get(base) or {}), **ours[kind.name]}
    for entry, wanted in told.items():
        if entry not in ours:
            yield entry, "is missing"
        elif isinstance(wanted, dict) and isinstance(ours[entry], dict):
            for method, arguments in wanted.items():
                found = ours[entry].get(method, "missing")
                if arguments is not None and found != arguments:
                    yield f"{entry}.{method}", f"ours: {found}, Horovod's: {arguments}"
        elif (
            isinstance(wanted, list)
            and isinstance(ours[entry], list)
            and ours[entry][: len(wanted)] != wanted
        ):
            yield entry, f"ours: {ours[entry]}, Horovod's: {wanted}"


def main(arguments):
    """Prints the differences of modules."""
    compare = of_sources if "--sources" in arguments else differences
    table = facts()
    found = []
    for name in (argument for argument in arguments if not argument.startswith("-")):
        theirs = name.replace("farandole", "horovod", 1)
        found += [[theirs, entry, what] for entry, what in compare(name, table[theirs])]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
