# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Garbage for everything that Python reads from others: an error that says so, and no effect on
other work.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.needs import skipped_without
from tests.trust.garbage import altered, cases, mutated, seconds

import farandole
from farandole._native import store as native
from farandole.data import ParquetLoader
from farandole.numpy import plain_value_exchange
from farandole.runner import warm_workers
from farandole.spark.common.saving import save_directory
from farandole.spark.torch.saving import safetensors_bytes

pytestmark = pytest.mark.timeout(120 + 4 * seconds())


def raised(kind, call, *arguments):
    """The error of this kind that a call raises, if it does."""
    try:
        call(*arguments)
    except kind as error:
        return error
    return None


def test_a_damaged_state_of_a_reader_is_an_error_and_leaves_the_reader_as_it_was(tmp_path):
    pq.write_table(pa.table({"x": np.arange(40)}), tmp_path / "a.parquet")
    loader = ParquetLoader(tmp_path, 8, seed=3, rank=0, size=1)
    sound = json.loads(json.dumps(loader.state_dict()))
    taken = refused = 0

    def case(draw):
        nonlocal taken, refused
        before = loader.state_dict()
        error = raised(ValueError, loader.load_state_dict, altered(draw, sound))
        if error is None:
            taken += 1
        else:
            assert "state" in str(error), error
            assert loader.state_dict() == before
            refused += 1
        assert sum(len(batch["x"]) for batch in loader) <= 40
        loader.load_state_dict(sound)
        assert sorted(int(x) for batch in loader for x in batch["x"]) == list(range(40))

    cases(case)
    assert taken > 0
    assert refused > 0


def test_a_damaged_file_of_tensors_is_an_error_and_takes_no_memory():
    tensors = {"weight": torch.ones(3, 4), "steps": torch.tensor(7), "empty": torch.ones(0, 2)}
    sound = safetensors_bytes.dump_tensors(tensors)
    (length,) = struct.unpack_from("<Q", sound)
    header, data = json.loads(sound[8 : 8 + length]), sound[8 + length :]
    taken = refused = 0

    def case(draw):
        nonlocal taken, refused
        if draw.random() < 0.3:
            damaged = mutated(draw, sound)
        else:
            text = json.dumps(altered(draw, header)).encode()
            damaged = struct.pack("<Q", len(text)) + text + data
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        error = raised(ValueError, safetensors_bytes.load_tensors, damaged)
        if error is None:
            taken += 1
        else:
            assert "file of tensors" in str(error), error
            refused += 1
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 64 << 10

    cases(case)
    assert taken > 0
    assert refused > 0


def test_a_damaged_saved_object_is_an_error_and_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(save_directory, "_BASE_ROW_BYTES", 8 << 20)
    files = save_directory._StoreSaveFiles(native.Store(str(tmp_path)))
    rows = [
        (part, chunk, bytearray(part.encode() * 2_000))
        for part in ("state", "objects")
        for chunk in range(3)
    ]
    files.write_rows("data", rows)
    (path,) = (tmp_path / "data").iterdir()
    # As it is written now, and as earlier versions wrote it.
    older = pa.table(
        {"part": [one[0] for one in rows], "chunk": pa.array([one[1] for one in rows], pa.int32())}
    )
    older = older.append_column("bytes", pa.array([bytes(one[2]) for one in rows]))
    pq.write_table(older, tmp_path / "older.parquet")
    sound = [path.read_bytes(), (tmp_path / "older.parquet").read_bytes()]
    for one in sound:
        path.write_bytes(one)
        assert list(files.read_rows("data")) == [
            (part, chunk, bytes(data)) for part, chunk, data in rows
        ]
    taken = refused = 0

    def case(draw):
        nonlocal taken, refused
        path.write_bytes(mutated(draw, draw.choice(sound)))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        error = raised((ValueError, OSError), lambda: list(files.read_rows("data")))
        if error is None:
            taken += 1
        else:
            assert any(
                word in str(error) for word in (path.name, str(tmp_path), "column", "byte budget")
            ), error
            refused += 1
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 128 << 10

    cases(case)
    assert taken > 0
    assert refused > 0


def test_deep_and_huge_headers_of_tensors_are_errors():
    one = '{"x":{"dtype":"F32","shape":[%s],"data_offsets":[0,0]}}'
    # The third took all memory: a list, multiplied.
    shapes = [
        1 << 40,
        f"0.5,1{400 * '0'}",
        f"[[]],{1 << 58}",
        "true",
        ",".join(["1"] * 65),
        "-1,-1",
    ]
    for text in (b"[" * 100_000, b"[]", b"7", *((one % shape).encode() for shape in shapes)):
        with pytest.raises(ValueError, match="not a whole file of tensors"):
            safetensors_bytes.load_tensors(struct.pack("<Q", len(text)) + text)


