# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Processes of a foreign starter, with the variables that it sets: they meet, or they fail."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.programs import program_path
from tests.started import PAGE, SUM, blocks, environment, places, run, together, world

from farandole._native import registrar


def horovod(rank: int, size: int, **extra: str) -> dict[str, str]:
    """Horovod's own variables of a rank on one host."""
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_SIZE": str(size),
        **extra,
    }


def openmpi(rank: int, size: int) -> dict[str, str]:
    names = {"RANK": rank, "SIZE": size, "LOCAL_SIZE": size}
    own = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}
    return {**own, "PMIX_RANK": str(rank), "PMIX_NAMESPACE": f"test-{os.getpid()}"}


def hydra(rank: int, size: int) -> dict[str, str]:
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), "MPI_LOCALNRANKS": str(size)}


def slurm(rank: int, size: int) -> dict[str, str]:
    step = {"SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_ID": "0"}
    return {
        **step,
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "64",
        "SLURM_JOB_ID": f"9{os.getpid()}",
    }


def jsrun(rank: int, size: int) -> dict[str, str]:
    names = {"RANK": rank, "SIZE": size, "LOCAL_SIZE": size}
    return {
        "LSB_JOBID": f"8{os.getpid()}",
        **{f"JSM_NAMESPACE_{name}": str(value) for name, value in names.items()},
    }


def by_hand(rank: int, size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(os.getpid()),
    }


@pytest.mark.parametrize("variables", [horovod, openmpi, hydra, slurm, jsrun, by_hand])
def test_ranks_that_a_starter_has_numbered_form_one_world(variables) -> None:
    ended = together([variables(rank, 3) for rank in range(3)])
    assert [one.place for one in ended] == world(3)


def test_torchrun_starts_a_world() -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "3",
        "--no-python",
    ]
    assert places(run([*command, sys.executable, "-c", SUM])) == world(3)


def test_the_pages_script_trains_one_model() -> None:
    first, second = together([by_hand(rank, 2) for rank in range(2)], blocks(PAGE, "python")[0])
    assert first.out.startswith("2 processes trained one model: "), first.err
    assert (second.status, second.out) == (0, ""), second.err


def test_ranks_that_go_round_two_hosts_keep_their_numbers() -> None:
    # A container of YARN counts as a host of its own.
    hosts = [
        {"CONTAINER_ID": name, "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": "5",
            "HOROVOD_LOCAL_SIZE": "9",
         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getpid())}
        for rank, name in enumerate("ababa")
    ]  # fmt: skip
    ended = together(hosts)
    locals_ = [(0, 3, 0, 2), (0, 2, 1, 2), (1, 3, 0, 2), (1, 2, 1, 2), (2, 3, 0, 1)]
    assert [one.place for one in ended] == [
        [rank, 5, *place, 31] for rank, place in enumerate(locals_)
    ]


def test_a_directory_that_all_see_is_a_place_to_meet_and_nothing_stays_there(
    tmp_path: Path,
) -> None:
    for rendezvous in (str(tmp_path), f"file://{tmp_path}"):
        spread = {"HOROVOD_LOCAL_SIZE": "1", "FARANDOLE_RENDEZVOUS": rendezvous}
        ended = together([horovod(rank, 2) | spread for rank in range(2)])
        assert [one.place for one in ended] == world(2)
        assert list(tmp_path.iterdir()) == []


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_a_secret_and_an_address_are_enough() -> None:
    meeting = {"FARANDOLE_JOB_SECRET": "a secret for tests only", "HOROVOD_LOCAL_SIZE": "1",
        "HOME": "/nowhere",
               "FARANDOLE_RENDEZVOUS": f"127.0.0.1:{free_port()}"}  # fmt: skip
    assert [
        one.place for one in together([horovod(rank, 2) | meeting for rank in range(2)])
    ] == world(2)


def test_a_secret_alone_makes_up_the_port_of_the_first_host() -> None:
    meeting = {"FARANDOLE_JOB_SECRET": f"a secret for tests {os.getpid()}"}
    assert [
        one.place for one in together([slurm(rank, 2) | meeting for rank in range(2)])
    ] == world(2)


