# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Directories of workers, which are gone after them."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from farandole.common import scratch_directories
from farandole.runner import forkserver, warm_workers
from farandole.runner.errors import FarandoleJobError
from farandole.spark.common.backend import LocalBackend

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The directory of temporary files, here and in the processes that a test starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def files_below(place):
    return [path for path in place.rglob("*") if not path.is_dir()]


HOLDS = """
import sys
from farandole.common import scratch_directories
with scratch_directories.temporary_directory() as folder:
    (folder / "model.keras").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_killed_worker_leaves_no_directory(place):
    def killed():
        import os
        import signal

        from farandole.common import scratch_directories

        with scratch_directories.temporary_directory() as folder:
            (folder / "model.keras").touch()
            print(folder, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    told = io.StringIO()
    with pytest.raises(FarandoleJobError, match="SIGKILL"):
        LocalBackend(1, verbose=0, warm=False, stdout=told).run(killed)
    folder = Path(told.getvalue().strip().removeprefix("[0]<stdout>:"))
    assert folder.is_relative_to(place)
    assert not folder.exists()
    assert files_below(place) == []


def test_a_new_directory_deletes_files_of_killed_processes_and_keeps_those_in_use(place):
    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return process, Path(process.stdout.readline().strip())

    (killed, left), (living, used) = start(), start()
    try:
        killed.kill()
        killed.wait()
        assert (left / "model.keras").exists()
        with scratch_directories.temporary_directory() as own:
            assert os.listdir(own) == []
            assert not left.exists()
            assert (used / "model.keras").exists()
        assert not own.exists()
    finally:
        for process in (killed, living):
            process.communicate()
    assert not used.exists()


DAY = 24 * 3600


@pytest.mark.parametrize("host", ["same host", "other host"])
@pytest.mark.parametrize(
    ("boot", "lock"),
    [
        ("same boot", "held"),
        ("same boot", "free"),
        ("other boot", "held"),
        ("other boot", "free"),
        ("other boot", "invisible"),  # a kernel tells of its own locks
    ],
)
@pytest.mark.parametrize("days", [0, 1, 29, 31, 400])
def test_a_directory_of_another_host_stays_in_a_shared_place(
    place, monkeypatch, host, boot, days, lock
):
    """NFS and Lustre keep the lock of a directory on its host, so other hosts can lock it, too."""
    names = {"same": "node-a", "other": "node-b"}
    monkeypatch.setattr(scratch_directories, "gethostname", lambda: "node-a")
    monkeypatch.setattr(scratch_directories, "boot_id", lambda: "aaaaaaaa-0")
    with scratch_directories.hold_scratch_directory() as made:
        used = made.with_name(made.name + "x") if lock == "free" else made
        used.mkdir(exist_ok=True)
        if lock == "invisible":
            monkeypatch.setattr(fcntl, "flock", lambda *_: None)
        (used / "model.keras").touch()
        os.utime(used, (used.stat().st_atime, used.stat().st_mtime - days * DAY))
        monkeypatch.setattr(scratch_directories, "gethostname", lambda: names[host.split()[0]])
        same_boot = boot == "same boot"
        monkeypatch.setattr(
            scratch_directories, "boot_id", lambda: "aaaaaaaa-0" if same_boot else "bbbb-0"
        )
        with scratch_directories.hold_scratch_directory():
            gone = not (used / "model.keras").exists()
        may_go = same_boot or (host == "same host" and days > 30)
        assert gone == (may_go and lock != "held")


def test_the_socket_of_a_fork_server_of_another_host_stays_in_a_shared_place(place, monkeypatch):
    for boot, expected in (("aaaaaaaa-0", True), (scratch_directories.boot_id(), False)):
        with monkeypatch.context() as patch:
            patch.setattr(scratch_directories, "boot_id", lambda boot=boot: boot)
            (place / "warm-1.lock").write_text(f"1 1 {forkserver._boot_and_pid_namespace()}")
        (place / "warm-1").touch()
        forkserver.remove_sockets_of_ended_owners(place)
        assert (place / "warm-1").exists() == expected


def test_where_there_is_something_else_in_its_place_a_directory_is_made_all_the_same(place):
    (place / f"farandole-{os.getuid()}").touch()
    with scratch_directories.temporary_directory() as own:
        assert own.parent == place
    assert not own.exists()


def test_where_nothing_can_be_locked_nothing_is_left_behind(place, monkeypatch):
    def refused(descriptor, how):
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refused)
    with scratch_directories.temporary_directory() as own:
        assert own.parent == place
    assert [
        path for path in place.rglob("*") if path != warm_workers.private_user_directory()
    ] == []


def take(folder, how):
    """Does what another user can do in the directory of temporary files."""
    if how == "directory":
        folder.mkdir(mode=0o755)
        folder.chmod(0o755)
    elif how == "link":
        folder.symlink_to("/etc")
    else:
        folder.touch()
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534, follow_symlinks=False)


@pytest.mark.parametrize("how", ["directory", "link", "file"])
def test_a_directory_of_another_user_is_passed_over(place, monkeypatch, how):
    session, home = place / "session", place / "home"
    session.mkdir(mode=0o700)
    home.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    monkeypatch.setenv("HOME", str(home))
    name = f"farandole-{os.getuid()}"
    take(place / name, how)
    for expected in (session / name, home / ".farandole"):
        assert scratch_directories.private_user_directory() == expected
        assert expected.stat().st_mode & 0o777 == 0o700
        expected.rmdir()
        take(expected, how)
        # A directory of /run/user is a session's, too, and only some machines have one.
        monkeypatch.setenv("XDG_RUNTIME_DIR", "")
        if Path(f"/run/user/{os.getuid()}").is_dir():
            break
    else:
        with pytest.raises(PermissionError, match=re.escape(str(place / name))):
            scratch_directories.private_user_directory()
    with scratch_directories.temporary_directory() as own:
        assert own.parent == place, "large files stay in the directory for temporary files"


def test_warm_workers_start_where_another_user_has_taken_the_usual_directory(place, monkeypatch):
    home = place / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    take(place / f"farandole-{os.getuid()}", "directory")
    assert LocalBackend(1, verbose=0).run(lambda: 7) == [7]
