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

_DYNAMO_MODULE = "torch._dynamo"


def defer_compiler() -> None:
    """Keeps the compiler from being imported by optimizers, unless it has been already."""
    if _DYNAMO_MODULE in sys.modules:
        return
    spec = PathFinder.find_spec(_DYNAMO_MODULE, torch.__path__)
    if spec is None or not spec.has_location:
        return
    stand_in = _DeferredCompiler()
    stand_in.__spec__, stand_in.__file__, stand_in.__package__ = spec, spec.origin, _DYNAMO_MODULE
    stand_in.__path__ = list(spec.submodule_search_locations or ())
    sys.meta_path.insert(0, _CompilerFinder())
    sys.modules[_DYNAMO_MODULE] = stand_in
    setattr(torch, "_dynamo", stand_in)  # noqa: B010 - type checkers do not know this name of torch


def is_compiler_deferred() -> bool:
    """Returns whether the compiler has not been needed yet."""
    return isinstance(sys.modules.get(_DYNAMO_MODULE), _DeferredCompiler)


class _OptimizedModuleMeta(type):
    """A metaclass whose `isinstance` asks the compiler, if the compiler is imported."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return not is_compiler_deferred() and isinstance(
            instance, sys.modules[_DYNAMO_MODULE].OptimizedModule
        )


class OptimizedModule(metaclass=_OptimizedModuleMeta):
    """A stand-in for the class of compiled modules, which has no instances without the compiler."""


class _SubmoduleStandIn(ModuleType):
    """A stand-in for a submodule of the compiler from which eager code takes one attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(getattr(_import_compiler(), self.__name__.rpartition(".")[2]), name)


def _create_submodule_stand_in(name: str, **known: Any) -> ModuleType:
    part = _SubmoduleStandIn(f"{_DYNAMO_MODULE}.{name}")
    part.__dict__.update(known)
    return part


def _is_compile_supported(device: str) -> bool:
    return _import_compiler().utils.is_compile_supported(device)


class _DeferredCompiler(ModuleType):
    """In the compiler's place."""

    def __init__(self) -> None:
        super().__init__(_DYNAMO_MODULE)
        self.OptimizedModule = OptimizedModule
        # The default mode of DistributedDataParallel.
        self.utils = _create_submodule_stand_in(
            "utils",
            get_optimize_ddp_mode=lambda: "ddp_optimizer",
            # torchvision imports this function, and calls it in one operation.
            is_compile_supported=_is_compile_supported,
        )
        # torch.distributed begins, and nothing has been traced.
        self.trace_rules = _create_submodule_stand_in("trace_rules", clear_lru_cache=lambda: None)

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
        def call_function(*args: Any, **kwargs: Any) -> Any:
            if is_compiler_deferred():
                return fn(*args, **kwargs)
            if not known:
                known.append(sys.modules[_DYNAMO_MODULE].disable(fn, recursive, **options))
            return known[0](*args, **kwargs)

        return call_function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {_DYNAMO_MODULE!r} has no attribute {name!r}")
        return getattr(_import_compiler(), name)


class _CompilerFinder(MetaPathFinder):
    """An import finder that imports the compiler when a module below it is imported, unless the
    module has a stand-in.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if not fullname.startswith(f"{_DYNAMO_MODULE}.") or not is_compiler_deferred():
            return None
        found: ModuleType | None = sys.modules[_DYNAMO_MODULE].__dict__.get(
            fullname.rpartition(".")[2]
        )
        if not isinstance(found, _SubmoduleStandIn):
            _import_compiler()
            found = sys.modules.get(fullname)
        return None if found is None else ModuleSpec(fullname, _AlreadyLoadedModuleLoader(found))


class _AlreadyLoadedModuleLoader(Loader):
    """A module that came along with the compiler."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        del spec
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _import_compiler() -> ModuleType:
    if is_compiler_deferred():
        del sys.modules[_DYNAMO_MODULE]
        for name, module in list(sys.modules.items()):
            if isinstance(module, _SubmoduleStandIn):
                del sys.modules[name]
        delattr(torch, "_dynamo")
    return importlib.import_module(_DYNAMO_MODULE)
