# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Large results and functions, floods of output, and how long the smallest job takes."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest
from tests.programs import program_path
from tests.spark.deployments import PATIENCE, drive

import farandole.spark
from farandole.spark.common import LocalStore
from farandole.spark.common.backend import LocalBackend
from farandole.spark.job.spill import MAX_INLINE_PICKLE_BYTES, JobSpillDirectory
from farandole.stores.run_names import SPILL_DIRECTORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120, func_only=True)]


@pytest.mark.timing
def test_a_trivial_function_on_two_tasks_of_a_warm_session_takes_a_second_and_a_half(spark):
    farandole.spark.run(lambda: None, num_proc=2)
    times = []
    for _ in range(5):
        started = time.monotonic()
        assert farandole.spark.run(lambda: 1, num_proc=2) == [1, 1]
        times.append(time.monotonic() - started)
    # The best of them: what else the machine does is not ours.
    assert min(times) <= 1.5, times


def test_results_and_functions_beyond_16_megabytes_travel_by_the_store_and_leave_nothing_there(
    spark, tmp_path
):
    ballast = bytes(20 << 20)

    def work():
        import os

        rank = int(os.environ["RANK"])
        (folder,) = (entry for entry in os.scandir(f"{home}/runs/{spills}") if entry.is_dir())
        carried = sum(entry.stat().st_size for entry in os.scandir(folder.path))
        return (
            (bytes([rank]) * (MAX_INLINE_PICKLE_BYTES + 1) if rank else "small"),
            len(ballast),
            carried,
        )

    home, spills = str(tmp_path), SPILL_DIRECTORY
    small, large = farandole.spark.run(work, num_proc=2, store=LocalStore(home))
    assert small[0] == "small"
    assert large[0] == b"\1" * (MAX_INLINE_PICKLE_BYTES + 1)
    assert small[1] == len(ballast)
    assert small[2] >= len(ballast), "the function did not come by the store"
    assert not list(Path(home).rglob("*spill*/*"))


@pytest.mark.timeout(240 * PATIENCE)
def test_a_model_larger_than_a_row_of_spark_is_fitted_and_such_a_result_names_the_store(tmp_path):
    body = program_path(__file__, "fit_large_model")
    done = drive(body, tmp_path, 220)
    assert done.stdout.count("parameters 5000000") == 2, done.stdout + done.stderr[-3000:]
    assert "left []" in done.stdout
    told = done.stdout.partition("told ")[2]
    assert "maxResultSize" in told
    assert "with store=..." in told


def test_a_spilled_result_that_was_tampered_with_is_not_unpickled(tmp_path):
    spill = JobSpillDirectory.create_in_store(LocalStore(str(tmp_path)))
    stored = spill.write_hashed_bytes(b"\x80\x05N.")
    assert stored.name == hashlib.sha256(b"\x80\x05N.").hexdigest()
    (file,) = tmp_path.rglob(stored.name)
    file.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ValueError, match="differs from the file that the job wrote"):
        spill.load_result(stored)


class Counter:
    """A stream that counts, and remembers how it ended."""

    def __init__(self, until: Path | None = None) -> None:
        self.bytes = 0
        self.last = ""
        self.lines = 0
        self.wrong = 0
        self.number = -1
        self.until = until

    def write(self, text: str) -> None:
        self.bytes += len(text)
        self.lines += 1
        number = int(text.partition(":")[2].split()[0])
        self.wrong += number < self.number
        self.number = number
        self.last = text
        if self.until is not None:
            deadline = time.monotonic() + 100
            while not self.until.exists():
                assert time.monotonic() < deadline, "training is held up for good"
                time.sleep(0.05)
            self.until = None

    def flush(self) -> None:
        pass


def flood(megabytes, done=None):
    """Prints so much, in numbered lines of a kilobyte, and tells how long that took; notes that
    it is done.
    """
    import sys
    import time

    tail = "x" * 1013
    started = time.monotonic()
    for number in range(megabytes << 10):
        sys.stdout.write(f"{number:010d} {tail}\n")
    sys.stdout.flush()
    seconds = time.monotonic() - started
    if done is not None:
        open(done, "x").close()
    return seconds


@pytest.mark.timing
def test_a_flood_of_output_comes_whole_in_order_and_at_the_drivers_pace():
    out = Counter()
    before = _memory()
    started = time.monotonic()
    LocalBackend(1, stdout=out, verbose=0, env={"PYTHONUNBUFFERED": ""}, warm=False).run(
        flood, args=(200,)
    )
    seconds = time.monotonic() - started
    assert out.lines == 200 << 10, f"{out.lines} lines"
    assert out.wrong == 0
    assert out.last.startswith("[0]<stdout>:0000204799 ")
    assert _memory() - before < 256 << 20
    assert 200 / seconds > 20, f"{200 / seconds:.0f} MB/s"


@pytest.mark.slow
@pytest.mark.timing
def test_a_driver_that_reads_nothing_delays_training_for_seconds_then_lines_are_dropped(
    capsys, tmp_path
):
    done = tmp_path / "done"
    out = Counter(until=done)
    before = _memory()
    backend = LocalBackend(1, stdout=out, env={"PYTHONUNBUFFERED": ""}, warm=False)
    (seconds,) = backend.run(flood, args=(120, str(done)))
    assert seconds < 20, seconds
    assert out.lines < 120 << 10
    assert " lines of workers: the driver could not keep up" in capsys.readouterr().err
    assert _memory() - before < 300 << 20


def _memory() -> int:
    return int(Path(f"/proc/{os.getpid()}/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGESIZE"
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_result_of_two_gigabytes_comes_back_whole(spark, tmp_path):
    def big():
        import os

        return bytes([7 + int(os.environ["RANK"])]) * ((2 << 30) - 4096)

    (result,) = farandole.spark.run(big, num_proc=1, store=str(tmp_path))
    assert len(result) == (2 << 30) - 4096
    assert (result[0], result[-1]) == (7, 7)
