# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Compares modules that are imported here with Horovod's table: `python -m tests.surface.check horovod.torch ...`.

Prints a JSON list of differences, `[module, name, what]`, so that a test can run it where a framework is loaded.
"""

import ast
import importlib
import inspect
import json
import sys
from pathlib import Path

FACTS = Path(__file__).with_name("facts.json")
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def differences(name, facts):
    """What a module lacks, and where it takes other arguments."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith(("horovod", "farandole")):
            yield "*", "no such module"
            return
        raise
    for entry, told in facts.items():
        if not hasattr(module, entry):
            yield entry, "is missing"
        elif isinstance(told, dict):
            yield from of_class(module, entry, told)
        elif told is not None:
            yield from of_function(module, entry, getattr(module, entry), told, bound=False)


def of_class(module, entry, told):
    """What a class lacks, and where its methods take other arguments."""
    found = getattr(module, entry)
    if not inspect.isclass(found):
        if "__init__" in told:  # a function that returns what the class would have made
            yield from of_function(module, entry, found, told["__init__"], bound=False)
        return
    for method, arguments in told.items():
        name = f"{entry}.{method}"
        if not hasattr(found, method):
            yield name, "is missing"
        elif arguments is not None:
            static = isinstance(inspect.getattr_static(found, method), staticmethod | classmethod)
            yield from of_function(module, name, getattr(found, method), arguments, bound=not static)


def of_function(module, name, found, told, *, bound):
    """The difference between the arguments of a function and those it should take, if there is one."""
    try:
        parameters = list(inspect.signature(found).parameters.values())[1 if bound else 0 :]
    except (TypeError, ValueError):
        yield name, f"is {found!r}, not a function"
        return
    if problem := difference(module, parameters, told):
        ours = ", ".join(str(one.replace(annotation=one.empty)) for one in parameters)
        yield name, f"{problem}; ours: ({ours}), Horovod's: ({', '.join(told)})"


def difference(module, parameters, told):
    """The first thing that a call of Horovod's function cannot rely on; arguments beyond its own are free."""
    takes_more = {one.kind for one in parameters if one.kind in VARIABLE}
    named = {one.name: one for one in parameters if one.kind not in VARIABLE}
    places = [one.name for one in parameters if one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD}]
    asked, keywords = [], False
    for place, argument in enumerate(told):
        name, given, default = argument.partition("=")
        if name.startswith("*"):
            keywords = True
            kind = inspect.Parameter.VAR_KEYWORD if name.startswith("**") else inspect.Parameter.VAR_POSITIONAL
            if name != "*" and kind not in takes_more:
                return f"takes no {name}"
            continue
        asked.append(name)
        if name not in named:
            return f"has no argument {name}"
        if not keywords and (place >= len(places) or places[place] != name):
            return f"argument {place + 1} is not {name}"
        if given and (ours := named[name].default) is not ours_empty and not same(module, ours, default):
            return f"the default of {name} is {ours!r}"
        if given and named[name].default is ours_empty:
            return f"{name} has no default"
    needed = [one.name for one in named.values() if one.default is ours_empty and one.name not in asked]
    return f"needs {needed[0]}" if needed else None


ours_empty = inspect.Parameter.empty


def same(module, value, told):
    """Whether a default is what the text says: a literal, or a name that the module has."""
    try:
        return ast.literal_eval(told) == value
    except (ValueError, SyntaxError):
        pass
    first, *rest = told.split(".")
    for place in (module, importlib.import_module("farandole.common.util")):
        found = getattr(place, first, place)
        for part in rest:
            found = getattr(found, part, None)
        if found is not place and (found is value or found == value):
            return True
    return getattr(value, "__name__", None) == rest[-1:] or type(value).__name__.lower().endswith(told.replace("_", ""))


def main(names):
    """Prints the differences of modules."""
    facts = json.loads(FACTS.read_text())
    found = [[name, entry, what] for name in names for entry, what in differences(name, facts[name])]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
