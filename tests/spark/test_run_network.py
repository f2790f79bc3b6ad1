# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Addresses and ports of a job: those that are offered, those that listen, and the error if no
worker can connect.
"""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest
from tests import sockets
from tests.spark.deployments import PATIENCE, drive

import farandole.spark
from farandole._native.registrar import Registrar
from farandole.spark.common.backend import LocalBackend

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 * PATIENCE, func_only=True)]


def reduce_and_list_ports():
    """The sum of all ranks, and the TCP ports on which this process listens."""
    import numpy as np

    import farandole.numpy as hvd

    hvd.init()
    total = float(hvd.allreduce(np.ones(1, dtype=np.float32), op=hvd.Sum)[0])
    return total, sorted(port for _, port in sockets.listening())


def a_range(width: int) -> tuple[int, int]:
    """Ports of which some are free."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        first = min(probe.getsockname()[1], 65535 - width)
    return first, first + width


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_the_driver_is_found_under_the_name_it_was_given(host, monkeypatch):
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    monkeypatch.setenv("FARANDOLE_DRIVER_HOST", host)
    with Registrar(1) as registrar:
        offered = {address.rpartition(":")[0].strip("[]") for address in registrar.addresses}
    assert offered == {host}
    assert LocalBackend(2, warm=False).run(lambda: 1) == [1, 1]


def test_driver_and_ranks_listen_within_the_range_of_ports_alone(spark, monkeypatch):
    first, last = a_range(200)
    ports = f"{first}-{last}"
    monkeypatch.setenv("FARANDOLE_PORT_RANGE", ports)
    with Registrar(1) as registrar:
        assert all(
            first <= int(address.rpartition(":")[2]) <= last for address in registrar.addresses
        )
    env = {"FARANDOLE_PORT_RANGE": ports, "FARANDOLE_SHARED_MEMORY": "0"}
    for total, listening in farandole.spark.run(reduce_and_list_ports, num_proc=2, env=env):
        assert total == 2.0
        assert listening
        assert all(first <= port <= last for port in listening), (listening, ports)


def test_driver_and_ranks_meet_by_ipv6_alone(monkeypatch):
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    monkeypatch.setenv("FARANDOLE_BIND_ADDRESS", "::1")
    with Registrar(1) as registrar:
        assert {address.rpartition(":")[0] for address in registrar.addresses} == {"[::1]"}
    env = {"FARANDOLE_BIND_ADDRESS": "::1", "FARANDOLE_SHARED_MEMORY": "0"}
    for total, _ in LocalBackend(2, env=env, warm=False).run(reduce_and_list_ports):
        assert total == 2.0


@pytest.mark.timing
def test_a_driver_that_no_task_can_reach_is_said_with_every_address_and_its_reason(tmp_path):
    # Tasks of a local master always call the loopback.
    body = """
import time

spark = session("local-cluster[2,1,1024]", executor_cores="1")
began = time.monotonic()
try:
    farandole.spark.run(lambda: 1, num_proc=2, start_timeout=20)
except farandole.spark.FarandoleJobError as error:
    print(error, f"\\ntold within the limit: {time.monotonic() - began < 20}")
spark.stop()
"""
    # An address of the network for documentation: nobody answers there.
    told = drive(body, tmp_path, 100, FARANDOLE_DRIVER_HOST="192.0.2.1").stdout
    assert re.search(r"task [01] on .* cannot reach the registrar of job", told), told
    assert "192.0.2.1:" in told
    assert "FARANDOLE_DRIVER_HOST" in told
    assert "told within the limit: True" in told


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["pyarrow", "farandole"])
def test_an_executor_without_a_package_causes_an_error_that_says_how_to_install_it(
    missing, tmp_path
):
    packages = tmp_path / "packages"
    packages.mkdir()
    for root in [Path(part) for part in sys.path if part.endswith("site-packages")]:
        for entry in root.iterdir():
            if not entry.name.startswith((missing, "__editable__", "farandole.pth")):
                (packages / entry.name).exists() or (packages / entry.name).symlink_to(entry)
    if missing != "farandole" and not (packages / "farandole").exists():
        # a checkout that a .pth names
        (packages / "farandole").symlink_to(Path(farandole.spark.__file__).parents[1])
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="{packages}:$PYTHONPATH"\nexec {sys.executable} -S "$@"\n'
    )
    python.chmod(0o755)
    body = """
spark = session("local[2]")
try:
    farandole.spark.run(print, num_proc=2)
except farandole.spark.FarandoleJobError as error:
    print(error.reason)
spark.stop()
"""
    done = drive(body, tmp_path, 100, PYSPARK_PYTHON=str(python))
    assert f"no module {missing!r}" in done.stdout, done.stdout + done.stderr[-2000:]
    assert "pip install 'farandole[spark]'" in done.stdout
