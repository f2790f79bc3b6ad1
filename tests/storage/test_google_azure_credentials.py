# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Tokens of Google Cloud Storage and signatures of Azure that expire after a second or two."""

import itertools
import os
import time
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

import pytest
from tests.storage.trouble_proxy import TroubleProxy

from farandole._native import store as native
from farandole.spark.common import Store

LIFE = {"gcs": 1.0, "azure": 2.0}
"""Seconds; a signature's times have whole seconds."""


class TokenFront(TroubleProxy):
    """Passes requests on that have a valid token, as Google Cloud Storage does.

    Attributes:
        refused: number of requests with an expired token.
    """

    def __init__(self, upstream):
        self.refused = 0
        self._tokens = {}
        super().__init__(upstream)

    def grant(self, token, expires):
        """Makes a token valid until a time."""
        self._tokens[f"Bearer {token}"] = expires

    def find_refusal(self, request, body):  # noqa: ARG002 - as the base class calls it
        """Refuses requests with an unknown or expired token."""
        if self._tokens.get(request.headers.get("authorization"), 0) > time.time():
            return None
        self.refused += 1
        return 401, (
            b"<?xml version='1.0' encoding='UTF-8'?><Error><Code>AuthenticationRequired</Code>"
            b"<Message>Authentication required.</Message></Error>"
        )


class Issuer:
    """A function that returns credentials.

    Attributes:
        says_expiry: whether it returns the expiry, too.
        ends: whether it has no credentials any more.
        granted: number of the credentials that it has returned.
    """

    def __init__(self, make):
        self._make, self.says_expiry, self.ends, self.granted = make, True, False, 0

    def __call__(self):
        if self.ends:
            raise RuntimeError("hidden-reason")
        values, expires = self._make()
        self.granted += 1
        return {**values, "expires": expires} if self.says_expiry else values


@pytest.fixture
def gcs_service(gcs_options, prefix):
    """URL, options and issuer."""
    front, numbers = TokenFront(urlsplit(gcs_options["endpoint_url"]).netloc), itertools.count()

    def make():
        token, expires = f"hidden-token-{next(numbers)}", time.time() + LIFE["gcs"]
        front.grant(token, expires)
        return {"token": token}, expires

    yield f"gs://bucket/{prefix}", {"endpoint_url": f"http://127.0.0.1:{front.port}"}, Issuer(make)
    front.close()


def connection_part(options, name):
    parts = dict(part.split("=", 1) for part in options["connection_string"].split(";"))
    return parts[name]


def new_signature(options):
    """Returns a signature for the container and its expiry; the service itself checks both."""
    blob = pytest.importorskip("azure.storage.blob")
    expires = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=LIFE["azure"])
    signature = blob.generate_container_sas(
        connection_part(options, "AccountName"),
        "bucket",
        account_key=connection_part(options, "AccountKey"),
        permission="racwdl",
        expiry=expires,
    )
    return signature, expires


def azure_place(options):
    return {
        "account_name": connection_part(options, "AccountName"),
        "azure_storage_endpoint": connection_part(options, "BlobEndpoint"),
    }


@pytest.fixture
def azure_service(azure_options, prefix):
    """URL, options and issuer."""

    def make():
        signature, expires = new_signature(azure_options)
        return {"sas_token": signature}, expires

    return f"az://bucket/{prefix}", azure_place(azure_options), Issuer(make)


@pytest.fixture(params=["gcs", "azure"])
def service(request, monkeypatch):
    """URL, options and issuer, and an environment without credentials."""
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FARANDOLE_STORE_TIMEOUT", "4")
    return request.param, *request.getfixturevalue(f"{request.param}_service")


def open_store(url, options):
    return native.Store(Store.create(url, storage_options=options).prefix_path)


def use_store(store, seconds):
    rounds, ends = 0, time.monotonic() + seconds
    while time.monotonic() < ends:
        store.write(f"{rounds}", b"x" * rounds)
        assert store.read(f"{rounds}") == b"x" * rounds
        assert store.exists(f"{rounds}")
        rounds += 1
    assert len(store.list()) == rounds
    return rounds


@pytest.mark.parametrize("says_expiry", [True, False], ids=["expiry", "no-expiry"])
@pytest.mark.timing
def test_tokens_of_a_function_are_renewed(service, says_expiry):
    kind, url, options, issuer = service
    issuer.says_expiry = says_expiry
    assert use_store(open_store(url, {**options, "credentials": issuer}), 6) > 3
    assert issuer.granted >= 6 / LIFE[kind] / 2


@pytest.mark.timing
def test_tokens_that_are_gone_end_in_an_error_that_names_the_function(service):
    kind, url, options, issuer = service
    store = open_store(url, {**options, "credentials": issuer})
    store.write("x", b"1")
    issuer.ends = True
    time.sleep(LIFE[kind] + 1)
    with pytest.raises(PermissionError) as refused:
        store.read("x")
    assert f"{url}/x" in str(refused.value)
    assert "the function in the storage option credentials" in str(refused.value)
    assert "hidden" not in str(refused.value)
    assert "sig=" not in str(refused.value)


@pytest.mark.timing
def test_a_signature_in_the_environment_is_read_again(azure_options, prefix, monkeypatch):
    monkeypatch.setenv("FARANDOLE_STORE_TIMEOUT", "4")

    def publish():
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", new_signature(azure_options)[0])

    publish()
    store = open_store(f"az://bucket/{prefix}", azure_place(azure_options))
    for name in ("a", "b", "c"):
        store.write(name, b"1")
        time.sleep(LIFE["azure"] + 1)
        publish()
        assert store.read(name) == b"1"


@pytest.mark.timing
def test_a_fixed_signature_that_has_expired_is_refused_at_once(azure_options, prefix):
    options = {**azure_place(azure_options), "sas_token": new_signature(azure_options)[0]}
    store = open_store(f"az://bucket/{prefix}", options)
    store.write("x", b"1")
    time.sleep(LIFE["azure"] + 1)
    started = time.monotonic()
    with pytest.raises(PermissionError, match="the options azure_storage_sas_"):
        store.read("x")
    assert time.monotonic() - started < 30, "options never change, so there is nothing to wait for"
