# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A Horovod task of Flyte. As a program, it writes the inputs and prints the task's command."""

import json
import os
import sys
from pathlib import Path

from flytekit import task
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.core.utils import write_proto_to_file
from flytekitplugins.kfmpi import HorovodJob, Launcher, Worker

CONFIG = HorovodJob(
    worker=Worker(replicas=1),
    launcher=Launcher(replicas=1),
    slots=2,
    verbose=True,
    discovery_script_path=os.environ["DISCOVERY_SCRIPT"],
)


@task(task_config=CONFIG)
def train(scale: float) -> float:
    import horovod.torch as hvd
    import torch

    hvd.init()
    total = hvd.allreduce(torch.tensor([scale * (hvd.rank() + 1)]), op=hvd.Sum).item()
    print(f"rank {hvd.rank()} of {hvd.size()}: {total:g}", flush=True)
    hvd.shutdown()
    return total


if __name__ == "__main__":
    inputs = TypeEngine.dict_to_literal_map(FlyteContextManager.current_context(), {"scale": 2.5})
    write_proto_to_file(inputs.to_flyte_idl(), str(Path(sys.argv[1]) / "inputs.pb"))
    settings = SerializationSettings(
        project="p", domain="d", version="v", image_config=ImageConfig.auto_default_image()
    )
    print(json.dumps(train.get_command(settings)))
