# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The small modules of the drop-in that scripts and tests import from Horovod's inside."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def _convention(monkeypatch):
    """Sets Farandole's gradient convention, and restores it after a test, because the drop-in
    sets another one.
    """
    monkeypatch.setenv("FARANDOLE_GRADIENT_CONVENTION", "farandole")


def until(fits, what, limit=30.0):
    end = time.monotonic() + limit
    while not fits():
        assert time.monotonic() < end, f"not within {limit} s: {what}"
        time.sleep(0.01)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_functions_run_in_threads_and_their_errors_come_back():
    from horovod.runner.util.threads import execute_function_multithreaded, in_thread, on_event

    def half(number):
        if number % 2:
            raise KeyError(number)
        return number // 2

    assert execute_function_multithreaded(half, [[0], [2], [8]], max_concurrent_executions=2) == {
        0: 0,
        1: 1,
        2: 4,
    }
    assert execute_function_multithreaded(half, []) == {}
    with pytest.raises(RuntimeError, match="func half did not complete") as raised:
        execute_function_multithreaded(half, [[0], [3]])
    assert isinstance(raised.value.__cause__, KeyError)
    heard = []
    in_thread(heard.append, (1,)).join(10)
    with pytest.raises(ValueError, match="args must be a tuple"):
        in_thread(heard.append, 2)
    event, stop = threading.Event(), threading.Event()
    waiting = on_event(event, heard.append, (3,), stop=stop, check_stop_interval_s=0.01)
    event.set()
    waiting.join(10)
    never = on_event(threading.Event(), heard.append, (4,), stop=stop, check_stop_interval_s=0.01)
    stop.set()
    never.join(10)
    assert not never.is_alive()
    assert heard == [1, 3]
    with pytest.raises(ValueError, match="stop event"):
        on_event(event, print, daemon=False)


def test_a_pipe_holds_one_text_and_hands_it_over_in_parts():
    from horovod.runner.util.streams import Pipe

    pipe = Pipe()
    pipe.write("abcdef")
    writer = threading.Thread(target=pipe.write, args=("next",))
    writer.start()
    assert pipe.read(4) == "abcd"
    assert pipe.read(4) == "ef"
    assert pipe.read() == "next"
    writer.join(10)
    pipe.write(b"left")
    pipe.close()
    assert pipe.read() == b"left"
    assert pipe.read() is None
    with pytest.raises(RuntimeError, match="closed"):
        pipe.write("more")


def test_digests_objects_and_deadlines():
    from horovod.runner.common.util import codec, secret, timeout

    key = secret.make_secret_key()
    assert len(key) == secret.SECRET_LENGTH
    digest = secret.compute_digest(key, b"message")
    assert len(digest) == secret.DIGEST_LENGTH
    assert secret.check_digest(key, b"message", digest)
    assert not secret.check_digest(key, b"massage", digest)
    assert codec.loads_base64(codec.dumps_base64({"a": [1]})) == {"a": [1]}
    assert isinstance(codec.dumps_base64(1, to_ascii=False), bytes)
    late = timeout.Timeout(0, "Timed out waiting for {activity}.")
    until(late.timed_out, "the end of no time")
    assert late.remaining() == 0
    with pytest.raises(
        timeout.TimeoutException, match=r"waiting for hosts\. Timeout after 0 seconds"
    ):
        late.check_time_out_for("hosts")
    timeout.Timeout(60, "").check_time_out_for("anything")


def test_hosts_are_read_and_ranks_given_out(tmp_path):
    from horovod.runner.common.util import hosts

    file = tmp_path / "hosts"
    file.write_text("# two hosts\na slots=2\n\nb slots=1 # last\n")
    assert hosts.parse_host_files(str(file)) == "a:2,b:1"
    assert hosts.parse_hosts_and_slots("a:2, b:1") == (["a", "b"], {"a": 2, "b": 1})
    with pytest.raises(ValueError, match="Invalid host input"):
        hosts.parse_hosts_and_slots("a")
    file.write_text("a\n")
    with pytest.raises(ValueError, match="line 1: a host must be given"):
        hosts.parse_host_files(str(file))
    found = hosts.get_host_assignments(hosts.parse_hosts("a:2,b:4"), 3, 4)
    told = [(one.hostname, one.to_response_string()) for one in found]
    assert told == [
        ("a", "0,4,0,2,0,2"),
        ("a", "1,4,1,2,0,2"),
        ("b", "2,4,0,2,1,2"),
        ("b", "3,4,1,2,1,2"),
    ]
    with pytest.raises(
        ValueError, match=r"more processes \(9\) than there are available slots \(6\)"
    ):
        hosts.get_host_assignments(hosts.parse_hosts("a:2,b:4"), 9)
    assert hosts.INVALID_SLOT_INFO.rank == -1


