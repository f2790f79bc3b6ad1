# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`run_elastic`: workers on Spark are killed, lost with their executors and decommissioned; the
others continue.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.programs import program_path, program_text
from tests.spark.deployments import connect_server, drive

import farandole.spark
from farandole.runner.errors import FarandoleJobError
from farandole.runner.job_limits import elastic_timeout_seconds
from farandole.spark.job.decommission import own_executor_id
from farandole.spark.runner import elastic_worker_counts

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

TRAIN = program_text(__file__, "elastic_training")
"""Every step adds an average of ones: whatever happens, the total is the number of the steps."""


def check(found: list[Any], size: int) -> None:
    assert [rank for rank, *_ in found] == list(range(size))
    for _, told, steps, total, _ in found:
        assert told == size
        assert total == pytest.approx(steps)


def driven(program: Path, directory: Path, *arguments: str, **env: str) -> tuple[list[Any], str]:
    """Returns the results of the ranks of a driver's program, and its stderr."""
    notes = directory / "notes"
    notes.mkdir()
    done = drive(program, directory, 200, *arguments, NOTES=str(notes), **env)
    return eval(done.stdout.strip().splitlines()[-1]), done.stderr


def test_a_killed_worker_is_replaced_and_the_others_keep_their_process(
    spark: SparkSession, tmp_path: Path
) -> None:
    scope: dict[str, Any] = {}
    exec(TRAIN, scope)
    train = scope["train"]

    def killing(folder: str) -> Any:
        import farandole.torch as hvd

        hvd.init()
        if hvd.rank() == 1 and not os.path.exists(f"{folder}/killed"):
            import threading

            def kill() -> None:
                open(f"{folder}/killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)

            threading.Timer(1.0, kill).start()
        return os.getpid(), train(folder, 50)

    (tmp_path / "hold").touch()

    def release() -> None:
        """Lets the training end when the replacement has taken part in a step."""
        deadline = time.monotonic() + 150
        for size in ("1", "2"):
            while time.monotonic() < deadline:
                step = tmp_path / "step"
                if (
                    (tmp_path / "killed").exists()
                    and step.exists()
                    and step.read_text().split()[1:] == [size]
                ):
                    break
                time.sleep(0.02)
        (tmp_path / "hold").unlink()

    watching = threading.Thread(target=release)
    watching.start()
    found = farandole.spark.run_elastic(killing, (str(tmp_path),), num_proc=2, min_num_proc=1)
    watching.join()
    check([result for _, result in found], 2)
    worlds = found[0][1][-1]
    assert [size for _, size in worlds] == [2, 1, 2]
    started = {entry.name for entry in tmp_path.glob("pid-*")}
    assert len(started) == 3
    assert {f"pid-{pid}" for pid, _ in found} < started


def test_a_function_that_fails_everywhere_ends_the_job_with_its_own_exception(
    spark: SparkSession,
) -> None:
    def broken() -> None:
        import farandole.torch as hvd

        hvd.init()
        raise LookupError("there is no such column")

    with pytest.raises(FarandoleJobError, match="LookupError: there is no such column") as caught:
        farandole.spark.run_elastic(broken, num_proc=2, min_num_proc=1)
    assert isinstance(caught.value.__cause__, LookupError)


def test_numbers_of_processes_that_contradict_each_other_are_refused() -> None:
    assert elastic_worker_counts(None, None, None, lambda: 3) == (3, 3, 3)
    assert elastic_worker_counts(None, 2, 6, lambda: 3) == (6, 2, 6)
    assert elastic_worker_counts(4, 2, None, lambda: 3) == (4, 2, 4)
    with pytest.raises(ValueError, match="5 <= 4 <= 4 does not"):
        elastic_worker_counts(4, 5, None, lambda: 3)
    with pytest.raises(ValueError, match="min_num_proc must be at least 1: 0"):
        elastic_worker_counts(4, 0, None, lambda: 3)
    with pytest.raises(ValueError, match="elastic_timeout"):
        elastic_timeout_seconds(0.0)


def test_too_few_slots_are_refused_before_anything_starts(spark: SparkSession) -> None:
    with pytest.raises(ValueError, match="num_proc=3 needs 3 task slots"):
        farandole.spark.run_elastic(print, num_proc=3)


def test_the_executor_is_found_among_the_ancestors(tmp_path: Path) -> None:
    def process(number: int, parent: int, *command: str) -> None:
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "cmdline").write_bytes("\0".join(command).encode() + b"\0")
        (tmp_path / str(number) / "stat").write_text(f"{number} (a (name) S 9) S {parent} 1 1")

    process(3, 2, "python", "-m", "pyspark.daemon")
    process(
        2,
        1,
        "java",
        "org.apache.spark.executor.CoarseGrainedExecutorBackend",
        "--executor-id",
        "17",
        "--cores",
    )
    process(1, 0, "init")
    assert own_executor_id(3, tmp_path) == "17"
    assert own_executor_id(1, tmp_path) is None


DYNAMIC = {
    "dynamicAllocation_enabled": "true", "dynamicAllocation_shuffleTracking_enabled": "true",
    "dynamicAllocation_minExecutors": "0", "dynamicAllocation_maxExecutors": "4",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, DYNAMIC], ids=["fixed", "dynamic allocation"])
def test_half_of_the_executors_are_killed_and_spark_brings_new_ones(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    program = program_path(__file__, "lose_half_of_executors")
    found, _ = driven(program, tmp_path, json.dumps(settings))
    check(found, 4)
    sizes = [size for _, size in found[0][-1]]
    assert (sizes[0], min(sizes), sizes[-1]) == (4, 2, 4)


@pytest.mark.slow
def test_on_connect_a_killed_worker_is_replaced_and_the_other_continues(tmp_path: Path) -> None:
    program = program_path(__file__, "lose_worker_of_connect")
    (tmp_path / "server").mkdir()
    with connect_server(tmp_path / "server") as url:
        found, _ = driven(program, tmp_path, SERVER=url)
    check(found, 2)
    assert [size for _, size in found[0][-1]] == [2, 1, 2]
    assert len(list((tmp_path / "notes").glob("pid-*"))) == 3


@pytest.mark.slow
def test_a_worker_leaves_before_its_executor_is_decommissioned(tmp_path: Path) -> None:
    found, told = driven(program_path(__file__, "decommission_executor"), tmp_path)
    for _, _, steps, total, _ in found:
        assert total == pytest.approx(steps)
    assert "leaves: Spark decommissions executor" in told
    assert "was lost" not in told
    assert "was ended by" not in told
