# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Requests to the REST interface of a Databricks workspace.

Answers are not trusted: their size and time are limited, and redirections, which would carry the
token to another host, are refused. No message has a token.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from farandole.data.inputs.catalog_names import HOST_VARIABLE

TOKEN_VARIABLE: Final = "DATABRICKS_TOKEN"  # noqa: S105 - a name
_CLIENT_VARIABLES: Final = ("DATABRICKS_CLIENT_ID", "DATABRICKS_CLIENT_SECRET")
_SIGN_IN_PATH: Final = "/oidc/v1/token"
_LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
_REQUEST_SECONDS: Final = 20.0
"""Longest time of one attempt."""
_MAX_ATTEMPTS: Final = 3
_MAX_PAUSE_SECONDS: Final = 5.0
_REPEATED_STATUSES: Final = (429, 500, 502, 503, 504)
_MAX_ANSWER_BYTES: Final = 4 << 20
_MAX_FIELD_CHARACTERS: Final = 16 << 10
_MAX_REASON_CHARACTERS: Final = 300
_READ_BYTES: Final = 64 << 10
_MIN_TOKEN_SECONDS: Final = 5.0
_TOKEN_LIFE_SHARE: Final = 0.8
"""Share of the life of an OAuth token after which another one is requested."""


@dataclass(frozen=True)
class CatalogSession:
    """A workspace, and the means to sign in to it: a token, or a client with its secret.

    Attributes:
        host: URL of the workspace, without a path.
    """

    host: str
    token: str | None = field(default=None, repr=False)
    client_id: str | None = field(default=None, repr=False)
    client_secret: str | None = field(default=None, repr=False)

    @classmethod
    def from_environment(cls, table: str) -> CatalogSession:
        """Returns the session of the environment.

        Args:
            table: Name of the wanted table, for messages.

        Raises:
            ValueError: A variable is missing, or the host is no HTTPS URL.
        """
        host = os.environ.get(HOST_VARIABLE, "").strip()
        token = os.environ.get(TOKEN_VARIABLE)
        client_id, secret = (os.environ.get(name) for name in _CLIENT_VARIABLES)
        if not host or not (token or (client_id and secret)):
            raise ValueError(
                f"the table {table} of Unity Catalog needs {HOST_VARIABLE}, and {TOKEN_VARIABLE} "
                f"or {' and '.join(_CLIENT_VARIABLES)}, in the environment"
            )
        url = _checked_host(host, table)
        return cls(url, token) if token else cls(url, None, client_id, secret)

    def table_label(self, name: str) -> str:
        """Returns a description of a table for messages.

        Args:
            name: `catalog.schema.table`.
        """
        return f"the table {name} of Unity Catalog at {self.host}"

    def request_json(
        self, path: str, body: dict[str, Any] | None, label: str, advice: str
    ) -> dict[str, Any]:
        """Sends a request, and returns the object in the answer.

        Args:
            path: Path below the host.
            body: Object to post; without it, the request is a GET.
            label: Description of the wanted thing, for messages.
            advice: Advice for a request that is refused.

        Raises:
            PermissionError: The workspace refuses the request.
            FileNotFoundError: There is no such thing.
            OSError: No answer, or another error of the workspace.
            ValueError: The answer is no object, or too large.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.host}{path}", data)  # noqa: S310 - a checked host
        request.add_header("Authorization", f"Bearer {self._bearer_token(label)}")
        request.add_header("Content-Type", "application/json")
        return self._send(request, label, advice)

    def _bearer_token(self, label: str) -> str:
        if self.token:
            return self.token
        with _OAUTH_TOKENS.lock:
            found = _OAUTH_TOKENS.by_session.get(self)
            if found is not None and time.monotonic() < found[1]:
                return found[0]
            request = urllib.request.Request(  # noqa: S310 - a checked host
                f"{self.host}{_SIGN_IN_PATH}",
                urlencode({"grant_type": "client_credentials", "scope": "all-apis"}).encode(),
            )
            pair = base64.b64encode(f"{self.client_id}:{self.client_secret}".encode()).decode()
            request.add_header("Authorization", f"Basic {pair}")
            answer = self._send(request, label, f"check {' and '.join(_CLIENT_VARIABLES)}")
            token, life = read_text_field(answer, "access_token", label), answer.get("expires_in")
            seconds = float(life) if isinstance(life, int | float) else 0.0
            end = time.monotonic() + max(seconds * _TOKEN_LIFE_SHARE, _MIN_TOKEN_SECONDS)
            _OAUTH_TOKENS.by_session[self] = token, end
            return token

    def _send(self, request: urllib.request.Request, label: str, advice: str) -> dict[str, Any]:
        for attempt in range(_MAX_ATTEMPTS):
            is_last = attempt == _MAX_ATTEMPTS - 1
            try:
                with _OPENER.open(request, timeout=_REQUEST_SECONDS) as answer:
                    return _parse_object(_read_limited(answer, label), label)
            except urllib.error.HTTPError as error:
                with error:
                    if is_last or error.code not in _REPEATED_STATUSES:
                        raise self._describe_refusal(error, label, advice) from None
            except (OSError, http.client.HTTPException) as error:
                if is_last:
                    reason = getattr(error, "reason", None) or error
                    raise OSError(f"{label}: no answer: {self._without_secrets(reason)}") from None
            time.sleep(min(2.0**attempt, _MAX_PAUSE_SECONDS))
        raise AssertionError("the last attempt returns or raises")

    def _describe_refusal(self, error: urllib.error.HTTPError, label: str, advice: str) -> OSError:
        try:
            found = json.loads(_read_limited(error, label))
            reason = found.get("message") or found.get("error_description") or ""
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            reason = ""
        text = f"{label}: HTTP status {error.code}: {self._without_secrets(reason)}".rstrip(": ")
        if error.code in (401, 403):
            sign_in = f"check {TOKEN_VARIABLE}: it may have expired" if self.token else ""
            help_text = sign_in if error.code == 401 and sign_in else advice  # noqa: PLR2004 - HTTP
            return PermissionError(f"{text}. {help_text[:1].upper()}{help_text[1:]}")
        if error.code == 404:  # noqa: PLR2004 - of HTTP
            return FileNotFoundError(f"{text}. Check the name, and the host")
        if 300 <= error.code < 400:  # noqa: PLR2004 - of HTTP
            return OSError(
                f"{text}. A redirection is not followed: set {HOST_VARIABLE} to its host"
            )
        return OSError(text)

    def _without_secrets(self, reason: Any) -> str:
        text = "".join(c if c.isprintable() else " " for c in str(reason))[:_MAX_FIELD_CHARACTERS]
        cached = _OAUTH_TOKENS.by_session.get(self)
        for secret in (self.token, self.client_secret, cached and cached[0]):
            text = text.replace(secret, "***") if secret else text
        return text[:_MAX_REASON_CHARACTERS]


class _OauthTokens:
    """Tokens of clients in this process, with the times at which others are requested."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_session: dict[CatalogSession, tuple[str, float]] = {}


