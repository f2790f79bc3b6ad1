# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Values that the launcher forwards to workers on other hosts, output that comes back, and
secrets in neither.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time

import pytest
from tests.launch.conftest import BUSY, printed_json

pytestmark = pytest.mark.slow

TELL = """
import json, os, sys
print(json.dumps({"rank": int(os.environ["RANK"]),
    "env": {name: os.environ[name] for name in os.environ},
                  "folder": os.getcwd(), "argv": sys.argv[1:]}), flush=True)
"""


def seen_environment(cluster, *arguments, **env):
    """Returns the values that two ranks on two hosts see in their environment."""
    cluster.write("tell.py", TELL)
    done = cluster.launched(
        "-np", 2, "-H", "h1:1,h2:1", sys.executable, "/run/job/tell.py", *arguments, **env
    )
    assert done.returncode == 0, done.stderr
    words = printed_json(done.stdout)
    assert len(words) == 2, done.stdout
    return words


def test_the_environment_is_forwarded_as_it_is_but_for_horovods_exceptions(hosts):
    cluster = hosts("h1", "h2")
    kept = {
        "PLAIN": "1",
        "QUOTED": """it's "so" $HOME `id` \\n""",
        "LINES": "one\ntwo\n",
        "UNICODE": "Größe → 𝄞",
        "EMPTY": "",
        "PATH": "/run/job/bin:" + cluster["head"].environment()["PATH"],
    }
    withheld = {
        "OLDPWD": "/somewhere",
        "BASH_FUNC_which%%": "() { true; }",
        "CUDA_VISIBLE_DEVICES": "3",
        "MY_CUDA_VISIBLE_DEVICES": "3",
        "_HOROVOD_SECRET_KEY": "c2VjcmV0",
    }
    # A world that this shell was part of some time ago.
    stale = {"RANK": "7", "WORLD_SIZE": "9", "HOROVOD_RANK": "7", "HOROVOD_SIZE": "9"}
    for word in seen_environment(cluster, "one", "two words", "$HOME", **kept, **withheld, **stale):
        env = word["env"]
        assert {name: env.get(name) for name in kept} == kept
        assert not {name for name, value in withheld.items() if env.get(name) == value}
        assert env["RANK"] == str(word["rank"])
        assert env["WORLD_SIZE"] == "2"
        assert env.get("HOROVOD_RANK", env["RANK"]) == env["RANK"]
        assert word["argv"] == ["one", "two words", "$HOME"]


def test_a_value_that_is_no_text_stays_behind_and_disturbs_nothing(hosts):
    cluster = hosts("h1", "h2")
    for word in seen_environment(cluster, RAW=os.fsdecode(b"caf\xe9"), PLAIN="1"):
        assert "RAW" not in word["env"]
        assert word["env"]["PLAIN"] == "1"


def test_workers_start_in_the_launchers_folder_where_there_is_one(hosts):
    cluster = hosts("h1", "h2")
    cluster["head"].write("deep/er/x", "")
    cluster["h1"].write("deep/er/x", "")
    cluster.write("tell.py", TELL)
    words = cluster.farandole("-np", 2, "-H", "h1:1,h2:1", sys.executable, "/run/job/tell.py")
    done = cluster["head"].run("sh", "-c", 'cd deep/er && exec "$@"', "sh", *words)
    assert done.returncode == 0, done.stderr
    first, second = printed_json(done.stdout)
    assert first["folder"] == "/run/job/deep/er"
    assert second["folder"] == "/run/home"


SECRET = "Tr0ub4dor-and-3"
KEEPING = (
    """
import json, os
print(json.dumps({"rank": int(os.environ["RANK"]), "env": dict(os.environ)}), flush=True)
"""
    + BUSY
)


