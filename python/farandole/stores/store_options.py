# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The options of a store, such as credentials and endpoints, which are sent with it to other
processes.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import threading
import weakref
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import cloudpickle

from farandole._native import store as native
from farandole.common.logs import start_logging_for_urls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HADOOP_USER_OPTION: Final = "hadoop.user.name"
"""Option with the name of the user in HDFS."""
_ROOT_PATTERN: Final = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+)://([^/]*)(/*)([^/]?)")
"""Pattern of the scheme, the bucket and the first character of the path of a URL."""
_LOCAL_SCHEMES: Final = ("file", "dbfs")
_DEFAULT_HOST_SCHEMES: Final = ("hdfs", "viewfs")
"""Schemes whose URLs need no host, because the Hadoop configuration names a default."""
_CHECK_NAME: Final = "_farandole_option_check"
"""Path below a place that is used only to check options."""
_CHECK_LOCK: Final = threading.Lock()
CREDENTIALS_OPTION: Final = "credentials"
"""Option with a function that returns credentials."""
_FUNCTION_NUMBERS: Final = itertools.count()
_CREDENTIAL_FUNCTIONS: Final[dict[str, Callable[[], Any]]] = {}
"""Functions that return credentials, by the name that is the option's value."""


class StorageOptions:
    """Options of the places a store uses.

    To make such an object changes nothing in the process. `apply` puts the options in force, and a
    store calls it when the store is used. Unpickling applies the options, too, because they are
    sent to the processes that use them.

    Args:
        urls: URLs below which the options hold.
        options: as the user gave them; nested ones, as fsspec's `client_kwargs`, are flattened.
            `credentials` may be a function without parameters that returns credentials. It is
            called again before they expire, and after the service has refused them.

    Raises:
        TypeError: `credentials` is not a function, or another option is one.
        ValueError: a place has no bucket, so its options would hold for all buckets.
    """

    def __init__(self, urls: tuple[str, ...], options: Mapping[str, Any] | None) -> None:
        for url in urls:
            _require_bucket_in_url(url)
        self._urls = urls
        given = dict(options or {})
        function = given.get(CREDENTIALS_OPTION)
        if callable(function):
            given[CREDENTIALS_OPTION] = f"function {next(_FUNCTION_NUMBERS)}"
            _register_credentials_function(given[CREDENTIALS_OPTION], function)
        elif function is not None:
            # Text, for example of a file, must not choose a function of this process.
            raise TypeError(f"the storage option {CREDENTIALS_OPTION!r} must be a function")
        self._options = _flatten_options(given)
        if self._options:
            _OPTIONS_OF_STORES[id(self)] = self

    def check(self) -> None:
        """Checks that the backends of all places know the options, without access to a file.

        Raises:
            ValueError: naming the option.
        """
        for url in self._urls:
            unused = f"{url.rstrip('/')}/{_CHECK_NAME}"
            with _CHECK_LOCK:
                native.configure_options(unused, self._options)
                try:
                    native.Store(unused)
                finally:
                    native.configure_options(unused, {})

    def covers_url(self, url: str) -> bool:
        """Returns whether a URL is one of the places, or below one.

        Args:
            url: to open.
        """
        places = (root.rstrip("/") for root in self._urls)
        return any(url == root or url.startswith(f"{root}/") for root in places)

    def apply_to_process(self) -> None:
        """Puts them in force in this process, for all URLs at and below the places."""
        start_logging_for_urls(self._urls)
        user = self._options.get(HADOOP_USER_OPTION)
        if user is not None:
            os.environ.setdefault("HADOOP_USER_NAME", user)
        if self._options:
            for url in self._urls:
                native.configure_options(url, self._options)

    @classmethod
    def for_url(cls, url: str) -> StorageOptions:
        """Returns the options with which this process opens a URL.

        Args:
            url: URL of a file or directory.
        """
        options: dict[str, Any] = native.configured_options(url)
        name = options.get(CREDENTIALS_OPTION)
        if name in _CREDENTIAL_FUNCTIONS:
            options[CREDENTIALS_OPTION] = _CREDENTIAL_FUNCTIONS[name]
        return cls((url,), options)

    @staticmethod
    def function_for_url(url: str) -> Callable[[], Any] | None:
        """Returns the function that returns credentials for a URL in this process, if there is one.

        Args:
            url: URL of a file or directory.
        """
        name = native.configured_options(url).get(CREDENTIALS_OPTION, "")
        return _CREDENTIAL_FUNCTIONS.get(name)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state with the function that returns credentials, if there is one."""
        state = dict(self.__dict__)
        function = _CREDENTIAL_FUNCTIONS.get(self._options.get(CREDENTIALS_OPTION, ""))
        if function is not None:
            try:
                state["_function"] = cloudpickle.dumps(function)
            except Exception as error:
                raise TypeError(
                    f"the function in the storage option {CREDENTIALS_OPTION!r} cannot be sent to "
                    f"other processes; create clients and locks inside it: {error}"
                ) from error
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores and applies."""
        function = state.pop("_function", None)
        self.__dict__.update(state)
        if function is not None:
            # Each task of Spark unpickles the options: the same function is one backend.
            name = f"function {hashlib.sha256(function).hexdigest()[:24]}"
            if name not in _CREDENTIAL_FUNCTIONS:
                _register_credentials_function(name, cloudpickle.loads(function))
            self._options = {**self._options, CREDENTIALS_OPTION: name}
        self.apply_to_process()

    def __bool__(self) -> bool:
        """Returns whether there are any."""
        return bool(self._options)

    def __eq__(self, other: object) -> bool:
        """Equal when places and options are."""
        return isinstance(other, StorageOptions) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        """Returns the hash of the places."""
        return hash(self._urls)

    def __repr__(self) -> str:
        """Shows no value."""
        return f"StorageOptions({', '.join(sorted(self._options))})"


