# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Lightning on Farandole's engine: once this is imported, `Trainer(strategy="farandole")` trains on
all ranks, and `Trainer(strategy="farandole_fsdp")` a model that is divided among them.

Processes are started by `farandole run`, a Spark job or another launcher; each uses one device.
Gradients, metrics with `sync_dist=True` and torchmetrics go through `torch.distributed` with the
backend `"farandole"`. The name `"horovod"`, which Lightning itself has removed, means the same.

Example:
    import lightning
    import farandole.lightning

    trainer = lightning.Trainer(strategy="farandole", accelerator="cpu", max_epochs=3)
    trainer.fit(module, loader)
"""

from importlib.util import find_spec

if find_spec("lightning") is None and find_spec("pytorch_lightning") is None:
    raise ImportError(
        "farandole.lightning needs Lightning: pip install farandole[lightning]", name="lightning"
    )

from farandole.lightning.strategy import (
    FarandoleEnvironment,
    FarandoleShardingStrategy,
    FarandoleStrategy,
    register,
)

__all__ = ["FarandoleEnvironment", "FarandoleShardingStrategy", "FarandoleStrategy", "register"]

register()
