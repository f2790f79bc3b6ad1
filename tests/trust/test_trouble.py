# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Nothing is lost: whatever happens to a store, an operation goes on or tells of it, and all that
was there stays.

`trouble_table.py` says what happens where, and what must hold. A short run takes cells that cover
every pair of factors; `make test-trust` takes all of them, with longer troubles.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import signal
import threading
import time
import zipfile
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pytest
from tests.needs import skip_without
from tests.storage.trouble_proxy import TroubleProxy
from tests.trust import trouble_table as table
from tests.trust.trouble_mount import READS, WRITES, TroubleMount

from farandole._native import store as native
from farandole.common.commits import StoredCommits
from farandole.data import ParquetLoader, prepare_data
from farandole.spark.common import Store
from farandole.spark.common.saving import save_directory
from farandole.stores.run_lease import RunInUseError, RunLease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)
GRID = table.every_cell()
FEW = table.pairwise(GRID)
MIB = 1 << 20
ROWS = 2000
METADATA = {"class": "an.Object", "uid": "u", "paramMap": {}, "defaultParamMap": {}}
NUMBERS = {
    "full": errno.ENOSPC,
    "quota": errno.EDQUOT,
    "unreadable": errno.EIO,
    "stale": errno.ESTALE,
    "unconnected": errno.ENOTCONN,
}
_MOUNTS_MISSING = (
    None
    if os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK)
    else "mounts need root and /dev/fuse"
)
libc = ctypes.CDLL(None, use_errno=True)


def archive(text: str) -> bytes:
    """A checkpoint."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("weights", text * MIB)
    return file.getvalue()


ONE, TWO = archive("1"), archive("2")


def rows(first: int) -> pa.Table:
    return pa.table({"x": np.arange(first, first + ROWS, dtype=np.int64)})


class Experiment:
    """A store with data in use, data to be collected, a checkpoint, a model and a file of a user.

    Args:
        store: empty.
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        self.data = prepare_data(rows(0), store)
        prepare_data(rows(ROWS), store).release()
        self.run = store.to_remote("run")
        self.run.write_checkpoint("checkpoint", ONE)
        self.model = f"{store.prefix_path}/model"
        self.save_model(b"old")
        self.note = f"{store.get_train_data_path(7)}/mine.parquet"
        store.write_text(self.note, "mine")

    def save_model(self, data: bytes) -> None:
        save_directory.SaveDirectory(self.model, None).write_object_version(
            METADATA, {"weights": data}, overwrite=True
        )

    def load_model(self) -> bytes:
        reading = save_directory.SaveDirectory(self.model, None)
        return reading.read_parts(reading.read_metadata())["weights"]

    def read(self) -> None:
        found = np.concatenate([batch["x"] for batch in ParquetLoader(self.data.train_url, 64)])
        assert sorted(found.tolist()) == list(range(ROWS))

    def prepare(self) -> None:
        with prepare_data(rows(5 * ROWS), self.store) as prepared:
            assert prepared.train_rows == ROWS

    def checkpoint(self) -> None:
        self.run.write_checkpoint("checkpoint", TWO)
        assert self.run.read_checkpoint_to_resume() == TWO

    def commit(self) -> None:
        commits = StoredCommits(self.store, "elastic", 1)
        commits.acquire_lease()
        try:
            commits.start_commit_write(1, {}, lambda: TWO, lambda: None)
            error = commits.wait_for_commit_write()
            if error is not None:
                raise error
            assert commits.read_last_commit() == TWO
        finally:
            commits.release_lease()

    def resume(self) -> None:
        assert self.run.read_checkpoint_to_resume() in (ONE, TWO), "training would begin anew"

    def lease(self) -> None:
        lease, other = (RunLease(self.store.get_run_path("run"), "run") for _ in range(2))
        lease.acquire_lease()
        try:
            lease.renew_or_raise()
            with pytest.raises(RunInUseError):
                other.acquire_lease()
        finally:
            lease.release_lease()

    def gc(self) -> None:
        assert set(self.store.gc(older_than=-0.0)) <= {"intermediate_train_data.1"}

    def check_kept(self) -> None:
        """Checks that nothing was lost."""
        self.read()
        self.resume()
        assert self.load_model() in (b"old", b"new")
        assert self.store.read(self.note) == b"mine"

    def operation(self, name: str) -> Callable[[], None]:
        if name == "saved model":
            return lambda: self.save_model(b"new")
        return getattr(self, name)


class Trouble:
    """The trouble of one cell; `begin` and `end` are what the place can do."""

    def __init__(self, store: Any, begin: Callable[[str, float], None], end: Callable[[], int]):
        self.store, self.begin, self.end = store, begin, end


@contextlib.contextmanager
def service(request: Any, kind: str, prefix: str) -> Iterator[Trouble]:
    """An emulator behind a proxy."""
    options = dict(request.getfixturevalue(f"{kind}_options"))
    scheme = {"s3": "s3", "gcs": "gs", "azure": "az"}[kind]
    text = options.get("endpoint_url") or options["connection_string"].split("BlobEndpoint=")[1]
    proxy = TroubleProxy(urlsplit(text).netloc)
    near = text.replace(urlsplit(text).netloc, f"127.0.0.1:{proxy.port}")
    options = {key: str(value).replace(text, near) for key, value in options.items()}

    def begin(trouble: str, seconds: float) -> None:
        if trouble == "slow":
            proxy.rate, proxy.hits = MIB, 1
        else:
            proxy.begin(trouble, seconds)

    def end() -> int:
        proxy.rate = None
        hits = proxy.hits
        proxy.begin(None, 0)
        return hits

    try:
        yield Trouble(
            Store.create(f"{scheme}://bucket/{prefix}", storage_options=options), begin, end
        )
    finally:
        proxy.close()