def test_a_command_is_run_and_its_lines_carry_its_number():
    from horovod.runner.common.util import safe_shell_exec, tiny_shell_exec

    out, err = io.StringIO(), io.StringIO()
    code = safe_shell_exec.execute(
        "echo a; echo b >&2; printf c; exit 3", stdout=out, stderr=err, index=7
    )
    assert (code, out.getvalue(), err.getvalue()) == (
        3,
        "[7]<stdout>:a\n[7]<stdout>:c",
        "[7]<stderr>:b\n",
    )
    assert safe_shell_exec.execute("kill -9 $$", stdout=out, stderr=err) == 128 + 9
    assert tiny_shell_exec.execute("echo $WHAT", env={"WHAT": "that"}) == ("that\n", 0)


def test_a_command_ends_with_its_event_and_so_do_its_children(tmp_path):
    from horovod.runner.common.util import safe_shell_exec

    pids, event = tmp_path / "pids", threading.Event()
    codes = []
    command = f"sleep 600 & echo $! $$ > {pids}; wait"
    thread = threading.Thread(
        target=lambda: codes.append(
            safe_shell_exec.execute(
                command, stdout=io.StringIO(), stderr=io.StringIO(), events=[event]
            )
        )
    )
    thread.start()
    until(lambda: pids.exists() and len(pids.read_text().split()) == 2, "the command")
    event.set()
    thread.join(30)
    assert codes == [128 + signal.SIGTERM]
    assert not any(is_alive(int(pid)) for pid in pids.read_text().split())


def test_a_command_ends_with_the_process_that_ran_it(tmp_path):
    pids = tmp_path / "pids"
    program = (
        "from horovod.runner.common.util import safe_shell_exec\n"
        f"safe_shell_exec.execute('sleep 600 & echo $! $$ > {pids}; wait')\n"
    )
    runner = subprocess.Popen([sys.executable, "-c", program], env={**os.environ})
    try:
        until(lambda: pids.exists() and len(pids.read_text().split()) == 2, "the command")
    finally:
        runner.kill()
        runner.wait()
    until(
        lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()), "the command's end"
    )


def test_variables_of_workers(monkeypatch):
    from horovod.runner.common.util import env

    assert [env.is_exportable(name) for name in ("PATH", "OLDPWD", "CUDA_VISIBLE_DEVICES")] == [
        True,
        False,
        False,
    ]
    for name in (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "RANK",
        "WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "PMI_RANK",
    ):
        monkeypatch.delenv(name, raising=False)
    assert env.get_env_rank_and_size() == (0, 1)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    with pytest.raises(RuntimeError, match="only OMPI_COMM_WORLD_RANK is set"):
        env.get_env_rank_and_size()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert env.get_env_rank_and_size() == (2, 4)


def test_a_configuration_file_becomes_variables():
    from horovod.runner.common.util import config_parser as parser

    names = [
        *parser._VARIABLES,
        *parser._FLAGS,
        *parser._OF_AUTOTUNE,
        "fusion_threshold_mb",
        "timeline_filename",
    ]
    more = [
        "timeline_mark_cycles",
        "log_with_timestamp",
        "tcp_flag",
        "autotune",
        "use_gloo",
        "use_mpi",
    ]
    args = SimpleNamespace(**dict.fromkeys([*names, *more]))
    config = {
        "controller": "gloo",
        "params": {"fusion_threshold_mb": 32, "cycle_time_ms": 5},
        "autotune": {"enabled": True, "warmup_samples": 4},
        "timeline": {"filename": "t.json", "mark_cycles": True},
        "stall_check": {"enabled": False, "warning_time_seconds": 9},
        "logging": {"level": "INFO", "with_timestamp": False},
    }
    parser.set_args_from_config(args, config, {"cycle_time_ms"})
    assert args.use_gloo
    assert args.cycle_time_ms is None
    parser.validate_config_args(args)
    assert parser.set_env_from_args({}, args) == {
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "4",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "9",
        "HOROVOD_LOG_LEVEL": "INFO",
        "HOROVOD_LOG_HIDE_TIME": "1",
    }
    args.cache_capacity = -1
    with pytest.raises(ValueError, match="cache_capacity=-1 must be >= 0"):
        parser.validate_config_args(args)


