# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Elastic jobs on Ray: by both executors, and with a discovery of the script's own."""

import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod.ray import ElasticRayExecutor, RayExecutor
from horovod.ray.elastic import RayHostDiscovery

import ray

ROWS, BATCH, EPOCHS = 64, 8, 3
folder = Path(sys.argv[1])


class Discovery(RayHostDiscovery):
    """Leaves nodes out that were removed by hand."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.removed = {"192.0.2.99"}
        self.asked = 0

    def find_available_hosts_and_slots(self):
        hosts = super().find_available_hosts_and_slots()
        self.asked += 1
        return {host: slots for host, slots in hosts.items() if host not in self.removed}


def training_fn():
    hvd.init()
    torch.manual_seed(1)
    x = torch.rand(ROWS, 2)
    dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    sampler = hvd.elastic.ElasticSampler(dataset)
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, EPOCHS):
            for state.batch, (rows, labels) in enumerate(loader):
                if (
                    state.epoch == 1
                    and state.batch == 1
                    and hvd.rank() == 1
                    and not (folder / "lost").exists()
                ):
                    (folder / "lost").touch()
                    raise RuntimeError("as if this worker were broken")
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(rows), labels).backward()
                optimizer.step()
                sampler.record_batch(state.batch, BATCH)
            sampler.set_epoch(state.epoch + 1)
            state.commit()

    def on_state_reset():
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * hvd.size()

    state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0, sampler=sampler)
    state.register_reset_callbacks([on_state_reset])
    train(state)
    return model.weight.detach().tolist()


def check(results):
    assert len(results) == 2, results
    assert results[0] == results[1], results


ray.init(address="local", num_cpus=2, include_dashboard=False)

executor = RayExecutor(
    RayExecutor.create_settings(verbose=True), min_workers=2, max_workers=2, cpus_per_slot=1
)
executor.start()
check(executor.run(training_fn))
assert (folder / "lost").exists()
executor.shutdown()

settings = ElasticRayExecutor.create_settings(min_np=2, max_np=2, verbose=2)
executor = ElasticRayExecutor(settings, use_gpu=False, cpus_per_slot=1)
executor.start()
check(executor.run(training_fn))

settings = ElasticRayExecutor.create_settings(min_num_proc=2, verbose=True)
settings.discovery = Discovery(use_gpu=False, cpus_per_slot=1)
executor = ElasticRayExecutor(settings, cpus_per_slot=1, override_discovery=False)
executor.start()
check(executor.run(training_fn))
assert settings.discovery.asked > 1
ray.shutdown()
print("done")
