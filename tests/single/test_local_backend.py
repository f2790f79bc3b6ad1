# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`LocalBackend` beyond what every backend promises: no Spark, this process's modules, a fair
share of the cores.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from farandole.runner.errors import FarandoleJobError
from farandole.spark.common.backend import LocalBackend

pytestmark = pytest.mark.timeout(60)


def test_it_runs_without_pyspark_in_sight(tmp_path):
    (tmp_path / "pyspark.py").write_text("raise ImportError('nobody may import this')")
    code = """
from farandole.spark.common.backend import LocalBackend
print(LocalBackend(2).run(lambda: "no JVM"))
"""
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['no JVM', 'no JVM']"


def test_workers_import_what_stands_beside_the_drivers_script(tmp_path):
    (tmp_path / "beside.py").write_text("def answer():\n    return 42\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import beside\nfrom farandole.spark.common.backend import LocalBackend\n"
        "print(LocalBackend(1).run(beside.answer))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[42]"


def test_lines_appear_on_the_drivers_own_streams(capsys):
    LocalBackend(1).run(lambda: print("seen"))
    assert "[0]<stdout>:seen\n" in capsys.readouterr().out


def test_cores_are_shared_out_unless_the_user_has_shared_them(monkeypatch):
    def threads():
        import os

        return os.environ["OMP_NUM_THREADS"]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert LocalBackend(1).run(threads) == [str(len(os.sched_getaffinity(0)))]
    assert LocalBackend(1, env={"OMP_NUM_THREADS": "3"}).run(threads) == ["3"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert LocalBackend(1).run(threads) == ["5"]


def test_a_gang_needs_a_process():
    with pytest.raises(ValueError, match="at least 1: 0"):
        LocalBackend(0)


def test_workers_die_with_a_killed_driver(tmp_path):
    code = f"""
from farandole.spark.common.backend import LocalBackend
def sleep():
    import os, time
    open(os.path.join({str(tmp_path)!r}, str(os.getpid())), "w").close()
    time.sleep(600)
LocalBackend(2).run(sleep)
"""
    driver = subprocess.Popen([sys.executable, "-c", code])
    try:
        _until(lambda: len(os.listdir(tmp_path)) == 2)
    finally:
        driver.kill()
        driver.wait()
    workers = [int(name) for name in os.listdir(tmp_path)]
    _until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers))


def test_an_error_survives_pickling():
    import pickle

    error = FarandoleJobError(
        "rank 1 on h failed", rank=1, host="h", stderr_tail="words", signal_name="SIGBUS"
    )
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.rank, again.host, again.signal_name) == (1, "h", "SIGBUS")


def _until(condition, limit=20.0):
    import time

    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_job_that_cannot_run_is_refused_before_the_start():
    with pytest.raises(TypeError, match="num_proc must be a whole number: '2'"):
        LocalBackend("2")
    with pytest.raises(TypeError, match="fn must be a function: 5"):
        LocalBackend(1).run(5)
    with pytest.raises(
        TypeError, match="env must hold strings, or None to remove a variable: 'X' is 3"
    ):
        LocalBackend(1, env={"X": 3}).run(lambda: 1)


def test_a_worker_joins_its_threads_and_runs_its_exit_functions(tmp_path):
    def leave_traces(folder):
        def late():
            time.sleep(0.2)
            (Path(folder) / "thread").write_text("joined")

        threading.Thread(target=late).start()
        atexit.register(lambda: (Path(folder) / "exit").write_text("ran"))

    LocalBackend(1).run(leave_traces, args=(str(tmp_path),))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "thread": "joined",
        "exit": "ran",
    }
