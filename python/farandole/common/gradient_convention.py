# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The convention for gradients of collectives: of the sum of all ranks' losses, or Horovod's.

`FARANDOLE_GRADIENT_CONVENTION` decides. The drop-in package sets it when a script imports
`horovod`, unless it is set. For n ranks Horovod's gradients are 1/n of Farandole's for `allgather`
and `broadcast`, and n times Farandole's for `reducescatter`; the gradient of an allreduce by `Min`,
`Max`, `Product` or `Adasum` is reduced by the same op.
"""

from __future__ import annotations

from farandole._native import engine
from farandole.common import basics

_cached_convention: list[bool] = []


def uses_horovod_gradients() -> bool:
    """Returns whether gradients are Horovod's. Looked up once in a world.

    Raises:
        ValueError: When the variable is neither `farandole` nor `horovod`.
    """
    if not _cached_convention:
        _cached_convention.append(engine.uses_horovod_gradients())
    return _cached_convention[0]


basics.call_on_each_init(_cached_convention.clear)
