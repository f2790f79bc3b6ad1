# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Imports of `horovod.x` end in the module object of `farandole.x`."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, ModuleType

_HERE = Path(__file__).parent


class _SameModule(Loader):
    """Hands out a module that exists under another name and leaves it as it is."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002 - the interface's
        module = importlib.import_module(self._name)
        self._own = module.__spec__, module.__loader__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has written the alias's spec into the module.
        module.__spec__, module.__loader__ = self._own

    def get_code(self, fullname: str) -> CodeType | None:  # noqa: ARG002 - `python -m horovod.x`
        spec = find_spec(self._name)
        return getattr(spec.loader, "get_code", lambda _: None)(self._name) if spec else None


class _Finder(MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the interface's
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        root, _, rest = fullname.partition(".")
        if root != "horovod" or not rest:
            return None
        own = _own(fullname)
        if own is not None:
            return own
        theirs = f"farandole.{rest}"
        try:
            found = find_spec(theirs)
        except ModuleNotFoundError as error:
            if error.name is None or not theirs.startswith(error.name):
                raise  # a framework that is not installed, not a module of ours
            found = None
        if found is None:
            raise ModuleNotFoundError(
                f"Farandole has no counterpart of Horovod's module: {fullname}", name=fullname
            )
        spec = ModuleSpec(fullname, _SameModule(theirs), origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec


class _Back(MetaPathFinder):
    """Finds for Farandole's packages what lies only here: `from horovod.spark.common import
    constants`.

    Python asks a package for such a name by the package's own name, which is Farandole's.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the interface's
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        root, _, rest = fullname.partition(".")
        own = _own(f"horovod.{rest}") if root == "farandole" and rest else None
        if own is None:
            return None
        spec = ModuleSpec(fullname, _SameModule(own.name), origin=own.origin)
        spec.submodule_search_locations = own.submodule_search_locations
        return spec


def _own(fullname: str) -> ModuleSpec | None:
    """Returns the module of this name that lies beside this file."""
    place = _HERE.joinpath(*fullname.split(".")[1:])
    if (package := place / "__init__.py").is_file():
        return spec_from_file_location(fullname, package, submodule_search_locations=[str(place)])
    if (module := place.with_suffix(".py")).is_file():
        return spec_from_file_location(fullname, module)
    return None


def install() -> None:
    """Puts the finders first, once: Python's own would load the files here a second time, by
    Farandole's name.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path[:0] = [_Finder(), _Back()]