def test_addresses_of_this_host():
    import socket

    from horovod.runner.util import network

    assert "127.0.0.1" in network.get_local_host_addresses()
    assert network.get_local_intfs() == {"lo"}
    assert network.filter_local_addresses(["localhost", "192.0.2.77"]) == ["192.0.2.77"]
    assert network.get_driver_ip(["lo"]) == "127.0.0.1"
    with pytest.raises(RuntimeError, match="no IPv4 address: nothing0"):
        network.get_driver_ip(["nothing0"])
    server, port = network.find_port(socket.create_server)
    assert server.getsockname()[1] == port
    server.close()


def test_helpers_of_common(monkeypatch):
    from horovod.common import util

    compare = util.is_version_greater_equal_than
    assert compare("2.16.1", "2.16.0")
    assert compare("2.16.0", "2.16.0")
    assert compare("2.17.0rc1", "2.16.9")
    assert not compare("2.16.0rc1", "2.16.0")
    assert not compare("2.9.3", "2.16.0")
    with pytest.raises(ValueError, match=r"major\.minor\.patch"):
        compare("2.16.0", "2.16")
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("MADE", raising=False)
    with util.env(KEPT="inside", MADE="new", LEFT=None):
        assert (os.environ["KEPT"], os.environ["MADE"]) == ("inside", "new")
    assert os.environ["KEPT"] == "before"
    assert "MADE" not in os.environ
    choose = util.get_average_backwards_compatibility_fun(util)
    assert choose(util.Sum, None) == util.Sum
    with pytest.warns(DeprecationWarning, match="Parameter `average` has been replaced with `op`"):
        assert choose(None, False) == util.Sum
    assert util.is_iterable(iter(()))
    assert not util.is_iterable(3)
    assert not util.extension_available("cobol")
    with pytest.raises(ImportError, match="needs cobol"):
        util.check_extension("horovod.cobol", "HOROVOD_WITH_COBOL", __file__, "mpi_lib")


def test_models_travel_as_text():
    import torch
    from horovod.spark.lightning import util as lightning
    from horovod.spark.torch import util

    model = torch.nn.Linear(2, 1)
    copy = util.deserialize_fn()(util.serialize_fn()(model))
    assert torch.equal(copy.weight, model.weight)
    scripted = util.deserialize_fn()(util.serialize_fn()(torch.jit.script(model)))
    assert torch.equal(scripted(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert lightning.serialize_fn is util.serialize_fn


def test_helpers_of_stores(tmp_path):
    pytest.importorskip("pyarrow")
    from horovod.spark.common.store import DBFSLocalStore, HDFSStore, LocalStore, Store

    store = LocalStore(str(tmp_path / "store"))
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    (source / "a.ckpt").write_text("a")
    (source / "inner" / "b.ckpt").write_text("b")
    target = store.get_run_path("run")
    store.copy(str(source), target, recursive=True)
    assert [path.rpartition("run/")[2] for path in store.get_checkpoints("run")] == [
        "a.ckpt",
        "inner/b.ckpt",
    ]
    store.copy(str(source / "a.ckpt"), f"{target}/c.ckpt")
    assert store.read(f"{target}/c.ckpt") == b"a"
    with pytest.raises(FileNotFoundError, match="nothing to copy at"):
        store.copy(str(tmp_path / "none"), target)
    assert store.get_filesystem().exists(f"{target}/a.ckpt")
    assert LocalStore.matches("/x")
    assert not LocalStore.matches("hdfs://node/x")
    assert HDFSStore.matches("hdfs://node:8020/x")
    assert [
        DBFSLocalStore.normalize_path(path)
        for path in ("dbfs:/a", "file:/dbfs/a", "file:///dbfs/a")
    ] == ["/dbfs/a"] * 3
    with pytest.raises(ValueError, match="not a path of Databricks"):
        DBFSLocalStore.normalize_path("/a")
    with pytest.raises(NotImplementedError):
        Store().get_checkpoints("run")
