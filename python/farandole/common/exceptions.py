# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Exceptions, defined in Python so that they pickle and exist without the native library.

The native code raises by fault: a wrong call is a `ValueError`, a failed peer or a changed world a
`FarandoleInternalError`, a machine that refuses a `FarandoleEnvironmentError`.
"""


class FarandoleInternalError(RuntimeError):
    """A collective failed because of a peer or a shut-down; the process itself may form a new world."""


class FarandoleEnvironmentError(RuntimeError):
    """The machine, the network or the configuration refused something; the message says what."""


class FarandoleBugError(RuntimeError):
    """Farandole itself is wrong; please report it with the message."""


HorovodInternalError = FarandoleInternalError
"""Horovod's name of `FarandoleInternalError`."""