_OAUTH_TOKENS: Final = _OauthTokens()


class _RedirectRefusal(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follows nothing."""


_OPENER: Final = urllib.request.build_opener(_RedirectRefusal)


def read_text_field(record: dict[str, Any], name: str, label: str) -> str:
    """Returns a text of an answer.

    Args:
        record: An object of an answer.
        name: Name of the field.
        label: Description of the wanted thing, for messages.

    Raises:
        ValueError: The field is missing, is no text, or is too long.
    """
    value = record.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_FIELD_CHARACTERS:
        raise ValueError(f"{label}: the answer has no usable field {name}")
    return value


def _checked_host(host: str, table: str) -> str:
    parts = urlsplit(host if "://" in host else f"https://{host}")
    is_private = parts.scheme == "https" or (
        parts.scheme == "http" and parts.hostname in _LOOPBACK_HOSTS
    )
    has_more = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if not is_private or not parts.hostname or has_more or not host.isprintable():
        raise ValueError(
            f"the table {table} of Unity Catalog needs {HOST_VARIABLE} in the form "
            "https://NAME.cloud.databricks.com"
        )
    return f"{parts.scheme}://{parts.netloc}"


def _read_limited(answer: Any, label: str) -> bytes:
    """Reads a body in bounded time.

    Raises:
        ValueError: It is too large.
        OSError: It takes too long.
    """
    deadline, data = time.monotonic() + _REQUEST_SECONDS, b""
    while part := answer.read1(_READ_BYTES):
        data += part
        if len(data) > _MAX_ANSWER_BYTES:
            raise ValueError(f"{label}: the answer has more than {_MAX_ANSWER_BYTES >> 20} MiB")
        if time.monotonic() > deadline:
            raise OSError(f"the answer takes longer than {_REQUEST_SECONDS:.0f} s")
    return data


def _parse_object(data: bytes, label: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{label}: the answer is no JSON object")
    return found
