# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Only "no such file" is absence: a store that cannot be asked never looks like an empty one."""

from __future__ import annotations

import ast
import errno
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.single.test_checkpoint_safety import archive
from tests.single.test_failed_writes import Trouble, TroubledStore

import farandole
from farandole._native import store as native
from farandole.data import encoding_learning, prepared_directories, statistics
from farandole.runner.show import journal as journals
from farandole.spark.common import LocalStore, Store
from farandole.spark.common.runs import run_fingerprint_check
from farandole.spark.common.runs.fingerprint import Fingerprint
from farandole.stores import durable_writes, remote_store, small_files

pytestmark = pytest.mark.timeout(300)
ERRNOS = (errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.ELOOP)
RUN_FILES = ("checkpoint", "checkpoint.previous", "_run.json", "_fingerprint.json", "_record.json")


class Unreadable:
    """A native store whose files cannot be read or looked up for a reason other than absence."""

    def __init__(self, store, code, name=None):
        self._store, self._code, self._name = store, code, name

    def __getattr__(self, method):
        found = getattr(self._store, method)
        if not callable(found):
            return found

        def operation(*args):
            if method in ("read", "size", "stat", "exists", "list", "list_directory") and (
                self._name is None or not args or args[0] == self._name
            ):
                raise OSError(self._code, os.strerror(self._code))
            return found(*args)

        return operation


@pytest.fixture
def run(tmp_path):
    remote = LocalStore(str(tmp_path)).to_remote("r")
    for epoch in (98, 99):
        remote.write_checkpoint("checkpoint", archive(f"{epoch}"))
    remote.write("_record.json", b'{"events": [{"text": "old"}]}')
    remote.write("logs/history.jsonl", b'{"epoch": 0, "train": {"loss": 1, "all_metrics": []}}\n')
    remote.write("logs/steps.jsonl", b'{"epoch": 0.5, "loss": 1}\n')
    return remote


@pytest.mark.parametrize("code", ERRNOS)
@pytest.mark.parametrize("name", [*RUN_FILES[:3], None])
def test_a_run_that_cannot_be_read_is_no_fresh_run(run, monkeypatch, code, name):
    def open_store(url):
        return Unreadable(native.Store(url), code, name)

    before = {
        path: path.read_bytes() for path in Path(run.run_path[7:]).rglob("*") if path.is_file()
    }
    if name == "checkpoint.previous":
        native.Store(run.run_path).write("checkpoint", b"cut")
        before[Path(run.run_path[7:]) / "checkpoint"] = b"cut"
    monkeypatch.setattr(remote_store, "native", SimpleNamespace(Store=open_store))
    with pytest.raises(OSError, match=os.strerror(code)):
        run.read_checkpoint_to_resume()
    if name in ("checkpoint", None):
        with pytest.raises(OSError, match=os.strerror(code)):
            run.read_checkpoint("checkpoint")
        with pytest.raises(OSError, match=os.strerror(code)):
            run.read("checkpoint")
    for path, data in before.items():
        assert path.read_bytes() == data


@pytest.mark.parametrize("code", ERRNOS)
@pytest.mark.parametrize("name", ["checkpoint", "_fingerprint.json"])
def test_a_run_whose_record_cannot_be_read_is_not_begun(run, monkeypatch, code, name):
    monkeypatch.setattr(
        run_fingerprint_check, "Store", lambda url: Unreadable(native.Store(url), code, name)
    )
    with pytest.raises(OSError, match=os.strerror(code)):
        run_fingerprint_check.check_or_store_fingerprint(
            run, "r", Fingerprint(()), 1, force=False, tell=lambda _: None
        )
    assert run.read("_fingerprint.json") is None


@pytest.mark.parametrize("code", ERRNOS)
@pytest.mark.parametrize(
    "read",
    [
        statistics.read_statistics,
        encoding_learning.read_encoding,
        prepared_directories._unfinished_preparation_key,
        lambda url: prepared_directories.NativeStore(url).exists("x"),
        lambda url: small_files.read_json(prepared_directories.NativeStore(url), "x"),
        lambda url: small_files.read_json_lines(prepared_directories.NativeStore(url), "x"),
    ],
)
def test_descriptions_of_data_are_absent_or_an_error(tmp_path, monkeypatch, code, read):
    url = f"file://{tmp_path}"
    assert not read(url) or read(url) == ([], [])
    for module in (statistics, encoding_learning, prepared_directories):
        monkeypatch.setattr(module, "NativeStore", lambda url: Unreadable(native.Store(url), code))
    with pytest.raises(OSError, match=os.strerror(code)):
        read(url)


