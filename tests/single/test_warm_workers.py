# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Workers from a fork server: fast, the same as others, and gone when they should be."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.programs import program_path

from farandole.runner import warm_workers
from farandole.runner.errors import FarandoleJobError
from farandole.spark.common.backend import LocalBackend

pytestmark = pytest.mark.timeout(120)
assert torch is not None


def children_of_nobody(name: str) -> list[int]:
    """Processes of this user with this word in their command."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                told = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if name.encode() in told:
                found.append(int(entry.name))
    return found


def servers() -> set[int]:
    """The fork servers of this process."""
    return {
        pid
        for pid in children_of_nobody("farandole.runner.forkserver")
        if f"\0{os.getpid()}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


def until(condition, limit=20.0):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def end_servers():
    for pid in servers():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    until(lambda: not servers())


@pytest.fixture(scope="module", autouse=True)
def _own_folder(tmp_path_factory):
    """Servers of this module alone, and none of them left."""
    end_servers()  # those of other modules
    tmp_path_factory.getbasetemp()  # made before the folder is another, which goes with this module
    patch = pytest.MonkeyPatch()
    patch.setattr("tempfile.tempdir", None)
    patch.setenv("TMPDIR", f"/tmp/w{os.getpid()}")
    os.makedirs(f"/tmp/w{os.getpid()}", exist_ok=True)
    yield
    end_servers()
    patch.undo()
    subprocess.run(["rm", "-rf", f"/tmp/w{os.getpid()}"], check=True)


def begun():
    """Returns the time at which this process became a worker, whether it had imported torch, and
    its id.
    """
    import sys
    import time

    return time.time(), "torch" in sys.modules, os.getpid()


@pytest.mark.timing
def test_workers_come_with_torch_in_milliseconds_and_one_server_serves_them_all():
    backend = LocalBackend(2, verbose=0)
    backend.run(begun)
    assert len(servers()) == 1
    times = []
    for _ in range(4):
        started = time.time()
        found = backend.run(begun)
        times.append(max(at for at, _, _ in found) - started)
        assert all(had_torch for _, had_torch, _ in found)
    assert len(servers()) == 1

    def imports():
        import time

        import torch

        return time.time(), torch.__version__

    started = time.time()
    cold = max(at for at, _ in LocalBackend(2, verbose=0, warm=False).run(imports)) - started
    assert min(times) < cold / 3, (times, cold)


FIRST_STEP = program_path(__file__, "take_first_step")


def test_the_first_optimizer_of_a_warm_worker_does_not_import_the_compiler():
    # A process of its own: workers have what their driver has imported, and other tests import the
    # compiler.
    done = subprocess.run(
        [sys.executable, FIRST_STEP], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[False]\n"), done.stderr


@pytest.mark.timing
def test_a_workers_whole_life_takes_a_tenth_of_a_second_or_the_time_of_a_few_interpreters(tmp_path):
    LocalBackend(1, verbose=0).run(begun)
    cold = [sys.executable, "-m", "farandole.runner.worker"]
    env = {"FARANDOLE_PAYLOAD_FD": None, "FARANDOLE_RESULT_FD": None}
    changes = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    }
    from farandole.runner.agent import worker_environment_changes

    # What a server imports depends on what this process has imported, by other tests for one.
    wanted = warm_workers.resolve_warm_worker_settings(True, by_default=True)
    command = warm_workers.warm_worker_command(
        wanted, cold, worker_environment_changes({**changes, **env}, {}), os.getpid()
    )
    assert command[3].endswith("warm_worker_proxy.py")
    times, floors = [], []
    for _ in range(7):
        started = time.monotonic()
        subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True)
        floors.append(time.monotonic() - started)
        started = time.monotonic()
        # Without a payload it says so and ends: the whole life of a worker that has nothing to do.
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        times.append(time.monotonic() - started)
        assert (done.returncode, "is started by an agent" in done.stderr) == (2, True), done.stderr
    assert len(servers()) == 1
    # On a machine that does other things, too, an interpreter that starts and ends has no better
    # luck.
    assert min(times) < max(0.1, 15 * min(floors)), (times, floors)


def test_a_warm_worker_is_as_any_other(tmp_path):
    def look():
        import os
        import random
        import sys

        import numpy as np
        import torch

        print("out of", os.environ["RANK"])
        return {
            "main": sys.modules["__main__"].__name__,
            "threads": torch.get_num_threads(),
            "variable": os.environ.get("FARANDOLE_TEST_WARM"),
            "gone": os.environ.get("FARANDOLE_TEST_GONE"),
            "directory": os.getcwd(),
            "session": os.getsid(0) == os.getpid(),
            "random": (random.random(), np.random.rand(), torch.initial_seed()),  # noqa: NPY002 - the state that a fork would share
            "stdin": sys.stdin.read(),
        }

    import io

    os.environ["FARANDOLE_TEST_GONE"] = "here"
    try:
        env = {"FARANDOLE_TEST_WARM": "yes", "FARANDOLE_TEST_GONE": None, "OMP_NUM_THREADS": "2"}
        out = io.StringIO()
        made = LocalBackend(2, env=env, verbose=0, warm=True, stdout=out).run(look)
        plain = LocalBackend(2, env=env, verbose=0, warm=False, stdout=io.StringIO()).run(look)
    finally:
        del os.environ["FARANDOLE_TEST_GONE"]
    for mine, theirs in zip(made[0].pop("random"), made[1].pop("random"), strict=True):
        assert mine != theirs
    for one in plain:
        del one["random"]
        del one["main"]
    for one in made:
        assert one.pop("main") == "farandole.runner.worker"
    assert made == plain
    assert sorted(out.getvalue().splitlines()) == ["[0]<stdout>:out of 0", "[1]<stdout>:out of 1"]


def test_how_a_warm_worker_ends_is_how_its_job_ends():
    def leave(how):
        import os
        import signal
        import sys

        if os.environ["RANK"] == "1":
            if how == "exception":
                raise KeyError("no such layer")
            if how == "code":
                sys.exit(7)
            os.kill(os.getpid(), signal.SIGSEGV)

    backend = LocalBackend(2, verbose=0, warm=True)
    with pytest.raises(FarandoleJobError, match="no such layer") as caught:
        backend.run(leave, args=("exception",))
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(FarandoleJobError) as caught:
        backend.run(leave, args=("code",))
    assert (caught.value.rank, caught.value.exit_code) == (1, 7)
    with pytest.raises(FarandoleJobError) as caught:
        backend.run(leave, args=("signal",))
    assert (caught.value.rank, caught.value.signal_name) == (1, "SIGSEGV")


def sleeper(folder):
    """Notes itself and a child of its own, and stays."""
    import os
    import subprocess
    import time

    child = subprocess.Popen(["sleep", "600"])
    for pid in (child.pid, os.getpid()):
        open(os.path.join(folder, str(pid)), "w").close()
    time.sleep(600)


def alive(pid) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("victim", ["driver", pytest.param("server", marks=pytest.mark.slow)])
def test_warm_workers_and_their_children_die_with_their_driver_and_with_their_server(
    victim, tmp_path
):
    code = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
import cloudpickle
from farandole.spark.common.backend import LocalBackend
import test_warm_workers
cloudpickle.register_pickle_by_value(test_warm_workers)
LocalBackend(2, verbose=0).run(test_warm_workers.sleeper, args=({str(tmp_path)!r},))
"""
    driver = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: len(os.listdir(tmp_path)) == 4, limit=60)
        own = f"\0{driver.pid}\0".encode()
        found = [
            pid for pid in children_of_nobody("farandole.runner.forkserver") if own in _command(pid)
        ]
        # The server and, as its forks, the workers.
        workers = [int(name) for name in os.listdir(tmp_path)]
        server = next(pid for pid in found if pid not in workers)
        if victim == "driver":
            driver.kill()
        else:
            os.kill(server, signal.SIGKILL)
            driver.wait(timeout=30)
        until(lambda: not any(alive(pid) for pid in workers), limit=5)
        until(lambda: not alive(server), limit=5)
    finally:
        driver.kill()
        _, err = driver.communicate()
    if victim == "server":
        assert "SIGKILL" in err


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_a_server_without_work_leaves(monkeypatch):
    monkeypatch.setenv("FARANDOLE_WARM_IDLE_SECONDS", "0.5")
    before = servers()
    LocalBackend(1, verbose=0, env={"MALLOC_TOP_PAD_": "65536"}).run(begun)
    fresh = servers() - before
    until(lambda: not (servers() & fresh), limit=15)


