# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Requests to the REST interface of a Databricks workspace.

Answers are not trusted: their size and time are limited, and redirections, which would carry the
token to another host, are refused. No message has a token.
"""

from __future__ import annotations

import base64
import functools
import http.client
import io
import json
import os
import random
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

HOST_VARIABLE: Final = "DATABRICKS_HOST"
TOKEN_VARIABLE: Final = "DATABRICKS_TOKEN"  # noqa: S105 - a name
_CLIENT_VARIABLES: Final = ("DATABRICKS_CLIENT_ID", "DATABRICKS_CLIENT_SECRET")
_SIGN_IN_PATH: Final = "/oidc/v1/token"
_LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
_REQUEST_SECONDS: Final = 40.0
"""Longest time of a request with all its attempts, and with a sign-in before it."""
_ATTEMPT_SECONDS: Final = 15.0
_MAX_ATTEMPTS: Final = 3
_MAX_PAUSE_SECONDS: Final = 5.0
_REPEATED_STATUSES: Final = (429, 500, 502, 503, 504)
_MAX_ANSWER_BYTES: Final = 4 << 20
_MAX_FIELD_CHARACTERS: Final = 16 << 10
_MAX_REASON_CHARACTERS: Final = 300
_READ_BYTES: Final = 64 << 10
_MIN_TOKEN_SECONDS: Final = 5.0
"""Shortest time for which an OAuth token is used, unless the workspace refuses it."""
_MAX_TOKEN_SECONDS: Final = 3600.0
"""Longest life of an OAuth token, even if the workspace says another one."""
_TOKEN_LIFE_SHARE: Final = 0.8
"""Share of the life of an OAuth token after which another one is requested."""


class SignInError(PermissionError):
    """The workspace does not know the token, or the client and its secret (HTTP status 401)."""


@dataclass(frozen=True)
class CatalogSession:
    """A workspace, and a token for it, or a client with its secret.

    Attributes:
        host: URL of the workspace, without a path.
    """

    host: str
    token: str | None = field(default=None, repr=False)
    client_id: str | None = field(default=None, repr=False)
    client_secret: str | None = field(default=None, repr=False)

    @classmethod
    def from_environment(cls, subject: str) -> CatalogSession:
        """Returns the session of the environment.

        Args:
            subject: The wanted table or volume, for messages: `the table main.sales.clicks`.

        Raises:
            ValueError: A variable is missing, the host is no HTTPS URL, or the token has
                characters that a token cannot have.
        """
        names = (HOST_VARIABLE, TOKEN_VARIABLE, *_CLIENT_VARIABLES)
        host, token, client_id, secret = (os.environ.get(name, "").strip() for name in names)
        if not host or not (token or (client_id and secret)):
            raise ValueError(
                f"{subject} of Unity Catalog needs {HOST_VARIABLE}, and {TOKEN_VARIABLE} "
                f"or {' and '.join(_CLIENT_VARIABLES)}, in the environment"
            )
        url = _checked_host(host, subject)
        if token and not _is_header_word(token):
            raise ValueError(
                f"{subject} of Unity Catalog needs a token in {TOKEN_VARIABLE}: its value "
                "has spaces, or characters that are not printable ASCII"
            )
        return cls(url, token) if token else cls(url, None, client_id, secret)

    def label_subject(self, subject: str) -> str:
        """Returns a description of a table or volume for messages.

        Args:
            subject: As for `from_environment`.
        """
        return f"{subject} of Unity Catalog at {self.host}"

    def request_json(
        self,
        path: str,
        body: dict[str, Any] | None,
        label: str,
        advice: str,
        *,
        headers: Mapping[str, str] | None = None,
        max_bytes: int = _MAX_ANSWER_BYTES,
    ) -> dict[str, Any]:
        """Sends a request, and returns the object in the answer.

        Args:
            path: Path below the host.
            body: Object to post; without it, the request is a GET.
            label: Description of the wanted thing, for messages.
            advice: Advice for a request that is refused.
            headers: Further headers.
            max_bytes: Largest size of an answer.

        Raises:
            PermissionError: The workspace refuses the request.
            FileNotFoundError: There is no such thing.
            OSError: No answer, or another error of the workspace.
            ValueError: The answer is no object, or too large.
        """
        deadline = time.monotonic() + _REQUEST_SECONDS
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.host}{path}", data)  # noqa: S310 - a checked host
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            request.add_header(name, value)
        token = self._bearer_token(label, deadline)
        request.add_header("Authorization", f"Bearer {token}")
        try:
            return self._send(request, label, advice, deadline, max_bytes)
        except SignInError:
            if self.token:
                raise
        # The workspace may have withdrawn the token of a client before its time.
        _OAUTH_TOKENS.pop(self, None)
        request.add_header("Authorization", f"Bearer {self._bearer_token(label, deadline)}")
        return self._send(request, label, advice, deadline, max_bytes)

    def _bearer_token(self, label: str, deadline: float) -> str:
        if self.token:
            return self.token
        # Without a lock, which a fork would leave taken in the child: threads may sign in twice.
        found = _OAUTH_TOKENS.get(self)
        if found is not None and time.monotonic() < found[1]:
            return found[0]
        request = urllib.request.Request(  # noqa: S310 - a checked host
            f"{self.host}{_SIGN_IN_PATH}",
            urlencode({"grant_type": "client_credentials", "scope": "all-apis"}).encode(),
        )
        pair = base64.b64encode(f"{self.client_id}:{self.client_secret}".encode()).decode()
        request.add_header("Authorization", f"Basic {pair}")
        answer = self._send(request, label, "", deadline)
        token, life = read_text_field(answer, "access_token", label), answer.get("expires_in")
        if not _is_header_word(token):
            raise ValueError(f"{label}: the answer has no usable field access_token")
        if not isinstance(life, int | float) or not life > 0:  # such as NaN
            life = 0.0
        seconds = min(life, _MAX_TOKEN_SECONDS)
        end = time.monotonic() + max(seconds * _TOKEN_LIFE_SHARE, _MIN_TOKEN_SECONDS)
        _OAUTH_TOKENS[self] = token, end
        return token

    def _send(
        self,
        request: urllib.request.Request,
        label: str,
        advice: str,
        deadline: float,
        max_bytes: int = _MAX_ANSWER_BYTES,
    ) -> dict[str, Any]:
        opener = _make_opener()
        for attempt in range(_MAX_ATTEMPTS):
            is_last = attempt == _MAX_ATTEMPTS - 1
            seconds, wanted_pause = deadline - time.monotonic(), 0.0
            try:
                if seconds <= 0:
                    raise TimeoutError("timed out")
                with opener.open(request, timeout=min(seconds, _ATTEMPT_SECONDS)) as answer:
                    data = _read_limited(answer, label, max_bytes)
                return _parse_object(data, label)
            except urllib.error.HTTPError as error:
                with error:
                    if is_last or error.code not in _REPEATED_STATUSES:
                        raise self._describe_refusal(error, request, label, advice) from None
                    wanted_pause = _parse_pause(error.headers.get("Retry-After"))
            except (OSError, http.client.HTTPException) as error:
                if is_last or seconds <= 0:
                    reason = getattr(error, "reason", None) or error
                    text = self._without_secrets(reason, request)
                    raise OSError(f"{label}: no answer: {text}") from None
            # Not all processes ask again at the same time.
            pause = max(2.0**attempt, wanted_pause) * random.uniform(0.5, 1.0)  # noqa: S311
            time.sleep(min(pause, _MAX_PAUSE_SECONDS, max(deadline - time.monotonic(), 0.0)))
        raise AssertionError("the last attempt returns or raises")

    def _describe_refusal(
        self,
        error: urllib.error.HTTPError,
        request: urllib.request.Request,
        label: str,
        advice: str,
    ) -> OSError:
        try:
            found = _parse_object(_read_limited(error, label, _MAX_ANSWER_BYTES), label)
            if isinstance(found.get("error"), dict):  # of the REST catalog of Iceberg
                found = found["error"]
            reason = found.get("message") or found.get("error_description") or ""
        except (OSError, ValueError, http.client.HTTPException):
            reason = ""
        text = f"{label}: HTTP status {error.code}: {self._without_secrets(reason, request)}"
        text = text.rstrip(": ")
        if error.code == 401:  # noqa: PLR2004 - of HTTP
            used = (TOKEN_VARIABLE,) if self.token else _CLIENT_VARIABLES
            return SignInError(f"{text}. Check {' and '.join(used)}: it may have expired")
        if error.code == 403:  # noqa: PLR2004 - of HTTP
            return PermissionError(f"{text}. {advice[:1].upper()}{advice[1:]}".rstrip(". "))
        if error.code == 404:  # noqa: PLR2004 - of HTTP
            return FileNotFoundError(f"{text}. Check the name, and the host")
        if 300 <= error.code < 400:  # noqa: PLR2004 - of HTTP
            return OSError(
                f"{text}. A redirection is not followed: set {HOST_VARIABLE} to its host"
            )
        return OSError(text)

    def _without_secrets(self, reason: Any, request: urllib.request.Request) -> str:
        text = "".join(c if c.isprintable() else " " for c in str(reason))[:_MAX_FIELD_CHARACTERS]
        sent = (request.get_header("Authorization") or "").rpartition(" ")[2]
        for secret in (sent, self.token, self.client_secret):
            text = text.replace(secret, "***") if secret else text
        return text[:_MAX_REASON_CHARACTERS]


_OAUTH_TOKENS: Final[dict[CatalogSession, tuple[str, float]]] = {}
"""Tokens of clients in this process, with the times at which others are requested."""


class _TimedReader(io.RawIOBase):
    """Reads from a socket until a deadline, also if each byte comes in time."""

    def __init__(self, raw: Any, sock: Any, deadline: float) -> None:
        self._raw, self._sock, self._deadline = raw, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(seconds)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    def __init__(self, sock: Any, *args: Any, deadline: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp: Any = io.BufferedReader(_TimedReader(self.fp.detach(), sock, deadline))


class _TimedConnection(http.client.HTTPConnection):
    """A connection whose timeout is one of its whole answer, and not of each byte."""

    def __init__(self, *args: Any, timeout: float = _ATTEMPT_SECONDS, **kwargs: Any) -> None:
        super().__init__(*args, timeout=timeout, **kwargs)
        deadline = time.monotonic() + timeout
        self.response_class: Any = functools.partial(_TimedResponse, deadline=deadline)


class _TimedTlsConnection(_TimedConnection, http.client.HTTPSConnection):
    pass


class _PlainHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_TimedConnection, req)


class _TlsHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_TimedTlsConnection, req)


def _make_opener() -> urllib.request.OpenerDirector:
    """Returns an opener of HTTP and HTTPS alone, which follows no redirection. HTTP, which is for
    loopback, uses no proxy, because a proxy would read the token.
    """
    opener = urllib.request.OpenerDirector()
    proxies = {name: url for name, url in urllib.request.getproxies().items() if name == "https"}
    for handler in (
        urllib.request.ProxyHandler(proxies),
        _PlainHandler(),
        _TlsHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


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


def _is_header_word(text: str) -> bool:
    """Returns whether a text can be a token in a header, and no character ends the header."""
    return text.isascii() and text.isprintable() and " " not in text


def _parse_pause(text: str | None) -> float:
    """Returns the seconds of a header Retry-After; 0 without one, and for a date."""
    is_number = text is not None and text.isascii() and text.isdecimal()
    return float(text[:4]) if text is not None and is_number else 0.0


def _checked_host(host: str, subject: str) -> str:
    try:
        parts = urlsplit(host if "://" in host else f"https://{host}")
    except ValueError:
        parts = urlsplit("")
    is_token_safe = parts.scheme == "https" or (
        parts.scheme == "http" and parts.hostname in _LOOPBACK_HOSTS
    )
    has_more_than_host = parts.path.strip("/") or parts.query or parts.fragment
    is_host = parts.hostname and "@" not in parts.netloc and host.isprintable()
    if not is_token_safe or not is_host or has_more_than_host:
        raise ValueError(
            f"{subject} of Unity Catalog needs {HOST_VARIABLE} in the form "
            "https://NAME.cloud.databricks.com"
        )
    return f"{parts.scheme}://{parts.netloc}"


def _read_limited(answer: Any, label: str, max_bytes: int) -> bytes:
    """Returns a body.

    Raises:
        ValueError: It is too large.
        OSError: It takes too long.
    """
    data = b""
    while part := answer.read1(_READ_BYTES):
        data += part
        if len(data) > max_bytes:
            raise ValueError(f"{label}: the answer has more than {max_bytes >> 20} MiB")
    return data


def _parse_object(data: bytes, label: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{label}: the answer is no JSON object")
    return found
