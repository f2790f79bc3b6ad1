# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fixtures of all tests, and how they are divided among processes (`pytest -n`)."""

import signal
from pathlib import PurePosixPath

import pytest

# A shell starts what it puts into the background deaf to Ctrl-C, and every child inherits that; the
# tests send some.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests of these directories share what only one process may have (Ray's cluster, the network of a
# faulty job) or what is expensive to start (worlds of ranks).
UNDIVIDED = ("ray", "chaos", "parallel", "faults")


@pytest.hookimpl(optionalhook=True)  # the environment of MXNet lacks pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    """Gives whole files to processes, because tests of a file share fixtures."""
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = PurePosixPath(nodeid.split("::")[0])
            return file.parts[1] if file.parts[1] in UNDIVIDED else str(file)

    return FileScheduling(config, log)