_OPTIONS_OF_STORES: Final[weakref.WeakValueDictionary[int, StorageOptions]] = (
    weakref.WeakValueDictionary()
)
"""The options of the stores of this process, by their identity."""


def apply_options_covering_url(url: str) -> None:
    """Puts the options of a store of this process in force, if the URL is in the store.

    Args:
        url: URL that a caller without options opens.
    """
    for options in list(_OPTIONS_OF_STORES.values()):
        if options.covers_url(url):
            options.apply_to_process()


def request_credentials(url: str) -> dict[str, str]:
    """Returns the present credentials of the function in the options of a URL; empty without one.

    A function with a method `present_credentials` may return those that the native store has.

    Args:
        url: URL of a file or directory.
    """
    function = StorageOptions.function_for_url(url)
    if function is None:
        return {}
    return _credentials_as_texts(getattr(function, "present_credentials", function)())


def _require_bucket_in_url(url: str) -> None:
    """Refuses a place that is not below one bucket, container or host.

    Raises:
        ValueError: naming the place.
    """
    root = _ROOT_PATTERN.match(url)
    if root is None or root[2] or root[1].lower() in _LOCAL_SCHEMES:
        return
    if root[1].lower() not in _DEFAULT_HOST_SCHEMES or not root[4]:
        raise ValueError(f"a bucket or container is missing: {url!r}")


def _register_credentials_function(name: str, function: Callable[[], Any]) -> None:
    _CREDENTIAL_FUNCTIONS[name] = function
    native.register_credentials(name, lambda: _credentials_as_texts(function()))


def _credentials_as_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the text of credentials.

    Raises:
        ValueError: an expiry without a zone.
    """
    texts = {}
    for name, value in values.items():
        found = value
        if name in ("expires", "Expiration") and isinstance(value, int | float):
            found = datetime.fromtimestamp(value, UTC)
        if isinstance(found, datetime):
            if found.tzinfo is None:
                raise ValueError("the expiry needs a time zone")
            found = found.isoformat()
        if found is not None:
            texts[name] = str(found)
    return texts


def _flatten_options(options: Mapping[str, Any]) -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in options.items():
        if isinstance(value, dict):
            flat |= _flatten_options(value)
        elif callable(value):
            raise TypeError(f"the storage option {key!r} cannot be a function")
        elif value is not None:
            flat[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return flat
