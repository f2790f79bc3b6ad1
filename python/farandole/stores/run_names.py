# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Names that users may give to runs and checkpoints, and the names that are reserved.

Names that begin with `_` are reserved for the files and directories of Farandole. So nothing that
Farandole creates, or deletes, among the runs of a store can be a run of a user.
"""

from __future__ import annotations

import re
from typing import Final

SPILL_DIRECTORY: Final = "_spill"
"""Directory among the runs with the directories of jobs on Spark."""
RESERVED_PREFIX: Final = "_"
_OWN_NAMES: Final = ("logs", "output", "timeline.json")
"""Other names of files and directories in the directory of a run."""
_ADDED_SUFFIX_PATTERN: Final = re.compile(r"\.(previous|best|epoch-\d+)$")
"""Pattern of the suffixes that a run adds to the name of its checkpoints."""


def check_run_id(run_id: str, name: str = "run_id") -> None:
    """Refuses a name that cannot be the name of a run.

    Args:
        run_id: path below the directory of runs.
        name: name of the parameter, for messages.

    Raises:
        ValueError: naming the parameter and the value.
    """
    parts = run_id.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name} must name a directory below the store's runs: {run_id!r}")
    if any(part.startswith(RESERVED_PREFIX) for part in parts) or set(_OWN_NAMES) & set(parts[1:]):
        raise ValueError(
            f"{name} must not contain a reserved name, which begins with {RESERVED_PREFIX!r} or "
            f"is {', '.join(_OWN_NAMES)} in the directory of a run: {run_id!r}"
        )


def check_checkpoint_filename(filename: str) -> None:
    """Refuses a name that cannot be the file name of a run's checkpoints.

    Args:
        filename: the name.

    Raises:
        ValueError: naming the value.
    """
    plain = filename not in ("", ".", "..", *_OWN_NAMES) and not set(filename) & set("/\\\0#")
    if not plain or filename.startswith(RESERVED_PREFIX):
        raise ValueError(
            "checkpoint_filename must be the name of a file, without a directory, and must not "
            f"begin with {RESERVED_PREFIX!r} or be {', '.join(_OWN_NAMES)}: {filename!r}"
        )
    if _ADDED_SUFFIX_PATTERN.search(filename):
        raise ValueError(
            "checkpoint_filename must not end with .previous, .best or .epoch-N, which a run adds "
            f"to the names of its other checkpoints: {filename!r}"
        )
