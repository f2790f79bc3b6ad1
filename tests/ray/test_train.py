# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trainers of Ray Train V2 whose workers are ranks of one world."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import ray.data
import ray.train

import ray
from farandole.ray import train
from farandole.ray.elastic_train import WorkerRoster

# Workers import no test: what they run comes with its module.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEPS = 30
ROWS = [{"x": x / 32, "y": 2 * x / 32} for x in range(64)]


def loop(config):
    """A regression over a shard of a data set; checkpoints each epoch, and continues from the
    last one.
    """
    import tempfile

    import torch

    import farandole.torch as hvd

    hvd.init()
    context = ray.train.get_context()
    assert (hvd.rank(), hvd.size()) == (context.get_world_rank(), context.get_world_size())
    Path(config["folder"], f"{os.getpid()}").touch()
    torch.manual_seed(1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            told = torch.load(Path(folder, "model.pt"))
        model.load_state_dict(told["model"])
        first = told["epoch"] + 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    shard = ray.train.get_dataset_shard("train")
    for epoch in range(first, 3):
        if epoch == 2 and config.get("fails") and checkpoint is None and hvd.rank() == 1:
            raise RuntimeError("of rank 1")
        rows = 0
        for batch in shard.iter_torch_batches(batch_size=8, dtypes=torch.float):
            rows += len(batch["x"])
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch["x"][:, None])[:, 0], batch["y"])
            loss.backward()
            optimizer.step()
        total = hvd.allreduce(torch.tensor(float(rows)), op=hvd.Sum).item()
        with tempfile.TemporaryDirectory() as folder:
            if hvd.rank() == 0:
                torch.save({"model": model.state_dict(), "epoch": epoch}, Path(folder, "model.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            told = {
                "loss": loss.item(),
                "rows": total,
                "first": first,
                "weight": model.weight.item(),
            }
            ray.train.report(told, checkpoint=checkpoint if hvd.rank() == 0 else None)


def trainer(tmp_path, *, failures=0, **config):
    folder = tmp_path / "pids"
    folder.mkdir(exist_ok=True)
    return train.HorovodTrainer(
        loop,
        train_loop_config={"folder": str(folder), **config},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(tmp_path / "results"),
            failure_config=ray.train.FailureConfig(max_failures=failures),
        ),
        datasets={
            "train": ray.data.from_items(
                [{"x": x / 32, "y": 2 * x / 32} for x in range(64)], override_num_blocks=2
            )
        },
    )


@pytest.mark.slow
def test_horovods_trainer_trains_on_shards_reports_and_keeps_a_checkpoint(resources, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    result = trainer(tmp_path).fit()
    assert signal.getsignal(signal.SIGINT) is before
    assert result.metrics["rows"] == 64
    losses = list(result.metrics_dataframe["loss"])
    assert losses[-1] < losses[0] / 2
    with result.checkpoint.as_directory() as folder:
        assert Path(folder, "model.pt").exists()


@pytest.mark.slow
def test_a_worker_that_fails_has_ray_start_all_again_from_the_last_checkpoint(resources, tmp_path):
    result = trainer(tmp_path, failures=1, fails=True).fit()
    assert result.metrics["first"] == 2
    assert len(list((tmp_path / "pids").iterdir())) == 4, "two workers, twice"


@pytest.mark.slow
def test_a_stream_loader_makes_batches_of_each_ranks_shard(resources, tmp_path):
    def loop():
        import torch

        import farandole.torch as hvd
        from farandole.data import StreamLoader

        hvd.init()
        shard = ray.train.get_dataset_shard("train")
        loader = StreamLoader(shard, 8, ["x", "v"], shuffle_rows=16, framework="torch")
        for _ in range(2):
            batches = list(loader)
            assert {tuple(batch["v"].shape) for batch in batches} == {(8, 2)}
            assert all(sorted(batch) == ["v", "x"] for batch in batches)
            assert all(
                torch.equal(batch["v"], torch.stack([batch["x"], -batch["x"]], 1))
                for batch in batches
            )
            rows = hvd.allgather(torch.cat([batch["x"] for batch in batches]))
            assert sorted(rows.tolist()) == [*range(64)]
            assert len(batches) == 4
        with pytest.raises(ValueError, match="one rank's already"):
            StreamLoader(shard, 8, rank=hvd.rank(), size=hvd.size())
        loader.load_state_dict({**loader.state_dict(), "row": 16})
        with pytest.raises(ValueError, match="cannot be resumed"):
            next(iter(loader))
        (tmp_path / f"passed.{hvd.rank()}").touch()

    rows = [
        {"x": float(x), "v": np.array([x, -x], dtype=float), "other": "text"} for x in range(64)
    ]
    train.HorovodTrainer(
        loop,
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=str(tmp_path)),
        datasets={"train": ray.data.from_items(rows, override_num_blocks=4)},
    ).fit()
    assert sorted(path.name for path in tmp_path.glob("passed.*")) == ["passed.0", "passed.1"]


