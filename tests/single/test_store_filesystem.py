# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`Store.fs`: files that are created once, and stores that cannot be asked."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from farandole.spark.common import Store
from farandole.stores.filesystem import StoreFileSystem


@pytest.fixture(params=["local", "memory"])
def place(request, tmp_path):
    return str(tmp_path) if request.param == "local" else f"memory://fs-{tmp_path.name}/x"


def test_of_many_that_create_a_file_one_succeeds_and_none_overwrites_it(place):
    fs, path = Store.create(place).fs, f"{place}/file"
    files = [fs.open(path, "xb") for _ in range(8)]
    barrier, made = threading.Barrier(8), []

    def close(number):
        files[number].write(b"%d" % number)
        barrier.wait()
        try:
            files[number].close()
        except FileExistsError:
            return
        made.append(number)

    threads = [threading.Thread(target=close, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = made
    assert fs.cat_file(path) == b"%d" % winner
    with pytest.raises(FileExistsError, match="file"):
        fs.open(path, "xb")


@pytest.mark.parametrize("mode", ["wb", "xb"])
def test_a_file_that_appears_between_opening_and_closing_is_replaced_only_if_asked(place, mode):
    fs, path = Store.create(place).fs, f"{place}/file"
    file = fs.open(path, mode)
    file.write(b"late")
    fs.pipe_file(path, b"first")
    if mode == "xb":
        with pytest.raises(FileExistsError):
            file.close()
    else:
        file.close()
    assert fs.cat_file(path) == (b"first" if mode == "xb" else b"late")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOTCONN])
@pytest.mark.parametrize("look", ["exists", "isfile", "isdir"])
def test_a_store_that_cannot_be_asked_is_not_absence(place, monkeypatch, look, code):
    fs = Store.create(place).fs
    fs.pipe_file(f"{place}/a/b", b"x")
    found = [getattr(fs, look)(f"{place}/{name}") for name in ("a", "a/b", "c")]
    assert found == {"exists": [1, 1, 0], "isfile": [0, 1, 0], "isdir": [1, 0, 0]}[look]

    def info(self, path, **_):
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(StoreFileSystem, "info", info)
    with pytest.raises(OSError, match=os.strerror(code)):
        getattr(fs, look)(f"{place}/a/b")
