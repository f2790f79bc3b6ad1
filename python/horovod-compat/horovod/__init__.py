# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Horovod's names for Farandole: `horovod.torch` is `farandole.torch`, the same module object, and
so on down.

A script that imports Horovod runs unchanged. What Farandole has no module for, and scripts import
all the same, lies as a small module of its own beside this file.

Gradients of collectives follow Horovod's convention, too, in this process and in workers that it
starts, unless `FARANDOLE_GRADIENT_CONVENTION` says otherwise.
"""

import os as _os

from horovod import _alias

if not (
    _os.environ.get("FARANDOLE_GRADIENT_CONVENTION")
    or _os.environ.get("HOROVOD_GRADIENT_CONVENTION")
):
    _os.environ["FARANDOLE_GRADIENT_CONVENTION"] = "horovod"

_alias.install()

from farandole import __version__ as _farandole  # noqa: E402
from farandole.runner import run  # noqa: E402

__version__ = f"0.28.1+farandole.{_farandole}"
"""The Horovod whose names these are, and the Farandole that answers to them."""

__all__ = ["__version__", "run"]
