# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Runs functions on two nodes of a Ray cluster, and removes one in the middle."""

import threading

from ray.cluster_utils import Cluster

import ray
from farandole.ray import RayExecutor
from farandole.runner.errors import FarandoleJobError


def train():
    import numpy as np

    import farandole.numpy as hvd

    hvd.init()
    return hvd.rank(), hvd.allreduce(np.ones(1), op=hvd.Sum).item()


def wait():
    import time

    import numpy as np

    import farandole.numpy as hvd

    hvd.init()
    while True:
        hvd.allreduce(np.ones(1))
        time.sleep(0.05)


cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
other = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False)
made = RayExecutor(RayExecutor.create_settings(), num_hosts=2, num_workers_per_host=1)
made.start()
print(made.run(train), flush=True)

threading.Timer(2, cluster.remove_node, [other]).start()
try:
    made.run(wait)
except FarandoleJobError as error:
    print("died:", error, flush=True)
made.shutdown()
ray.shutdown()
cluster.shutdown()
