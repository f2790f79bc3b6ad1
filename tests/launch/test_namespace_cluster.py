# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The hosts that the other tests stand on are what they claim to be, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch.conftest import Hosts
from tests.launch.namespace_cluster import HOME, missing, until
from tests.needs import skip_without, skipped_without

ROOT = Path(__file__).parents[2]


def connects(cluster, name, port=22):
    program = f"import socket; socket.create_connection(({name!r}, {port}), timeout=1.0)"
    return cluster["head"].run(sys.executable, "-c", program).returncode == 0


def test_a_host_has_a_name_files_processes_and_memory_of_its_own(hosts):
    cluster = hosts("h1", "h2")
    cluster["h1"].write("mine", "1")
    seen = {}
    for name in ("h1", "h2"):
        script = "hostname; readlink /proc/self/ns/ipc; ls; ls /proc | grep -c '^[0-9]'; echo ~"
        done = cluster["head"].run("ssh", name, f"cd /run/job && {script}")
        assert done.returncode == 0, done.stderr
        seen[name] = done.stdout.split()
    assert seen["h1"][0] == "h1"
    assert seen["h1"][2] == "mine"
    assert seen["h2"][0] == "h2"
    assert "mine" not in seen["h2"]
    assert seen["h1"][1] != seen["h2"][1], "one IPC namespace for both"
    # What the cluster keeps there, the session's own and the pipeline's.
    assert int(seen["h1"][3]) < 10
    assert {words[-1] for words in seen.values()} == {HOME}


def test_processes_of_a_host_are_counted_by_their_arguments(hosts):
    cluster = hosts("h1", "h2")
    assert cluster.processes() == []
    cluster["head"].start("ssh", "h1", "exec env MARK=yes sleep 1000")
    until(
        lambda: any(process.argv[:1] == ("sleep",) for process in cluster["h1"].processes()),
        "sleep to run",
    )
    (sleep,) = [process for process in cluster["h1"].processes() if process.argv[:1] == ("sleep",)]
    assert sleep.argv == ("sleep", "1000")
    assert "MARK=yes" in sleep.environ
    assert cluster["h2"].processes() == []
    assert ("0.0.0.0", 22) in cluster["h1"].listening()
    assert cluster["head"].listening() == []
    # A command that does not read outlives its connection: the tests of launches would see that.
    os.kill(sleep.pid, signal.SIGKILL)


def test_connections_of_a_hosts_processes_are_listed_as_long_as_they_have_them(hosts):
    cluster = hosts("h1", "h2")
    cluster["head"].start("ssh", "h1", "exec sleep 1000")
    until(
        lambda: any(process.argv[:1] == ("sleep",) for process in cluster["h1"].processes()),
        "sleep to run",
    )
    ((near, far),) = cluster["head"].connections()
    assert far == (cluster["h1"].address, 22)
    assert cluster["h1"].connections() == [(far, near)]
    assert cluster["h2"].connections() == []
    for process in cluster.processes():
        # A client ends by itself when its server is killed.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    cluster.until_quiet()
    assert [cluster[name].connections() for name in ("head", "h1")] == [[], []]


def test_a_cut_host_is_silent_until_it_is_restored_and_others_continue(hosts):
    cluster = hosts("h1", "h2")
    assert connects(cluster, "h1")
    cluster["h1"].cut()
    assert not connects(cluster, "h1")
    assert connects(cluster, "h2")
    cluster["h1"].restore()
    assert connects(cluster, "h1")


def test_a_host_without_power_is_gone_with_all_its_processes(hosts):
    cluster = hosts("h1")
    running = cluster["head"].start(
        "ssh", "-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=1", "h1", "sleep 1000"
    )
    until(lambda: len(cluster["h1"].processes()) > 1, "the session")
    pids = [process.pid for process in cluster["h1"].processes()]
    cluster["h1"].power_off()
    assert cluster["h1"].processes() == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert running.wait() == 255
    assert "timed out" in running.output


def interfaces():
    return sorted(entry.name for entry in Path("/sys/class/net").iterdir())


def test_nothing_is_left_of_a_bed_that_was_closed(machine):
    mounts, cards = Path("/proc/self/mounts").read_text(), interfaces()
    with Hosts("head", "h1") as cluster:
        cluster["h1"].listen()
        cluster.login(cluster["head"])
        cluster["head"].start("ssh", "h1", "sleep 1000")
        until(lambda: bool(cluster["h1"].processes()), "the session")
        holders = [cluster.switch.holder, *(host.hold.holder for host in cluster.hosts.values())]
        pids = [cluster.switch.pid, *(host.hold.pid for host in cluster.hosts.values())]
        pids += [process.pid for process in cluster.processes()]
    assert all(holder.returncode is not None for holder in holders)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert Path("/proc/self/mounts").read_text() == mounts
    assert interfaces() == cards


KILLED = """
import os, sys, time
from tests.launch.conftest import Hosts
cluster = Hosts("head", "h1")
cluster["h1"].listen()
cluster.login(cluster["head"])
cluster["head"].start("ssh", "h1", "echo on; sleep 1000").until("on")
print(*(host.hold.pid for host in cluster.hosts.values()),
    *(process.pid for process in cluster.processes()), flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_when_what_made_the_bed_is_killed(machine):
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    words = [sys.executable, "-c", KILLED]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as maker:
        pids = [int(word) for word in maker.stdout.readline().split()]
        assert len(pids) >= 4, pids
        maker.send_signal(signal.SIGKILL)
        maker.wait(30)
        until(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids),
            "the end of all",
            limit=10.0,
        )


def test_a_machine_that_can_have_no_hosts_says_how_it_could(monkeypatch):
    monkeypatch.setattr("tests.launch.namespace_cluster.TOOLS", {"no-such-sshd": "openssh-server"})
    if os.geteuid() != 0:
        assert "needs root" in missing()
        pytest.skip("the rest of this test needs root")
    assert missing() == "needs the Debian packages openssh-server: .ci/packages installs them"


def test_absent_packages_fail_only_in_ci(tmp_path):
    user = tmp_path / "id"  # not root, and no other program
    user.write_text("#!/bin/sh\necho 1000\n")
    user.chmod(0o755)
    for ci, code in ((None, 0), ("true", 1)):
        env = {"PATH": str(tmp_path)} | ({"CI": ci} if ci else {})
        done = subprocess.run(
            ["/bin/sh", ROOT / ".ci/packages"], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        assert "chromium" in done.stderr


@pytest.mark.parametrize(
    ("ci", "user", "fails"), [(None, 0, False), ("true", 1000, False), ("true", 0, True)]
)
def test_what_a_machine_lacks_fails_only_in_ci_as_root(monkeypatch, ci, user, fails):
    monkeypatch.delenv("CI", raising=False)
    if ci is not None:
        monkeypatch.setenv("CI", ci)
    monkeypatch.setattr("os.geteuid", lambda: user)
    skip_without(None)
    with pytest.raises(
        pytest.fail.Exception if fails else pytest.skip.Exception, match="needs loop devices"
    ):
        skip_without("needs loop devices")
    assert not skipped_without(None).args[0]
    if fails:
        with pytest.raises(RuntimeError, match="needs loop devices"):
            skipped_without("needs loop devices")
    else:
        assert skipped_without("needs loop devices").args[0]
