# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The table through which other libraries of this process reach its engine."""

from typing import Any

def capsule() -> Any:
    """A capsule named `farandole.door` with the table's address, which stays valid until the process ends."""
