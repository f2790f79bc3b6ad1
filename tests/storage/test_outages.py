# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Outages: every operation on every service goes on after every trouble, or names it in time."""

import json
import logging
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from tests.programs import program_path
from tests.storage.trouble_proxy import TROUBLES, TroubleProxy

from farandole._native import store as native
from farandole.common.logs import start_logging

MIB = 1 << 20
PART = 8 * MIB
LARGE = bytes(range(256)) * (20 * MIB // 256)
"""More than goes in one request."""


def read_large(store, name):
    assert store.read(f"{name}-large") == LARGE


def write_large(store, name):
    store.write(f"{name}-new", LARGE)
    assert store.read_range(f"{name}-new", PART - 2, PART + 2) == LARGE[PART - 2 : PART + 2]


def copy(store, name):
    store.copy(f"{name}-large", f"{name}-copy")
    assert store.size(f"{name}-copy") == len(LARGE)


def delete(store, name):
    store.delete(name)
    assert not store.exists(name)


def hold_lease(store, name):
    directory = store.open_child(f"{name}-leased")
    lease = directory.acquire_lease()
    assert lease is not None, "the own lease does not stand in the way"
    assert directory.renew_mark(lease)
    assert directory.acquire_lease() is None
    mark = directory.downgrade_lease(lease)
    directory.delete(mark)
    assert directory.list_directory() == []


def create(store, name):
    assert store.create_if_absent(f"{name}-once", name.encode())
    assert not store.create_if_absent(f"{name}-once", b"other")


def sweep(store, name):
    data = store.open_child(f"{name}-sweep")
    gone, left = data.sweep_stale_data(0.0)
    assert [path for path, _, _ in gone] == ["intermediate_train_data.0"]
    assert left == []


def write_small(store, name):
    store.write(f"{name}-new", b"small")
    assert store.read(f"{name}-new") == b"small"


OPERATIONS = {
    "read": lambda store, name: expect(store.read(name), b"0123456789"),
    "read large": read_large,
    "read range": lambda store, name: expect(store.read_range(name, 2, 5), b"234"),
    "size": lambda store, name: expect(store.size(name), 10),
    "exists": lambda store, name: expect(store.exists(f"{name}-tree"), True),
    "stat": lambda store, name: expect(store.stat(name)[1], 10),
    "list": lambda store, name: expect(len(store.list(f"{name}-tree")), 2),
    "list directory": lambda store, name: expect(len(store.list_directory(f"{name}-tree")), 2),
    "write": write_small,
    "write large": write_large,
    "copy": copy,
    "create": create,
    "delete": delete,
    "delete all": lambda store, name: expect(store.delete_all(f"{name}-tree"), 2),
    "lease": hold_lease,
    "sweep": sweep,
}
LARGE_OPERATIONS = ("read large", "copy")


def expect(found, expected):
    assert found == expected


def fill(store, name, operation):
    """Writes the files that an operation needs."""
    store.write(name, b"0123456789")
    for part in ("a", "b/c"):
        store.write(f"{name}-tree/{part}", b"x")
    if operation in LARGE_OPERATIONS:
        store.write(f"{name}-large", LARGE)
    manifest = {"fingerprint": "data x", "files": []}
    store.write(
        f"{name}-sweep/intermediate_train_data.0/_manifest.json", json.dumps(manifest).encode()
    )


@pytest.fixture(params=["s3", "gcs", "azure"])
def service(request, prefix, monkeypatch):
    """A service behind a proxy: a function from a timeout to its store, and the proxy."""
    options = dict(request.getfixturevalue(f"{request.param}_options"))
    scheme = {"s3": "s3", "gcs": "gs", "azure": "az"}[request.param]
    text = options.get("endpoint_url") or options["connection_string"].split("BlobEndpoint=")[1]
    proxy = TroubleProxy(urlsplit(text).netloc)
    near = text.replace(urlsplit(text).netloc, f"127.0.0.1:{proxy.port}")
    options = {key: str(value).replace(text, near) for key, value in options.items()}

    def open_store(timeout):
        monkeypatch.setenv("FARANDOLE_STORE_TIMEOUT", str(timeout))
        url = f"{scheme}://bucket/{prefix}-{timeout}"
        native.configure_options(url, options)
        return native.Store(url)

    yield open_store, proxy
    proxy.close()


def endure(service, trouble, seconds, timeout, skip):
    """Runs every operation while a trouble lasts."""
    open_store, proxy = service
    store = open_store(timeout)
    names = {operation: operation.replace(" ", "-") + f"-{skip}" for operation in OPERATIONS}
    for operation, name in names.items():
        fill(store, name, operation)
    proxy.begin(trouble, seconds, skip=skip)
    started = time.monotonic()
    with ThreadPoolExecutor(len(OPERATIONS)) as pool:
        done = {
            operation: pool.submit(run, store, names[operation])
            for operation, run in OPERATIONS.items()
        }
        failed = {operation: one.exception() for operation, one in done.items()}
    assert {name: error for name, error in failed.items() if error is not None} == {}
    assert time.monotonic() - started >= (0 if trouble == "refused" else seconds / 2)
    assert proxy.hits > 0, "the trouble did not happen"


@pytest.mark.parametrize("trouble", TROUBLES)
def test_every_operation_goes_on_after_a_short_outage(service, trouble):
    # A sixth of the timeout, as half a minute is of three.
    endure(service, trouble, 3.0, 18, 0)


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("skip", [7, 23])
def test_operations_go_on_after_an_outage_in_their_middle(service, trouble, skip):
    endure(service, trouble, 1.0, 6, skip)


@pytest.mark.slow
@pytest.mark.parametrize("trouble", TROUBLES)
def test_every_operation_goes_on_after_half_a_minute(service, trouble):
    endure(service, trouble, 30.0, 180, 0)


@pytest.mark.parametrize("trouble", ["busy", "refused", "silent", "stalled", "reset"])
def test_a_lasting_outage_ends_in_an_error_that_names_file_and_setting(service, trouble):
    open_store, proxy = service
    store = open_store(1)
    proxy.begin(trouble, 60.0)
    attempts = {
        "read": lambda: store.read("x"),
        "read x": lambda: store.read_range("x", 0, 1),
        "look up": lambda: store.size("x"),
        "list": lambda: store.list("x"),
        "write": lambda: store.write("x", b"1"),
        "write x": lambda: store.write("x", LARGE),
        "copy": lambda: store.copy("x", "y"),
        "delete": lambda: store.delete("x"),
    }

    def fail(action):
        started = time.monotonic()
        # S3 copies by another way above a size, so a copy first looks the size up.
        words = "(copy|look up)" if action == "copy" else action.removesuffix(" x")
        with pytest.raises(OSError, match=f"cannot {words} ") as told:
            attempts[action]()
        assert 1 <= time.monotonic() - started < 30
        return str(told.value)

    with ThreadPoolExecutor(len(attempts)) as pool:
        for text in pool.map(fail, attempts):
            assert f"{store.url}/x" in text
            assert "FARANDOLE_STORE_TIMEOUT" in text


def test_a_wait_is_logged_when_it_begins_and_when_it_ends(service, caplog):
    open_store, proxy = service
    start_logging()
    store = open_store(18)
    store.write("x", b"1")
    proxy.begin("busy", 2.0)
    with caplog.at_level(logging.WARNING, logger="farandole"):
        assert store.read("x") == b"1"
        deadline = time.monotonic() + 30
        while "no operation waits" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.05)
    service_url = store.url.rsplit("/", 1)[0]
    assert re.search(f"{service_url} does not serve requests: .*503.*{store.url}/x", caplog.text)
    assert re.search(f"no operation waits for {service_url} any more, after", caplog.text)


