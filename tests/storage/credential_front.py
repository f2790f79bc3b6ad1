# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A front of an S3 emulator that checks keys, which expire, and gives out keys itself."""

import collections
import itertools
import json
import math
import re
import threading
import time
from datetime import UTC, datetime
from urllib.parse import parse_qs

from tests.storage.trouble_proxy import TroubleProxy


class CredentialFront(TroubleProxy):
    """Passes requests on that have a valid key and its token.

    Attributes:
        life: seconds that a key is valid.
        refused: number of requests with an expired key.
        denied: part of the paths for which every key is refused.
        granted: number of keys given out.
        requests_per_key: number of requests after which a key is revoked; None: never.
    """

    def __init__(self, upstream, life=1.0):
        self.life, self.refused, self.denied, self.granted = life, 0, None, 0
        self.ends = False
        self.requests_per_key = None
        self._requests = collections.Counter()
        self._numbers = itertools.count()
        self._keys = {}
        self._key_lock = threading.Lock()
        super().__init__(upstream)

    def grant(self):
        """Returns a new key, its secret, its token and the time of its expiry."""
        with self._key_lock:
            number = next(self._numbers)
            expires = time.time() + self.life
            key, token = f"KEY{number}", f"hidden-token-{number}"
            self._keys[key] = (token, expires)
            self.granted += 1
        return {
            "AccessKeyId": key,
            "SecretAccessKey": f"hidden-secret-{number}",
            "SessionToken": token,
            "Expiration": datetime.fromtimestamp(expires, UTC).isoformat().replace("+00:00", "Z"),
        }

    def revoke_all(self):
        """Ends the life of all keys now."""
        with self._key_lock:
            self._keys = {key: (token, 0.0) for key, (token, _) in self._keys.items()}

    def find_refusal(self, request, body):
        """Answers requests for keys, and refuses expired keys and denied paths."""
        query = parse_qs(body.decode(errors="replace")) if b"Action=AssumeRole" in body else {}
        if query:
            return self._answer_role(request, query)
        if request.path.startswith("/federation/credentials"):
            return self._answer_sign_on(request)
        if self.denied is not None and self.denied in request.path:
            return 403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
        key = re.search("Credential=([^/]+)/", request.headers.get("authorization", ""))
        token, expires = self._keys.get(key[1] if key else None, (None, 0))
        if token is None or token != request.headers.get("x-amz-security-token"):
            return 403, b"<Error><Code>InvalidAccessKeyId</Code><Message>no</Message></Error>"
        with self._key_lock:
            self._requests[token] += 1
            is_worn = self._requests[token] > (self.requests_per_key or math.inf)
        if is_worn or time.time() >= expires:
            self.refused += 1
            return 400, b"<Error><Code>ExpiredToken</Code><Message>old</Message></Error>"
        return None

    def _answer_role(self, request, query):
        action = query["Action"][0]
        base = re.search("Credential=([^/]+)/", request.headers.get("authorization", ""))
        good = (
            query.get("WebIdentityToken") == ["identity"]
            if action == "AssumeRoleWithWebIdentity"
            else base is not None and base[1] == "BASE"
        )
        if not good or self.ends:
            return 403, b"<ErrorResponse><Error><Code>AccessDenied</Code></Error></ErrorResponse>"
        keys = "".join(f"<{name}>{value}</{name}>" for name, value in self.grant().items())
        text = f"<{action}Response><{action}Result><Credentials>{keys}</Credentials>"
        return 200, f"{text}</{action}Result></{action}Response>".encode()

    def _answer_sign_on(self, request):
        if request.headers.get("x-amz-sso_bearer_token") != "session" or self.ends:
            return 401, b"{}"
        keys = self.grant()
        expires = datetime.fromisoformat(keys["Expiration"]).timestamp()
        found = {
            "accessKeyId": keys["AccessKeyId"],
            "secretAccessKey": keys["SecretAccessKey"],
            "sessionToken": keys["SessionToken"],
            "expiration": int(expires * 1000),
        }
        return 200, json.dumps({"roleCredentials": found}).encode()