def test_the_viewers_files_of_a_store_that_cannot_be_read_for_a_while_lose_nothing(
    run, monkeypatch, caplog
):
    trouble = Trouble()
    trouble.start(0, "from then on")
    opened = SimpleNamespace(Store=lambda url: TroubledStore(native.Store(url), trouble))
    monkeypatch.setattr(journals, "native", opened)
    monkeypatch.setattr(remote_store, "native", opened)
    monkeypatch.setattr(journals.RunJournal, "_write_loop", lambda _: None)
    with caplog.at_level(logging.WARNING, "farandole"):
        journal = journals.RunJournal(run, {})
    assert "earlier entries of the run viewer cannot be read" in caplog.text
    journal.put_row("r", "event/1", {"text": "new"})
    journal.put_row("r", "epoch/1", {"epoch": 1, "values": {"loss": 0.5}})
    journal.put_row("r", "step", {"epoch": 1, "step": 1, "steps": 2, "loss": 0.5})
    with pytest.raises(OSError, match="no space left"):
        journal._write_files()
    trouble.stop()
    assert b"new" not in run.read("_record.json")
    journal._write_files()
    assert b"old" in run.read("_record.json")
    assert b"new" in run.read("_record.json")
    assert run.read("logs/steps.jsonl").count(b"\n") == 2
    assert sorted(journal._epochs) == [0, 1]


@pytest.mark.parametrize("code", ERRNOS)
def test_a_local_path_that_cannot_be_examined_is_not_absent(tmp_path, monkeypatch, code):
    def stat(self, *, follow_symlinks=True):
        raise OSError(code, os.strerror(code), str(self))

    looks = (
        durable_writes.is_path_present,
        durable_writes.is_present_file,
        durable_writes.is_present_directory,
    )
    (tmp_path / "file").touch()
    found = {
        path: [look(path) for look in looks]
        for path in (tmp_path, tmp_path / "file", tmp_path / "file" / "below", tmp_path / "x")
    }
    assert list(found.values()) == [[1, 0, 1], [1, 1, 0], [0, 0, 0], [0, 0, 0]]
    monkeypatch.setattr(Path, "stat", stat)
    for look in looks:
        with pytest.raises(OSError, match=os.strerror(code)):
            look(tmp_path / "file")


LOCKED = """
import os, sys
from farandole.spark.common import LocalStore
run = LocalStore(sys.argv[1]).to_remote("r")
if os.geteuid() == 0:
    os.seteuid(65534)
reads = lambda: run.read("_run.json"), lambda: run.read_checkpoint("checkpoint")
for look in (run.read_checkpoint_to_resume, *reads):
    try:
        print("found", look())
    except PermissionError as error:
        print("refused", error)
"""


def test_a_directory_that_may_not_be_entered_is_an_error(run, tmp_path):
    for path in (tmp_path, *tmp_path.parents):
        if path == Path("/tmp"):
            break
        path.chmod(path.stat().st_mode | 0o055)
    folder = tmp_path / "runs" / "r"
    folder.chmod(0)
    try:
        done = subprocess.run(
            [sys.executable, "-c", LOCKED, str(tmp_path)],
            capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
    finally:
        folder.chmod(0o755)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["refused"] * 3, done


LOOKS = {"exists", "is_file", "is_dir", "isfile", "isdir", "lexists", "is_mount"}
ALLOWED_LOOKS = {
    # Files of the installation, of this process, or of the interpreter's path.
    "common/basics.py": 1,
    "runner/show/run_environment.py": 1,
    "runner/warm_workers.py": 1,
    "spark/keras/saving/onnx.py": 1,
    "spark/shim.py": 1,
    "tensorflow/_native_ops.py": 1,
    "torch/_gpu_tensors.py": 1,
    # Directories of this process, whose absence or refusal has the same effect: another place.
    "common/scratch_directories.py": 2,
    "data/data_memory_budget.py": 1,
    # Whether a page may link to a timeline on this host.
    "runner/show/training_run_reports.py": 1,
    # A wait, after which the file is read.
    "tensorflow/data/compute_service.py": 1,
}
"""Looks at local paths in each file. Python 3.14 and later take every error for absence there, so a
new one uses `durable.is_path_present`, `is_present_file` or `is_present_directory`, or is added
here."""
STORE_LOOKS = {
    "data/inputs/delta_tables.py": 1,
    "data/inputs/file_discovery.py": 2,
    "data/inputs/iceberg_tables.py": 1,
    "data/prepared_directories.py": 3,
    "spark/common/estimator_hooks.py": 1,
    "spark/common/runs/run_fingerprint_check.py": 1,
    "spark/common/saving/save_directory.py": 3,
    "spark/torch/sharding/driver_state.py": 2,
    "spark/torch/sharding/state_files.py": 1,
    "spark/transformers/checkpoint.py": 1,
    "stores/filesystem.py": 1,
    "stores/remote_store.py": 1,
    "stores/store.py": 1,
}
"""Looks at directories of a store, which raises an error if the store cannot be asked."""


def test_every_look_at_a_path_is_known():
    root, found = Path(farandole.__file__).parent, {}
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text())
        count = sum(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in LOOKS
            for node in ast.walk(tree)
        )
        if count:
            found[path.relative_to(root).as_posix()] = count
    known = {
        name: ALLOWED_LOOKS.get(name, 0) + STORE_LOOKS.get(name, 0)
        for name in ALLOWED_LOOKS | STORE_LOOKS
    }
    assert found == known


def test_a_store_made_in_memory_has_the_same_rule():
    run = Store.create("memory://absence").to_remote("r")
    assert run.read_checkpoint_to_resume() is None
    assert run.read("x") is None
