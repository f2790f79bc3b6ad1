# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A Spark cluster on several hosts. A model of Keras trains on two of them. The network is cut: the
driver from its executors, and one executor from all.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pyspark
import pytest
from tests.launch.namespace_cluster import JOB, SUBNET, readable, until
from tests.programs import program_path, program_text
from tests.sockets import listening

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PEER_TIMEOUT = 5.0
"""The default of FARANDOLE_PEER_TIMEOUT."""
STARTS = 240.0
"""The longest wait for JVMs, in seconds."""
CLASS = Path(pyspark.__path__[0]) / "bin" / "spark-class"

# Two executors on two hosts sum until a file is there. Each rank leaves its number and its process.
DRIVER = program_text(__file__, "sum_on_two_executors")


def start_spark_cluster(cluster, **env):
    """Starts a master and two workers, and returns the variables that a driver needs, too."""
    # By itself, Spark's master gives up silent workers after 60 s, also while the host that it
    # shares sleeps.
    env |= {"SPARK_MASTER_OPTS": "-Dspark.worker.timeout=240"}
    env |= {
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_DIRS": "/run/tmp",
        "SPARK_LOG_DIR": "/run/tmp",
    }
    env["JAVA_TOOL_OPTIONS"] = (
        "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData -Djava.io.tmpdir=/run/tmp"
    )
    head = cluster["head"]
    master = [
        "org.apache.spark.deploy.master.Master",
        "--host",
        "head",
        "--port",
        "7077",
        "--webui-port",
        "0",
    ]
    head.start(CLASS, *master, **env)
    until(lambda: any(port == 7077 for _, port in head.listening()), "Spark's master", STARTS)
    for name in ("h1", "h2"):
        own = [
            "--host",
            name,
            "--cores",
            "1",
            "--memory",
            "1g",
            "--webui-port",
            "0",
            "--work-dir",
            f"{JOB}/work",
        ]
        cluster[name].start(
            CLASS, "org.apache.spark.deploy.worker.Worker", *own, "spark://head:7077", **env
        )
    return env


def start_spark_job(cluster, start_timeout=60.0, **env):
    """A driver whose two ranks work on two hosts; the variables are those of the driver and its
    executors.
    """
    env = start_spark_cluster(cluster, **env)
    cluster.write("driver.py", DRIVER)
    driver = cluster["head"].start(sys.executable, "driver.py", str(start_timeout), **env)

    def works():
        told = ((cluster[name].root / "run/job/rank").exists() for name in ("h1", "h2"))
        return driver.process.poll() is not None or all(told)

    until(works, lambda: driver.output, STARTS)
    assert driver.process.poll() is None, driver.output
    return driver


def alive(host):
    """Returns whether the rank of a host still exists."""
    process, _ = host.read("rank").split()
    return host.run("test", "-d", f"/proc/{process}").returncode == 0


def test_a_model_of_keras_trains_on_two_hosts(hosts, tmp_path):
    cluster = hosts("h1", "h2")
    env = start_spark_cluster(cluster, KERAS_BACKEND="torch")
    program = program_path(__file__, "fit_keras_on_two_hosts")
    driver = cluster["head"].start(sys.executable, program, tmp_path, **env)
    assert driver.wait(STARTS) == 0, driver.output
    ranks = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank-*"))]
    assert sorted(rank["host"] for rank in ranks) == ["h1", "h2"]
    assert all(rank["size"] == 2 for rank in ranks)
    first, second = (rank["weights"] for rank in ranks)
    assert first == second
    assert first == pytest.approx([2.0, -3.0, 0.5], abs=0.05)


