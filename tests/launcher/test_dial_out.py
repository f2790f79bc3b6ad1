# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Hosts that open connections and take none: each is a network namespace with a cable to the
driver and no other.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.programs import program_path

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 100.0
INSIDE = [
    "unshare",
    "--net",
    "--ipc",
    "--uts",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "--",
]

WORKER = program_path(__file__, "link_by_dial_out")

AGENT = program_path(__file__, "run_agents")

HUB = program_path(__file__, "start_islands")


def islands(
    folder: Path, places: list[list[int]], *options: str, **env: str
) -> tuple[list[dict], str]:
    """Returns the ranks' lines and the whole output of tasks on hosts that can connect to the
    driver only.
    """
    program = json.dumps([places, str(AGENT), str(WORKER), *options])
    done = subprocess.run(
        [*INSIDE, sys.executable, HUB, program],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        cwd=folder,
        env={
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": ":".join(filter(None, sys.path)),
            **env,
        },
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    words = [
        line.removeprefix("stdout ")
        for line in done.stdout.splitlines()
        if line.startswith('stdout {"rank"')
    ]
    return sorted((json.loads(word) for word in words), key=lambda word: word["rank"]), said


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    tools = all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip"))
    probe = [*INSIDE, "ip", "link", "add", "probe", "type", "veth", "peer", "name", "eborp"]
    if not tools or subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine gives no network namespaces")


def test_ranks_of_hosts_that_take_no_connection_are_linked_through_the_drivers_port(tmp_path):
    told, said = islands(tmp_path, [[0, 1], [2]], FARANDOLE_DIAL_OUT="1")
    assert [(word["rank"], word["local"], word["right"], word["rows"]) for word in told] == [
        (0, 2, True, 6),
        (1, 2, True, 6),
        (2, 1, True, 6),
    ], said
    # 127.0.0.1, as the kernel writes it: nothing is open to other hosts.
    assert {address for word in told for address in word["listening"]} <= {"0100007F"}, said


@pytest.mark.timing
def test_the_death_of_a_rank_behind_the_relay_is_heard_within_a_second_or_so(tmp_path):
    told, said = islands(tmp_path, [[0], [1]], "--one-dies", FARANDOLE_DIAL_OUT="1")
    heard = [word for word in told if "heard" in word]
    assert [word["rank"] for word in heard] == [0], said
    assert "rank 1" in heard[0]["error"], said
    assert heard[0]["heard"] < 2.5, said


def test_without_the_option_such_hosts_cannot_be_linked_and_name_the_unreachable_hosts(tmp_path):
    told, said = islands(tmp_path, [[0], [1]], FARANDOLE_START_TIMEOUT="6")
    assert told == []
    assert "rank 0" in said
    assert "10.231.0.2" in said
