# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Real starters: mpirun of Open MPI and of MPICH, srun and sbatch of a real Slurm, torchrun; and
mpi4py.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.launch import slurm as slurms
from tests.programs import program_path
from tests.started import PAGE, SUM, blocks, places, run, script, together, world

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.launch.slurm import Slurm
    from tests.started import Ended

DIGITS = str(Path(__file__).parents[2] / "examples" / "torch_digits.py")
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "4"]
HYDRA = ["mpiexec.hydra", "-np", "4"]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "4",
    "--no-python",
]
SRUN = ["srun", "-n", "4", "--overcommit"]
TRAINING = 240.0
"""Seconds for the example, with four processes on two busy cores."""


def need(program: str, package: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed (Debian: {package})")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    reason = slurms.missing()
    if reason is not None:
        pytest.skip(reason)
    with slurms.Slurm() as running:
        yield running


@pytest.fixture
def mpirun() -> list[str]:
    need("mpirun", "openmpi-bin")
    if "Open MPI" not in run(["mpirun", "--version"]).out:
        pytest.skip("mpirun is not Open MPI's")
    return MPIRUN


def trained(ended: Ended) -> str:
    """The line that rank 0 of the example has printed; one model has one."""
    assert ended.status == 0, ended.err
    lines = [line for line in ended.out.splitlines() if "accuracy" in line]
    assert len(lines) == 1, ended.out
    return lines[0]


@pytest.mark.slow
@pytest.mark.timeout(3 * TRAINING)
def test_all_starters_train_one_model_and_the_same(mpirun: list[str], slurm: Slurm) -> None:
    train = [sys.executable, DIGITS, "--epochs", "1", "--batch-size", "128", "--no-cuda"]
    told = {
        "mpirun": trained(run([*mpirun, *train], limit=TRAINING)),
        "torchrun": trained(run([*TORCHRUN, *train], limit=TRAINING)),
        "srun": trained(slurm.run(*SRUN, *train, limit=TRAINING)),
    }
    # Ranks are the starters', so all give each rank the same part of the data.
    assert len(set(told.values())) == 1, told


def test_mpirun_of_open_mpi(mpirun: list[str]) -> None:
    assert places(run([*mpirun, *script(SUM)])) == world(4)


def test_mpirun_of_mpich() -> None:
    need("mpiexec.hydra", "mpich")
    assert places(run([*HYDRA, *script(SUM)])) == world(4)
    # A shell between the starter and the rank.
    assert places(run([*HYDRA, "sh", "-c", f"{sys.executable} -c '{SUM}'; exit $?"])) == world(4)


@pytest.mark.parametrize("kind", ["none", "pmi2"])
def test_srun(slurm: Slurm, kind: str) -> None:
    assert places(slurm.run(*SRUN, f"--mpi={kind}", *script(SUM))) == world(4)


def test_srun_that_forwards_a_secret(slurm: Slurm, tmp_path: Path) -> None:
    folders = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": "/nowhere"}
    secret = {"FARANDOLE_JOB_SECRET": "a secret for tests only"}
    assert places(slurm.run(*SRUN, *script(SUM), **folders, **secret)) == world(4)
    assert list(tmp_path.iterdir()) == []


def test_torchrun_within_srun_is_what_counts(slurm: Slurm) -> None:
    inner = [*TORCHRUN[:-2], "2", "--no-python", *script(SUM)]
    assert places(slurm.run("srun", "-n", "1", *inner)) == world(2)


def batch(slurm: Slurm, *lines: str) -> Ended:
    """Runs a batch script to its end."""
    path, out, err = (slurm.folder / f"batch.{name}" for name in ("sh", "out", "err"))
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    command = ["sbatch", "-W", "-n", "4", "--overcommit", "-o", str(out), "-e", str(err), str(path)]
    ended = slurm.run(*command, limit=TRAINING)
    return type(ended)(ended.status, out.read_text(), err.read_text())


def test_a_batch_script_starts_ranks_by_srun_or_mpirun_and_is_none_itself(
    slurm: Slurm, mpirun: list[str]
) -> None:
    code = slurm.folder / "sum.py"
    code.write_text(SUM)
    python = f"{sys.executable} {code}"
    assert places(batch(slurm, f"srun --overcommit {python}")) == world(4)
    assert places(batch(slurm, f"{' '.join(mpirun)} {python}")) == world(4)
    alone = batch(slurm, python)
    assert alone.place == world(1)[0]
    assert "start it as srun python" in alone.err


@pytest.mark.parametrize("starter", ["mpirun", "mpich", "srun", "torchrun"])
def test_without_a_way_to_meet_a_job_fails_with_a_message(
    starter: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    nowhere = {"FARANDOLE_RENDEZVOUS": str(tmp_path / "missing")}
    if starter == "mpirun":
        ended = run([*request.getfixturevalue("mpirun"), *script(SUM)], nowhere)
    elif starter == "mpich":
        need("mpiexec.hydra", "mpich")
        ended = run([*HYDRA, *script(SUM)], nowhere)
    elif starter == "srun":
        ended = request.getfixturevalue("slurm").run(*SRUN, *script(SUM), **nowhere)
    else:
        ended = run([*TORCHRUN, *script(SUM)], nowhere)
    assert ended.status != 0
    assert "place" not in ended.out
    assert "FARANDOLE_RENDEZVOUS must be a directory that is there" in ended.err, ended.err


def test_a_rank_that_srun_does_not_start_is_named(slurm: Slurm) -> None:
    code = "import os, sys\nif os.environ['SLURM_PROCID'] == '2': sys.exit(0)\n" + SUM
    ended = slurm.run(*SRUN, *script(code), FARANDOLE_START_TIMEOUT="6")
    assert ended.status != 0
    assert "place" not in ended.out
    assert "of 4, started by srun, waited for all ranks to come, 1 missing: [2]" in ended.err, (
        ended.err
    )


COMMUNICATORS = program_path(__file__, "join_mpi_communicators")


def test_communicators_of_mpi4py_form_worlds(mpirun: list[str]) -> None:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    assert places(run([*mpirun, *script(COMMUNICATORS)])) == world(4)


@pytest.mark.slow
@pytest.mark.timeout(3 * TRAINING)
def test_the_pages_batch_script_and_communicators_work(
    slurm: Slurm, mpirun: list[str], tmp_path: Path
) -> None:
    train, communicator = blocks(PAGE, "python")
    (slurm.folder / "train.py").write_text(train)
    script_of_page = next(piece for piece in blocks(PAGE, "sh") if "#SBATCH --ntasks=4" in piece)
    path = f"PATH={Path(sys.executable).parent}:$PATH"
    ended = batch(slurm, path, *script_of_page.splitlines()[1:])
    assert ended.out.startswith("4 processes trained one model: "), ended.err
    if importlib.util.find_spec("mpi4py") is not None:
        (tmp_path / "communicator.py").write_text(communicator)
        ended = run([*mpirun, sys.executable, str(tmp_path / "communicator.py")], limit=TRAINING)
        assert ended.out.split("\n") == ["a world of 2", "a world of 2", ""], ended.err


class Namespaces:
    """Two hosts, as far as names and shared memory go."""

    def __init__(self) -> None:
        self.held = []
        for name in ("one", "two"):
            hold = [
                "unshare",
                "--uts",
                "--ipc",
                "sh",
                "-c",
                f"hostname {name} && echo up && exec cat",
            ]
            process = subprocess.Popen(
                hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self.held.append(process)
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"

    def prefixes(self, hosts: str) -> list[list[str]]:
        """Returns for each host the command prefix that runs a program on it, by the hosts'
        numbers.
        """
        return [
            ["nsenter", "--target", str(self.held[int(host)].pid), "--uts", "--ipc", "--"]
            for host in hosts
        ]

    def close(self) -> None:
        for process in self.held:
            process.communicate()


@pytest.fixture
def hosts() -> Iterator[Namespaces]:
    if os.geteuid() != 0:
        pytest.skip("hosts that are namespaces need root")
    two = Namespaces()
    yield two
    two.close()


@pytest.mark.parametrize("by", ["home", "secret"])
def test_ranks_that_mpirun_deals_out_by_node_keep_their_numbers_on_two_hosts(
    hosts: Namespaces, tmp_path: Path, by: str
) -> None:
    meeting = {"HOME": str(tmp_path)}
    if by == "secret":
        meeting = {
            "HOME": "/nowhere",
            "FARANDOLE_JOB_SECRET": "a secret for tests only",
            "MASTER_ADDR": "127.0.0.1",
        }
    # As with `mpirun --map-by node`: even ranks on the first host.
    ranks = [
        {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_NAMESPACE": f"test-{os.getpid()}",
            **meeting,
        }
        for rank in range(4)
    ]
    ended = together(ranks, prefixes=hosts.prefixes("0101"))
    assert [one.place for one in ended] == [
        [rank, 4, rank // 2, 2, rank % 2, 2, 15] for rank in range(4)
    ]
    if by == "home":
        assert [path.name for path in tmp_path.iterdir()] == [".farandole"]
        assert list((tmp_path / ".farandole").iterdir()) == []
