# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`DistributedOptimizer(fault_tolerant=True)` on Ray: a rank is killed in a step, and no step is
repeated.
"""

import os
import signal
import sys
from pathlib import Path

import cloudpickle
import pytest
import ray.train

import ray
from farandole.ray import RayExecutor, train

for pickler in (cloudpickle, ray.cloudpickle):
    # Workers import no test: what they run comes with its module.
    pickler.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ENOUGH = 3
"""Steps with the rank that joined, after which training ends."""
MOST = 900


class Together:
    """Counts the steps of two ranks since one was killed; a rank that joins gets the count from
    a peer.
    """

    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def loop(config):
    """Trains until a successor of the killed rank has taken part in some steps; tells each step
    and its process.
    """
    import time

    import torch

    import farandole.torch as hvd

    folder = Path(config["folder"])
    hvd.init()
    torch.manual_seed(os.getpid())
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), fault_tolerant=True
    )
    together = Together()
    optimizer.share(together=together)
    killed, first = folder / "killed", optimizer.steps
    while together.steps < ENOUGH and optimizer.steps < MOST:
        step, follows = optimizer.steps, killed.exists()
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        if step == first + 10 and hvd.rank() == 1 and not follows:
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        with (folder / f"{os.getpid()}.steps").open("a") as steps:
            steps.write(f"{step}\n")
        together.steps += hvd.size() == 2 and follows
        time.sleep(0.05)
    weights = [round(value, 6) for value in model.weight.detach().flatten().tolist()]
    (folder / f"{os.getpid()}.weights").write_text(f"{optimizer.steps} {weights}")
    return hvd.rank(), hvd.size()


def check(folder):
    """The survivor has done each step once, and ends as the successor does."""
    assert (folder / "killed").exists()
    done = {
        path.stem: [int(line) for line in path.read_text().split()]
        for path in folder.glob("*.steps")
    }
    assert len(done) == 3, "two ranks, and the one that joined"
    survivor = max(done.values(), key=len)
    assert survivor == [*range(len(survivor))]
    killed, joined = sorted(
        (steps for steps in done.values() if steps is not survivor), key=lambda steps: steps[0]
    )
    assert killed == survivor[killed[0] : killed[0] + 10]
    assert joined == survivor[joined[0] :]
    assert len(joined) >= ENOUGH
    (ends,) = {path.read_text() for path in folder.glob("*.weights")}
    assert ends.startswith(f"{len(survivor)} ")


def test_no_step_of_an_elastic_job_is_repeated(resources, tmp_path):
    made = RayExecutor(RayExecutor.create_settings(), min_workers=1, max_workers=2)
    made.start()
    assert made.run(loop, [{"folder": str(tmp_path)}]) == [(0, 2), (1, 2)]
    made.shutdown()
    check(tmp_path)


def test_no_step_of_a_loop_of_ray_train_is_repeated(resources, tmp_path):
    train.DataParallelTrainer(
        loop,
        train_loop_config={"folder": str(tmp_path)},
        backend_config=train.FarandoleConfig(elastic=True, min_workers=1),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(tmp_path / "results"),
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    ).fit()
    check(tmp_path)
