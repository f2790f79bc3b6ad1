# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`farandole run` and `horovodrun`: hosts, files of output, configuration files, Ctrl-C, as a
terminal sees them.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMPAT = Path(__file__).parents[2] / "python" / "horovod-compat"
COMMANDS = {
    "farandole": [sys.executable, "-m", "farandole", "run"],
    "horovodrun": [
        sys.executable,
        "-c",
        "import sys; from horovod._command import main; sys.exit(main())",
    ],
}
RANKS = ["python", "-c", "import os; print(os.environ['RANK'], os.environ['HOROVOD_SIZE'])"]


@pytest.fixture(params=sorted(COMMANDS))
def command(request):
    def run(*words, **variables):
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(
                [*filter(None, [os.environ.get("PYTHONPATH")]), str(COMPAT)]
            )
        }
        words = [sys.executable if word == "python" else str(word) for word in words]
        return subprocess.run(
            [*COMMANDS[request.param], *words],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
            env=env | variables,
        )

    run.called = request.param
    return run


def test_horovods_first_command_starts_two_ranks(command):
    done = command("-np", "2", "-H", "localhost:4", *RANKS)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:0 2", "[1]<stdout>:1 2"]


def test_hosts_without_a_number_fill_their_slots_and_too_few_are_refused(command):
    done = command("-H", "localhost:3", *RANKS)
    assert len(done.stdout.splitlines()) == 3, done.stderr
    done = command("-np", "3", "-H", "localhost:2", *RANKS)
    assert done.returncode == 1
    assert (
        "Requested more processes (3) than there are available slots (2): localhost has 2"
        in done.stderr
    )
    assert done.stderr.startswith(f"{command.called}: ")


def test_output_goes_to_files_and_lines_may_have_the_time(command, tmp_path):
    done = command("-np", "2", "--output-filename", tmp_path / "out", "-prefix-timestamp", *RANKS)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert re.fullmatch(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\[\d\]<stdout>:\d 2", line), (
            line
        )
    for rank in (0, 1):
        assert (tmp_path / "out" / f"rank.{rank}" / "stdout").read_text() == f"{rank} 2\n"
        assert (tmp_path / "out" / f"rank.{rank}" / "stderr").read_text() == ""
    (tmp_path / "file").touch()
    done = command("-np", "1", "--output-filename", tmp_path / "file", "touch", tmp_path / "ran")
    assert done.returncode == 1
    assert "cannot write the output of rank 0" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_flag_wins_over_the_file_and_the_file_over_the_variable(command, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "params: {cache_capacity: 7, cycle_time_ms: 3}\nstall_check: {warning_time_seconds: 9}\n"
        "z: {y: 1}\n"
    )
    show = "import os; print(*[os.environ.get('FARANDOLE_' + name) for name in "
    show += "('CACHE_CAPACITY', 'STALL_CHECK_TIME_SECONDS', 'FUSION_THRESHOLD')])"
    words = ["-np", "1", "--config-file", file, "--cache-capacity", "8", "python", "-c", show]
    done = command(*words, FARANDOLE_CACHE_CAPACITY="1", FARANDOLE_FUSION_THRESHOLD="2MiB")
    assert done.stdout == "[0]<stdout>:8 9 2MiB\n", done.stderr
    assert (
        f"{file}: params.cycle_time_ms means nothing here: the engine has no cycles" in done.stderr
    )
    assert "no such key, z.y is ignored" in done.stderr


def test_ignored_variables_are_named_once_and_unknown_ones_with_the_nearest_name(command):
    done = command("-np", "1", "--gloo", "--tcp", "--mpi-args", "-x A", "true")
    assert done.returncode == 0
    assert [done.stderr.count(flag) for flag in ("--gloo ", "--tcp ", "--mpi-args ")] == [1, 1, 1]
    done = command("-np", "1", "--fusion-treshold-mb", "3", "true")
    assert done.returncode == 2
    assert "--fusion-threshold-mb" in done.stderr


