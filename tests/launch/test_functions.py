# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`farandole.run` of a function on several hosts: results and exceptions come back, interpreters
must be alike.
"""

from __future__ import annotations

import json
import platform
import signal
import sys

import pytest
from tests.launch.test_unfit_hosts import play
from tests.programs import program_text

pytestmark = pytest.mark.slow

# A user's script on the launcher's host alone: its functions travel.
DRIVER = program_text(__file__, "run_functions_on_hosts")


def driven(cluster, how):
    """Returns the output of the script's end."""
    cluster["head"].write("driver.py", DRIVER)
    done = cluster["head"].run(sys.executable, "driver.py", how, "h1:2,h2:2")
    assert done.returncode == 0, done.stderr
    cluster.until_quiet(5.0)
    return json.loads(done.stdout.splitlines()[-1])


def test_results_of_all_hosts_come_back_by_rank(hosts):
    cluster = hosts("h1", "h2")
    assert driven(cluster, "world") == [
        [("h1", "h1", "h2", "h2")[rank], rank, [60.0] * 3] for rank in range(4)
    ]


def test_an_exception_comes_back_with_its_rank_host_and_traceback(hosts):
    cluster = hosts("h1", "h2")
    told = driven(cluster, "failing")
    assert "rank 3 on h2" in told["error"], told
    assert told["cause"] == "LookupError('no digits on this host')"
    assert "in failing" in told["remote"], told


def test_a_host_with_another_python_is_named_with_both_versions(hosts):
    # This machine has one minor version alone: an agent that says so plays the other one.
    cluster = hosts("h1", "h2")
    play(cluster["h2"], python="3.8.10")
    told = driven(cluster, "world")
    assert told["error"].startswith("h2: Python 3.8.10 runs there"), told
    assert f"and {platform.python_version()} here" in told["error"], told


def test_a_driver_that_is_killed_leaves_nothing(hosts):
    cluster = hosts("h1", "h2")
    cluster["head"].write("driver.py", DRIVER)
    running = cluster["head"].start(sys.executable, "driver.py", "waiting", "head:1,h1:2,h2:1")
    running.until(*(f"[{rank}]<stdout>:up {rank}" for rank in range(4)))
    running.send(signal.SIGKILL)
    cluster.until_quiet(10.0)
