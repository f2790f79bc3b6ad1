# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Runs functions in a Ray cluster by Ray Client."""

import socket
import subprocess
import sys
from pathlib import Path

import ray
from farandole.ray import ElasticRayExecutor, RayBackend, RayExecutor


def train():
    import numpy as np

    import farandole.numpy as hvd

    hvd.init()
    return hvd.rank(), hvd.allreduce(np.ones(1), op=hvd.Sum).item()


def log():
    import farandole.torch as hvd
    from farandole.ray import ray_logger

    hvd.init()
    if hvd.rank() == 0:
        ray_logger.log({"size": hvd.size()})
    return hvd.rank()


def free():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


ray_command = str(Path(sys.executable).with_name("ray"))
door = free()
# It ends with its process. `ray stop` would end every Ray of this machine, and drivers that use
# one with it.
head = subprocess.Popen(
    [
        ray_command,
        "start",
        "--head",
        "--num-cpus=4",
        "--include-dashboard=false",
        "--port",
        free(),
        "--ray-client-server-port",
        door,
        "--disable-usage-stats",
        "--block",
    ],
    stdout=subprocess.PIPE,
    text=True,
)
try:
    for line in head.stdout:
        if "Ray runtime started" in line:
            break
    import threading

    threading.Thread(target=head.stdout.read, daemon=True).start()
    ray.init("ray://127.0.0.1:" + door)
    made = RayExecutor(RayExecutor.create_settings(), num_workers=2)
    made.start()
    seen = []
    print(made.run(train), made.run(log, callbacks=[seen.append]), seen, flush=True)
    made.shutdown()
    made = RayExecutor(RayExecutor.create_settings(), min_workers=2, max_workers=2)
    made.start()
    seen = []
    print("elastic", made.run(log, callbacks=[seen.append]), seen, flush=True)
    made.shutdown()
    made = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=2))
    made.start()
    seen = []
    print("older", made.run(log, callbacks=[seen.append]), seen, flush=True)
    try:
        RayBackend(2).run(train)
    except RuntimeError as error:
        print("refused:", error, flush=True)
    del made
    ray.shutdown()
finally:
    head.terminate()
    head.wait(60)
