# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""One program on every Spark that fits on one machine: executors of their own, a standalone
cluster, Connect.
"""

from __future__ import annotations

import pytest
from tests.spark.deployments import KILLS, PATIENCE, connect_server, drive, driver, standalone

pytestmark = pytest.mark.timeout(280 * PATIENCE)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The URL of a Spark Connect server with two slots."""
    with connect_server(tmp_path_factory.mktemp("connect")) as url:
        yield url


PROGRAM = """
def work(offset):
    import os
    import numpy as np
    import farandole.numpy as hvd
    hvd.init()
    total = hvd.allreduce(np.full(4, hvd.rank() + offset, dtype=np.float32), op=hvd.Sum)
    return hvd.rank(), hvd.size(), hvd.local_size(), os.getppid(), total.tolist()

ran = os.getcwd()

def fail():
    import os, tempfile
    os.close(tempfile.mkstemp(prefix="ran-", dir=ran)[0])
    if os.environ["RANK"] == "1":
        raise KeyError("no such layer")

def check(local_size, executors):
    results = farandole.spark.run(work, args=(1,), num_proc=2)
    assert [result[:3] for result in results] == [(0, 2, local_size), (1, 2, local_size)], results
    assert [result[4] for result in results] == [[3.0] * 4] * 2, results
    assert len({result[3] for result in results}) == 2, results
    try:
        farandole.spark.run(fail, num_proc=2)
        raise AssertionError("nothing was raised")
    except farandole.spark.FarandoleJobError as error:
        assert error.rank == 1 and isinstance(error.__cause__, KeyError), error
        assert "no such layer" in error.remote_traceback, error
    # Nothing is run again for it: rank 0 once, unless it was ended before it came to that, and rank 1 once.
    assert len([name for name in os.listdir(ran) if name.startswith("ran-")]) in (1,
        2), os.listdir(ran)
    print("all well")
"""  # noqa: E501

FIT = """
def fit(spark, folder):
    import torch
    from farandole.spark.common import LocalStore
    from farandole.spark.torch import TorchEstimator
    rows = [(float(i % 7), float(i % 7) * 2 + 1) for i in range(400)]
    frame = spark.createDataFrame(rows, ["x", "y"])
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    estimator = TorchEstimator(num_proc=2, model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=torch.nn.MSELoss(), feature_cols=["x"], label_cols=["y"], batch_size=20, epochs=30,
        random_seed=1,
        input_shapes=[[-1, 1]], verbose=0, store=LocalStore(folder))
    found = estimator.fit(frame).transform(frame).first()
    assert abs(found["y__output"] - found["y"]) < 0.5, found
    print("fitted")
"""


def test_a_spark_connect_client_runs_functions_and_fits_models_and_gets_an_error_for_missing_slots(
    server, tmp_path
):
    body = """
spark = SparkSession.builder.remote(os.environ["SERVER"]).getOrCreate()
assert type(spark).__module__.startswith("pyspark.sql.connect")
check(2, 2)
fit(spark, os.getcwd() + "/store")
try:
    farandole.spark.run(work, args=(1,), num_proc=3, start_timeout=3)
except Exception as error:
    print(type(error).__name__, error)
"""
    done = drive(PROGRAM + FIT + body, tmp_path, 150, SERVER=server)
    assert "all well" in done.stdout
    assert "fitted" in done.stdout
    assert "TimeoutError" in done.stdout
    assert "needs 3 task slots at once" in done.stdout


def test_interrupting_the_connect_session_takes_the_workers_along(server, tmp_path, pids):
    body = f"""
import threading
folder = {pids.folder!r}
def sleep():
    import os, time
    os.close(os.open(os.path.join(folder, str(os.getpid())), os.O_CREAT))
    time.sleep(600)
def cancel():
    import time
    while len(os.listdir(folder)) < 2:
        time.sleep(0.05)
    spark.interruptAll()
spark = SparkSession.builder.remote(os.environ["SERVER"]).getOrCreate()
threading.Thread(target=cancel).start()
try:
    farandole.spark.run(sleep, num_proc=2)
except farandole.spark.FarandoleJobError as error:
    print("told:", error.reason)
"""
    with driver(body, tmp_path, SERVER=server) as process:
        pids.wait(2, 90 * PATIENCE, process)
        # it takes a moment until somebody interrupts, then at most five
        gone = pids.gone(2, limit=8)
        out, err = process.communicate(timeout=30 * PATIENCE)
    assert gone
    assert "told:" in out, err[-3000:]
    assert "cancel" in out.lower() or "interrupt" in out.lower(), out


