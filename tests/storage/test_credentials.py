# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Keys that expire: every source of credentials is asked again, and nothing is lost."""

import hashlib
import json
import os
import pickle
import sys
import threading
import time
from urllib.parse import urlsplit

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.storage.credential_front import CredentialFront

import farandole
from farandole._native import store as native
from farandole.data import ParquetLoader
from farandole.spark.common import Store
from farandole.stores.store_options import StorageOptions

ROLE = "arn:aws:iam::1:role/r"


@pytest.fixture
def front(s3_options, monkeypatch, tmp_path):
    """An S3 service whose keys live for a second, and an environment without keys."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("FARANDOLE_STORE_TIMEOUT", "3")
    proxy = CredentialFront(urlsplit(s3_options["endpoint_url"]).netloc)
    for service in ("STS", "SSO"):
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    yield proxy
    proxy.close()


def write_profile(tmp_path, text):
    (tmp_path / ".aws").mkdir(exist_ok=True)
    (tmp_path / ".aws" / "config").write_text(text)


def put_in_environment(keys):
    os.environ["AWS_SECRET_ACCESS_KEY"] = keys["SecretAccessKey"]
    os.environ["AWS_SESSION_TOKEN"] = keys["SessionToken"]
    os.environ["AWS_ACCESS_KEY_ID"] = keys["AccessKeyId"]


def use_function(front, tmp_path, monkeypatch):
    return {"credentials": lambda: give(front)}, None


def use_function_without_expiry(front, tmp_path, monkeypatch):
    def credentials():
        return {k: v for k, v in give(front).items() if k != "Expiration"}

    return {"credentials": credentials}, None


def give(front):
    if front.ends:
        raise RuntimeError("hidden-reason")
    return front.grant()


def use_environment(front, tmp_path, monkeypatch):
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID"):
        monkeypatch.setenv(name, "unset")
    return {}, put_in_environment


def use_file(front, tmp_path, monkeypatch):
    (tmp_path / ".aws").mkdir()

    def write(keys):
        text = (
            f"[default]\naws_access_key_id={keys['AccessKeyId']}\n"
            f"aws_secret_access_key={keys['SecretAccessKey']}\n"
            f"aws_session_token={keys['SessionToken']}\n"
        )
        fresh = tmp_path / ".aws" / "fresh"
        fresh.write_text(text)
        fresh.replace(tmp_path / ".aws" / "credentials")

    return {}, write


def use_process(front, tmp_path, monkeypatch):
    write_profile(tmp_path, f"[profile p]\ncredential_process = /bin/cat {tmp_path}/keys\n")
    monkeypatch.setenv("AWS_PROFILE", "p")

    def write(keys):
        (tmp_path / "fresh").write_text(json.dumps({"Version": 1, **keys}))
        (tmp_path / "fresh").replace(tmp_path / "keys")

    return {}, write


def use_web_identity(front, tmp_path, monkeypatch):
    (tmp_path / "token").write_text("identity\n")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
    return {}, None


def use_role(front, tmp_path, monkeypatch):
    write_profile(
        tmp_path,
        f"[profile p]\nrole_arn = {ROLE}\nsource_profile = base\n"
        "[profile base]\naws_access_key_id = BASE\naws_secret_access_key = hidden-base\n",
    )
    return {"profile": "p"}, None


def use_sign_on(front, tmp_path, monkeypatch):
    write_profile(
        tmp_path,
        "[profile p]\nsso_session = corp\nsso_account_id = 1\nsso_role_name = r\n"
        "[sso-session corp]\nsso_region = us-east-1\n",
    )
    cache = tmp_path / ".aws" / "sso" / "cache"
    cache.mkdir(parents=True)
    token = {"accessToken": "session", "expiresAt": "2099-01-01T00:00:00Z"}
    name = hashlib.sha1(b"corp", usedforsecurity=False).hexdigest()
    (cache / f"{name}.json").write_text(json.dumps(token))
    monkeypatch.setenv("AWS_PROFILE", "p")
    return {}, None


SOURCES = {
    "function": use_function,
    "function without expiry": use_function_without_expiry,
    "environment": use_environment,
    "file": use_file,
    "process": use_process,
    "web identity": use_web_identity,
    "role": use_role,
    "sign-on": use_sign_on,
}


class Rotation:
    """Publishes keys in time, or half a second after the end of the earlier ones."""

    def __init__(self, front, publish, pause):
        self._front, self._publish, self._pause = front, publish, pause
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        if publish is not None:
            publish(front.grant())
            self._thread.start()

    def _run(self):
        while not self._ended.wait(self._pause):
            self._publish(self._front.grant())

    def end(self):
        self._ended.set()
        if self._publish is not None:
            self._thread.join()


def open_store(front, prefix, options=None):
    """Returns the store of a prefix with its options."""
    store = Store.create(f"s3://bucket/{prefix}", storage_options=with_endpoint(front, options))
    return native.Store(store.prefix_path)


def with_endpoint(front, options=None):
    """Returns options that lead to the front: each front has a backend of its own."""
    return {"endpoint_url": f"http://127.0.0.1:{front.port}", **(options or {})}


def use_store(store, seconds):
    """Reads and writes for a while; returns the number of rounds."""
    rounds, ends = 0, time.monotonic() + seconds
    while time.monotonic() < ends:
        path = str(rounds)
        store.write(path, str(rounds).encode())
        assert store.read(path) == str(rounds).encode()
        assert store.exists(path)
        rounds += 1
    return rounds


PUBLISHED = ("environment", "file", "process")
"""Sources whose keys another process publishes, which may be late."""


@pytest.mark.parametrize(
    ("source", "pause"), [(source, 0.4) for source in SOURCES] + [(one, 1.4) for one in PUBLISHED]
)
@pytest.mark.timing
def test_keys_of_a_second_are_renewed(front, prefix, tmp_path, monkeypatch, source, pause):
    options, publish = SOURCES[source](front, tmp_path, monkeypatch)
    rotation = Rotation(front, publish, pause)
    try:
        store = open_store(front, prefix, options)
        assert use_store(store, 4) > 3
    finally:
        rotation.end()
    assert front.granted >= 3


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.timing
def test_keys_that_are_gone_end_in_an_error_that_names_their_source(
    front, prefix, tmp_path, monkeypatch, source
):
    options, publish = SOURCES[source](front, tmp_path, monkeypatch)
    Rotation(front, publish, 60)
    store = open_store(front, prefix, options)
    store.write("x", b"1")
    front.ends = True
    time.sleep(front.life)
    with pytest.raises(PermissionError) as refused:
        store.read("x")
    text = str(refused.value)
    assert f"s3://bucket/{prefix}/x" in text
    word = {"function without expiry": "function", "sign-on": "profile", "role": "profile"}
    word |= {"process": "profile", "file": "profile"}
    assert word.get(source, source) in text
    assert "hidden" not in text


def test_a_path_without_permission_is_refused_at_once(front, prefix):
    front.life, front.denied = 60, "denied"
    store = open_store(front, prefix, {"credentials": front.grant})
    store.write("x", b"1")
    granted, started = front.granted, time.monotonic()
    with pytest.raises(PermissionError, match=f"s3://bucket/{prefix}/denied.*function"):
        store.read("denied")
    assert front.granted == granted + 1, "one renewal, no loop"
    assert time.monotonic() - started < 30


def test_many_refusals_ask_for_few_keys(front, prefix):
    front.life, front.denied = 60, "denied"
    store = open_store(front, prefix, {"credentials": front.grant})
    store.write("x", b"1")
    granted, started = front.granted, time.monotonic()
    for number in range(30):
        with pytest.raises(PermissionError):
            store.read(f"denied/{number}")
    assert front.granted <= granted + 2 + (time.monotonic() - started)


@pytest.mark.timing
def test_keys_that_are_options_never_change_so_there_is_no_wait(front, prefix, monkeypatch):
    monkeypatch.setenv("FARANDOLE_STORE_TIMEOUT", "60")
    keys = front.grant()
    names = {"key": "AccessKeyId", "secret": "SecretAccessKey", "token": "SessionToken"}
    store = open_store(front, prefix, {name: keys[theirs] for name, theirs in names.items()})
    store.write("x", b"1")
    time.sleep(front.life)
    started = time.monotonic()
    with pytest.raises(PermissionError, match="the options key and secret has expired"):
        store.read("x")
    assert time.monotonic() - started < 30


def test_variables_that_have_changed_count_for_the_next_store(front, prefix):
    front.life = 60
    put_in_environment(front.grant())
    try:
        first = open_store(front, prefix)
        first.write("x", b"1")
        put_in_environment(front.grant())
        front.refused = 0
        second = open_store(front, prefix)
        assert second.read("x") == b"1"
    finally:
        for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID"):
            os.environ.pop(name, None)


def test_a_function_travels_with_the_options(front, prefix):
    options = StorageOptions((f"s3://bucket/{prefix}",), {"credentials": _module_keys})
    copy = pickle.loads(pickle.dumps(options))
    again = pickle.loads(pickle.dumps(options))
    assert copy == again, "the same function is one backend"
    assert "hidden" not in repr(copy)
    lock = threading.Lock()
    local = StorageOptions(("s3://bucket/x",), {"credentials": lambda: lock})
    with pytest.raises(TypeError, match="cannot be sent"):
        pickle.dumps(local)
    with pytest.raises(TypeError, match="key"):
        StorageOptions(("s3://bucket/x",), {"key": _module_keys})


def test_text_never_chooses_a_function(front, prefix):
    store = open_store(front, prefix, {"credentials": front.grant})
    store.write("x", b"1")
    for text in ("function 0", "function 1", "anything"):
        with pytest.raises(TypeError, match="must be a function"):
            StorageOptions(("s3://bucket/x",), {"credentials": text})


def _module_keys():
    return {"key": "a", "secret": "hidden", "token": "b"}


def train(front, prefix, seconds):
    """Reads epochs and writes checkpoints; returns the number of epochs."""
    options = with_endpoint(front, {"credentials": front.grant})
    store = Store.create(f"s3://bucket/{prefix}", storage_options=options)
    for part in range(4):
        table = pa.table({"x": np.arange(part * 100, part * 100 + 100)})
        pq.write_table(table, f"{store.prefix_path}/data/{part}.parquet", filesystem=store.fs)
    run, epochs, ends = store.to_remote("r"), 0, time.monotonic() + seconds
    loader = ParquetLoader(f"{store.prefix_path}/data", 50, shuffle=True)
    while time.monotonic() < ends:
        rows = np.sort(np.concatenate([batch["x"] for batch in loader]))
        assert rows.tolist() == list(range(400))
        run.write("state", str(epochs).encode())
        assert run.read("state") == str(epochs).encode()
        epochs += 1
    return epochs


@pytest.mark.timing
def test_a_training_outlives_its_keys(front, prefix):
    assert train(front, prefix, 10) > 3
    assert front.granted >= 10


def keys_of(address):
    """Returns a function that gets keys from the front, in whichever process calls it."""

    def get():
        import json
        import urllib.request

        url = f"http://{address}/federation/credentials"
        request = urllib.request.Request(url, headers={"x-amz-sso_bearer_token": "session"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            found = json.load(answer)["roleCredentials"]
        return {
            "key": found["accessKeyId"],
            "secret": found["secretAccessKey"],
            "token": found["sessionToken"],
            "expires": found["expiration"] / 1000,
        }

    return get


def train_in_worker(store, seconds):
    """Writes checkpoints in a worker process; returns their number."""
    import time

    import farandole.torch as hvd

    hvd.init()
    run, count, ends = store.to_remote(f"r{hvd.rank()}"), 0, time.monotonic() + seconds
    while time.monotonic() < ends:
        run.write("state", str(count).encode())
        assert run.read("state") == str(count).encode()
        count += 1
    return count


@pytest.mark.timing
def test_each_worker_of_a_job_renews_its_keys(front, prefix):
    for function in (keys_of, train_in_worker):
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
    options = with_endpoint(front, {"credentials": keys_of(f"127.0.0.1:{front.port}")})
    store = Store.create(f"s3://bucket/{prefix}", storage_options=options)
    counts = farandole.run(train_in_worker, args=(store, 5.0), num_proc=2)
    assert min(counts) > 3
    # The driver has made no request: five lives of a key in each of the two workers.
    assert front.granted >= 8


@pytest.mark.slow
@pytest.mark.timing
def test_a_training_with_120_expiries_loses_nothing(front, prefix):
    # Two hours with tokens of a minute, sixty times faster.
    assert train(front, prefix, 125) > 20
    assert front.granted >= 120
