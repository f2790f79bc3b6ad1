# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`sparkdl`: Databricks' HorovodRunner, on Spark's tasks and on processes of the driver."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from farandole.spark import FarandoleJobError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _convention(monkeypatch):
    """The runner imports `horovod`, whose choice of gradients would stay for later tests."""
    monkeypatch.setenv("FARANDOLE_GRADIENT_CONVENTION", "farandole")


@pytest.fixture
def runner():
    from sparkdl import HorovodRunner

    return HorovodRunner


def add_ranks(base, scale=1):
    """A training function as in a notebook: it imports what it needs."""
    import horovod
    import horovod.torch as hvd
    import torch
    from sparkdl.horovod import log_to_driver

    assert horovod.__version__ == "0.28.1"
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert not hvd.mpi_enabled()
    hvd.init()
    print(f"line of rank {hvd.rank()}")
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum).item()
    if hvd.rank() == 0:
        log_to_driver(f"the sum is {total:g}")
        return base + scale * total
    return "of another rank"


def test_ranks_on_spark_send_messages_but_their_lines_stay_in_the_logs(spark, runner, capsys):
    assert runner(np=2).run(add_ranks, base=10, scale=2) == 16.0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["the sum is 3"]
    assert "line of rank" not in shown.err


def test_all_lines_of_ranks_on_spark_appear_with_the_prefixes_of_mpirun(spark, runner, capsys):
    assert runner(np=2, driver_log_verbosity="all").run(add_ranks, base=0) == 3.0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [
        "[1,0]<stdout>:line of rank 0",
        "[1,1]<stdout>:line of rank 1",
        "the sum is 3",
    ]


def test_ranks_on_the_driver_show_their_lines_in_any_case(runner, capsys):
    assert runner(np=-3).run(add_ranks, base=1) == 7.0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines[:3] == [f"[1,{rank}]<stdout>:line of rank {rank}" for rank in range(3)]
    assert lines[3:] == ["the sum is 6"]


def test_np_0_takes_all_slots_and_is_deprecated(spark, runner):
    def size():
        return int(os.environ["WORLD_SIZE"])

    slots = spark.sparkContext.defaultParallelism
    with pytest.warns(DeprecationWarning, match=r"np=0 is deprecated.*Set np to the number"):
        assert runner(np=0).run(size) == slots == 2


def test_more_ranks_than_slots_are_refused_before_the_job_starts(spark, runner):
    with pytest.raises(ValueError, match=r"num_proc=3 needs 3 task slots.* has 2"):
        runner(np=3).run(add_ranks, base=0)


@pytest.mark.parametrize("np", [2, -2])
def test_an_error_of_a_rank_is_the_error_of_the_run(spark, runner, np):
    def fail():
        if os.environ["RANK"] == "1":
            raise FloatingPointError("loss is nan")

    with pytest.raises(FarandoleJobError, match="loss is nan") as caught:
        runner(np=np).run(fail)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, FloatingPointError)


@pytest.mark.parametrize("np", [1.5, "2", None, True])
def test_np_must_be_an_integer(runner, np):
    with pytest.raises(TypeError):
        runner(np=np)


def test_arguments_have_names_as_with_databricks_and_are_checked(runner):
    import numpy as np

    assert runner(np=np.int64(-2)).num_processor == -2
    with pytest.raises(TypeError):
        runner(2)
    with pytest.raises(ValueError, match=r"one of all, log_callback_only: 'some'"):
        runner(np=2, driver_log_verbosity="some")


def test_a_message_is_cut_after_4000_characters(runner, capsys):
    def send():
        from sparkdl.horovod import log_to_driver

        log_to_driver("x" * 4000)
        log_to_driver("y" * 4001)
        log_to_driver({"loss": 0.5})

    assert runner(np=-1).run(send) is None
    assert capsys.readouterr().out.splitlines() == [
        "x" * 4000,
        "y" * 3997 + "...",
        "{'loss': 0.5}",
    ]


def test_a_message_without_a_runner_goes_to_stdout(capsys):
    from sparkdl.horovod import log_to_driver

    log_to_driver("no driver")
    assert capsys.readouterr().out == "no driver\n"


def test_other_reports_of_a_rank_are_no_messages(runner, capsys):
    def send():
        from farandole.spark import task

        return task.report({"kind": "mine", "text": "not a message"})

    assert runner(np=-1).run(send) is True
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("per_batch_log", [False, True])
def test_the_log_callback_of_rank_0_shows_epochs_and_batches(runner, capsys, per_batch_log):
    def fit(per_batch_log):
        import horovod.keras as hvd
        import keras
        import numpy as np
        from sparkdl.horovod.tensorflow.keras import LogCallback

        hvd.init()
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        callbacks = [hvd.callbacks.MetricAverageCallback()]
        if hvd.rank() == 0:
            callbacks.append(LogCallback(per_batch_log))
        rows = np.ones((8, 2), "float32")
        model.fit(rows, rows[:, :1], 4, epochs=2, verbose=0, callbacks=callbacks)

    runner(np=-2).run(fit, per_batch_log=per_batch_log)
    texts = [line.split(" ", 2)[2] for line in capsys.readouterr().out.splitlines()]
    batches = [text for text in texts if text.startswith("Batch")]
    epochs = [text for text in texts if text.startswith("Epoch")]
    assert len(batches) == (4 if per_batch_log else 0)
    assert len(texts) == len(batches) + len(epochs)
    assert [text.split(" took ")[0] for text in epochs] == [
        "Epoch 1 begins",
        "Epoch 1",
        "Epoch 2 begins",
        "Epoch 2",
    ]
    assert epochs[1].rpartition(" s: ")[2].startswith("loss ")


def test_databricks_modules_load_neither_pyspark_nor_a_framework():
    program = (
        "import sys, sparkdl, sparkdl.horovod.runner_base as base\n"
        "assert base.HorovodRunner is sparkdl.HorovodRunner\n"
        "assert not {'torch', 'keras', 'tensorflow', 'pyspark'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