def test_a_gang_whose_connect_client_cannot_be_dialled_meets_among_itself_and_reports_by_the_store(
    server, tmp_path
):
    body = """
import io, time
spark = SparkSession.builder.remote(os.environ["SERVER"]).getOrCreate()
folder = os.getcwd()

def train(offset):
    import os, time
    from farandole.spark.task import report
    print("hello from", os.environ["RANK"])
    report({"step": 1})
    # The driver receives it while this still works.
    deadline = time.monotonic() + 30
    while not os.path.exists(folder + "/report_noted"):
        assert time.monotonic() < deadline, "the driver hears nothing"
        time.sleep(0.05)
    return work(offset)[:3]

def note_report(rank, record):
    assert record == {"step": 1}
    open(folder + "/report_noted", "w").close()

out = io.StringIO()
options = dict(num_proc=2, store=folder + "/store", stdout=out, start_timeout=20)
print("met", farandole.spark.run(train, (1,), on_progress=note_report, **options))
assert sorted(out.getvalue().splitlines()) == [f"[{rank}]<stdout>:hello from {rank}" for rank in range(2)]
print("alone", farandole.spark.run(lambda: 7, num_proc=2, start_timeout=20))
try:
    farandole.spark.run(fail, num_proc=2)
except farandole.spark.FarandoleJobError as error:
    print("raised", type(error.__cause__).__name__, error.rank)
print("left", [name for _, _, names in os.walk(folder + "/store") for name in names])
"""  # noqa: E501
    done = drive(PROGRAM + body, tmp_path, 150, SERVER=server, FARANDOLE_DRIVER_HOST="192.0.2.1")
    assert "met [(0, 2, 2), (1, 2, 2)]" in done.stdout, done.stderr[-3000:]
    assert "alone [7, 7]" in done.stdout
    assert "raised KeyError 1" in done.stdout
    assert "left []" in done.stdout


@pytest.mark.slow
def test_data_too_large_for_a_message_of_connect_is_uploaded_before(server, tmp_path):
    body = """
import torch
from farandole.spark.job import connect_artifacts
from farandole.spark.torch import TorchModel
spark = SparkSession.builder.remote(os.environ["SERVER"]).getOrCreate()
ballast = os.urandom(140 << 20)
def length():
    return len(ballast)
print("carried", farandole.spark.run(length, num_proc=2))
model = torch.nn.Sequential(torch.nn.Embedding(9_000_000, 4), torch.nn.Flatten())
with torch.no_grad():
    model[0].weight[7] = torch.arange(4.0)
frame = spark.range(7, 8).selectExpr("id as x")
made = TorchModel(model=model, feature_columns=["x"], input_dtypes=["int64"], label_columns=["y"])
for _ in range(2):
    print("predicted", made.transform(frame).first()["y__output"])
print("sent", len(connect_artifacts._SENT_FILES_BY_SESSION[spark]))
"""
    done = drive(body, tmp_path, 200, SERVER=server)
    assert f"carried [{140 << 20}, {140 << 20}]" in done.stdout, done.stderr[-3000:]
    assert done.stdout.count("predicted [0.0,1.0,2.0,3.0]") == 2, done.stdout + done.stderr[-3000:]
    assert "sent 2" in done.stdout


@pytest.mark.newest
@pytest.mark.slow
def test_executors_of_a_local_cluster_hold_one_rank_each(tmp_path):
    body = """
spark = session("local-cluster[2,1,1024]")
check(2, 2)
fit(spark, os.getcwd() + "/store")
try:
    farandole.spark.run(work, args=(1,), num_proc=3, start_timeout=2)
except Exception as error:
    print(type(error).__name__, error)
spark.stop()
"""
    done = drive(PROGRAM + FIT + body, tmp_path, 200)
    assert "all well" in done.stdout
    assert "fitted" in done.stdout
    assert "3 task slots at once, Spark has 2" in done.stdout


