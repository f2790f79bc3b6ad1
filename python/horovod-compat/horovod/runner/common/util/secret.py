# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Keys and digests of messages."""

from __future__ import annotations

import hashlib
import hmac
import secrets

SECRET_LENGTH = 32
"""Bytes of a key."""
DIGEST_LENGTH = 32
"""Bytes of a digest."""
HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"  # noqa: S105 - the name of a variable
"""The variable that Horovod's launcher hands its key on in; Farandole's jobs have a ticket
instead.
"""


def make_secret_key() -> bytes:
    """Returns a new key."""
    return secrets.token_bytes(SECRET_LENGTH)


def compute_digest(key: bytes, message: bytes) -> bytes:
    """Returns the HMAC of a message by SHA-256."""
    return hmac.digest(key, message, hashlib.sha256)


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Returns whether a digest is that of a message, in constant time."""
    return hmac.compare_digest(compute_digest(key, message), digest)
