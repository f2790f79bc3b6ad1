# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Compares two builds of one release byte by byte, and names the members that differ.

Usage: `python release/compare.py ONE OTHER`. Prints the SHA-256 of each file. If a file differs,
the exit code is 1.
"""

from __future__ import annotations

import hashlib
import sys
import tarfile
import zipfile
from pathlib import Path


def members(file: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file inside of an archive."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            contents = {name: archive.read(name) for name in archive.namelist()}
    else:
        with tarfile.open(file) as archive:
            entries = {
                entry.name: archive.extractfile(entry) for entry in archive if entry.isfile()
            }
            contents = {
                name: stream.read() for name, stream in entries.items() if stream is not None
            }
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def main(one: Path, other: Path) -> int:
    """Compares all files of two directories."""
    names = {
        file.name for place in (one, other) for file in place.glob("farandole*") if file.is_file()
    }
    status = 0 if names else 1
    for name in sorted(names):
        files = one / name, other / name
        missing = [str(file) for file in files if not file.is_file()]
        if missing:
            sys.stdout.write(f"differs: {missing[0]} does not exist\n")
            status = 1
            continue
        first, second = (hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
        if first == second:
            sys.stdout.write(f"same: {first}  {name}\n")
            continue
        status = 1
        left, right = (members(file) for file in files)
        inner = sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))
        sys.stdout.write(
            f"differs: {name}: {', '.join(inner) or 'only the archive around its members'}\n"
        )
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