def test_variables_of_horovods_that_mean_nothing_are_said_once(command):
    done = command("-np", "2", "true", HOROVOD_CYCLE_TIME="5", HOROVOD_HIERARCHICAL_ALLREDUCE="0")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("HOROVOD_CYCLE_TIME means nothing here: the engine has no cycles") == 1
    assert "HIERARCHICAL" not in done.stderr


def test_check_build_has_horovods_form(command):
    done = command("-cb")
    assert done.returncode == 0
    assert "Available Frameworks:\n    [X] TensorFlow\n" in done.stdout
    assert "    [ ] MPI\n" in done.stdout


def test_an_interface_is_a_network_to_listen_in(command):
    show = (
        "import os; print(os.environ['FARANDOLE_BIND_ADDRESS'], os.environ['NCCL_SOCKET_IFNAME'])"
    )
    done = command("-np", "1", "--network-interfaces", "lo", "python", "-c", show)
    assert done.stdout == "[0]<stdout>:127.0.0.0/8 lo\n", done.stderr


def test_an_interface_that_this_host_lacks_is_left_out_with_a_warning(command):
    show = "import os; print(os.environ['FARANDOLE_BIND_ADDRESS'])"
    done = command("-np", "1", "--network-interfaces", "no0,lo", "python", "-c", show)
    assert done.stdout == "[0]<stdout>:127.0.0.0/8\n", done.stderr
    told = "--network-interfaces: no network on this host, so it is not used: no0 (used: 127.0.0"
    assert told in done.stderr


def test_a_job_of_several_ranks_says_where_each_runs_when_asked(command):
    done = command("-np", "2", "--verbose", "sh", "-c", "exit $RANK")
    assert done.returncode == 1
    for told in (
        "starting 2 processes of sh -c exit $RANK",
        "rank 1 is local rank 1 on ",
        "rank 1 exited with code 1",
    ):
        assert told in done.stderr


@pytest.fixture
def silent(tmp_path):
    """A program that never reaches a host."""
    program = tmp_path / "silent"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    return ["-H", "localhost:1,silent:1", "--ssh-command", str(program)]


def test_a_host_that_never_answers_is_named_when_the_time_to_start_is_over(command, silent):
    began = time.monotonic()
    done = command(*silent, "--start-timeout", "1", "true")
    assert done.returncode == 1
    assert re.search(r"silent: it has not answered within \d+\.\ds$", done.stderr), done.stderr
    assert time.monotonic() - began < 30


def test_ctrl_c_does_not_wait_for_a_host_that_has_not_answered(silent):
    words = [*COMMANDS["farandole"], *silent, "--verbose", "true"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as job:
        assert "starting 2 processes" in job.stderr.readline()
        job.send_signal(signal.SIGINT)
        assert job.wait(60) == 130


@pytest.mark.parametrize("polite", [True, False])
@pytest.mark.timing
def test_ctrl_c_leaves_time_for_a_last_checkpoint_and_a_second_one_does_not(tmp_path, polite):
    script = (
        f"import os, pathlib, time\nfolder = pathlib.Path({str(tmp_path)!r})\n"
        "folder.joinpath('at' + os.environ['RANK']).touch()\n"
        "while True:\n    try:\n        time.sleep(600)\n    except KeyboardInterrupt:\n"
        f"        folder.joinpath('asked' + os.environ['RANK']).touch()\n        if {polite}: "
        "raise SystemExit(0)\n"
    )
    words = [*COMMANDS["farandole"], "-np", "2", sys.executable, "-c", script]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as job:
        _until(lambda: len(list(tmp_path.glob("at*"))) == 2)
        job.send_signal(signal.SIGINT)
        _until(lambda: len(list(tmp_path.glob("asked*"))) == 2)
        if not polite:
            job.send_signal(signal.SIGINT)
        # A kill does not wait for the grace of the first Ctrl-C.
        assert job.wait(8) == 130
        assert "interrupted" in job.stderr.read()


def _until(true, seconds=60):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
