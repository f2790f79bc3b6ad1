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

WORKER = """
import glob, json, os, pathlib, signal, sys, time
import numpy as np
import farandole.numpy as hvd
from tests.sockets import listening
hvd.init()
rank, size = hvd.rank(), hvd.size()
total = hvd.allreduce(np.arange(300_000, dtype=np.float32) * (rank + 1), op=hvd.Sum)
right = bool((total == np.arange(300_000, dtype=np.float32) * sum(range(1, size + 1))).all())
gathered = hvd.allgather(np.full((rank + 1, 2), rank, dtype=np.int32)).shape
print(json.dumps({"rank": rank, "local": hvd.local_size(), "right": right, "rows": gathered[0],
                  "listening": sorted({address for address, _ in listening()})}), flush=True)
hvd.barrier()
if "--one-dies" in sys.argv:
    if rank == size - 1:
        # Not before the others are in the operation: what it said last, that the barrier is over, may die with it,
        # as the way out of here is a thread of this process.
        deadline = time.monotonic() + 30
        while len(glob.glob("in-flight-*")) < size - 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    handle = hvd.allreduce_async(total)
    pathlib.Path(f"in-flight-{rank}").touch()
    began = time.monotonic()
    try:
        hvd.synchronize(handle)
    except hvd.FarandoleInternalError as error:
        print(json.dumps({"rank": rank, "heard": time.monotonic() - began, "error": str(error)}),
            flush=True)
        sys.exit(1)
hvd.shutdown()
"""  # noqa: E501

AGENT = """
import json, os, sys, threading
from farandole._native import launcher
print("ready", flush=True)
ticket = sys.stdin.readline().strip()
host, tasks, command = sys.argv[1], json.loads(sys.argv[2]), [sys.executable, *sys.argv[3:]]
def run(task):
    outcome = launcher.run_agent(ticket, task, command, host=host, start_timeout=40.0)
    sys.stderr.write(f"{outcome}\\n{outcome.stderr_tail}\\n")
threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""

HUB = """
import json, subprocess, sys, threading
from farandole._native.registrar import Registrar
places, agent, *command = json.loads(sys.argv[1])
def ip(*words):
    subprocess.run(["ip", *words], check=True)
ip("link", "set", "lo", "up")
hosts = []
for number, tasks in enumerate(places):
    own = ["unshare", "--net", "--ipc", "--uts", "--", sys.executable, "-c", agent,
        f"island-{number}",
           json.dumps(tasks), *command]
    host = subprocess.Popen(own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdout.readline() == "ready\\n"
    far = ["nsenter", "--target", str(host.pid), "--net", "ip"]
    ip("link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns",
        str(host.pid))
    ip("address", "add", f"10.231.{number}.1/24", "dev", f"port{number}")
    ip("link", "set", f"port{number}", "up")
    for words in (["link", "set", "lo", "up"],
        ["address", "add", f"10.231.{number}.2/24", "dev", "eth0"],
                  ["link", "set", "eth0", "up"]):
        subprocess.run([*far, *words], check=True)
    hosts.append(host)
with Registrar(sum(map(len, places)), start_timeout=60.0) as registrar:
    for host in hosts:
        host.stdin.write(registrar.ticket + "\\n")
        host.stdin.flush()
    ended = 0
    while any(host.poll() is None for host in hosts):
        for event in registrar.events(0.25):
            if event.kind == "log":
                print(event.stream, event.text, flush=True)
    for event in registrar.events(0.0):
        if event.kind == "log":
            print(event.stream, event.text, flush=True)
"""


def islands(
    folder: Path, places: list[list[int]], *options: str, **env: str
) -> tuple[list[dict], str]:
    """Returns the ranks' lines and the whole output of tasks on hosts that can connect to the
    driver only.
    """
    worker = folder / "worker.py"
    worker.write_text(WORKER)
    program = json.dumps([places, AGENT, str(worker), *options])
    done = subprocess.run(
        [*INSIDE, sys.executable, "-c", HUB, program],
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
