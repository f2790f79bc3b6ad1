# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TorchDistributor`: loaders of frames in the processes of pyspark's, and Farandole's own class of
this name, which has pyspark's arguments.
"""

from __future__ import annotations

import json
import os
import sys

import pytest
from pyspark import cloudpickle
from pyspark.ml.torch.distributor import TorchDistributor as PysparkDistributor
from tests.programs import program_path
from tests.spark.deployments import drive

from farandole.data import frame_loader
from farandole.spark import FarandoleJobError, TorchDistributor

pytestmark = [pytest.mark.timeout(300)]
# with Spark's own copy, as the distributor does
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = 101
TORCHRUN_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "CUDA_VISIBLE_DEVICES",
)
"""Variables whose values torchrun and this class agree on."""


def train(loader, folder):
    """Writes the rows that a rank sees in two epochs, and returns the size of the world."""
    import torch

    torch.distributed.init_process_group("gloo")
    loader.follow_world()
    epochs = [[row for batch in loader for row in batch["id"].tolist()] for _ in range(2)]
    (folder / f"{loader.rank}.json").write_text(json.dumps(epochs))
    size = torch.distributed.get_world_size()
    torch.distributed.destroy_process_group()
    return size


@pytest.mark.slow
def test_the_processes_of_a_torch_distributor_read_every_row_of_a_frame_once(spark, tmp_path):
    frame = spark.range(ROWS).selectExpr("id", "id / 4 as x").repartition(3)
    loader = frame_loader(frame, 10, ["id", "x"], cache=tmp_path / "cache", framework="torch")
    distributor = PysparkDistributor(num_processes=2, local_mode=True, use_gpu=False)
    assert distributor.run(train, loader, tmp_path) == 2
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for epoch in range(2):
        assert sorted(row for rank in ranks for row in rank[epoch]) == list(range(ROWS))
    assert all(len(rank[0]) >= ROWS // 2 for rank in ranks), "each has its share"
    assert ranks[0][0] != ranks[0][1], "each epoch has its own order"


def step(rate, *, folder=None):
    """One step of DDP. Returns the weight on rank 0, and writes the variables of every rank."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    (parallel(torch.tensor([[float(dist.get_rank() + 1)]])).sum()).backward()
    optimizer.step()
    if folder is not None:
        variables = {name: os.environ.get(name) for name in TORCHRUN_VARIABLES}
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(variables))
    weight = (dist.get_rank(), round(model.weight.item(), 6))
    dist.destroy_process_group()
    return weight


@pytest.mark.parametrize("local_mode", [True, False])
def test_a_function_gets_its_arguments_and_the_result_is_that_of_rank_0(spark, local_mode):
    distributor = TorchDistributor(num_processes=2, local_mode=local_mode, use_gpu=False)
    # The gradients are 1 and 2, so their mean is 1.5.
    assert distributor.run(step, 0.1) == (0, 0.85)


@pytest.mark.slow
@pytest.mark.parametrize("local_mode", [True, False])
def test_processes_have_the_variables_that_pyspark_and_torchrun_set(spark, tmp_path, local_mode):
    found = []
    for kind in (PysparkDistributor, TorchDistributor):
        folder = tmp_path / kind.__module__
        folder.mkdir()
        distributor = kind(num_processes=2, local_mode=local_mode, use_gpu=False)
        assert distributor.run(step, 0.1, folder=folder) == (0, 0.85)
        found.append([json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)])
    assert found[0] == found[1]


@pytest.mark.parametrize("local_mode", [True, False])
def test_a_script_gets_its_command_line(spark, tmp_path, capsys, local_mode):
    script = program_path(__file__, "distributed_script")
    distributor = TorchDistributor(num_processes=2, local_mode=local_mode, use_gpu=False)
    assert distributor.run(str(script), "--folder", tmp_path, 7) is None
    lines = capsys.readouterr().out.splitlines()
    for rank in range(2):
        record = json.loads((tmp_path / f"{rank}.json").read_text())
        assert record == {"name": "__main__", "number": 7, "size": 2, "beside": True}
        assert f"[{rank}]<stdout>:number 7" in lines


