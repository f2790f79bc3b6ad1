# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Exceptions, defined in Python so that they pickle and exist without the native library.

The native code chooses the class by the kind of failure. A wrong call is a `FarandoleUsageError`,
which is a `ValueError`. A failed peer or a changed world is a `FarandoleInternalError`. A problem
of the machine or the network is a `FarandoleEnvironmentError`.
"""

from __future__ import annotations


class FarandoleInternalError(RuntimeError):
    """A collective failed because of a peer or a shutdown. This process may form a new world."""


class FarandoleUsageError(ValueError, FarandoleInternalError):
    """A call that is wrong, or that does not match the calls of the other ranks. The world
    continues.

    It is a `ValueError`, since the call is wrong, and a `FarandoleInternalError`, since Horovod
    raises its `HorovodInternalError` where the engine refuses an operation. `elastic.run` does not
    try it again.
    """


class FarandoleEnvironmentError(RuntimeError):
    """The machine, the network or the configuration refused an operation, which the message
    names.
    """


class FarandoleBugError(RuntimeError):
    """A bug in Farandole. Please report it with the message."""


class WorkerDismissed(SystemExit):
    """The dismissal of a worker of an elastic job: its host was removed, or the worker has
    requested to leave.

    `init` raises it. If it is not caught, the process ends with code 0, which is no failure of the
    job.

    Attributes:
        reason: The reason of the dismissal.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason


class JobSuspended(SystemExit):
    """The suspension of a job: its last commit is in the store, and the launcher starts it again
    later.

    `commit` and `check_host_updates` of a state raise it on all ranks. If it is not caught, the
    process ends with code 0, and the launcher requeues its batch job.
    """

    def __init__(self) -> None:
        super().__init__(0)


HorovodInternalError = FarandoleInternalError
"""Horovod's name of `FarandoleInternalError`."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """The set of hosts has changed: training continues from here in a new world.

    Attributes:
        skip_sync: Whether ranks were only removed, so that the state of the others needs no
            synchronization.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Returns the message about a part that was built with another version than the installed
    one.
    """
    return f"{name} was built with version {version}, but this is installed: {installed_version}"


class HorovodVersionMismatchError(ImportError):
    """The error of an object that was saved or built with another version than the installed
    one.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version

    def __reduce__(self) -> tuple[type[HorovodVersionMismatchError], tuple[str, str, str]]:
        """Pickles by the three arguments."""
        return type(self), (str(self.name), self.version, self.installed_version)
