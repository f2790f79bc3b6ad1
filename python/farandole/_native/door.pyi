# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The table through which other libraries of this process reach its engine."""

from typing import Any

def engine_table_capsule() -> Any:
    """A capsule named `farandole.door` with the table's address, which stays valid until the
    process ends.
    """

def note_all_joined() -> None:
    """Takes note that all ranks have joined: unnamed operations are numbered anew from here on."""

def completed_join_count() -> int:
    """The number of times that all ranks have joined in this session."""
