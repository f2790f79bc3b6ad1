# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Hosts that can run nothing are named with the reason before anything starts anywhere."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from tests.launch.namespace_cluster import HOME

pytestmark = pytest.mark.slow


def refused(cluster, *arguments, **env):
    """Returns the message of a launcher that must fail without starting a worker."""
    cluster.write("start.py", "open('started', 'w').close()")
    names = ",".join(f"{name}:1" for name in cluster.hosts if name != "head")
    size = len(cluster.hosts) - 1
    done = cluster.launched("-np", size, "-H", names, *arguments, sys.executable, "start.py", **env)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr
    cluster.until_quiet(15.0)
    assert not any(
        (host.root / "run/job/started").exists() for host in cluster.hosts.values() if host.is_on
    )
    return done.stderr


def test_a_host_without_power(hosts):
    cluster = hosts("h1", "h2")
    cluster["h2"].power_off()
    said = refused(cluster, "--start-timeout", 5)
    assert "h2: ssh: connect to host h2 port 22: " in said, said
    assert "h1: " not in said, said


@pytest.mark.timing
def test_hosts_are_checked_side_by_side_and_all_that_fail_are_named(hosts):
    cluster = hosts("h1", "h2", "h3", "h4")
    for name in ("h2", "h3", "h4"):
        cluster[name].power_off()
    # One after the other would be three times 4 s.
    began = time.monotonic()
    said = refused(cluster, "--start-timeout", 4)
    assert time.monotonic() - began < 9.0, said
    for name in ("h2", "h3", "h4"):
        assert f"{name}: ssh: connect to host {name} port 22: " in said, said


def test_an_unknown_name(hosts):
    cluster = hosts("h1")
    done = cluster.launched("-np", 2, "-H", "h1:1,h9:1", sys.executable, "-c", "pass")
    assert done.returncode != 0
    assert "h9: ssh: Could not resolve hostname h9" in done.stderr


def test_a_host_that_does_not_take_the_key(hosts):
    cluster = hosts("h1", "h2")
    cluster["h2"].write(f"{HOME}/.ssh/authorized_keys", "", mode=0o600)
    said = refused(cluster)
    assert "h2: " in said, said
    assert "Permission denied (publickey)" in said, said


def test_a_host_whose_key_is_not_known(hosts):
    cluster = hosts("h1", "h2")
    known = (
        line
        for line in cluster["head"].read(f"{HOME}/.ssh/known_hosts").splitlines()
        if not line.startswith("h2 ")
    )
    cluster["head"].write(f"{HOME}/.ssh/known_hosts", "\n".join(known) + "\n", mode=0o600)
    # Its address is still in the file: the name alone decides.
    said = refused(cluster, "--ssh-command", "ssh -o CheckHostIP=no")
    assert "h2: " in said, said
    assert "Host key verification failed" in said, said


def test_a_host_without_the_package(hosts):
    cluster = hosts("h1", "h2")
    cluster["h2"].without_package()
    said = refused(cluster)
    assert f"h2: {sys.executable}: No module named farandole" in said, said


def test_a_host_without_the_interpreter(hosts):
    cluster = hosts("h1", "h2")
    cluster["h2"].without_package(interpreter=False)
    said = refused(cluster)
    assert "h2: " in said, said
    assert f"{sys.executable}: not found" in said or "No such file" in said, said


# The first words of an agent of another version, and then it waits for its order, as agents do.
PLAYED = """
import json, sys
hello = json.dumps({hello}).encode()
sys.stdout.buffer.write(b"farandole agent 1\\nH" + len(hello).to_bytes(8, "big") + hello)
sys.stdout.flush()
sys.stdin.read()
"""


def play(host, **changes):
    """Puts an agent in the place of the package of a host that says other things of itself."""
    import farandole

    version = farandole.__version__
    source = (
        Path(__file__).parents[2] / "crates" / "launcher" / "src" / "agent_protocol.rs"
    ).read_text()
    protocol = int(re.search(r"AGENT_PROTOCOL_VERSION: u32 = (\d+);", source)[1])
    hello = {"version": protocol, "farandole": version, "python": "3.11.7"}
    hello |= {"executable": sys.executable, "host": host.name}
    host.write("/run/played/__init__.py", "")
    host.write("/run/played/__main__.py", PLAYED.replace("{hello}", repr(hello | changes)))
    host.mount("/run/played", Path(farandole.__file__).parent)


def test_a_host_with_another_version_of_the_package(hosts):
    from farandole import __version__

    cluster = hosts("h1", "h2")
    play(cluster["h2"], farandole="0.0.9")
    said = refused(cluster)
    assert "h2: farandole 0.0.9 is installed there" in said, said
    assert f"and {__version__} here" in said, said


def test_a_host_whose_agent_speaks_another_language(hosts):
    cluster = hosts("h1", "h2")
    play(cluster["h2"], version=99)
    said = refused(cluster)
    assert "h2: another build of farandole " in said, said


def test_a_host_whose_interpreter_ends_without_a_word(hosts):
    cluster = hosts("h1", "h2")
    cluster["h2"].write("/run/python", "#!/bin/sh\nexit 3\n", mode=0o755)
    cluster["h2"].mount("/run/python", Path(sys.executable).resolve())
    said = refused(cluster)
    assert "h2: the connection ended with status 3" in said, said