def test_a_slow_link_has_a_deadline_by_progress(service):
    # Longer than the timeout in all: no deadline counts for the whole transfer.
    open_store, proxy = service
    store = open_store(10)
    proxy.rate = len(LARGE) / 6
    started = time.monotonic()
    store.write("x", LARGE)
    assert store.read("x") == LARGE
    assert time.monotonic() - started > 10


@pytest.mark.parametrize("answers", [False, True], ids=["stalled", "silent"])
def test_a_connection_that_takes_no_more_of_an_upload_is_given_up(service, answers):
    # Half of the timeout without progress, whatever the size, and then another attempt.
    open_store, proxy = service
    store = open_store(6)
    trouble = "silent" if answers else "stalled"
    for size in (1 * MIB, 12 * MIB, len(LARGE)):
        proxy.begin(trouble, 60, limit=1)
        started = time.monotonic()
        store.write("x", LARGE[:size])
        assert time.monotonic() - started < 30
        assert proxy.hits > 0


@pytest.mark.parametrize(
    ("timeout", "rate"),
    [(6, MIB), pytest.param(180, 64 << 10, marks=pytest.mark.slow)],
    ids=["scaled", "64-KiB-per-second"],
)
def test_an_upload_over_a_slow_link_is_not_given_up(service, timeout, rate):
    # The whole part takes longer than a connection may be silent.
    open_store, proxy = service
    store = open_store(timeout)
    proxy.rate = rate
    started, requests = time.monotonic(), proxy.requests
    store.write("x", LARGE[:PART])
    assert time.monotonic() - started > timeout / 6
    assert proxy.requests == requests + 1, "one attempt is enough"
    proxy.rate = None
    assert store.read("x") == LARGE[:PART]


@pytest.mark.slow
def test_a_transfer_may_take_longer_than_a_connection_may_be_silent(service):
    open_store, proxy = service
    store = open_store(180)
    proxy.rate = len(LARGE) / 45
    store.write("x", LARGE)
    assert store.read("x") == LARGE


MEASURE = program_path(__file__, "measure_checkpoint")

STREAMS = 5
"""Four parts in flight, and the next one."""


def measure_memory(options, prefix, size, timeout):
    command = [sys.executable, MEASURE, f"s3://bucket/{prefix}", json.dumps(options), size]
    result = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for grown in map(int, result.stdout.split()):
        assert grown * 1024 < 2 * PART * STREAMS, f"{result.stdout} KiB"


def test_a_checkpoint_needs_two_parts_of_memory_for_each_stream(s3_options, prefix):
    measure_memory(s3_options, prefix, 256 * MIB, 120)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_checkpoint_of_six_gigabytes_is_written_copied_and_read(s3_on_disk_options, prefix):
    measure_memory(s3_on_disk_options, prefix, 6 << 30, 1700)