@pytest.mark.newest
@pytest.mark.slow
def test_a_spare_slot_takes_over_for_a_lost_executor_after_the_time_to_start_has_passed(tmp_path):
    body = """
def trains(folder):
    import os, pathlib, time
    from farandole.runner.warm_workers import executor_pid
    mine, deadline = executor_pid(), time.monotonic() + 60
    pathlib.Path(folder, f"rank-{mine}").touch()
    # The one whose executor_pid is lost never returns: it could be faster than its end.
    while not (lost := list(pathlib.Path(folder).glob("lost-*"))) or lost[0].name == f"lost-{mine}":
        assert time.monotonic() < deadline, "no executor_pid was lost"
        time.sleep(0.05)
    return mine

def ranks(folder):
    return {int(entry.name.partition("-")[2]) for entry in folder.glob("rank-*")}

def lose(folder, seconds):
    deadline = time.monotonic() + 60
    while len(ranks(folder)) < 2:
        assert time.monotonic() < deadline, "no two ranks"
        time.sleep(0.05)
    time.sleep(seconds)  # the job grows older than it may take to start
    victim = min(ranks(folder))
    (folder / f"lost-{victim}").touch()
    os.kill(victim, signal.SIGKILL)

spark = session("local-cluster[3,1,1024]", executor_cores="1")
until_executors(3, 60)
farandole.spark.run(work, args=(1,), num_proc=3)
folder, limit = pathlib.Path("ranks").absolute(), 8
folder.mkdir()
saboteur = threading.Thread(target=lose, args=(folder, limit + 2), daemon=True)
saboteur.start()
owners = farandole.spark.run(trains, args=(str(folder),), num_proc=2, start_timeout=limit)
saboteur.join()
print("on the dead", set(owners) - set(executors()), "on", len(set(owners)))
spark.stop()
"""
    done = drive(KILLS + PROGRAM + body, tmp_path, 150)
    assert "on the dead set() on 2" in done.stdout, done.stdout + done.stderr[-3000:]


@pytest.fixture(scope="module")
def on_standalone(tmp_path_factory):
    """The output of a driver whose jobs ran on a standalone master with two workers of two
    cores.
    """
    body = """
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests
spark = session(os.environ["MASTER_URL"], executor_cores="2", task_cpus="1")
check(2, 2)
fit(spark, os.getcwd() + "/store")
profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build
try:
    # Two executors of two cores hold two tasks of two cores, and not a third.
    size = lambda: __import__("os").environ["WORLD_SIZE"]
    def elastic_size():
        import farandole.numpy as hvd
        hvd.init()
        return hvd.size()
    print("sizes", farandole.spark.run(size, num_proc=2, resource_profile=profile))
    print("elastic",
        farandole.spark.run_elastic(elastic_size, num_proc=2, resource_profile=profile))
    farandole.spark.run(work, args=(1,), num_proc=3, start_timeout=3, resource_profile=profile)
except Exception as error:
    print(type(error).__name__, error)
spark.stop()
"""
    directory = tmp_path_factory.mktemp("standalone")
    with standalone(directory, {}, {}, cores=2) as url:
        return drive(PROGRAM + FIT + body, directory, 200, MASTER_URL=url)


@pytest.mark.slow
def test_a_standalone_cluster_started_from_the_pip_package_runs_and_fits(on_standalone):
    assert "all well" in on_standalone.stdout
    assert "fitted" in on_standalone.stdout


@pytest.mark.slow
def test_stage_level_scheduling_gives_tasks_what_the_profile_asks_for(on_standalone):
    assert "sizes ['2', '2']" in on_standalone.stdout, on_standalone.stderr[-3000:]
    assert "elastic [2, 2]" in on_standalone.stdout, on_standalone.stderr[-3000:]
    assert "TimeoutError" in on_standalone.stdout
