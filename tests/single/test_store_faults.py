# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Stores that fail: every error comes within a bounded time, names the file and says what was
tried.
"""

import contextlib
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.programs import program_path

from farandole._native import store as native
from farandole.data import ParquetLoader
from farandole.spark.common import Store

TIMEOUT = 10
"""Seconds for which requests are repeated."""
BOUND = 60
"""Seconds in which a store that never works has to be given up: the timeout, the last request, and
what a busy machine adds.
"""


class Handler(BaseHTTPRequestHandler):
    """A server whose fault is the first part of the path behind the bucket."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        mood = [*self.path.split("?")[0].split("/"), "silent"][2]
        self.server.asked.append(mood)
        if mood.isdigit():
            body = b"<Error><Code>Said</Code><Message>so</Message></Error>"
            self.send_response(int(mood))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        elif mood == "cut":
            self.send_response(200)
            for name, value in (
                ("Content-Length", "100"),
                ("ETag", '"x"'),
                ("Last-Modified", self.date_time_string()),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"half of it")
            self.close_connection = True
        else:  # silent
            self.server.ended.wait(BOUND)
            self.close_connection = True

    def do_PUT(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.do_GET()

    do_HEAD = do_GET  # noqa: N815 - the base class calls it so
    do_DELETE = do_GET  # noqa: N815
    do_POST = do_PUT  # noqa: N815


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.ended = [], threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()


@contextlib.contextmanager
def service():
    server = Server()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()


def attempt(mood, port):
    """Returns the errors of reading and writing, and the time that both took."""
    url = f"s3://bucket/{mood}"
    options = {
        "endpoint_url": f"http://127.0.0.1:{port}",
        "anon": "true",
        "region_name": "here",
    }
    native.configure_options(url, options)
    store, told, start = native.Store(url), {}, time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        for name, ask in (
            ("read", lambda: store.read("a b.txt")),
            ("write", lambda: store.write("a b.txt", b"x")),
        ):
            told[name] = pool.submit(ask)
    return {name: future.exception() for name, future in told.items()}, time.monotonic() - start


@pytest.fixture(scope="module")
def faults():
    """All of them at once: most of the time is waiting."""
    with (
        pytest.MonkeyPatch.context() as environment,
        service() as server,
        socket.create_server(("127.0.0.1", 0)) as nobody,
    ):
        environment.setenv("FARANDOLE_STORE_TIMEOUT", str(TIMEOUT))
        closed = nobody.getsockname()[1]
        nobody.close()
        port = server.server_address[1]
        moods = dict.fromkeys(("500", "503", "403", "404", "silent", "cut"), port) | {
            "refused": closed
        }
        with ThreadPoolExecutor(len(moods)) as pool:
            told = {mood: pool.submit(attempt, mood, port) for mood, port in moods.items()}
        yield {mood: future.result() for mood, future in told.items()}, list(server.asked)


@pytest.mark.parametrize("mood", ["500", "503", "silent", "refused"])
def test_a_store_that_never_works_is_given_up_and_says_how_often_it_was_asked(faults, mood):
    (told, seconds), asked = faults[0][mood], faults[1]
    for action, error in told.items():
        assert type(error) is OSError, (action, error)
        assert f"cannot {action} s3://bucket/{mood}/a b.txt" in str(error)
        assert "retries" in str(error)
        assert "FARANDOLE_STORE_TIMEOUT" in str(error)
    assert TIMEOUT < seconds < BOUND
    if mood != "refused":
        assert 4 < asked.count(mood) <= 200, "asked more than once by each, and not for ever"


def test_a_store_that_says_no_is_asked_once(faults):
    (told, seconds), asked = faults[0]["403"], faults[1]
    for action, error in told.items():
        assert isinstance(error, PermissionError), (action, error)
        assert f"not allowed to {action}: s3://bucket/403/a b.txt" in str(error)
    (absent, _), _ = faults[0]["404"], None
    assert isinstance(absent["read"], FileNotFoundError)
    assert "s3://bucket/404/a b.txt" in str(absent["read"])
    assert asked.count("403") == asked.count("404") == 2
    assert seconds < 30


def test_an_answer_that_breaks_off_is_an_error(faults):
    (told, seconds), _ = faults[0]["cut"], None
    assert type(told["read"]) is OSError, told
    assert "cannot read s3://bucket/cut/a b.txt" in str(told["read"])
    assert seconds < BOUND


LOGGED_USES = {
    "store": """
from farandole.spark.common import Store
options = {"endpoint_url": f"http://127.0.0.1:{port}", "anon": "true", "region_name": "here"}
use = lambda: Store.create("s3://bucket/503", storage_options=options).read("s3://bucket/503/x")
""",
    "loader": """
from farandole.data import ParquetLoader
options = {"endpoint_url": f"http://127.0.0.1:{port}", "anon": "true", "region_name": "here"}
use = lambda: ParquetLoader("s3://bucket/503/x", 10, storage_options=options)
""",
}
LOGGED = """
import sys, threading
import farandole, farandole.data
assert threading.active_count() == 1, threading.enumerate()
port = sys.argv[1]
{use}
try:
    use()
except OSError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("use", LOGGED_USES)
def test_a_busy_service_is_logged_without_further_ado(use, monkeypatch):
    monkeypatch.setenv("FARANDOLE_STORE_TIMEOUT", "3")
    with service() as server:
        program = LOGGED.replace("{use}", LOGGED_USES[use])
        command = [sys.executable, "-c", program, str(server.server_address[1])]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1, done.stderr
    assert re.search("WARNING farandole.*s3://bucket does not serve requests.*503", done.stderr)


HOLDING = """
import json, sys, time
from farandole.data.prepared_directories import PreparedDirectory
from farandole.spark.common import Store
port, begun = sys.argv[1:3]
options = {"endpoint_url": f"http://127.0.0.1:{port}", "anon": "true", "region_name": "here"}
store = Store.create("s3://bucket/silent", storage_options=options)
held = [PreparedDirectory(store, index, "_use-1.json") for index in range(3)]
open(begun, "w").write(str(time.time()))
"""


@pytest.mark.parametrize("way", ["silent", "refused"])
def test_a_process_whose_store_is_gone_ends_all_the_same(tmp_path, way):
    with service() as server, socket.create_server(("127.0.0.1", 0)) as nobody:
        closed = nobody.getsockname()[1]
        nobody.close()
        port = server.server_address[1] if way == "silent" else closed
        command = [sys.executable, "-c", HOLDING, str(port), str(tmp_path / "begun")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        ended = time.time()
        assert done.returncode == 0, done.stderr
        # The service is named, and nothing else is said.
        for line in done.stderr.splitlines():
            assert re.search("WARNING farandole.*s3://bucket", line), done.stderr
        assert ended - float((tmp_path / "begun").read_text()) < 30, (
            "two seconds, and what a busy machine adds"
        )
        assert way == "refused" or server.asked, "it was tried"


def on_a_full_disk(tmp_path, program, limit="size=4m"):
    """Runs a program on a small disk that nobody else sees."""
    place = tmp_path / "disk"
    place.mkdir()
    script = f'mount -t tmpfs -o {limit} none "$1" && shift && exec "$@"'
    command = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        script,
        "sh",
        place,
        sys.executable,
        program,
        place,
    ]
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=120
    )


def may_mount():
    tried = ["unshare", "--mount", "true"]
    return (
        shutil.which("unshare")
        and subprocess.run(tried, capture_output=True, check=False).returncode == 0
    )


@pytest.mark.skipif(not may_mount(), reason="only root mounts a small disk")
def test_gc_makes_room_on_a_full_disk(tmp_path):
    program = program_path(__file__, "collect_on_full_disk")
    done = on_a_full_disk(tmp_path, program)
    assert done.returncode == 0, done.stderr
    gone, left = done.stdout.splitlines()
    assert gone == "['intermediate_train_data.0']"
    assert left == "['filler', 'mine.txt'] mine"


@pytest.mark.skipif(not may_mount(), reason="only root mounts a small disk")
def test_gc_on_a_disk_without_room_for_a_name_loses_nothing(tmp_path):
    program = program_path(__file__, "collect_without_names")
    done = on_a_full_disk(tmp_path, program, "nr_inodes=60")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True True", "['intermediate_train_data.0']"]


@pytest.mark.skipif(not may_mount(), reason="only root mounts a small disk")
def test_a_full_disk_leaves_the_last_good_file_and_says_so(tmp_path):
    program = program_path(__file__, "write_to_full_disk")
    done = on_a_full_disk(tmp_path, program)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "checkpoint",
        "checkpoint",
        "data",
        "left",
        "still",
    ], done.stdout
    assert all(
        "No space left on device" in line and "/disk/store/" in line for line in lines[:3]
    ), done.stdout
    assert lines[3:] == ["left True", "still 1"]


def numbers(rows):
    return pa.table({"id": np.arange(rows), "x": np.arange(rows, dtype=np.float32)})


def test_files_of_no_bytes_no_rows_and_one_row_are_distinguished(tmp_path):
    for name in ("bytes", "none", "one", "some"):
        (tmp_path / name).mkdir()
    (tmp_path / "bytes" / "part.parquet").touch()
    with pytest.raises(OSError, match=r"bytes/part\.parquet"):
        ParquetLoader(tmp_path / "bytes", 1)
    pq.write_table(numbers(0), tmp_path / "none" / "part.parquet")
    with pytest.raises(ValueError, match=r"no rows in .*/none"):
        ParquetLoader(tmp_path / "none", 1)
    pq.write_table(numbers(1), tmp_path / "one" / "part.parquet")
    for size in (1, 3):
        got = [
            list(ParquetLoader(tmp_path / "one", 4, rank=rank, size=size)) for rank in range(size)
        ]
        assert [len(batches) for batches in got] == [1] * size
        assert sum(len(batch["id"]) for batches in got for batch in batches) == 1
    # What Spark leaves behind: empty partitions beside full ones.
    for number, rows in enumerate((0, 5, 0, 1)):
        pq.write_table(numbers(rows), tmp_path / "some" / f"part-{number}.parquet")
    got = np.concatenate([batch["id"] for batch in ParquetLoader(tmp_path / "some", 4)])
    assert sorted(got.tolist()) == [0, 0, 1, 2, 3, 4]


def test_names_may_be_any(tmp_path):
    directory = tmp_path / "a b=c%20ü+#?" / "k=v w"
    directory.mkdir(parents=True)
    pq.write_table(numbers(7), directory / "pärt 0=x%.parquet")
    batch = next(iter(ParquetLoader(tmp_path / "a b=c%20ü+#?", 10, columns=["id"])))
    assert sorted(batch["id"].tolist()) == list(range(7))
    store = Store.create(str(tmp_path / "a b=c%20ü+#?"))
    store.write_text(f"{store.get_run_path('läuft 1=2')}/note.txt", "x")
    assert store.read(f"{store.get_run_path('läuft 1=2')}/note.txt") == b"x"


@pytest.mark.parametrize("way", ["deleted", "shorter", "replaced"])
def test_a_file_that_changes_in_the_middle_of_an_epoch_is_named(tmp_path, way):
    for number in range(20):
        pq.write_table(
            numbers(30_000),
            tmp_path / f"{number:02}.parquet",
            use_dictionary=False,
            compression="none",
        )
    loader = ParquetLoader(tmp_path, 1000, shuffle=False, byte_budget=3 << 20)
    batches = iter(loader)
    next(batches)
    last = tmp_path / "19.parquet"
    if way == "deleted":
        last.unlink()
    elif way == "shorter":
        with last.open("r+b") as file:
            file.truncate(1000)
    else:
        other = pa.table({"id": pa.array(["text"] * 10), "x": np.arange(10, dtype=np.float32)})
        pq.write_table(other, tmp_path / "new", compression="none")
        (tmp_path / "new").rename(last)
    with pytest.raises(OSError, match=r"19\.parquet"):
        list(batches)
