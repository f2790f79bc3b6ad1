# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Every socket on which a job takes connections, with its address and port, under all settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import cloudpickle
import pytest
from tests import sockets
from tests.programs import program_path
from tests.started import environment, together

from farandole.spark.common import LocalBackend

pytestmark = pytest.mark.timeout(300)
# Workers import no test.
cloudpickle.register_pickle_by_value(sockets)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
LOOPBACK = "0100007F"
"""127.0.0.1, as the kernel writes it."""
EVERYWHERE = "00000000"
RANGE = range(41820, 41860)
SETTINGS = {
    "nothing": {},
    "bind address": {"FARANDOLE_BIND_ADDRESS": "127.0.0.0/8"},
    "port range": {"FARANDOLE_PORT_RANGE": "41820-41859"},
    "dial out": {"FARANDOLE_DIAL_OUT": "1"},
    "no shared memory": {"FARANDOLE_SHARED_MEMORY": "0"},
}
MODULES = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
"""Programs find `tests` by this path."""


def opened(method):
    """Returns the listeners of a rank with the engine up, and with a process group of torch,
    too.
    """
    import torch.distributed as dist

    import farandole.torch as hvd
    import farandole.torch.distributed  # noqa: F401 - registers the backend

    hvd.init(process_sets="dynamic")
    engine = sockets.listening()
    dist.init_process_group("farandole", init_method=method)
    dist.barrier()
    group = sockets.listening()
    store = dist.distributed_c10d._get_default_store()
    keeps_what_it_is_told(store, dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
    hvd.shutdown()
    return engine, group


def debugged():
    """Returns the listeners of a rank before, with and after the debug server of torch."""
    import socket

    import farandole.numpy as hvd
    from farandole.torch.distributed import debug

    hvd.init()
    before = sockets.listening()
    with pytest.raises(ValueError, match="without a password"):
        debug.start_debug_server(0)
    refused = sockets.listening()
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    debug.start_debug_server(port, open_to_the_network=True)
    started = sockets.listening() - before
    hvd.barrier()
    debug.stop_debug_server()
    hvd.barrier()
    return refused - before, started, sockets.listening() - before


def keeps_what_it_is_told(store, rank, size):
    from datetime import timedelta

    import torch.distributed as dist

    store.set(f"of {rank}", f"value {rank}")
    store.wait([f"of {one}" for one in range(size)], timedelta(seconds=60))
    assert [store.get(f"of {one}") for one in range(size)] == [
        b"value %d" % one for one in range(size)
    ]
    for _ in range(20):
        store.add("count", 1)
    store.set(f"done {rank}", "")
    store.wait([f"done {one}" for one in range(size)])
    assert store.add("count", 0) == 20 * size
    assert not store.check(["count", "nobody sets this"])
    with pytest.raises(Exception, match="nobody sets this"):
        store.wait(["nobody sets this"], timedelta(seconds=0.2))
    won = store.compare_set("first", "", f"rank {rank}")
    assert won in {b"rank %d" % one for one in range(size)}
    dist.barrier()
    assert store.get("first") == won
    if rank == 0:
        assert store.compare_set("first", "another", "new") == won
        assert store.delete_key("first")
        assert not store.delete_key("first")
    dist.barrier()
    assert not store.check(["first"])


@pytest.mark.parametrize(
    ("setting", "method"),
    [*((setting, "farandole://") for setting in SETTINGS), ("nothing", None), ("dial out", None)],
)
def test_a_local_job_listens_on_loopback_alone(monkeypatch, setting, method):
    for name, value in SETTINGS[setting].items():
        monkeypatch.setenv(name, value)
    from farandole.runner import backend

    before, driver = sockets.listening(), set()
    conduct = backend.run_gang

    def watching(*given):
        driver.update(sockets.listening() - before)
        return conduct(*given)

    monkeypatch.setattr(backend, "run_gang", watching)
    ranks = LocalBackend(2, verbose=0, warm=False).run(opened, (method,))
    assert [address for address, _ in driver] == [LOOPBACK], "the registrar"
    for engine, group in ranks:
        assert {address for address, _ in engine} <= {LOOPBACK}
        assert group == engine, "torch's store opens nothing"
    if setting == "port range":
        assert {port for _, port in driver} | {
            port for engine, _ in ranks for _, port in engine
        } <= set(RANGE)


@pytest.mark.skipif(find_spec("torch.distributed.debug") is None, reason="needs torch 2.15")
def test_torchs_debug_server_opens_ports_only_after_consent():
    for refused, started, stopped in LocalBackend(2, verbose=0, warm=False).run(debugged):
        assert not refused
        assert started, "torch opens ports"
        assert {address for address, _ in started} <= {EVERYWHERE, 32 * "0"}, (
            "all addresses, as the guide says"
        )
        assert not stopped


MEETING = """
from tests.sockets import listening
from farandole.tensorflow.data._registry import DataServiceRegistryClient, DataServiceRegistryServer
before = listening()
server = DataServiceRegistryServer(1, 1)
((address, port),) = listening() - before
assert address == "0100007F" and 41820 <= port < 41860, (address, port)
assert server.listen_addresses == [("127.0.0.1", port)]
DataServiceRegistryClient(server.listen_addresses, server.key, 20.0).shutdown()
server.close()
assert listening() == before
"""


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow")
def test_the_meeting_point_of_the_data_service_listens_where_it_may():
    env = environment(
        {**SETTINGS["bind address"], **SETTINGS["port range"], "KERAS_BACKEND": "tensorflow"}
    )
    done = subprocess.run(
        [sys.executable, "-c", MEETING], env=env, capture_output=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


SERVICE = program_path(__file__, "serve_data")


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow")
def test_the_data_service_opens_ports_of_tensorflow_on_all_addresses_after_consent():
    env = environment(
        {**SETTINGS["bind address"], "KERAS_BACKEND": "tensorflow", "PYTHONPATH": MODULES}
    )
    done = subprocess.run(
        [sys.executable, SERVICE], env=env, capture_output=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    found = addresses_and_ports(done.stdout.decode())
    assert len(found) >= 2, "a dispatcher and a worker"
    assert {address for address, _ in found} <= {EVERYWHERE, 32 * "0"}, (
        "all addresses, as the guide says"
    )


# Groups whose members change, by torch's own interface: no launcher has started them.
MEMBERS = program_path(__file__, "reconfigure_group")


@pytest.mark.parametrize("setting", ["nothing", "bind address", "port range"])
def test_groups_of_one_host_that_are_reconfigured_listen_on_loopback_alone(tmp_path, setting):
    told = {"MEETING": str(tmp_path / "store"), "PYTHONPATH": MODULES, **SETTINGS[setting]}
    ended = together([{"MEMBER": str(rank), **told} for rank in range(2)], MEMBERS)
    assert [one.status for one in ended] == [0, 0], ended
    found = [addresses_and_ports(one.out) for one in ended]
    assert found[0], "member 0 has the registrar"
    assert {address for member in found for address, _ in member} == {LOOPBACK}
    assert setting != "port range" or all(port in RANGE for member in found for _, port in member)


def addresses_and_ports(text):
    """Returns the sockets on which a process says that it listens."""
    return [(address, int(port)) for address, port in re.findall(r"\('([0-9A-F]+)', (\d+)\)", text)]


TWO_HOSTS = """
import farandole.numpy as hvd
from tests.sockets import listening
hvd.init()
assert hvd.cross_size() == 2
print("listens", sorted(listening()))
hvd.allgather_object(None)
hvd.shutdown()
"""


SEVERAL = {"FARANDOLE_BIND_ADDRESS": "127.0.0.2,127.0.0.3"}


@pytest.mark.parametrize("setting", ["nothing", "bind address", "several addresses", "dial out"])
def test_ranks_of_two_hosts_listen_where_they_are_told_to(setting):
    # A container of YARN counts as a host of its own.
    told = {
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(os.getpid()),
    }
    ended = together(
        [
            {
                "CONTAINER_ID": str(rank),
                "HOROVOD_RANK": str(rank),
                **told,
                **SETTINGS.get(setting, SEVERAL),
            }
            for rank in range(2)
        ],
        TWO_HOSTS,
    )
    assert [one.status for one in ended] == [0, 0], ended
    found = ["".join(line for line in one.out.splitlines() if "listens" in line) for one in ended]
    assert all(found)
    everywhere = [EVERYWHERE in one or f"'{32 * '0'}'" in one for one in found]
    if setting == "nothing":
        assert everywhere == [True, True], "all addresses is what the guide says"
    elif setting == "bind address":
        assert everywhere == [False, False]
        assert all(LOOPBACK in one for one in found)
    elif setting == "several addresses":
        for one in found:
            addresses = {address for address, _ in addresses_and_ports(one)}
            assert addresses == {"0200007F", "0300007F"}, found
    else:
        assert not everywhere[1], "a rank that dials out has doors on loopback alone"


DISCOVERED = ["-np", "2", "--min-np", "2", "--host-discovery-script"]
COMMANDS = {
    "fixed": (["-np", "2"], {}),
    "metrics": (["-np", "2", "--metrics", "0"], {}),
    "elastic": (["-np", "2", "--min-np", "2", "-H", "localhost:2"], {}),
    "elastic with discovered hosts": (
        DISCOVERED,
        {**SETTINGS["bind address"], **SETTINGS["port range"]},
    ),
}


@pytest.mark.parametrize(
    "kind",
    [
        "fixed",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in COMMANDS if kind != "fixed"),
    ],
)
def test_a_job_of_the_command_line_listens_on_loopback_alone(tmp_path, kind):
    flags, told = COMMANDS[kind]
    if flags is DISCOVERED:
        discover = tmp_path / "discover"
        discover.write_text("#!/bin/sh\necho localhost:2\n")
        discover.chmod(0o700)
        flags = [*flags, str(discover)]
    script = tmp_path / "rank.py"
    script.write_text(
        "import os\n"
        "import farandole.torch as hvd\n"
        "from tests.sockets import listening\n"
        "hvd.init()\n"
        "launcher = int(open(f'/proc/{os.getppid()}/stat').read().rsplit(')', 1)[1].split()[1])\n"
        f"above = listening(os.getppid()) | (listening(launcher) if launcher != {os.getpid()} "
        "else set())\n"
        "print('listens', sorted(listening()), sorted(above), flush=True)\n"
        "hvd.allgather_object(None)\n"
    )
    command = [sys.executable, "-m", "farandole", "run", *flags, sys.executable, str(script)]
    env = environment({"PYTHONPATH": MODULES, **told})
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"\('([0-9A-F]+)', (\d+)\)", done.stdout)
    assert done.stdout.count("listens") == 2
    assert {address for address, _ in found} == {LOOPBACK}, done.stdout
    if kind == "metrics":
        port = re.findall(r"metrics are at http://127\.0\.0\.1:(\d+)/", done.stderr)[0]
        assert ("0100007F", port) in re.findall(r"\('([0-9A-F]+)', (\d+)\)", done.stdout)
    assert kind != "elastic with discovered hosts" or all(
        int(port) in RANGE for _, port in found
    ), done.stdout


def test_the_run_viewer_listens_on_loopback_alone(monkeypatch, tmp_path):
    from farandole.ui import Viewer

    monkeypatch.setenv("FARANDOLE_BIND_ADDRESS", "0.0.0.0/0")
    before = sockets.listening()
    with Viewer((str(tmp_path),)):
        ((address, _),) = sockets.listening() - before
        assert address == LOOPBACK
    assert sockets.listening() == before


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("0", LOOPBACK),
        ("127.0.0.2:0", "0200007F"),
        ("[::1]:0", "00000000000000000000000001000000"),
        ("0.0.0.0:0", EVERYWHERE),
    ],
)
def test_metrics_are_served_on_loopback_or_where_the_setting_says(monkeypatch, setting, expected):
    from farandole.runner.show.metrics_export import export_run_metrics

    monkeypatch.setenv("FARANDOLE_BIND_ADDRESS", "0.0.0.0/0")
    monkeypatch.setenv("FARANDOLE_METRICS", setting)
    before = sockets.listening()
    with export_run_metrics("digits"), export_run_metrics("letters"):
        ((address, _),) = sockets.listening() - before
        assert address == expected
    assert sockets.listening() == before
