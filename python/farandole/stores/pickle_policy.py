# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Consent to unpickle files of a store, which runs their code.

The variable `FARANDOLE_ALLOW_PICKLE` applies to a process: `1` allows, `0` refuses. `allow_pickle`,
a method of readers and a parameter of `LightningEstimator`, has priority. Without either, the two
kinds of reads differ:

- when a run is resumed, the user has not named the checkpoint: only tensors and plain values are
  unpickled;
- in `load(path)`, the user has named the path: it is unpickled, with a warning. Spark ML's own
  `PipelineModel.load` takes no such parameter, and users expect that a saved pipeline can be
  loaded.
"""

from __future__ import annotations

from farandole import _variables as variables
from farandole._native.settings import read_setting

ALLOW_PICKLE_VARIABLE = variables.ALLOW_PICKLE
ALLOW_PICKLE_PARAMETER = "allow_pickle"


class PickleNotAllowedError(ValueError):
    """An object in a store contains code, and the user has not allowed to run it."""


def pickle_decision_from_env() -> bool | None:
    """Returns the value of the variable; `None` if it is not set.

    Raises:
        ValueError: it says something else.
    """
    return read_setting(ALLOW_PICKLE_VARIABLE)


def resolve_pickle_decision(allowed: bool | None) -> bool | None:
    """Returns the caller's decision, else the environment variable's, or `None` without either.

    Args:
        allowed: the caller's decision.

    Raises:
        ValueError: the variable is neither 1 nor 0.
    """
    return pickle_decision_from_env() if allowed is None else allowed


def require_unpickling_allowed(path: str, allowed: bool | None, instead: str = "") -> None:
    """Refuses to unpickle a loaded file if the user has forbidden it.

    Args:
        path: path of the object to load.
        allowed: by the reader; `None` asks the variable.
        instead: clause that names the alternative.

    Raises:
        PickleNotAllowedError: it is not allowed.
    """
    if resolve_pickle_decision(allowed) is False:
        raise PickleNotAllowedError(
            f"the object saved at {path} holds pickled code, which is not allowed to run: allow "
            f"it with read().allow_pickle(True) or {ALLOW_PICKLE_VARIABLE}=1{instead}"
        )
