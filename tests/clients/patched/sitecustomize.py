# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""All changes that clients need to run with today's frameworks; there are none for Farandole.

Python imports this module when it starts, if this directory is on `PYTHONPATH`. A process applies
the patches that `CLIENT_PATCHES` names, each when it imports the module of the patch. The tests run
every client without each of its patches, too, and find the error that the patch prevents.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class ClientPatch(NamedTuple):
    """A change of one module of a client or of a framework.

    Attributes:
        module: Name of the module.
        apply: Changes the module, after it was executed.
        reason: Reason of the change.
        error: Words of the error without it.
    """

    module: str
    apply: Callable[[Any], None]
    reason: str
    error: str


def _add_module_available(module: Any) -> None:
    from lightning_utilities.core.imports import module_available

    module._module_available = module_available


def _remove_validation_epoch_end(name: str) -> Callable[[Any], None]:
    return lambda module: delattr(getattr(module, name), "validation_epoch_end")


PATCHES = {
    "module-available": ClientPatch(
        "pytorch_lightning.utilities",
        _add_module_available,
        "Lightning 2 moved the function to lightning_utilities, and SynapseML is written for 1.5.",
        "cannot import name '_module_available'",
    ),
    "text-epoch-end": ClientPatch(
        "synapse.ml.dl.LitDeepTextModel",
        _remove_validation_epoch_end("LitDeepTextModel"),
        "Lightning 2 refuses modules with this method. It only logs an average.",
        "Support for `validation_epoch_end` has been removed in v2.0.0",
    ),
    "vision-epoch-end": ClientPatch(
        "synapse.ml.dl.LitDeepVisionModel",
        _remove_validation_epoch_end("LitDeepVisionModel"),
        "Lightning 2 refuses modules with this method. It only logs an average.",
        "Support for `validation_epoch_end` has been removed in v2.0.0",
    ),
}


class _PatchFinder(MetaPathFinder):
    """Finds the modules of patches as Python does, and applies the patch after the module ran."""

    def __init__(self, patches: list[ClientPatch]) -> None:
        self._patches = {patch.module: patch for patch in patches}

    def find_spec(self, fullname: str, *_: Any) -> Any:
        patch = self._patches.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if patch is not None else None
        if spec is None or spec.loader is None or patch is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            patch.apply(module)

        spec.loader.exec_module = execute_and_patch
        return spec


_names = [name for name in os.environ.get("CLIENT_PATCHES", "").split(",") if name]
if _names:
    sys.meta_path.insert(0, _PatchFinder([PATCHES[name] for name in _names]))
