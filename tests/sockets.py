# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Sockets on which a process listens, as the kernel lists them."""


def listening(pid="self"):
    """Addresses, as the kernel writes them, and TCP ports on which a process takes connections;
    this one by default.
    """
    import os

    inodes = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes.add(
                os.readlink(f"/proc/{pid}/fd/{descriptor}")
                .removeprefix("socket:[")
                .removesuffix("]")
            )
        except OSError:
            continue
    found = set()
    for table in (f"/proc/{pid}/net/tcp", f"/proc/{pid}/net/tcp6"):
        with open(table) as lines:
            rows = [line.split() for line in lines][1:]
        mine = [row[1].rpartition(":") for row in rows if row[3] == "0A" and row[9] in inodes]
        found |= {(address, int(port, 16)) for address, _, port in mine}
    return found
