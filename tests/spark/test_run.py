# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`farandole.spark.run` on Spark: slots, sessions, environments, cancellation."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import threading

import pytest

import farandole.spark
from farandole.spark import FarandoleJobError, conf
from farandole.spark.common.backend import SparkBackend

pytestmark = pytest.mark.timeout(90, func_only=True)


def test_more_processes_than_slots_are_refused_with_both_numbers_before_anything_starts(
    spark, pids
):
    with pytest.raises(ValueError, match=r"num_proc=4 .* has 2 .*local\[2\]"):
        farandole.spark.run(pids.note, num_proc=4)
    assert pids.seen() == []


def test_the_default_number_of_processes_is_sparks_parallelism(spark):
    def size():
        import os

        return os.environ["WORLD_SIZE"]

    assert farandole.spark.run(size) == ["2", "2"]
    assert SparkBackend().num_processes() == 2


def test_without_a_session_horovods_words_are_raised():
    code = """
import farandole.spark
try:
    farandole.spark.run(print, num_proc=1)
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == (
        "Exception Could not find an active SparkContext, are you running in a PySpark session?"
    )


def test_run_keeps_the_drivers_environment_to_itself_and_a_backend_hands_it_on(spark, monkeypatch):
    monkeypatch.setenv("FARANDOLE_TEST_OF_DRIVER", "driver")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")

    def look():
        import os

        return os.environ.get("FARANDOLE_TEST_OF_DRIVER"), os.environ.get("CUDA_VISIBLE_DEVICES")

    assert farandole.spark.run(look, num_proc=1) == [(None, None)]
    assert SparkBackend(1).run(look) == [("driver", None)]
    assert SparkBackend(1, env={}).run(look) == [(None, None)]


def test_workers_import_what_the_task_imports_and_load_no_framework(spark):
    def modules():
        import sys

        import farandole

        heavy = {"torch", "pyspark", "pyarrow", "numpy", "pandas"}
        return farandole.__version__, sorted(heavy & set(sys.modules))

    assert farandole.spark.run(modules, num_proc=1) == [(farandole.__version__, [])]


def test_lines_carry_the_time_when_asked(spark):
    out = io.StringIO()
    farandole.spark.run(
        lambda: print("hello"), num_proc=1, stdout=out, prefix_output_with_timestamp=True
    )
    assert re.fullmatch(
        r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\[0\]<stdout>:hello\n", out.getvalue()
    )


def test_cancelling_the_users_jobs_takes_the_workers_along(spark, pids):
    note = pids.note

    def sleep():
        import time

        note()
        time.sleep(600)

    def cancel():
        pids.wait(2)
        spark.sparkContext.cancelAllJobs()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    with pytest.raises(FarandoleJobError, match="cancel"):
        farandole.spark.run(sleep, num_proc=2)
    canceller.join()
    assert pids.gone(2)
    assert farandole.spark.run(lambda: 1, num_proc=2) == [1, 1]


def test_a_notebook_cells_job_group_reaches_the_job(spark, pids):
    note = pids.note

    def sleep():
        import time

        note()
        time.sleep(600)

    def cancel():
        pids.wait(1)
        spark.sparkContext.cancelJobGroup("cell-7")

    canceller = threading.Thread(target=cancel)
    canceller.start()
    spark.sparkContext.setJobGroup("cell-7", "a cell")
    try:
        with pytest.raises(FarandoleJobError, match="cancel"):
            farandole.spark.run(sleep, num_proc=1)
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
    canceller.join()
    assert pids.gone(1, limit=5)


def test_a_lost_agent_makes_spark_start_the_gang_again_and_the_job_succeeds(spark, tmp_path, capfd):
    once = str(tmp_path / "once")

    def kill_the_agent_once():
        import os
        import signal
        import time

        if os.environ["RANK"] == "0":
            try:
                os.close(os.open(once, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return "second time"
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        return "any time"

    assert farandole.spark.run(kill_the_agent_once, num_proc=2) == ["second time", "any time"]
    assert "started again by Spark" in capfd.readouterr().err


def test_two_runs_side_by_side_do_not_meet(spark):
    results = {}

    def run_job(name):
        results[name] = farandole.spark.run(lambda: name, num_proc=1)

    threads = [threading.Thread(target=run_job, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"a": ["a"], "b": ["b"]}


def test_a_job_that_finds_no_free_slot_in_time_says_so(spark, pids):
    note = pids.note

    def hold():
        import time

        note()
        time.sleep(600)

    failures = []

    def holder():
        try:
            farandole.spark.run(hold, num_proc=2)
        except FarandoleJobError as error:
            failures.append(error)

    thread = threading.Thread(target=holder)
    thread.start()
    pids.wait(2)
    with pytest.raises(TimeoutError, match=r"Timed out waiting for Spark tasks to start.*0 of 2"):
        farandole.spark.run(lambda: 1, num_proc=2, start_timeout=1.0)
    assert not failures
    spark.sparkContext.cancelAllJobs()
    thread.join()
    assert pids.gone(2)


def test_no_devices_are_assigned_on_a_machine_without_them(spark):
    def devices():
        from farandole.spark.task import get_available_devices

        return get_available_devices()

    assert farandole.spark.run(devices, num_proc=1) == [[]]


def test_arguments_for_mpi_get_a_warning(spark):
    with pytest.warns(UserWarning, match="use_mpi"):
        farandole.spark.run(lambda: 1, num_proc=1, use_mpi=True)


def test_every_setting_is_known_by_its_old_name_and_its_new_one():
    assert conf.both(conf.SPARK_CONF_REUSE_FAILED_EXECUTOR) == [
        ("spark.blacklist.stage.maxFailedTasksPerExecutor", "2147483647"),
        ("spark.excludeOnFailure.stage.maxFailedTasksPerExecutor", "2147483647"),
    ]
    assert conf.both(conf.SPARK_CONF_ALWAYS_RESTART_FAILED_TASK) == [
        ("spark.task.maxFailures", "2147483647")
    ]
    named = [
        value
        for name, value in vars(conf).items()
        if name.startswith("SPARK_CONF_") and isinstance(value, tuple)
    ]
    assert len(named) == 17
    assert {key for pair in named for key, _ in conf.both(pair)} == set(
        conf.SPARK_CONF_DEFAULT_VALUES
    )