def test_a_rank_with_another_secret_is_kept_out_and_named() -> None:
    port = free_port()
    impatient = {"FARANDOLE_START_TIMEOUT": "6", "FARANDOLE_RENDEZVOUS": f"127.0.0.1:{port}"}
    secrets = ["a secret for tests only", "another secret for tests"]
    first, second = together(
        [
            horovod(rank, 2) | impatient | {"FARANDOLE_JOB_SECRET": secrets[rank]}
            for rank in range(2)
        ]
    )
    assert first.status == second.status == 1
    assert "all ranks to come, 1 missing: [1]" in first.err, first.err
    assert "another certificate" in second.err, second.err
    assert secrets[0] not in first.err + second.err


def test_a_rank_that_never_comes_is_named_and_no_rank_is_a_world_of_one() -> None:
    # Rank 0 gives up first: a rank that had left before would be missing, too.
    patience = [{"FARANDOLE_START_TIMEOUT": seconds} for seconds in ("4", "30")]
    first, second = together([horovod(rank, 3) | patience[rank] for rank in range(2)])
    for ended in (first, second):
        assert ended.status == 1
        assert "place" not in ended.out
        assert "FarandoleEnvironmentError" in ended.err
    assert (
        "rank 0 of 3, started by Horovod's variables, waited for all ranks to come, 1 missing: [2]"
        in first.err
    )
    assert "1 missing: [2]" in second.err


def test_without_rank_0_the_others_say_where_they_looked(tmp_path: Path) -> None:
    meeting = {"FARANDOLE_START_TIMEOUT": "2", "FARANDOLE_RENDEZVOUS": str(tmp_path)}
    (ended,) = together([slurm(1, 2) | meeting])
    assert ended.status == 1
    assert f"the file {tmp_path}/slurm-" in ended.err
    assert "it is not there" in ended.err
    assert "FARANDOLE_JOB_SECRET" in ended.err


def test_a_long_wait_names_its_reason_once(tmp_path: Path) -> None:
    meeting = {"FARANDOLE_START_TIMEOUT": "12", "FARANDOLE_RENDEZVOUS": str(tmp_path),
        "SLURM_STEP_NUM_NODES": "2",
               "SLURM_STEP_NODELIST": "node[03-04]"}  # fmt: skip
    (ended,) = together([slurm(1, 2) | meeting])
    lines = [
        line
        for line in ended.err.splitlines()
        if " WARNING farandole.session.foreign_launcher.rank_search: " in line
    ]
    assert len(lines) == 1, ended.err
    assert "rank 1 of 2, started by srun, waits for rank 0, most likely on node03" in lines[0]


def left_over(folder: Path, text: str) -> Path:
    """The file in which this test's ranks meet, with something in it that is not theirs."""
    impatient = {"FARANDOLE_START_TIMEOUT": "1", "FARANDOLE_RENDEZVOUS": str(folder)}
    (ended,) = together([slurm(1, 2) | impatient])
    name = ended.err.split(f"{folder}/")[1].split(":")[0]
    path = folder / name
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def test_a_file_that_others_can_use_is_not_believed(tmp_path: Path) -> None:
    path = left_over(tmp_path, "frn1.whatever")
    path.chmod(0o644)
    meeting = {"FARANDOLE_START_TIMEOUT": "2", "FARANDOLE_RENDEZVOUS": str(tmp_path)}
    (ended,) = together([slurm(1, 2) | meeting])
    assert ended.status == 1
    assert f"{path}: can be used by others: its mode is 644" in ended.err, ended.err


