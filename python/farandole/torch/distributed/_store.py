# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A store of torch.distributed at the job's registrar.

Torch's own `TCPStore` listens on all addresses and has no password. This store opens no port. It
uses the connection of each rank to the registrar, with TLS and the job's token, and follows all
settings of that connection.

The registrar keeps the first value of a key. So every change of a key is a separate entry,
`<key>/<number>`, which only one rank can create:

    set, add, compare_set, delete    claim the next number; if another rank was first, read its
                                     entry and try again
    get, wait                        wait for entry 0, then read on to the last one
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from torch._C._distributed_c10d import Store

from farandole._native import values

_TAG_BYTES: Final = 8
_SET_MARK: Final = b"s"
_DELETED_MARK: Final = b"d"
_ValueChange = Callable[[bytes | None], bytes | None]


class RegistrarStore(Store):
    """Keys and values of the ranks of one world.

    Args:
        name: Name of the store, unique in the job and the same on all ranks.
        timeout: Longest wait of `get` and `wait`.
    """

    def __init__(self, name: str, timeout: timedelta) -> None:
        super().__init__()
        self._name = name
        self._limit = timeout
        self._lock = threading.Lock()
        self._last: dict[str, tuple[int, bytes | None]] = {}
        """For each key, the number after the last known entry, and the value after that entry."""

    def set(self, key: str | bytes, value: str | bytes) -> None:
        """Sets a key."""
        self._change_value(_to_text(key), lambda _: _to_bytes(value))

    def get(self, key: str | bytes) -> bytes:
        """Waits for the value of a key.

        Raises:
            TimeoutError: it does not come in time.
        """
        return self._wait_for_value(_to_text(key), self._limit)

    def add(self, key: str | bytes, value: int) -> int:
        """Adds to the number under a key, which is 0 at first; returns the sum."""
        return int(
            self._change_value(_to_text(key), lambda now: b"%d" % (int(now or 0) + value)) or 0
        )

    def append(self, key: str | bytes, value: str | bytes) -> None:
        """Appends to the value under a key."""
        self._change_value(_to_text(key), lambda now: (now or b"") + _to_bytes(value))

    def compare_set(
        self, key: str | bytes, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Sets a key if its value equals the expected one, or if it has no value and none is
        expected; returns the value after that.
        """
        wanted, then = _to_bytes(expected_value), _to_bytes(desired_value)
        found: list[bytes | None] = []

        def change_expected_value(now: bytes | None) -> bytes | None:
            found[:] = [now]
            matches = now == wanted if now is not None else not wanted
            return then if matches else now

        after = self._change_value(_to_text(key), change_expected_value)
        return wanted if after is None else after

    def delete_key(self, key: str | bytes) -> bool:
        """Deletes a key; returns whether it existed."""
        existed: list[bool] = []

        def remove_value(now: bytes | None) -> bytes | None:
            existed[:] = [now is not None]
            return None

        self._change_value(_to_text(key), remove_value)
        return existed[0]

    def check(self, keys: list[str]) -> bool:
        """Returns whether all the keys have values."""
        return all(self._read_value_now(_to_text(key)) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all of some keys have values.

        Raises:
            TimeoutError: one of them does not come in time.
        """
        end = time.monotonic() + (timeout or self._limit).total_seconds()
        for key in keys:
            self._wait_for_value(_to_text(key), timedelta(seconds=max(0.0, end - time.monotonic())))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Like `get`, of several keys."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Like `set`, of several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Returns whether the store has `append`, `multi_get` and `multi_set`."""
        return True

    def num_keys(self) -> int:
        """Raises an error: keys cannot be counted.

        Raises:
            NotImplementedError: the registrar does not count keys.
        """
        raise NotImplementedError("the store of farandole:// cannot count its keys")

    # Names that torch's wrapping stores call.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of `get` and `wait`."""
        self._limit = timeout

    @property
    def timeout(self) -> timedelta:
        """The timeout of `get` and `wait`."""
        return self._limit

    def clone(self) -> RegistrarStore:
        """Returns another store with the same keys."""
        return RegistrarStore(self._name, self._limit)

    def _entry_key(self, key: str, number: int) -> str:
        return f"torch.distributed/{self._name}/{key}/{number}"

    def _last_known_entry(self, key: str) -> tuple[int, bytes | None]:
        with self._lock:
            return self._last.get(key, (0, None))

    def _apply_log_entry(self, key: str, number: int, entry: bytes) -> bytes | None:
        """Notes an entry; returns the value after it."""
        value = entry[_TAG_BYTES + 1 :] if entry[:1] == _SET_MARK else None
        with self._lock:
            if self._last.get(key, (0, None))[0] <= number:
                self._last[key] = (number + 1, value)
        return value

    def _read_value_now(self, key: str) -> bytes | None:
        """Returns the value of a key now."""
        number, value = self._last_known_entry(key)
        while (entry := values.wait_for_value(self._entry_key(key, number), 0)) is not None:
            value = self._apply_log_entry(key, number, entry)
            number += 1
        return value

    def _change_value(self, key: str, change: _ValueChange) -> bytes | None:
        """Changes a key by a function of its value; returns the new value."""
        tag = secrets.token_bytes(_TAG_BYTES)
        while True:
            before = self._read_value_now(key)
            number, known = self._last_known_entry(key)
            if known != before:
                continue  # another thread has seen more
            after = change(before)
            if after == before:
                return after
            mine = (_DELETED_MARK if after is None else _SET_MARK) + tag + (after or b"")
            held = values.put_if_absent(self._entry_key(key, number), mine)
            self._apply_log_entry(key, number, held)
            if held == mine:
                return after

    def _wait_for_value(self, key: str, limit: timedelta) -> bytes:
        end = time.monotonic() + limit.total_seconds()
        while (value := self._read_value_now(key)) is None:
            number, _ = self._last_known_entry(key)
            if (
                values.wait_for_value(
                    self._entry_key(key, number), max(0.0, end - time.monotonic())
                )
                is None
            ):
                raise TimeoutError(
                    f"{key!r} of the store of farandole:// did not come within "
                    f"{limit.total_seconds()} s"
                )
        return value


def _to_text(key: str | bytes) -> str:
    return key.decode() if isinstance(key, bytes) else key


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
