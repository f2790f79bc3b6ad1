# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Hosts that can run nothing are named with the reason before anything starts anywhere."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from tests.launch.bed import HOME

pytestmark = pytest.mark.slow


def refused(bed, *arguments, limit=15.0, **env):
    """What the launcher says when it starts nothing, within a time."""
    bed.write("start.py", "open('started', 'w').close()")
    began = time.monotonic()
    names = ",".join(f"{name}:1" for name in bed.hosts if name != "head")
    size = len(bed.hosts) - 1
    done = bed.launched("-np", size, "-H", names, *arguments, sys.executable, "start.py", **env)
    took = time.monotonic() - began
    assert done.returncode != 0, done.stdout
    assert took < limit, (took, done.stderr)
    assert "Traceback" not in done.stderr
    bed.until_quiet(5.0)
    assert not any((host.root / "run/job/started").exists() for host in bed.hosts.values() if host.root.exists())
    return done.stderr


def test_a_host_without_power(hosts):
    bed = hosts("h1", "h2")
    bed["h2"].power_off()
    said = refused(bed, "--start-timeout", 5)
    assert "h2: ssh: connect to host h2 port 22: " in said, said
    assert "h1: " not in said, said


def test_hosts_are_checked_side_by_side_and_all_that_fail_are_named(hosts):
    bed = hosts("h1", "h2", "h3", "h4")
    for name in ("h2", "h3", "h4"):
        bed[name].power_off()
    # One after the other would be three times 4 s.
    said = refused(bed, "--start-timeout", 4, limit=9.0)
    for name in ("h2", "h3", "h4"):
        assert f"{name}: ssh: connect to host {name} port 22: " in said, said


def test_a_name_that_nobody_knows(hosts):
    bed = hosts("h1")
    done = bed.launched("-np", 2, "-H", "h1:1,h9:1", sys.executable, "-c", "pass")
    assert done.returncode != 0
    assert "h9: ssh: Could not resolve hostname h9" in done.stderr


def test_a_host_that_does_not_take_the_key(hosts):
    bed = hosts("h1", "h2")
    bed["h2"].write(f"{HOME}/.ssh/authorized_keys", "", mode=0o600)
    said = refused(bed)
    assert "h2: " in said, said
    assert "Permission denied (publickey)" in said, said


def test_a_host_whose_key_is_not_known(hosts):
    bed = hosts("h1", "h2")
    known = (line for line in bed["head"].read(f"{HOME}/.ssh/known_hosts").splitlines() if not line.startswith("h2 "))
    bed["head"].write(f"{HOME}/.ssh/known_hosts", "\n".join(known) + "\n", mode=0o600)
    # Its address is still in the file: the name alone decides.
    said = refused(bed, "--ssh-command", "ssh -o CheckHostIP=no")
    assert "h2: " in said, said
    assert "Host key verification failed" in said, said


def test_a_host_without_the_package(hosts):
    bed = hosts("h1", "h2")
    bed["h2"].without_package()
    said = refused(bed)
    assert f"h2: {sys.executable}: No module named farandole" in said, said


def test_a_host_without_the_interpreter(hosts):
    bed = hosts("h1", "h2")
    bed["h2"].without_package(interpreter=False)
    said = refused(bed)
    assert "h2: " in said, said
    assert f"{sys.executable}: not found" in said or "No such file" in said, said


def patched(bed, host, old, new):
    """Gives a host a copy of the package whose library says another version of the same length."""
    import farandole

    folder = Path(farandole.__file__).parent
    library = (folder / "_native.abi3.so").read_bytes()
    assert len(old) == len(new)
    assert library.count(old.encode()) > 0
    copy = host.root / "run/native.so"
    copy.write_bytes(library.replace(old.encode(), new.encode()))
    host.mount("/run/native.so", folder / "_native.abi3.so")


def test_a_host_with_another_version_of_the_package(hosts):
    from farandole import __version__

    bed = hosts("h1", "h2")
    other = __version__[:-1] + ("9" if __version__[-1] != "9" else "8")
    patched(bed, bed["h2"], __version__, other)
    said = refused(bed)
    assert "h2: " in said, said
    assert other in said, said
    assert __version__ in said, said


def test_a_host_whose_interpreter_ends_without_a_word(hosts):
    bed = hosts("h1", "h2")
    bed["h2"].write("/run/python", "#!/bin/sh\nexit 3\n", mode=0o755)
    bed["h2"].mount("/run/python", Path(sys.executable).resolve())
    said = refused(bed)
    assert "h2: the connection ended with status 3" in said, said
