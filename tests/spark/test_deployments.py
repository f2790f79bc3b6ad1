# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""One program on every Spark that fits on one machine: executors of their own, a standalone
cluster, Connect.
"""

from __future__ import annotations

import pytest
from tests.programs import program_path
from tests.spark.deployments import PATIENCE, connect_server, drive, driver, standalone

pytestmark = pytest.mark.timeout(280 * PATIENCE)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The URL of a Spark Connect server with two slots."""
    with connect_server(tmp_path_factory.mktemp("connect")) as url:
        yield url


def test_a_spark_connect_client_runs_functions_and_fits_models_and_gets_an_error_for_missing_slots(
    server, tmp_path
):
    body = program_path(__file__, "work_by_connect")
    done = drive(body, tmp_path, 150, SERVER=server)
    assert "all well" in done.stdout
    assert "fitted" in done.stdout
    assert "TimeoutError" in done.stdout
    assert "needs 3 task slots at once" in done.stdout


def test_interrupting_the_connect_session_takes_the_workers_along(server, tmp_path, pids):
    body = program_path(__file__, "interrupt_connect")
    with driver(body, tmp_path, pids.folder, SERVER=server) as process:
        pids.wait(2, 90 * PATIENCE, process)
        # it takes a moment until somebody interrupts, then at most five
        gone = pids.gone(2, limit=8)
        out, err = process.communicate(timeout=30 * PATIENCE)
    assert gone
    assert "told:" in out, err[-3000:]
    assert "cancel" in out.lower() or "interrupt" in out.lower(), out


def test_a_gang_whose_connect_client_cannot_be_dialled_meets_among_itself_and_reports_by_the_store(
    server, tmp_path
):
    body = program_path(__file__, "meet_without_driver")
    done = drive(body, tmp_path, 150, SERVER=server, FARANDOLE_DRIVER_HOST="192.0.2.1")
    assert "met [(0, 2, 2), (1, 2, 2)]" in done.stdout, done.stderr[-3000:]
    assert "alone [7, 7]" in done.stdout
    assert "raised KeyError 1" in done.stdout
    assert "left []" in done.stdout


@pytest.mark.slow
def test_data_too_large_for_a_message_of_connect_is_uploaded_before(server, tmp_path):
    body = program_path(__file__, "upload_large_data")
    done = drive(body, tmp_path, 200, SERVER=server)
    assert f"carried [{140 << 20}, {140 << 20}]" in done.stdout, done.stderr[-3000:]
    assert done.stdout.count("predicted [0.0,1.0,2.0,3.0]") == 2, done.stdout + done.stderr[-3000:]
    assert "sent 2" in done.stdout


@pytest.mark.newest
@pytest.mark.slow
def test_executors_of_a_local_cluster_hold_one_rank_each(tmp_path):
    body = program_path(__file__, "work_on_executors")
    done = drive(body, tmp_path, 200)
    assert "all well" in done.stdout
    assert "fitted" in done.stdout
    assert "3 task slots at once, Spark has 2" in done.stdout


@pytest.mark.newest
@pytest.mark.slow
def test_a_spare_slot_takes_over_for_a_lost_executor_after_the_time_to_start_has_passed(tmp_path):
    body = program_path(__file__, "lose_late_executor")
    done = drive(body, tmp_path, 150)
    assert "on the dead set() on 2" in done.stdout, done.stdout + done.stderr[-3000:]


@pytest.fixture(scope="module")
def on_standalone(tmp_path_factory):
    """The output of a driver whose jobs ran on a standalone master with two workers of two
    cores.
    """
    body = program_path(__file__, "work_on_standalone")
    directory = tmp_path_factory.mktemp("standalone")
    with standalone(directory, {}, {}, cores=2) as url:
        return drive(body, directory, 200, MASTER_URL=url)


@pytest.mark.slow
def test_a_standalone_cluster_started_from_the_pip_package_runs_and_fits(on_standalone):
    assert "all well" in on_standalone.stdout
    assert "fitted" in on_standalone.stdout


@pytest.mark.slow
def test_stage_level_scheduling_gives_tasks_what_the_profile_asks_for(on_standalone):
    assert "sizes ['2', '2']" in on_standalone.stdout, on_standalone.stderr[-3000:]
    assert "elastic [2, 2]" in on_standalone.stdout, on_standalone.stderr[-3000:]
    assert "TimeoutError" in on_standalone.stdout