def test_files_of_an_earlier_start_are_ignored(tmp_path: Path) -> None:
    with registrar.Registrar(2, host="127.0.0.1") as earlier:
        dead = earlier.ticket
    meeting = {"FARANDOLE_RENDEZVOUS": str(tmp_path)}
    for text in (dead, "frn1.damaged", ""):
        path = left_over(tmp_path, text)
        # Rank 1 sees it first: its parent starts rank 0 when it has had the time to.
        command = [sys.executable, "-c", SUM]
        with subprocess.Popen(
            command,
            env=environment(slurm(1, 2) | meeting),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as second:
            end = time.monotonic() + 20
            while not (opened := opens(second.pid)) and time.monotonic() < end:
                time.sleep(0.01)
            assert opened, "rank 1 did not come up"
            (first,) = together([slurm(0, 2) | meeting])
            out, err = second.communicate(timeout=60)
        assert first.place == world(2)[0]
        assert out.split()[1:] == [str(number) for number in world(2)[1]], err
        assert not path.exists()


def opens(pid: int) -> bool:
    """Returns whether a process has loaded the engine."""
    try:
        with open(f"/proc/{pid}/maps") as maps:
            return "_native" in maps.read()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "2"},
            "OMPI_COMM_WORLD_RANK=2 is no rank of",
        ),
        ({"PMIX_RANK": "0"}, "PMIX_RANK tells a rank and no size"),
        ({"HOROVOD_RANK": "one", "HOROVOD_SIZE": "2"}, "HOROVOD_RANK is not a number: one"),
        (horovod(0, 2) | openmpi(0, 4), "HOROVOD_SIZE=2"),
        (horovod(0, 2) | {"FARANDOLE_RENDEZVOUS": "nowhere"}, "must be host:port or a directory"),
        (horovod(0, 2) | {"FARANDOLE_RENDEZVOUS": "host:1"}, "takes a FARANDOLE_JOB_SECRET"),
        (
            horovod(0, 2) | {"FARANDOLE_RENDEZVOUS": "/not/there"},
            "must be a directory that is there: /not/there",
        ),
        (horovod(0, 2) | {"FARANDOLE_JOB_SECRET": "short"}, "fewer than 16 characters"),
        (horovod(0, 2) | {"HOROVOD_LOCAL_SIZE": "1"}, "names this job"),
    ],
)
def test_an_error_names_the_reason_why_no_world_can_form(
    variables: dict[str, str], told: str
) -> None:
    (ended,) = together([variables])
    assert ended.status == 1
    assert told in ended.err, ended.err
    assert "place" not in ended.out


def test_a_batch_script_of_slurm_is_alone_and_hears_how_to_start() -> None:
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "2"}
    (ended,) = together([script])
    assert ended.place == world(1)[0]
    assert "start it as srun python" in ended.err


AGAIN = """
import numpy as np
import farandole.numpy as hvd
for round in range(3):
    hvd.init([]) if round == 1 else hvd.init()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == 2
    hvd.shutdown()
hvd.init()
print("place", hvd.rank(), flush=True)
"""


def test_a_world_that_others_have_started_can_be_left_and_joined_again() -> None:
    ended = together([horovod(rank, 2) for rank in range(2)], AGAIN)
    assert [one.place for one in ended] == [[0], [1]]


GONE = program_path(__file__, "continue_without_rank")


def test_ranks_continue_without_one_that_has_ended_well() -> None:
    ended = together([horovod(rank, 3) for rank in range(3)], GONE)
    assert [one.place for one in ended] == [[0], [1], [2]]


CHILD = program_path(__file__, "start_child_of_rank")


def test_a_process_that_a_rank_starts_is_no_rank_and_gets_an_error_at_once() -> None:
    ended = together([horovod(rank, 2) for rank in range(2)], CHILD)
    assert [one.place for one in ended] == [[0], [1]]


# A communicator as mpi4py's, made of torch's: MPI itself is in tests/launch.
COMMUNICATOR = program_path(__file__, "join_foreign_communicators")


def test_foreign_communicators_give_out_ranks_and_take_no_part_in_collectives() -> None:
    port = free_port()
    variables = {
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ended = together([variables | {"RANK": str(rank)} for rank in range(4)], COMMUNICATOR)
    assert [one.place for one in ended] == [[rank, 4] for rank in range(4)]


def test_a_folder_that_others_can_use_is_passed_over(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    own, session, home = tmp_path / f"farandole-{os.geteuid()}", tmp_path / "s", tmp_path / "home"
    for folder in (own, session, home):
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)
    folders = {"TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": str(session), "HOME": str(home)}
    ranks = [horovod(rank, 2) | folders for rank in range(2)]
    assert [one.place for one in together(ranks)] == world(2)
    used = home / ".farandole"
    # A machine with sessions has a folder of this user in /run/user, which comes first.
    assert used.is_dir() or Path(f"/run/user/{os.geteuid()}").is_dir()
    assert list(own.iterdir()) == list(session.iterdir()) == []
    own.rmdir()
    session.chmod(0o700)
    assert [one.place for one in together(ranks)] == world(2)
    assert not own.exists()
    assert list(session.iterdir()) == []