def test_files_of_killed_servers_are_deleted_when_the_next_one_starts(tmp_path):
    folder = warm_workers.private_user_directory()
    code = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
import cloudpickle
from farandole.spark.common.backend import LocalBackend
import test_warm_workers
cloudpickle.register_pickle_by_value(test_warm_workers)
LocalBackend(1, verbose=0).run(test_warm_workers.begun)
print("ran", flush=True)
sys.stdin.read()
"""
    before = set(folder.iterdir())
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as driver:
        assert driver.stdout.readline() == b"ran\n"
        left = set(folder.iterdir()) - before
        own = f"\0{driver.pid}\0".encode()
        for pid in [
            pid for pid in children_of_nobody("farandole.runner.forkserver") if own in _command(pid)
        ]:
            os.kill(pid, signal.SIGKILL)
        driver.kill()
    assert {path.suffix for path in left} == {"", ".lock"}
    # Those of others stay: who lives may start it again, and in another container, or on another
    # host that shares the directory, the numbers are others.
    theirs = [
        folder / name
        for name in ("warm-1", "warm-1.lock", "warm-2", "warm-2.lock", "warm-3.lock", "warm-4.lock")
    ]
    numbers = os.readlink("/proc/self/ns/pid")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for path, told in zip(
        theirs,
        (
            "",
            f"{os.getpid()} {warm_workers.process_start_ticks(os.getpid())} {boot}/{numbers}",
            "",
            f"1 1 {boot}/pid:[7]",
            "",
            f"1 1 another-boot/{numbers}",
        ),
        strict=True,
    ):
        path.write_text(told)
    LocalBackend(1, verbose=0, env={"MALLOC_TOP_PAD_": "131072"}).run(begun)
    assert not any(path.exists() for path in left)
    for path in theirs:
        path.unlink()  # which fails where it is gone


def test_a_server_that_is_asked_to_end_takes_its_socket_along():
    before = set(warm_workers.private_user_directory().iterdir())
    LocalBackend(1, verbose=0, env={"MALLOC_TOP_PAD_": "262144"}).run(begun)
    its = set(warm_workers.private_user_directory().iterdir()) - before
    assert {path.suffix for path in its} == {"", ".lock"}
    end_servers()
    until(lambda: not any(path.exists() for path in its))


def test_a_changed_environment_or_package_gets_a_server_of_its_own(tmp_path, monkeypatch):
    backend = LocalBackend(1, verbose=0)
    backend.run(begun)
    before = servers()
    monkeypatch.syspath_prepend(str(tmp_path))
    backend.run(begun)
    with_path = servers()
    assert len(with_path) == len(before) + 1
    # A job writes there what another one imports.
    (tmp_path / "late.py").write_text("answer = 42\n")

    def late():
        import late

        return late.answer

    assert backend.run(late) == [42]
    assert servers() == with_path
    # A package is installed there.
    (tmp_path / "some-1.0.dist-info").mkdir()
    assert backend.run(late) == [42]
    assert len(servers()) == len(with_path) + 1
    with_package = servers()
    (tmp_path / "other-1.0.dist-info").mkdir()
    backend.run(begun)
    assert len(servers()) == len(with_package) + 1


def test_a_server_that_cannot_fork_or_import_declines_and_workers_come_the_long_way(
    tmp_path, monkeypatch
):
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), "
        "daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for preload in ("threaded", "no_such_module"):
        monkeypatch.setattr(
            warm_workers,
            "resolve_warm_worker_settings",
            lambda *_, preload=preload, **__: warm_workers.WarmWorkerSettings((preload,), 20.0),
        )
        ((_, _, pid),) = LocalBackend(1, verbose=0).run(begun)
        assert pid not in servers()


def test_warm_workers_are_wanted_with_torch_and_repeated_fits(monkeypatch):
    monkeypatch.delenv("FARANDOLE_WARM_WORKERS", raising=False)
    assert warm_workers.resolve_warm_worker_settings(None, by_default=True) is not None
    assert warm_workers.resolve_warm_worker_settings(None, by_default=False) is None
    assert warm_workers.resolve_warm_worker_settings(True, by_default=False) is not None
    assert warm_workers.resolve_warm_worker_settings(False, by_default=True) is None
    monkeypatch.setenv("FARANDOLE_WARM_WORKERS", "off")
    assert warm_workers.resolve_warm_worker_settings(None, by_default=True) is None
    monkeypatch.setenv("FARANDOLE_WARM_WORKERS", "sometimes")
    with pytest.raises(
        ValueError, match="FARANDOLE_WARM_WORKERS must be auto, on or off: sometimes"
    ):
        warm_workers.resolve_warm_worker_settings(None, by_default=True)
    monkeypatch.delenv("FARANDOLE_WARM_WORKERS")
    with monkeypatch.context() as inner:
        # Who talks to kernels has imported that, too; that a kernel wants them is seen in one
        # (test_notebook.py).
        inner.setitem(sys.modules, "ipykernel", sys)
        assert warm_workers.resolve_warm_worker_settings(None, by_default=False) is None
        inner.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
        assert warm_workers.resolve_warm_worker_settings(None, by_default=False) is not None
    search = {"__name__": "pyspark.ml.tuning", "wanted": warm_workers.resolve_warm_worker_settings}
    exec("found = wanted(None, by_default=False)", search)
    assert search["found"] is not None
    monkeypatch.delitem(sys.modules, "torch")
    assert warm_workers.resolve_warm_worker_settings(None, by_default=True) is None