@pytest.mark.slow
def test_torchs_trainer_trains_in_our_world_with_rays_loaders(resources, tmp_path):
    from ray.train.torch import TorchTrainer

    def loop():
        import torch
        from ray.train.torch import prepare_data_loader, prepare_model

        import farandole.torch as hvd
        import farandole.torch.distributed  # noqa: F401 - registers the backend

        hvd.init()
        x = torch.linspace(0, 1, 64)[:, None]
        rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), 8)
        model = prepare_model(torch.nn.Linear(1, 1), parallel_strategy=None)
        for prepare, given in ((prepare_model, model), (prepare_data_loader, rows)):
            with pytest.raises(ValueError, match="process group"):
                prepare(given)
        torch.distributed.init_process_group("farandole", init_method="farandole://")
        parallel = prepare_model(torch.nn.Linear(1, 1, bias=False))
        parallel(torch.full((1, 1), 1.0 + hvd.rank())).sum().backward()
        assert parallel.module.weight.grad.item() == 1.5, "the average of both ranks"
        loader = prepare_data_loader(rows)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        seen = 0
        for epoch in range(20):
            loader.sampler.set_epoch(epoch)
            for features, labels in loader:
                seen += len(features)
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(features), labels).backward()
                optimizer.step()
        found = hvd.allgather(model.weight.detach()).flatten()
        if hvd.rank() == 0:
            (tmp_path / "told").write_text(
                f"{hvd.size()} {seen} {len(set(found.tolist()))} {found[0].item()}"
            )

    TorchTrainer(
        loop,
        torch_config=train.FarandoleConfig(),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=str(tmp_path)),
    ).fit()
    size, seen, weights, weight = (tmp_path / "told").read_text().split()
    assert (size, seen, weights) == ("2", str(20 * 32), "1")
    assert abs(float(weight) - 2) < 0.5


def elastic_loop(config):
    """Steps whose state is committed; prints the rank, the step and the process."""
    import time

    import torch

    import farandole.torch as hvd

    hvd.init()
    state = hvd.elastic.TorchState(weight=torch.zeros(1), step=0)

    @hvd.elastic.run
    def steps(state):
        while state.step < STEPS:
            Path(
                config["folder"],
                f"{state.step:03}.{hvd.rank()}.{hvd.size()}.{os.getpid()}.{time.time_ns()}",
            ).touch()
            state.weight = state.weight + hvd.allreduce(torch.ones(1), name="one", op=hvd.Average)
            state.step += 1
            time.sleep(0.05)
            state.commit()
            if state.step % 10 == 0:
                ray.train.report({"step": state.step, "weight": state.weight.item()})

    steps(state)
    if hvd.rank() == 0:
        Path(config["folder"]).with_name("weight").write_text(
            f"{state.step} {state.weight.item():g}"
        )


@pytest.mark.parametrize("how", ["killed", pytest.param("raises", marks=pytest.mark.slow)])
def test_only_the_worker_that_failed_is_replaced_and_the_others_lose_a_step(
    resources, tmp_path, how
):
    folder, failed = tmp_path / "steps", tmp_path / "failed"
    folder.mkdir()

    def failing(config):
        import threading
        import time

        def watch():
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and not any(folder.glob("012.1.*")):
                time.sleep(0.01)
            failed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

        first = not failed.exists()
        if how == "killed" and first and ray.train.get_context().get_world_rank() == 1:
            threading.Thread(target=watch, daemon=True).start()
        if how == "raises" and first and ray.train.get_context().get_world_rank() == 1:
            import farandole.torch as hvd

            hvd.init()
            failed.touch()
            raise KeyError("of one worker")
        elastic_loop(config)

    train.DataParallelTrainer(
        failing,
        train_loop_config={"folder": str(folder)},
        backend_config=train.FarandoleConfig(elastic=True),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(tmp_path / "results"),
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    ).fit()
    assert (tmp_path / "weight").read_text() == f"{STEPS} {STEPS}"
    done = [one.name.split(".") for one in folder.iterdir()]
    workers = {
        pid: [step for step, _, _, one, _ in done if one == pid] for pid in {one[3] for one in done}
    }
    assert len(workers) == (3 if how == "killed" else 2), (
        "the survivor stays, and one worker comes for the other"
    )
    survivor = max(workers.values(), key=len)
    assert {int(step) for step in survivor} == set(range(STEPS))
    assert len(survivor) - STEPS <= 1, "the steps that it did twice"


def test_a_worker_leaves_a_draining_node_only_while_enough_others_train():
    roll = WorkerRoster(2)
    for task in range(3):
        roll.add_worker(task, rank=task)
    roll.mark_in_world({0, 1, 2})
    roll.mark_leaving(0, "drained")
    roll.mark_leaving(1, "drained, too")
    assert roll.choose_dismissals() == [(0, "drained")]
    assert [task for task in range(3) if roll.must_stay(task)] == [1]
    assert roll.choose_dismissals() == []
    roll.remove_worker(0)
    assert roll.is_report_blocked(), "no worker has rank 0"
    roll.add_worker(3, rank=0)
    roll.mark_in_world({1, 2, 3})
    assert not roll.is_report_blocked()
    assert roll.choose_dismissals() == [(1, "drained, too")]
    assert not roll.must_stay(1)
    roll.add_worker(4, rank=1)
    roll.mark_in_world({2, 3, 4})
    roll.remove_worker(1)
    assert not roll.is_report_blocked(), "its successor was there before it was gone"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_workers": 1}, "elastic=True"),
        ({"elastic": True, "min_workers": 0}, "at least 1: 0"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        train.FarandoleConfig(**arguments)
