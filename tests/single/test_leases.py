# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Leases under trouble: hidden processes, forks, and fits whose lease was lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.needs import skip_without
from tests.programs import program_path
from tests.single.training import estimator, line, linear, write

from farandole._native.store import Store as NativeStore
from farandole.spark.common import LocalStore
from farandole.spark.common.runs.run_fingerprint_check import RunInUseError, hold_run_lease
from farandole.stores.lease_files import LeaseFile

LIMIT = 60.0
"""Longest time for a child process, in seconds."""
NOBODY = "65534"


def test_a_fit_whose_lease_is_gone_writes_nothing_more(tmp_path):
    remote = LocalStore(str(tmp_path)).to_remote("r")
    with hold_run_lease(remote.run_path, "r") as lease:
        held = replace(remote, lease_name=lease)
        held.write_checkpoint("checkpoint", b"ours")
        held.write("logs/history.jsonl", b"ours")
        NativeStore(remote.run_path).delete(lease)
        for attempt in (held.write_checkpoint, held.write):
            with pytest.raises(RunInUseError, match="nothing is written"):
                attempt("checkpoint", b"late")
    assert (tmp_path / "runs/r/checkpoint").read_bytes() == b"ours"
    remote.write("checkpoint", b"another fit's")


class LeaseThief(torch.nn.Module):
    """A loss that deletes the lease of the run at the end of the second epoch, as another fit does
    whose host sees no sign of life of this one.
    """

    def __init__(self, run: Path, batches: int) -> None:
        super().__init__()
        self.run, self.left = str(run), batches

    def forward(self, output, label):
        self.left -= 1
        if self.left == 0:
            for file in Path(self.run).glob("_lease-*"):
                file.unlink()
        return torch.nn.functional.mse_loss(output, label)


def test_training_that_loses_its_run_ends_with_an_error_and_the_last_checkpoint_stays(tmp_path):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    run = tmp_path / "runs/r"
    one = estimator(tmp_path, linear(), run_id="r", epochs=1).fit_on_parquet()
    assert len(one.getHistory()) == 1
    before = {file.name: file.read_bytes() for file in run.glob("checkpoint*")}
    made = estimator(
        tmp_path, linear(), run_id="r", epochs=20, loss=LeaseThief(run, 1), resume="force"
    )
    with pytest.raises(Exception, match="nothing is written"):
        made.fit_on_parquet()
    assert {file.name: file.read_bytes() for file in run.glob("checkpoint*")} == before


FORKS = program_path(__file__, "fork_lease_holder")


def test_a_fork_while_a_thread_holds_the_locks_leaves_a_child_that_ends(tmp_path):
    words = [sys.executable, FORKS, str(tmp_path / "run")]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(words, text=True, start_new_session=True, **pipes) as parent:
        try:
            out, said = parent.communicate(timeout=LIMIT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
    assert (parent.returncode, out) == (0, "parent done\n"), said


def hidden_processes_reason():
    """The reason why this machine cannot hide processes from users; `None` if it can."""
    if os.geteuid() != 0:
        return "needs root, to mount /proc with hidepid"
    tools = [tool for tool in ("unshare", "mount", "setpriv") if shutil.which(tool) is None]
    if tools:
        return f"needs {' '.join(tools)}"
    words = ["unshare", "--mount", "mount", "-o", "remount,hidepid=2", "/proc"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT)
    return None if done.returncode == 0 else f"needs hidepid: {done.stderr.strip()}"


ASKS = """
import os, sys
from farandole._native.store import Store
assert not os.path.exists(f"/proc/{sys.argv[2]}"), "the holder is hidden"
store = Store(sys.argv[1])
print(store.acquire_lease(), store.mark_in_use(), store.is_free())
"""


@pytest.mark.parametrize("hidepid", [1, 2])
def test_a_lease_of_another_user_whose_processes_are_hidden_counts(tmp_path, hidepid):
    skip_without(hidden_processes_reason())
    shared = Path("/var/tmp") / f"farandole-lease-{os.getpid()}-{hidepid}"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    try:
        mark = LeaseFile(str(shared), NativeStore(str(shared)).acquire_lease())
        script = (
            f"mount -o remount,hidepid={hidepid} /proc && "
            f'exec setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups "$@"'
        )
        code = ASKS if hidepid == 2 else ASKS.replace("assert not", "assert")
        asker = [sys.executable, "-c", code, str(shared), str(os.getpid())]
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, "sh", *asker],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT,
            cwd="/",
        )
        assert (done.returncode, done.stdout) == (0, "None None False\n"), done.stderr
        mark.delete_if_held()
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, "sh", *asker],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT,
            cwd="/",
        )
        assert done.stdout.startswith("_lease-"), done.stderr
    finally:
        shutil.rmtree(shared)


WRITES = """
import sys
from pathlib import Path
from farandole._native.store import Store
from farandole.stores import durable_writes
run = Store(sys.argv[1])
run.write("runs/a/file", b"1")
durable_writes.write_durably(run.open_child("runs/b"), "checkpoint", b"2", keeps=True)
durable_writes.write_durably(run, "direct", b"3")
run.write("plain", b"4")
print(run.read("runs/a/file") + run.read("runs/b/checkpoint") + run.read("direct"))
"""


def test_files_are_written_into_a_directory_that_this_user_cannot_list():
    skip_without(hidden_processes_reason())
    shared = Path("/var/tmp") / f"farandole-drop-{os.getpid()}"
    shared.mkdir()
    shared.chmod(0o733)
    try:
        words = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]
        done = subprocess.run(
            [*words, sys.executable, "-c", WRITES, str(shared)],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT,
            cwd="/",
        )
        assert (done.returncode, done.stdout) == (0, "b'123'\n"), done.stderr
        assert {path.name for path in shared.iterdir()} == {"runs", "direct", "plain"}
    finally:
        shutil.rmtree(shared)
