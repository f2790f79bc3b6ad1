# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Forks the holder of a lease while a thread holds the locks."""

import os
import sys
import threading

from farandole._native.store import Store
from farandole.stores import lease_files, run_lease

run = sys.argv[1]
mark = lease_files.LeaseFile(run, Store(run).acquire_lease())
held, free = threading.Event(), threading.Event()


def hold():
    with lease_files._HELD_LOCK, mark._file_lock, run_lease._ACQUIRE_LOCK:
        held.set()
        free.wait()


threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    mark.renew_if_held()
    assert not mark.renew_and_check_held()
    mark.stop_renewing()
    mark.delete_if_held()
    with run_lease._ACQUIRE_LOCK:
        assert Store(run).acquire_lease() is None, "the parent has it"
    sys.exit(7)
_, status = os.waitpid(child, 0)
free.set()
assert os.waitstatus_to_exitcode(status) == 7
assert mark.renew_and_check_held(), "a child deletes nothing of its parent"
print("parent done")
