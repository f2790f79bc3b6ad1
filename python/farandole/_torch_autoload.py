# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The function that torch calls at the end of `import torch`, for `FARANDOLE_AS_GLOO`.

The wheel names it as an entry point of the group `torch.backends`, which torch's autoload reads.
Without the variable, it does nothing. With it, `farandole.torch.distributed` is still imported only
when the program makes its first process group, because torch may be imported by a module of
`farandole.torch` itself, and because most processes, such as those that load data, make none.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_VARIABLES = ("FARANDOLE_AS_GLOO", "HOROVOD_AS_GLOO")


def install_as_gloo_if_requested() -> None:
    """Makes the first process group call `farandole.torch.distributed.as_gloo` if the environment
    asks for it.

    Raises:
        ValueError: The variable is no boolean.
    """
    if not any(name in os.environ for name in _VARIABLES):
        return
    from farandole._native.settings import read_setting  # noqa: PLC0415 - only with the variable

    if not read_setting(_VARIABLES[0]):
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

    def activate() -> None:
        distributed_c10d._new_process_group_helper = create_group  # noqa: SLF001
        handlers["env"] = env_handler
        from farandole.torch.distributed import as_gloo  # noqa: PLC0415 - see the docstring above

        as_gloo()

    def call_activated(name: str, find: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        def activate_and_call(*arguments: Any, **options: Any) -> Any:
            activate()
            return find()(*arguments, **options)

        activate_and_call.__name__ = name
        return activate_and_call

    handlers["env"] = call_activated("env_handler", lambda: handlers["env"])
    distributed_c10d._new_process_group_helper = call_activated(  # noqa: SLF001
        "_new_process_group_helper",
        lambda: distributed_c10d._new_process_group_helper,  # noqa: SLF001
    )
