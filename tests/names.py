# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Prints names and keywords of Farandole in the code of the pages that do not exist, and fails
if there are any.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from typing import Any

from tests.pages import all_blocks


class Names(ast.NodeVisitor):
    """Looks up the names of Farandole that a piece of code uses."""

    def __init__(self, known: dict[str, Any]) -> None:
        self.known = known
        self.wrong: list[str] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] in ("farandole", "horovod"):
                module = importlib.import_module(alias.name)
                top = importlib.import_module(alias.name.partition(".")[0])
                self.known[alias.asname or top.__name__] = module if alias.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module is not None and node.module.partition(".")[0] in ("farandole", "horovod"):
            for alias in node.names:
                module = importlib.import_module(node.module)
                if not hasattr(module, alias.name):
                    module = importlib.import_module(f"{node.module}.{alias.name}")
                    self.known[alias.asname or alias.name] = module
                else:
                    self.known[alias.asname or alias.name] = getattr(module, alias.name)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.known.pop(target.id, None)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.value_of(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = self.value_of(node.func)
        if called is not None and any(keyword.arg for keyword in node.keywords):
            parameters = inspect.signature(called).parameters
            if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
                names = {keyword.arg for keyword in node.keywords if keyword.arg}
                self.wrong += [
                    f"{ast.unparse(node.func)}(..., {name}=...)"
                    for name in names - parameters.keys()
                ]
        self.generic_visit(node)

    def value_of(self, node: ast.expr) -> Any:
        """The object that an expression of names and dots is; `None` where it is not one of
        Farandole's.
        """
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.value_of(node.value)
            if owner is None:
                return None
            found = getattr(owner, node.attr, None)
            if found is None and inspect.ismodule(owner):
                self.wrong.append(ast.unparse(node))
            return found
        return None


def main() -> int:
    """The exit status."""
    # Triton must be loaded before TensorFlow: see docs/user-guide/tensorflow.md.
    importlib.import_module("torch._dynamo")
    known: dict[str, dict[str, Any]] = {}
    wrong = []
    for block in all_blocks():
        if block.kind in ("python", "py"):
            names = Names(known.setdefault(block.page, {}))
            names.visit(ast.parse(block.text))
            wrong += [f"{block}: {name}" for name in names.wrong]
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