def test_no_secret_is_in_the_words_or_the_environment_of_anybody_but_the_workers(hosts):
    cluster = hosts("h1", "h2", listen=False)
    for name in ("h1", "h2"):
        cluster[name].listen(records=True)
    cluster.login(cluster["head"])
    cluster.write("keeping.py", KEEPING)
    seen, over = set(), threading.Event()

    def watch():
        while not over.is_set():
            seen.update(cluster.processes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        words = ["-np", 5, "-H", "head:1,h1:2,h2:2", sys.executable, "keeping.py"]
        running = cluster.launch(*words, WANDB_API_KEY=SECRET)
        running.until(*(f"[{rank}]<stdout>:goes on {rank}" for rank in range(5)))
        cluster["h1"].write("enough", "")
        assert running.wait() == 0, running.output
    finally:
        over.set()
        watcher.join()
    environments = [word["env"] for word in printed_json(running.out.read_text())]
    assert [env["WANDB_API_KEY"] for env in environments] == [SECRET] * 5
    # The ticket gives access to the job, and so does each of its long parts.
    tickets = {env["FARANDOLE_JOB"] for env in environments}
    parts = {
        part
        for ticket in tickets
        for part in re.split(r"[^A-Za-z0-9+/=_-]", ticket)
        if len(part) >= 20
    }
    assert parts, tickets
    secrets = {SECRET, *tickets, *parts}
    workers = {process for process in seen if process.argv[1:] == ("keeping.py",)}
    assert {process.host for process in workers} == {"head", "h1", "h2"}
    assert {process.host for process in seen - workers} == {"head", "h1", "h2"}
    for process in seen:
        assert not any(secret in word for secret in secrets for word in process.argv), process
    for process in seen - workers:
        # The launcher has what its user gave it, and hands it to what it starts on its own host.
        hidden = secrets - {SECRET} if process.host == "head" else secrets
        assert not any(secret in word for secret in hidden for word in process.environ), process
    # What watching may have missed: the command of each session, and the environment that sshd gave
    # to it.
    for name in ("h1", "h2"):
        assert len(cluster[name].read("/run/commands").splitlines()) == 1, (
            "more than one connection"
        )
        for record in ("/run/commands", "/run/sessions"):
            assert not any(secret in cluster[name].read(record) for secret in secrets)


def test_the_registrars_port_is_the_only_one_of_the_launchers_host(hosts):
    cluster = hosts("h1", "h2")
    cluster.write("busy.py", BUSY)
    running = cluster.launch("-np", 4, "-H", "h1:2,h2:2", sys.executable, "busy.py")
    running.until(*(f"[{rank}]<stdout>:goes on {rank}" for rank in range(4)))
    assert len({port for _, port in cluster["head"].listening()}) == 1
    cluster["h1"].write("enough", "")
    assert running.wait() == 0, running.output
    assert cluster["head"].listening() == []


LONG = """
import os, sys
rank = int(os.environ["RANK"])
for number in range(40):
    for stream in (sys.stdout, sys.stderr):
        stream.write(f"{number}:{rank}:" + f"Ünïcödé {rank} 𝄞→" * (1 + 75 * number) + ":end\\n")
print("𝄞→" * 20000)
sys.stdout.write("the last line has no end")
"""


def test_long_lines_of_any_script_come_whole_from_every_host(hosts):
    cluster = hosts("h1", "h2")
    cluster.write("long.py", LONG)
    done = cluster.launched("-np", 4, "-H", "h1:2,h2:2", sys.executable, "long.py")
    assert done.returncode == 0, done.stderr[-2000:]
    for output, name in ((done.stdout, "stdout"), (done.stderr, "stderr")):
        for rank in range(4):
            prefix = f"[{rank}]<{name}>:"
            lines = [
                line.removeprefix(prefix) for line in output.split("\n") if line.startswith(prefix)
            ]
            wanted = [
                f"{n}:{rank}:" + f"Ünïcödé {rank} 𝄞→" * (1 + 75 * n) + ":end" for n in range(40)
            ]
            assert lines[:40] == wanted, f"{name} of rank {rank}"
            # What is longer than 64 KiB comes in pieces.
            assert "".join(lines[40:]) == (
                "𝄞→" * 20000 + "the last line has no end" if name == "stdout" else ""
            )
    assert all(re.match(r"\[[0-3]\]<stdout>:", line) for line in done.stdout.splitlines())


FAIL = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
if rank == 2:
    how = sys.argv[1]
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    sys.exit(int(how))
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("how", "status"), [("3", 3), ("255", 255), ("SIGSEGV", 139), ("SIGKILL", 137)]
)
def test_the_status_is_that_of_the_first_failure_and_rank_and_host_are_named(hosts, how, status):
    cluster = hosts("h1", "h2")
    cluster.write("fail.py", FAIL)
    began = time.monotonic()
    done = cluster.launched("-np", 4, "-H", "h1:2,h2:2", sys.executable, "fail.py", how)
    assert done.returncode == status, done.stderr
    assert time.monotonic() - began < 30.0
    assert re.search(r"^farandole: rank 2 on h2\b.*" + how, done.stderr, re.MULTILINE), done.stderr
    cluster.until_quiet(15.0)


def test_a_program_that_is_not_there_is_named_with_its_host(hosts):
    cluster = hosts("h1", "h2")
    cluster["h1"].write("program", "#!/bin/sh\nsleep 1000\n", mode=0o755)
    done = cluster.launched("-np", 2, "-H", "h1:1,h2:1", "/run/job/program")
    assert done.returncode != 0
    assert "h2: cannot start /run/job/program: No such file or directory" in done.stderr
    cluster.until_quiet(15.0)


READ = """
import json, os, sys
print(json.dumps({"rank": int(os.environ["RANK"]), "read": sys.stdin.read()}), flush=True)
"""


def test_workers_read_nothing_whether_or_not_the_launcher_has_an_input(hosts):
    cluster = hosts("h1")
    cluster.write("read.py", READ)
    words = cluster.farandole("-np", 3, "-H", "localhost:1,h1:2", sys.executable, "read.py")
    for change, text in (
        ('exec "$@"', "typed\n"),
        ('exec "$@" <&-', ""),
        ('exec "$@" </dev/null', ""),
    ):
        done = cluster["head"].run("sh", "-c", change, "sh", *words, text=text)
        assert done.returncode == 0, done.stderr
        assert [word["read"] for word in printed_json(done.stdout)] == ["", "", ""], change


def test_messages_of_the_launcher_are_lines_of_their_own(hosts):
    cluster = hosts("h1")
    done = cluster.launched(
        "-np", 1, "-H", "h1:1", "--verbose", sys.executable, "-c", "print('out')"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0]<stdout>:out\n"
    assert all(line.startswith("farandole: ") for line in done.stderr.splitlines()), done.stderr
    assert json.dumps("h1")[1:-1] in done.stderr
