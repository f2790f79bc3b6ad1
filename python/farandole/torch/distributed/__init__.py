# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A backend of `torch.distributed` over Farandole's engine.

Importing this module registers the backend `"farandole"`. Its world is the one this process was
launched into, so `init_process_group` needs only the backend's name under `farandole run` and in
Spark jobs, which set the environment that `env://` reads. `init_method="farandole://"` does not use
the environment. Processes without a launcher form a world by any other `init_method` of torch.

Tensors on the host are used in place, tensors on a GPU go through host memory. All functions of
`torch.distributed` work as with Gloo: `docs/user-guide/torch-distributed.md` lists them with their
differences, and the limits before torch 2.14. The links of groups end with the session, not with
`destroy_process_group`.

With `enable_reconfigure=True` (torch 2.15) a group has no members before
`torch.distributed._reconfigure`, which changes them as often as it is called. In an elastic job,
`FaultTolerantDataParallel` finishes a step in which ranks are lost. See
`docs/user-guide/elastic.md` for both.

Example:
    import torch.distributed as dist
    import farandole.torch.distributed

    dist.init_process_group("farandole")
    model = torch.nn.parallel.DistributedDataParallel(model)
"""

import torch.distributed as dist

if not dist.is_available():
    raise ImportError(
        "farandole.torch.distributed needs a PyTorch that was built with torch.distributed"
    )

from farandole.torch.distributed._as_gloo import as_gloo
from farandole.torch.distributed._backend import FarandoleBackend
from farandole.torch.distributed._fault_tolerant import FaultTolerantDataParallel
from farandole.torch.distributed._group_creation import create_backend
from farandole.torch.distributed._rendezvous import register_rendezvous

__all__ = ["FarandoleBackend", "FaultTolerantDataParallel", "as_gloo"]

if "FARANDOLE" not in dist.Backend._plugins:  # noqa: SLF001 - a second registration is an error there
    dist.Backend.register_backend(
        "farandole", create_backend, extended_api=True, devices=["cpu", "cuda"]
    )
    register_rendezvous()
