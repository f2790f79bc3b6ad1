# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The function that torch calls at the end of `import torch`, for `FARANDOLE_AS_GLOO`.

The wheel names it as an entry point of the group `torch.backends`, which torch's autoload reads.
Without the variable, it does nothing. With it, `farandole.torch.distributed` is still imported only
when the program makes its first process group, because torch may be imported by a module of
`farandole.torch` itself, and because most processes, such as data loaders, make none.
"""

from __future__ import annotations

import functools
import os

from farandole import _variables as variables

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NAMES = (variables.AS_GLOO, variables.AS_GLOO.replace("FARANDOLE_", "HOROVOD_"))


def install_as_gloo_if_requested() -> None:
    """Makes the first process group call `farandole.torch.distributed.as_gloo` if the environment
    asks for it.

    Raises:
        ValueError: The variable is no boolean.
    """
    if not any(name in os.environ for name in _NAMES):
        return
    from farandole._native.settings import read_setting  # noqa: PLC0415 - only with the variable

    if not read_setting(variables.AS_GLOO):
        return
    import torch.distributed as dist  # noqa: PLC0415 - torch is being imported

    if dist.is_available():
        _call_before_first_group()


def _call_before_first_group() -> None:
    from torch.distributed import distributed_c10d  # noqa: PLC0415 - torch is being imported
    from torch.distributed.rendezvous import (  # noqa: PLC0415 - as above
        _rendezvous_handlers as handlers,  # torch can only add one
    )

    create_group = distributed_c10d._new_process_group_helper  # noqa: SLF001 - the place where torch makes all groups
    env_handler = handlers["env"]
    is_active = False

    def activate() -> None:
        nonlocal is_active
        if is_active:
            return
        is_active = True
        # A script that uses both engines may have replaced them already, and calls these here.
        if distributed_c10d._new_process_group_helper is activate_and_create_group:  # noqa: SLF001 - as above
            distributed_c10d._new_process_group_helper = create_group  # noqa: SLF001 - as above
        if handlers["env"] is activate_and_meet:
            handlers["env"] = env_handler
        from farandole.torch.distributed import as_gloo  # noqa: PLC0415 - see the docstring above

        as_gloo()

    @functools.wraps(create_group)
    def activate_and_create_group(*arguments: Any, **options: Any) -> Any:
        is_outermost = distributed_c10d._new_process_group_helper is activate_and_create_group  # noqa: SLF001 - as above
        activate()
        call = distributed_c10d._new_process_group_helper if is_outermost else create_group  # noqa: SLF001 - as above
        return call(*arguments, **options)

    def activate_and_meet(url: str, **options: Any) -> Any:
        is_outermost = handlers["env"] is activate_and_meet
        activate()
        return (handlers["env"] if is_outermost else env_handler)(url, **options)

    distributed_c10d._new_process_group_helper = activate_and_create_group  # noqa: SLF001 - as above
    handlers["env"] = activate_and_meet
