# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Values that the ranks of a world publish for each other at the registrar, behind TLS and the
job's token.
"""

def put_if_absent(key: str, value: bytes, /) -> bytes:
    """Publishes a value under a key that has none; what the key holds then, the same for all."""

def wait_for_value(key: str, timeout: float, /) -> bytes | None:
    """Waits for the value of a key; `None` where none comes within `timeout` seconds."""