@contextlib.contextmanager
def cluster(request: Any, prefix: str, monkeypatch: Any) -> Iterator[Trouble]:
    """HDFS, whose name node and data nodes can be stopped."""
    hdfs = request.getfixturevalue("hdfs")
    for name, value in hdfs.environment.items():
        monkeypatch.setenv(name, value)

    timers: list[threading.Timer] = []

    def begin(_: str, seconds: float) -> None:
        os.kill(hdfs.pid, signal.SIGSTOP)
        timers.append(threading.Timer(seconds, os.kill, (hdfs.pid, signal.SIGCONT)))
        timers[-1].start()

    def end() -> int:
        for timer in timers:
            timer.cancel()
        os.kill(hdfs.pid, signal.SIGCONT)
        return 1

    yield Trouble(Store.create(f"{hdfs.url}/{prefix}"), begin, end)


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[Trouble]:
    """A file system that can be filled."""
    place.mkdir()
    assert libc.mount(b"small", os.fsencode(place), b"tmpfs", 0, b"size=64m") == 0
    filler = place / "filler"

    def begin(_: str, __: float) -> None:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096):
                pass

    def end() -> int:
        filler.unlink()
        return 1

    try:
        yield Trouble(Store.create(str(place / "store")), begin, end)
    finally:
        libc.umount2(os.fsencode(place), 2)


@contextlib.contextmanager
def network_mount(place: Path) -> Iterator[Trouble]:
    """A mount whose server fails on demand."""
    mount = TroubleMount(place / "backing", place / "mount")

    def begin(trouble: str, seconds: float) -> None:
        if trouble == "skewed":
            mount.skew(240)
        elif trouble == "silent":
            mount.begin(0, (*READS, *WRITES), seconds)
        else:
            # What fails at once stays so until the operation has ended.
            mount.begin(NUMBERS[trouble], WRITES if trouble in table.FULL else READS, 60)

    def end() -> int:
        mount.skew(0)
        return mount.end_trouble()

    try:
        yield Trouble(Store.create(str(mount.place / "store")), begin, end)
    finally:
        mount.close()


def open_place(
    request: Any, kind: str, prefix: str, tmp_path: Path, monkeypatch: Any
) -> contextlib.AbstractContextManager[Trouble]:
    if kind in ("local", "mount"):
        skip_without(_MOUNTS_MISSING)
    if kind == "hdfs":
        return cluster(request, prefix, monkeypatch)
    if kind == "local":
        return small_disk(tmp_path / "disk")
    if kind == "mount":
        return network_mount(tmp_path)
    return service(request, kind, prefix)


@pytest.fixture
def endure(
    request: Any, prefix: str, tmp_path: Path, monkeypatch: Any
) -> Callable[[table.Cell, float], None]:
    """Runs a cell with a trouble of some seconds."""

    def run(cell: table.Cell, seconds: float) -> None:
        monkeypatch.setenv("FARANDOLE_STORE_TIMEOUT", str(max(4, int(6 * seconds))))
        # As where Spark does not know the store: the model is written by the store itself.
        monkeypatch.setattr(save_directory, "_spark_has_scheme", lambda *_: False)
        with open_place(request, cell.place, prefix, tmp_path, monkeypatch) as trouble:
            experiment = Experiment(trouble.store)
            operation = experiment.operation(cell.operation)
            lasts = seconds if cell.goes_on else 60
            trouble.begin(cell.trouble, lasts)
            started = time.monotonic()
            error = None
            try:
                operation()
            except Exception as failure:  # noqa: BLE001 - judged below
                error = failure
            took = time.monotonic() - started
            hits = trouble.end()
            judge(cell, experiment, error, hits)
            assert took < 8 * seconds + 20, f"it took {took:.0f} s"
            experiment.check_kept()
            operation()
            experiment.check_kept()
            experiment.data.release()

    return run


def judge(cell: table.Cell, experiment: Experiment, error: Exception | None, hits: int) -> None:
    """Checks an operation's end."""
    if cell.goes_on:
        if error is not None:
            raise error
        assert hits > 0 or cell.trouble in (*table.FULL, "skewed"), "the trouble did not happen"
        return
    assert hits > 0, "the trouble did not happen"
    assert isinstance(error, OSError), repr(error)
    assert not isinstance(error, FileNotFoundError), f"it is there: {error}"
    place = native.Store(experiment.store.prefix_path)
    assert (place.local_path or place.url) in str(error), f"names no place: {error}"


def test_few_cells_cover_every_pair() -> None:
    assert table.pairwise(GRID) == FEW, "another run would try other cells"
    for factors in (("place", "trouble"), ("operation", "kind"), ("place", "operation")):
        reached, tried = (
            {tuple(getattr(cell, factor) for factor in factors) for cell in cells}
            for cells in (GRID, FEW)
        )
        assert reached == tried


@pytest.mark.parametrize("cell", FEW, ids=str)
def test_a_short_trouble_loses_nothing(
    cell: table.Cell, endure: Callable[[table.Cell, float], None]
) -> None:
    endure(cell, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("cell", GRID, ids=str)
def test_no_trouble_loses_anything(
    cell: table.Cell, endure: Callable[[table.Cell, float], None]
) -> None:
    endure(cell, 3.0)
