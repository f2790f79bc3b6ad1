# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Becomes another user, and takes a path until its input ends."""

import fcntl
import os
import sys

path, how = sys.argv[1:]
os.setgid(65534)
os.setuid(65534)
if how == "link":
    os.symlink("/etc/passwd", path)
elif how == "pipe":
    os.mkfifo(path, 0o666)
else:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    os.fchmod(file, 0o666)
    fcntl.flock(file, fcntl.LOCK_EX)
print("taken", flush=True)
sys.stdin.read()
os.unlink(path)
