# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""torch's compiler, which is imported only if code compiles.

Every torch optimizer imports `torch._dynamo` in its first step, to mark where a graph would break.
That takes longer than to import torch itself. Lightning imports it for a class, and
DistributedDataParallel reads a setting. A substitute module provides what eager code uses. Any
other access to it, or to a module below it, imports the compiler.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NAME = "torch._dynamo"


def defer() -> None:
    """Keeps the compiler from being imported by optimizers, unless it has been already."""
    if _NAME in sys.modules:
        return
    spec = PathFinder.find_spec(_NAME, torch.__path__)
    if spec is None or not spec.has_location:
        return
    stand_in = _Deferred()
    stand_in.__spec__, stand_in.__file__, stand_in.__package__ = spec, spec.origin, _NAME
    stand_in.__path__ = list(spec.submodule_search_locations or ())
    sys.meta_path.insert(0, _Finder())
    sys.modules[_NAME] = stand_in
    setattr(torch, "_dynamo", stand_in)  # noqa: B010 - type checkers do not know this name of torch


def is_deferred() -> bool:
    """Returns whether the compiler has not been needed yet."""
    return isinstance(sys.modules.get(_NAME), _Deferred)


class _Compiled(type):
    """Asks the compiler, once it is there."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return not is_deferred() and isinstance(instance, sys.modules[_NAME].OptimizedModule)


class OptimizedModule(metaclass=_Compiled):
    """In the place of the class of compiled modules: without the compiler there are none."""


class _Part(ModuleType):
    """In the place of a module below the compiler, of which eager code asks one thing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(getattr(_compiler(), self.__name__.rpartition(".")[2]), name)


def _part(name: str, **known: Any) -> ModuleType:
    part = _Part(f"{_NAME}.{name}")
    part.__dict__.update(known)
    return part


class _Deferred(ModuleType):
    """In the compiler's place."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.OptimizedModule = OptimizedModule
        # The default mode of DistributedDataParallel.
        self.utils = _part("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
        # torch.distributed begins, and nothing has been traced.
        self.trace_rules = _part("trace_rules", clear_lru_cache=lambda: None)

    def graph_break(self, msg: str = "") -> None:
        """Does nothing: no function is compiled."""

    def disable(
        self, fn: Callable[..., Any] | None = None, recursive: bool = True, **options: Any
    ) -> Any:
        """Returns a function that the compiler, once it is there, will leave alone.

        Args:
            fn: the function; without one, a decorator is returned.
            recursive: as the compiler's.
            **options: as the compiler's.
        """
        if fn is None:
            return partial(self.disable, recursive=recursive, **options)
        known: list[Callable[..., Any]] = []

        @wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_deferred():
                return fn(*args, **kwargs)
            if not known:
                known.append(sys.modules[_NAME].disable(fn, recursive, **options))
            return known[0](*args, **kwargs)

        return call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        return getattr(_compiler(), name)


class _Finder(MetaPathFinder):
    """Brings the compiler when a module below it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if not fullname.startswith(f"{_NAME}.") or not is_deferred():
            return None
        _compiler()
        found = sys.modules.get(fullname)
        return None if found is None else ModuleSpec(fullname, _Loaded(found))


class _Loaded(Loader):
    """A module that came along with the compiler."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        del spec
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _compiler() -> ModuleType:
    if is_deferred():
        del sys.modules[_NAME]
        delattr(torch, "_dynamo")
    return importlib.import_module(_NAME)
