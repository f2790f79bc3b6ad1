# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`farandole.run` of an elastic job: results, exceptions, and hosts that an object of the caller
finds.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

import farandole
from farandole.common.exceptions import FarandoleEnvironmentError
from farandole.runner.elastic.discovery import FixedHosts, HostDiscovery, HostDiscoveryScript
from farandole.runner.errors import FarandoleJobError

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 60.0


def _train(folder, steps):
    import numpy as np

    import farandole.numpy as hvd
    from farandole.common.elastic import ObjectState, leave_and_join, run_fn

    def train(state):
        (folder / f"{hvd.rank()}-of-{hvd.size()}").write_text(str(os.getpid()))
        while (
            state.step < steps
            or not hvd.allreduce(np.array([float((folder / "enough").exists())]), op=hvd.Max)[0]
        ):
            state.step += 1
            time.sleep(0.02)
            state.commit()
        return hvd.rank(), hvd.size()

    hvd.init()
    return run_fn(train, leave_and_join)(ObjectState(hvd.broadcast_object, hvd.rank, step=0))


def _until(path: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


def _beside(work):
    """Runs beside the test; what it raises fails the test."""
    errors = []

    def run():
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_results_are_those_of_the_last_world(tmp_path, capsys):
    def kill():
        _until(tmp_path / "2-of-3")
        os.kill(int((tmp_path / "2-of-3").read_text()), signal.SIGKILL)
        _until(tmp_path / "1-of-2")
        (tmp_path / "enough").touch()

    thread, errors = _beside(kill)
    found = farandole.run(
        _train, (tmp_path, 0), num_proc=3, min_num_proc=2, cooldown_range=(600, 3600)
    )
    thread.join(LIMIT)
    assert not errors
    assert found == [(0, 2), (1, 2)]
    assert "rank 2 on localhost was ended by SIGKILL" in capsys.readouterr().err


@pytest.mark.parametrize("fixed", [True, False])
def test_an_object_finds_the_hosts(tmp_path, fixed):
    class Mine(HostDiscovery):
        slots = 1

        def find_available_hosts_and_slots(self):
            return {"localhost": self.slots}

    hosts = FixedHosts({"localhost": 1}) if fixed else Mine()

    def grow():
        _until(tmp_path / "0-of-1")
        if isinstance(hosts, FixedHosts):
            hosts.set({"localhost": 2})
        else:
            hosts.slots = 2
        _until(tmp_path / "1-of-2")
        (tmp_path / "enough").touch()

    thread, errors = _beside(grow)
    found = farandole.run(
        _train, (tmp_path, 0), num_proc=1, min_num_proc=1, host_discovery_script=hosts
    )
    thread.join(LIMIT)
    assert not errors
    assert found == [(0, 2), (1, 2)]


def test_an_object_that_fails_at_first_ends_the_job(tmp_path):
    class Broken(HostDiscovery):
        def find_available_hosts_and_slots(self):
            raise LookupError("no cloud")

    with pytest.raises(
        FarandoleEnvironmentError,
        match="find_available_hosts_and_slots failed: LookupError: no cloud",
    ):
        farandole.run(_train, (tmp_path, 0), num_proc=1, host_discovery_script=Broken())


def test_a_program_finds_the_hosts(tmp_path):
    (tmp_path / "enough").touch()
    found = farandole.run(
        _train, (tmp_path, 0), num_proc=2, host_discovery_script="echo localhost", slots=2
    )
    assert found == [(0, 2), (1, 2)]


def _fail():
    import farandole.numpy as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise LookupError("no such luck")
    hvd.allreduce(1.0)


def test_an_exception_comes_back_with_its_traceback():
    with pytest.raises(
        FarandoleJobError, match=r"rank 1 on localhost failed: LookupError: no such luck"
    ) as caught:
        farandole.run(_fail, num_proc=2, min_num_proc=2)
    assert isinstance(caught.value.__cause__, LookupError)
    assert "in _fail" in (caught.value.remote_traceback or "")


def test_too_few_slots_are_reported(tmp_path):
    with pytest.raises(FarandoleJobError, match=r"at least 2 workers.*localhost:1"):
        farandole.run(
            _train,
            (tmp_path, 0),
            num_proc=2,
            host_discovery_script=FixedHosts({"localhost": 1}),
            elastic_timeout=2,
        )


def test_arguments_that_contradict_each_other_are_refused():
    for wrong, message in [
        ({"max_num_proc": 2}, "so set min_num_proc, too"),
        (
            {"hosts": "a:1", "host_discovery_script": "find"},
            "hosts and host_discovery_script exclude each other",
        ),
        ({"num_proc": 2, "min_num_proc": 3}, r"--min-num-proc \(3\) is larger"),
        ({"min_num_proc": 1, "cooldown_range": (9, 5)}, "blacklist_cooldown_range must be"),
        ({"hosts": "localhost:1", "num_proc": 2, "min_num_proc": 1}, "more processes"),
    ]:
        with pytest.raises(ValueError, match=message):
            farandole.run(print, **wrong)
    with pytest.raises(TypeError, match="find_available_hosts_and_slots"):
        farandole.run(print, host_discovery_script=3)  # pyright: ignore[reportArgumentType]


def test_horovods_names_of_discovery(tmp_path):
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\necho a:2\necho\necho b\necho a:2\n")
    script.chmod(0o700)
    assert HostDiscoveryScript(script, 3).find_available_hosts_and_slots() == {"a": 2, "b": 3}
    with pytest.raises(ValueError, match="without slots: b"):
        HostDiscoveryScript(str(script), None).find_available_hosts_and_slots()
    script.write_text("#!/bin/sh\necho no >&2; exit 4\n")
    with pytest.raises(
        RuntimeError, match=r"Failed to execute discovery script: .*script\. Exit code: 4: no"
    ):
        HostDiscoveryScript(script, 1).find_available_hosts_and_slots()
