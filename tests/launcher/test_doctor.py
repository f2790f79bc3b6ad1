# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`farandole doctor` and the command's outside."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import farandole

if TYPE_CHECKING:
    from pathlib import Path


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "farandole", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **variables},
    )


def test_doctor_tries_links_and_launching_and_imports_no_framework() -> None:
    ended = command("doctor")
    for works in (
        "[X] PyTorch",
        "[X] shared memory",
        "[X] TCP",
        "[X] registrar",
        "[X] worker processes",
    ):
        assert works in ended.stdout
    assert ended.stdout.endswith("Problems\n    none\n"), ended.stdout
    assert ended.returncode == 0


def test_doctor_finds_a_framework_whatever_its_distribution_is_called(tmp_path: Path) -> None:
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("raise SystemExit('doctor imports nothing')\n")
    information = tmp_path / "my_own_jax-7.8.9.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: my_own_jax\nVersion: 7.8.9\n"
    )
    (information / "RECORD").write_text("jax/__init__.py,,\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    ended = command("doctor", PYTHONPATH=path)
    [line] = [line for line in ended.stdout.splitlines() if "] JAX " in line]
    assert line.startswith("    [X] JAX")
    assert "7.8.9 (my-own-jax)" in line


def test_doctor_reports_how_it_would_launch_here_and_its_own_launcher(tmp_path: Path) -> None:
    plain = command("doctor").stdout
    section = plain.partition("Launching here\n")[2].partition("\n\n")[0]
    assert "launcher        none" in section, plain
    assert "ssh" in section, plain
    assert "this process" in section, plain
    (tmp_path / "nodes").write_text("one\none\ntwo\n")
    inside = command(
        "doctor", PBS_JOBID="7", PBS_NODEFILE=str(tmp_path / "nodes"), OMPI_COMM_WORLD_RANK="3"
    ).stdout
    assert "launcher        PBS: 2 hosts with 3 slots\n" in inside
    assert "hosts           one:2,two:1\n" in inside
    assert "reached by      ssh\n" in inside
    assert "mpirun of Open MPI (OMPI_COMM_WORLD_RANK=3)" in inside


def test_a_batch_systems_file_that_is_missing_is_a_problem(tmp_path: Path) -> None:
    ended = command("doctor", PBS_JOBID="7", PBS_NODEFILE=str(tmp_path / "gone"))
    assert ended.returncode == 1
    assert "PBS_NODEFILE" in ended.stdout.partition("\nProblems\n")[2]


def test_a_variable_that_cannot_be_read_is_one_problem() -> None:
    ended = command("doctor", FARANDOLE_FUSION_THRESHOLD="much")
    assert ended.returncode == 1
    problems = ended.stdout.partition("\nProblems\n")[2].splitlines()
    assert len(problems) == 1, problems
    assert "FARANDOLE_FUSION_THRESHOLD must be " in problems[0]


def test_the_command_is_called_by_its_name_however_it_was_started() -> None:
    told = command()
    assert "Usage: farandole <COMMAND>" in told.stdout + told.stderr


def test_the_version_is_the_packages() -> None:
    assert command("--version").stdout == f"farandole {farandole.__version__}\n"


def test_a_command_line_that_makes_no_sense_is_refused_with_status_2() -> None:
    ended = command("run", "-np", "1", "--no-such-flag", "true")
    assert ended.returncode == 2
    assert "--no-such-flag" in ended.stderr


def test_doctor_and_run_find_the_hosts_of_clouds_and_only_the_first_one_launches(
    tmp_path: Path,
) -> None:
    sky = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": "4"}
    first = command("doctor", **sky, SKYPILOT_NODE_RANK="0").stdout
    assert "launcher        SkyPilot: 2 hosts with 8 slots\n" in first
    refused = command("run", "true", **sky, SKYPILOT_NODE_RANK="1")
    assert refused.returncode != 0
    assert "SKYPILOT_NODE_RANK" in refused.stderr
    named = command("run", "-H", "localhost:1", "true", **sky, SKYPILOT_NODE_RANK="1")
    assert named.returncode == 0, named.stderr
    (tmp_path / "resourceconfig.json").write_text(
        '{"current_host": "algo-1", "hosts": ["algo-1", "algo-2"]}'
    )
    told = command("doctor", SM_INPUT_CONFIG_DIR=str(tmp_path)).stdout
    assert "launcher        SageMaker: 2 hosts with 2 slots\n" in told
    contradiction = command("doctor", SM_INPUT_CONFIG_DIR=str(tmp_path), SM_HOSTS='["algo-7"]')
    assert contradiction.returncode == 1
    problems = contradiction.stdout.partition("\nProblems\n")[2]
    assert "SM_HOSTS" in problems
    assert f"{tmp_path}/resourceconfig.json" in problems