def test_a_script_takes_no_keyword_arguments():
    distributor = TorchDistributor(use_gpu=False)
    with pytest.raises(ValueError, match=r"train\.py is a script.*keyword arguments: epochs"):
        distributor.run("train.py", epochs=3)


def test_the_error_of_a_script_is_that_of_the_run(tmp_path):
    with pytest.raises(FarandoleJobError, match=r"missing\.py") as caught:
        TorchDistributor(use_gpu=False).run(str(tmp_path / "missing.py"))
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize(("number", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError)])
def test_the_number_of_processes_is_checked(number, error):
    with pytest.raises(error, match="num_processes"):
        TorchDistributor(number, use_gpu=False)


@pytest.fixture
def fake_gpus(tmp_path, monkeypatch):
    """A host with the GPUs 6 and 7, as far as `nvidia-smi` tells."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 6; echo 7\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def visible_device():
    return os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"]


def test_processes_on_the_driver_share_its_gpus(fake_gpus, monkeypatch, caplog):
    assert TorchDistributor().run(visible_device) == ("6", "0")
    distributor = TorchDistributor(num_processes=3)
    assert "num_processes=3 is reduced to the number of GPUs of the driver, 2" in caplog.text
    assert distributor.num_processes == 2
    assert distributor.run(visible_device) == ("6,7", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert TorchDistributor().run(visible_device) == ("7", "0")


@pytest.mark.parametrize("visible", [None, "", "-1", "NoDevFiles", "-1,0"])
def test_a_driver_without_gpus_says_how_to_train_on_cpus(monkeypatch, tmp_path, visible):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(RuntimeError, match=r"the driver has no GPU .*use_gpu=False"):
        TorchDistributor()


def test_tasks_without_a_gpu_are_refused(spark):
    with pytest.raises(RuntimeError, match=r"spark\.task\.resource\.gpu\.amount is 0: set it to 1"):
        TorchDistributor(num_processes=2, local_mode=False)


@pytest.mark.parametrize(
    ("mask", "address", "seen"),
    [(None, "3", "3"), ("2,3", "3", "3"), ("6,7", "1", "7"), ("5", "0", "5")],
)
def test_a_process_in_a_task_sees_only_the_gpu_that_spark_assigned(
    monkeypatch, mask, address, seen
):
    from farandole.spark import task, torch_distributor

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = dict(zip(names, ("1", "2", "1", "2", "127.0.0.1", "1"), strict=True))
    variables[task.RESOURCES_VARIABLE] = json.dumps({"gpu": [address]})
    if mask is not None:
        variables["CUDA_VISIBLE_DEVICES"] = mask
    monkeypatch.setattr(os, "environ", variables)
    assert torch_distributor._train_in_task(True, visible_device, (), {}) == (seen, "0")


@pytest.mark.slow
def test_each_task_of_a_cluster_trains_on_its_own_gpu(tmp_path, fake_gpus):
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -m farandole.spark.gpus\n")
    script.chmod(0o755)
    body = f"""
from farandole.spark import TorchDistributor
spark = session("local-cluster[1,2,1024]", executor_cores="2", **{{
    "task_resource_gpu_amount": "1", "executor_resource_gpu_amount": "2",
    "worker_resource_gpu_amount": "2", "worker_resource_gpu_discoveryScript": {str(script)!r}}})
def show():
    print("GPU", os.environ["CUDA_VISIBLE_DEVICES"], "of local rank", os.environ["LOCAL_RANK"])
TorchDistributor(num_processes=2, local_mode=False).run(show)
spark.stop()
"""
    done = drive(body, tmp_path, 150)
    shown = {line.partition(":")[2] for line in done.stdout.splitlines() if "<stdout>:" in line}
    assert shown == {"GPU 6 of local rank 0", "GPU 7 of local rank 0"}, done.stdout
