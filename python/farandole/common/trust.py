# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Consent to run code that lies in files: asked for before it runs, and not given unless somebody says so.

A pickle is code, and so is a Python lambda in a `.keras` file. Saved models and estimators may hold either, and who can
write to where they lie could have them run anything. `read().trust_code()` is the consent for one load; the variable
`FARANDOLE_TRUST_CODE` is that for a whole process, where nobody can call it, as in `PipelineModel.load`. It is what
torch calls `weights_only=False` and Keras `safe_mode=False`.
"""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "FARANDOLE_TRUST_CODE"
"""Consent for a whole process: `1`, `true`, `yes` or `on`."""

_YES: Final = ("1", "true", "yes", "on")
_NO: Final = ("", "0", "false", "no", "off")


class CodeNotTrustedError(ValueError):
    """A file holds code, and nobody has consented to run it. Nothing of it has run."""


def given() -> bool:
    """Whether the environment consents.

    Raises:
        ValueError: the variable says neither yes nor no.
    """
    told = os.environ.get(VARIABLE, "").strip().lower()
    if told in _YES:
        return True
    if told in _NO:
        return False
    raise ValueError(f"{VARIABLE} must be one of {', '.join(_YES)}, or {', '.join(_NO[1:])}: {told!r}")


def refusal(path: str, what: str, instead: str) -> str:
    """What is said without consent.

    Args:
        path: of the file.
        what: in it is code.
        instead: how to consent by a call, and how to do without.
    """
    return (
        f"{path} holds {what}: loading it runs code, and none of it has run. If you trust who can write there, consent "
        f"by {instead}, or by {VARIABLE}=1 for the whole process"
    )


def require(path: str, what: str, instead: str, consent: bool | None = None) -> None:
    """Refuses to go on without consent.

    Args:
        path: of the file.
        what: in it is code.
        instead: how to consent by a call, and how to do without.
        consent: what a caller has said; `None` asks the environment.

    Raises:
        CodeNotTrustedError: there is none.
    """
    if not (given() if consent is None else consent):
        raise CodeNotTrustedError(refusal(path, what, instead))
