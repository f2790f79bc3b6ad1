# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`farandole.run` with hosts: a script stands for ssh and runs everything here. Real hosts are
in tests/launch.
"""

import os
import platform
import sys
import time
from pathlib import Path

import pytest

import farandole
from farandole.runner.errors import FarandoleJobError


@pytest.fixture
def reach(tmp_path):
    """A program that "reaches" every host but those called down, and says which by HOST."""
    script = tmp_path / "reach"
    script.write_text(
        "#!/bin/sh\nhost=$1; shift\n"
        'case $host in down*) echo "reach: no route to $host" >&2; exit 255;; silent*) exec sleep '
        "600;; esac\n"
        'echo "Last login: today"; HOST=$host exec sh -c "$*"\n'
    )
    script.chmod(0o700)
    return str(script)


def _where():
    import farandole.numpy as fn

    fn.init()
    return (
        os.environ.get("HOST"),
        os.environ["GIVEN"],
        fn.rank(),
        float(fn.allreduce(1.0, op=fn.Sum)),
    )


def test_a_function_runs_on_every_host_in_the_order_of_slots(reach):
    found = farandole.run(
        _where,
        num_proc=4,
        hosts="localhost:1,far1:2,far2:4",
        ssh_command=reach,
        env={"GIVEN": "x y"},
    )
    assert found == [
        (host, "x y", rank, 4.0) for rank, host in enumerate([None, "far1", "far1", "far2"])
    ]


def _fail():
    if os.environ["RANK"] == "1":
        raise LookupError("no such luck")
    time.sleep(600)


def test_an_exception_on_another_host_comes_back_with_its_traceback(reach):
    with pytest.raises(
        FarandoleJobError, match=r"rank 1 on far failed: LookupError: no such luck"
    ) as caught:
        farandole.run(_fail, num_proc=2, hosts="localhost:1,far:1", ssh_command=reach)
    assert isinstance(caught.value.__cause__, LookupError)
    assert "in _fail" in (caught.value.remote_traceback or "")


def test_a_host_that_cannot_be_reached_is_named_before_anything_runs(reach, tmp_path):
    ran = tmp_path / "ran"
    with pytest.raises(
        FarandoleJobError, match=r"^2 hosts cannot be used: down: reach: no route to down; down2: "
    ) as caught:
        farandole.run(
            ran.touch, num_proc=4, hosts="localhost:1,far:1,down:1,down2:1", ssh_command=reach
        )
    assert not ran.exists()
    assert caught.value.host == "down"


def test_a_host_that_never_answers_is_named(reach):
    hosts = "localhost:1,silent1:1,silent2:1"
    with pytest.raises(TimeoutError, match=r"no answer has come from silent1, silent2$"):
        farandole.run(os.getpid, num_proc=3, hosts=hosts, ssh_command=reach, start_timeout=1)


def _early():
    if os.environ["RANK"] == "1":
        return "early"
    import farandole.numpy as fn

    fn.init()
    return "late"


def test_a_function_that_returns_without_init_is_named_to_the_ranks_that_wait_for_it():
    with pytest.raises(
        FarandoleJobError,
        match=r"rank 0 on .* failed: .*: rank 1 on .* has ended, and no world can",
    ):
        farandole.run(_early, num_proc=2)


def test_the_start_timeout_is_that_of_the_workers_too():
    assert farandole.run(os.getenv, ("FARANDOLE_START_TIMEOUT",), num_proc=1, start_timeout=70) == [
        "70.0"
    ]


def test_another_interpreter_is_refused_with_both_versions(reach, tmp_path):
    other = tmp_path / "python"
    # An interpreter that says it is another one; all else of it is this one's.
    other.write_text(
        f"#!{sys.executable}\nimport platform, sys\nplatform.python_version = lambda: '3.99.1'\n"
        "import farandole.__main__\nsys.argv[1:] = sys.argv[3:]\n"
        "sys.exit(farandole.__main__.main())\n"
    )
    other.chmod(0o700)
    with pytest.raises(
        FarandoleJobError,
        match=rf"Python 3\.99\.1 runs there .*, and {platform.python_version()} here",
    ):
        farandole.run(
            os.getpid, num_proc=1, hosts="far:1", ssh_command=reach, executable=str(other)
        )


def test_output_goes_to_files_of_each_rank_too(reach, tmp_path, capfd):
    folder = tmp_path / "out"
    farandole.run(
        print, args=("hello",), num_proc=2, hosts="far:2", ssh_command=reach, output_filename=folder
    )
    assert [(folder / f"rank.{rank}" / "stdout").read_text() for rank in (0, 1)] == [
        "hello\n",
        "hello\n",
    ]
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0]<stdout>:hello", "[1]<stdout>:hello"]


def test_a_host_file_and_too_few_slots(reach, tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# two hosts\nfar1 slots=1\n\nfar2\n")
    run = {"num_proc": 2, "hostfile": hostfile, "ssh_command": reach}
    assert farandole.run(os.getenv, args=("HOST",), **run) == ["far1", "far2"]
    with pytest.raises(FileNotFoundError, match=r"cannot read the host file .*gone"):
        farandole.run(os.getpid, hostfile=tmp_path / "gone")
    with pytest.raises(
        ValueError, match=r"Requested more processes \(3\) than there are available slots \(2\)"
    ):
        farandole.run(os.getenv, args=("HOST",), **run | {"num_proc": 3})


def test_arguments_that_contradict_are_wrong_or_mean_nothing():
    with pytest.raises(ValueError, match="hosts and hostfile exclude each other"):
        farandole.run(os.getpid, hosts="a:1", hostfile="b")
    with pytest.raises(ValueError, match="use_gloo and use_mpi exclude each other"):
        farandole.run(os.getpid, use_gloo=True, use_mpi=True)
    with pytest.raises(ValueError, match=r"no0 \(those with one"):
        farandole.run(os.getpid, network_interfaces=["no0"])
    with pytest.warns(UserWarning, match="mpi_args='-x' means nothing here"):
        farandole.run(os.getpid, mpi_args="-x")
    with pytest.warns(DeprecationWarning, match="np is deprecated, use num_proc"):
        assert len(farandole.run(os.getpid, np=2)) == 2


def test_an_interface_is_a_network_that_all_listen_in():
    bound = farandole.run(os.getenv, args=("FARANDOLE_BIND_ADDRESS",), network_interfaces="lo")
    assert bound == ["127.0.0.0/8"]
    run = {"args": ("FARANDOLE_BIND_ADDRESS",), "network_interfaces": ["lo", "no0"]}
    with pytest.warns(UserWarning, match=r"network_interfaces: .* not used: no0 \(used: 127"):
        assert farandole.run(os.getenv, **run) == ["127.0.0.0/8"]


def test_a_batch_job_gives_hosts_and_slots(tmp_path, monkeypatch, reach):
    nodes = tmp_path / "nodes"
    nodes.write_text("far1\nfar1\nfar2\n")
    monkeypatch.setenv("PBS_JOBID", "7")
    monkeypatch.setenv("PBS_NODEFILE", str(nodes))
    assert farandole.run(os.getenv, args=("HOST",), num_proc=3, ssh_command=reach) == [
        "far1",
        "far1",
        "far2",
    ]


def test_nothing_of_a_host_is_left_when_the_driver_is_killed(reach, tmp_path):
    pids = tmp_path / "pids"
    pids.mkdir()
    script = (
        "import farandole, os, time\n"
        f"def work():\n    open({str(pids)!r} + '/' + str(os.getpid()), 'w').close()\n    "
        "time.sleep(600)\n"
        f"farandole.run(work, num_proc=2, hosts='far1:1,far2:1', ssh_command={reach!r})\n"
    )
    driver = os.posix_spawn(sys.executable, [sys.executable, "-c", script], dict(os.environ))
    _until(lambda: len(list(pids.iterdir())) == 2)
    os.kill(driver, 9)
    os.waitpid(driver, 0)
    _until(lambda: not any(Path(f"/proc/{one.name}").exists() for one in pids.iterdir()))


def _until(true, seconds=30):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
