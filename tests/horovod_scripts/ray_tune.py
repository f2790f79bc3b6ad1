# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A search by Ray Tune whose trials are jobs that report with `tune.report`, and continue from a
checkpoint.
"""

import json
import sys
import tempfile
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod.ray.tune import DistributedTrainableCreator

import ray
from ray import tune


def training_function(config):
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    started = tune.get_checkpoint()
    first = json.loads(Path(started.to_directory(), "epoch.json").read_text()) + 1 if started else 0
    assert tune.get_context().get_trial_id()
    x = torch.rand(32, 2)[hvd.rank() :: hvd.size()]
    for epoch in range(first, first + config["epochs"]):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "epoch.json").write_text(json.dumps(epoch))
            told = {
                "loss": hvd.allreduce(loss.detach()),
                "rank": hvd.rank(),
                "size": hvd.size(),
                "first": first,
            }
            tune.report(told, checkpoint=tune.Checkpoint.from_directory(folder))


ray.init(address="local", num_cpus=2, include_dashboard=False)
trainable = DistributedTrainableCreator(
    training_function, num_slots=2, use_gpu=False, num_cpus_per_slot=1
)
analysis = tune.run(
    trainable,
    name="search",
    storage_path=sys.argv[1],
    metric="loss",
    mode="min",
    config={"epochs": 3, "lr": tune.grid_search([0.01, 0.3])},
    verbose=0,
)
assert analysis.best_config == {"epochs": 3, "lr": 0.3}, analysis.best_config
assert analysis.best_result["size"] == 2
assert analysis.best_result["rank"] == 0, "only the reports of rank 0 count"
assert analysis.best_result["training_iteration"] == 3, "each report is an iteration"
assert json.loads(Path(analysis.best_checkpoint.to_directory(), "epoch.json").read_text()) == 2
assert not list(Path(sys.argv[1]).glob("search/*/reported")), "copies are removed"

again = tune.run(
    trainable,
    name="again",
    storage_path=sys.argv[1],
    metric="loss",
    mode="min",
    restore=analysis.best_checkpoint.path,
    config={"epochs": 1, "lr": 0.3},
    verbose=0,
)
assert again.best_result["first"] == 3, "the trial continued from the checkpoint"
ray.shutdown()
print("done")