@pytest.mark.parametrize(("seconds", "peer_timeout"), [(3.0, PEER_TIMEOUT), (12.0, 30.0)])
def test_a_driver_that_is_cut_off_from_its_executors_for_less_than_the_peer_timeout_costs_nothing(
    hosts, seconds, peer_timeout
):
    cluster = hosts("h1", "h2")
    driver = start_spark_job(cluster, FARANDOLE_PEER_TIMEOUT=f"{peer_timeout:g}")
    cluster["head"].cut()
    with pytest.raises(AssertionError, match="still running"):
        driver.wait(seconds)
    assert alive(cluster["h1"])
    assert alive(cluster["h2"])
    cluster["head"].restore()
    for name in ("h1", "h2"):
        cluster[name].write("enough", "")
    assert driver.wait(60.0) == 0, driver.output
    assert "results [True, True]" in driver.lines, driver.output


@pytest.mark.parametrize("asleep", [False, True], ids=["stopped", "asleep"])
def test_a_driver_that_does_not_run_for_a_minute_costs_nothing(hosts, asleep):
    """Its processes are stopped. If its host sleeps, it does not answer either, which takes a
    longer peer timeout.
    """
    cluster, minute = hosts("h1", "h2"), 60.0
    driver = start_spark_job(
        cluster, FARANDOLE_PEER_TIMEOUT=f"{minute if asleep else PEER_TIMEOUT:g}"
    )
    head = cluster["head"]
    of_driver = [
        one.pid
        for one in head.processes()
        if "org.apache.spark.deploy.master.Master" not in one.argv
    ]
    if asleep:
        head.cut()
    for process in of_driver:
        os.kill(process, signal.SIGSTOP)
    try:
        with pytest.raises(AssertionError, match="still running"):
            driver.wait(minute)
    finally:
        head.restore()
        # the one that waits for the driver stops with it
        for process in (*of_driver, driver.process.pid):
            os.kill(process, signal.SIGCONT)
    for name in ("h1", "h2"):
        assert alive(cluster[name])
        cluster[name].write("enough", "")
    assert driver.wait(120.0) == 0, driver.output
    assert "results [True, True]" in driver.lines, driver.output
    assert "this process did not run for " in driver.output


def test_an_executor_that_is_cut_off_for_ever_is_named_and_the_job_waits_for_another(hosts):
    cluster = hosts("h1", "h2")
    driver = start_spark_job(cluster, start_timeout=30.0)
    lost = cluster["h2"].read("rank").split()[1]
    cluster["h2"].cut()
    until(
        lambda: not alive(cluster["h1"]) and not alive(cluster["h2"]),
        lambda: driver.output,
        3 * PEER_TIMEOUT,
    )
    # Spark gives the executor up after `spark.network.timeout`. The job's own limit ends it before.
    assert driver.wait(120.0) == 0, driver.output
    lost_task = rf"rank {lost} on h2\S*\) was lost: its agent was silent for 5.0 s"
    assert re.search(lost_task, driver.err.read_text()), driver.output
    (failed,) = (line for line in driver.lines if line.startswith("failed"))
    assert re.search(
        rf"TimeoutError .*after 30 s [01] of 2 tasks had registered.*{lost_task}", failed
    ), driver.output
    cluster["h2"].end()


def test_driver_and_ranks_listen_on_the_configured_address_and_ports(hosts):
    cluster = hosts("h1", "h2")
    driver = start_spark_job(
        cluster, FARANDOLE_BIND_ADDRESS=f"{SUBNET}.0/24", FARANDOLE_PORT_RANGE="41820-41859"
    )
    for host in cluster.hosts.values():
        # Spark's own JVMs listen as Spark is configured.
        ours = [process for process in host.processes() if "java" not in process.argv[0]]
        found = {
            (readable(address), port)
            for process in ours
            for address, port in listening(process.pid)
        }
        reachable = {(address, port) for address, port in found if address != "127.0.0.1"}
        assert reachable, f"the registrar, or links: {host.name}"
        assert all(
            address == host.address and port in range(41820, 41860) for address, port in reachable
        ), reachable
    for name in ("h1", "h2"):
        cluster[name].write("enough", "")
    assert driver.wait(60.0) == 0, driver.output
