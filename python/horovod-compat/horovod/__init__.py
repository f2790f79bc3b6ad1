# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Horovod's names for Farandole: `horovod.torch` is `farandole.torch`, the same module object, and
so on down.

A script that imports Horovod runs unchanged. What Farandole has no module for, and scripts import
all the same, lies as a small module of its own beside this file.

Gradients of collectives follow Horovod's convention, too, in this process and in workers that it
starts, unless `FARANDOLE_GRADIENT_CONVENTION` says otherwise. `gloo_enabled()` and the like answer
as Horovod's.
"""

import os as _os

from horovod import _alias

if not (
    _os.environ.get("FARANDOLE_GRADIENT_CONVENTION")
    or _os.environ.get("HOROVOD_GRADIENT_CONVENTION")
):
    _os.environ["FARANDOLE_GRADIENT_CONVENTION"] = "horovod"

_alias.install()

from farandole import __version__ as __farandole_version__  # noqa: E402
from farandole.runner import run  # noqa: E402

__version__ = "0.28.1"
"""The Horovod whose names these are, and nothing else: scripts compare it for equality.
`__farandole_version__` is the version of the Farandole that answers to them.
"""

__all__ = ["__farandole_version__", "__version__", "run"]
