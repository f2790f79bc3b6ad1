# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A job on Ray actors: functions on all of them, and an object that each of them keeps."""

import horovod.torch as hvd
import torch
from horovod.ray import RayExecutor

import ray


def ranks():
    hvd.init()
    return hvd.rank()


class Model:
    def __init__(self, learning_rate):
        hvd.init()
        torch.manual_seed(hvd.rank())
        self.model = torch.nn.Linear(4, 1)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=learning_rate)
        self.optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=self.model.named_parameters()
        )

    def get_weights(self):
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def train(self):
        self.optimizer.zero_grad()
        loss = self.model(torch.rand(8, 4)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()


ray.init(address="local", num_cpus=2, include_dashboard=False)
settings = RayExecutor.create_settings(timeout_s=60)

executor = RayExecutor(settings, num_hosts=1, num_slots=2, use_gpu=False, cpus_per_slot=1)
executor.start()
result = executor.run(ranks)
assert len(set(result)) == 2, result
assert ray.get(executor.run_remote(ranks)) == result
assert executor.run(lambda base, step: base + step * hvd.rank(), args=[10], kwargs={"step": 5}) == [
    10,
    15,
]
executor.shutdown()

executor = RayExecutor(settings, num_workers=2)
executor.start(executable_cls=Model, executable_kwargs={"learning_rate": 0.1})
before = executor.execute(lambda worker: worker.get_weights())
for _ in range(5):
    executor.execute(lambda worker: worker.train())
result = executor.execute(lambda worker: worker.get_weights())
assert all(isinstance(weights, dict) for weights in result)
assert all(torch.equal(result[0][name], result[1][name]) for name in result[0])
assert not torch.equal(before[0]["weight"], result[0]["weight"])
assert executor.execute_single(lambda worker: worker.get_weights().keys()) == result[0].keys()
executor.shutdown()
ray.shutdown()
print("done")