@pytest.fixture
def registry_module():
    # By its path: the package around it loads TensorFlow, which it does without.
    path = Path(farandole.__file__).parent / "tensorflow" / "data" / "_registry.py"
    spec = importlib.util.spec_from_file_location("meeting_of_data", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    server = module.DataServiceRegistryServer(1, 1)
    yield server, module
    server.close()


def address(server):
    return "127.0.0.1", server.listen_addresses[0][1]


def client(server, module):
    return module.DataServiceRegistryClient([address(server)], server.key, 10.0)


def request(server, module, text):
    """Returns the server's answer to a request that has the key."""
    line = socket.create_connection(address(server), 10.0)
    with line:
        until = time.monotonic() + 30.0
        randoms = module._receive_exactly(line, 32, until) + b"c" * 32
        proof = module.hmac.digest(server.key, b"request" + randoms + text, "sha256")
        module._send_message(line, randoms[32:] + proof + text, until)
        line.shutdown(socket.SHUT_WR)
        return line.makefile("rb").read()


def test_garbage_at_the_meeting_point_changes_nothing(registry_module, monkeypatch):
    server, module = registry_module
    failed = []
    monkeypatch.setattr(threading, "excepthook", lambda told: failed.append(told.exc_value))
    asker = client(server, module)
    asker.register_dispatcher(0, "here:1")
    requests = [
        {"call": "dispatcher", "dispatcher": 0, "address": "here:1"},
        {"call": "worker", "dispatcher": 0, "worker": 0},
        {"call": "await_dispatcher", "dispatcher": 0, "timeout": 0.0},
        {"call": "await_workers", "dispatcher": 0, "timeout": 0.0},
    ]

    def case(draw):
        if draw.random() < 0.5:
            with socket.create_connection(address(server), 10.0) as line:
                said = struct.pack(
                    "!I", draw.choice([0, 63, 64, 200, 1 << 16, 1 << 31])
                ) + draw.randbytes(200)
                # The door may close in the middle of a word.
                with contextlib.suppress(OSError):
                    line.sendall(said[: draw.randrange(len(said))])
                    line.shutdown(socket.SHUT_WR)
                    # The random part comes first; a client without the key gets only this part.
                    assert len(line.makefile("rb").read()) <= 32
        else:
            told = altered(draw, draw.choice(requests))
            if isinstance(told, dict) and "timeout" in told:
                told["timeout"] = draw.choice([0.0, -1, "0", None, float("nan"), 10**400])
            text = json.dumps(told).encode() if draw.random() < 0.8 else draw.randbytes(60)
            request(server, module, text if draw.random() < 0.95 else b"[" * 50_000)
        assert asker.wait_for_dispatcher_registration(0) == "here:1"

    cases(case)
    assert not failed


def is_over(line, byte):
    """Returns whether the other side has ended a connection on which one more byte is said."""
    try:
        line.sendall(bytes([byte]))
        return not line.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_stranger_at_the_meeting_point_has_so_long_in_all_however_slowly_he_speaks(
    registry_module, monkeypatch
):
    server, module = registry_module
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_SECONDS", 1.0)
    began = time.monotonic()
    with socket.create_connection(address(server), 10.0) as line:
        assert len(line.recv(100)) == 32
        line.settimeout(0.1)
        # The beginning of a message of 64 bytes.
        said = itertools.chain(b"\0\0\0\x40", itertools.repeat(0))
        while time.monotonic() < began + 60.0 and not is_over(line, next(said)):
            pass
    assert 0.5 < time.monotonic() - began < 30.0


def test_a_crowd_of_strangers_keeps_no_rank_from_the_meeting_point(registry_module, monkeypatch):
    server, module = registry_module
    server._max_connections = 50
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_SECONDS", 60.0)
    asker = client(server, module)
    asker.register_dispatcher(0, "here:1")
    strangers = []
    try:
        for _ in range(4):
            strangers += [socket.create_connection(address(server), 10.0) for _ in range(50)]
            began = time.monotonic()
            assert asker.wait_for_dispatcher_registration(0) == "here:1"
            assert time.monotonic() - began < 30.0
        assert len(server._unproven_connections) <= 50
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_request_that_was_changed_on_the_way_is_refused(registry_module):
    server, module = registry_module
    door = socket.create_server(("127.0.0.1", 0))

    def relay():
        near, _ = door.accept()
        with near, socket.create_connection(address(server), 10.0) as far:
            until = time.monotonic() + 30.0
            module._send_bytes(near, module._receive_exactly(far, 32, until), until)
            said = module._receive_message(near, 64, until)
            module._send_message(far, said.replace(b"here", b"evil"), until)
            near.sendall(far.recv(1000))

    thread = threading.Thread(target=relay)
    thread.start()
    misled = module.DataServiceRegistryClient([door.getsockname()], server.key, 5.0)
    with pytest.raises(ConnectionError, match="gave no answer"):
        misled.register_dispatcher(0, "here:1")
    thread.join(10.0)
    door.close()
    with pytest.raises(TimeoutError):
        client(server, module).wait_for_dispatcher_registration(0, timeout=0.0)


def reap(pid):
    """Descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.fixture
def forks(tmp_path, monkeypatch):
    """Yields the socket of a fork server that has imported little, and its process id."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    place = tmp_path / "w"
    told = warm_workers.WarmWorkerSettings(("json",), 30.0)
    warm_workers._start_server(told, sys.executable, dict(os.environ), os.getpid(), place)
    pid = int(_server_of(place))
    yield place, pid
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + 30.0
    while place.exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not place.exists()


def _server_of(place):
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and os.fsencode(place) in Path(
                f"/proc/{entry}/cmdline"
            ).read_bytes().split(b"\0"):
                return entry
    raise AssertionError("no fork server")


def send_request(place, draw, message, head=None, count=2):
    """A request, nearly; what the server says to it."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.settimeout(10.0)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        line.connect(str(place))
        # A client that closes with unread bytes resets the connection.
        if draw.random() < 0.8 and line.recv(1) != b"r":
            return b""
        socket.send_fds(
            line, [struct.pack("=I", len(message) if head is None else head)], [null] * count
        )
        line.sendall(message)
        if draw.random() < 0.3:
            return b""
        line.shutdown(socket.SHUT_WR)
        return line.makefile("rb").read()
    except OSError:
        return b""
    finally:
        line.close()
        os.close(null)


def test_garbage_at_the_fork_server_leaves_it_as_it_was(forks):
    place, pid = forks
    sound = b"\0".join([b"/", b"", b"FARANDOLE_X=1"])
    before = reap(pid)

    def case(draw):
        kind = draw.randrange(3)
        if kind == 0:
            send_request(place, draw, mutated(draw, sound)[:4000], count=draw.randrange(9))
        elif kind == 1:
            send_request(
                place,
                draw,
                draw.randbytes(60),
                head=draw.choice([0, 1, 60, 61, 1 << 31, (1 << 32) - 1]),
            )
        else:
            send_request(
                place,
                draw,
                sound,
                head=draw.choice([0, 5, len(sound) + 10]),
                count=draw.randrange(4),
            )

    cases(case)
    # Workers that were begun end by themselves, as they have nothing to do.
    end = time.monotonic() + 20.0
    while (left := reap(pid)) > before and time.monotonic() < end:
        time.sleep(0.05)
    assert left <= before
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(10.0)
        line.connect(str(place))
        assert line.recv(1) == b"r"


NOBODY = 65534


def floods(place, told, stop):
    """Connects to a socket in the present directory again and again; then says what was heard
    there.
    """
    heard, rounds = set(), 0
    while not select.select([stop], [], [], 0)[0]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(20.0)
            line.connect(place)
            try:
                heard.add(line.recv(1).decode())
            except ConnectionError:
                heard.add("reset")
        rounds += 1
        if rounds == 1:
            os.write(told, b"dialed\n")
    os.write(told, json.dumps([rounds, sorted(heard)]).encode())


@contextlib.contextmanager
def another_user(folder, work, *arguments):
    """Has a fork of this process, as another user, work in a directory; the reading end of its
    pipe.
    """
    told, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.chdir(folder)  # while the directories above it may still be passed
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            work(arguments[0], tells, *arguments[1:])
            status = 0
        finally:
            os._exit(status)
    os.close(tells)
    try:
        with os.fdopen(told, "rb") as pipe:
            yield pipe
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise


@skipped_without(None if os.geteuid() == 0 else "needs root, to be another user")
def test_another_user_gets_nothing_from_the_fork_server_and_keeps_nobody_from_it(forks, tmp_path):
    place, _ = forks
    # The directory keeps others out already. Here it does not.
    tmp_path.chmod(0o711)
    place.chmod(0o777)
    stop, stops = os.pipe()
    with another_user(tmp_path, floods, place.name, stop) as told:
        assert told.readline() == b"dialed\n"
        for _ in range(50):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
                line.settimeout(20.0)
                line.connect(str(place))
                assert line.recv(1) == b"r", "the owner is served meanwhile"
        os.write(stops, b"x")
        rounds, heard = json.loads(told.read())
    for end in (stop, stops):
        os.close(end)
    assert rounds > 1
    assert heard == ["n"], "declined before a request is read"


def test_a_damaged_message_of_plain_values_is_an_error():
    arrays = np.arange(6.0).reshape(2, 3), np.ones((0, 4)), np.float32(1)
    sound = plain_value_exchange.pack_plain({"a": [1, 2.5, ("x", b"yz", *arrays)], 7: None})
    text, _, rest = sound.partition(b"\0")
    told = json.loads(text)
    taken = refused = 0

    def case(draw):
        nonlocal taken, refused
        damaged = mutated(draw, sound)
        if draw.random() < 0.7:
            damaged = json.dumps(altered(draw, told)).encode() + b"\0" + rest
        if raised(ValueError, plain_value_exchange.unpack_plain, damaged) is None:
            taken += 1
        else:
            refused += 1

    cases(case)
    assert taken > 0
    assert refused > 0
