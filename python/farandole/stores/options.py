# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The options of a store, such as credentials and endpoints, which are sent with it to other
processes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from farandole._native import store as native

if TYPE_CHECKING:
    from collections.abc import Mapping

HADOOP_USER_OPTION = "hadoop.user.name"
"""Option with the name of the user in HDFS."""


class StorageOptions:
    """Options of the places a store uses; unpickling one puts them in force in the process that
    does.

    Args:
        places: URLs below which the options hold.
        options: as the user gave them; nested ones, as fsspec's `client_kwargs`, are flattened.
    """

    def __init__(self, places: tuple[str, ...], options: Mapping[str, Any] | None) -> None:
        self._places = places
        self._options = _flatten_options(options or {})
        self.apply()

    def apply(self) -> None:
        """Puts them in force in this process."""
        user = self._options.get(HADOOP_USER_OPTION)
        if user is not None:
            os.environ.setdefault("HADOOP_USER_NAME", user)
        if self._options:
            for place in self._places:
                native.configure_options(place, self._options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores and applies."""
        self.__dict__.update(state)
        self.apply()

    def __bool__(self) -> bool:
        """Returns whether there are any."""
        return bool(self._options)

    def __eq__(self, other: object) -> bool:
        """Equal when places and options are."""
        return isinstance(other, StorageOptions) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        """Returns the hash of the places."""
        return hash(self._places)

    def __repr__(self) -> str:
        """Shows no value."""
        return f"StorageOptions({', '.join(sorted(self._options))})"


def _flatten_options(options: Mapping[str, Any]) -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in options.items():
        if isinstance(value, dict):
            flat |= _flatten_options(value)
        elif value is not None:
            flat[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return flat
