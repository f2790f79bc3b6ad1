# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The build backend: maturin, and around it what maturin does not build.

A source distribution contains the files that git tracks, the Spark plugin's jar and the page of the
run viewer, so building it needs neither Maven nor npm. A wheel also contains the library of
TensorFlow ops. That library is a second crate, so the backend builds it first.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import maturin
from maturin import (  # noqa: F401 - hooks that a frontend may call
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_wheel,
)

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "farandole"
OPS = PACKAGE / "tensorflow" / "libfarandole_tensorflow.so"
MADE = tuple(
    PACKAGE / name for name in ("spark/farandole-spark.jar", "ui/viewer.js", "ui/viewer.css")
)
"""Files that Maven and npm make, the same on every machine."""


def build_wheel(directory: str, settings: Any = None, metadata: str | None = None) -> str:
    """Builds the files that are missing, then the wheel."""
    if not OPS.exists():
        target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
        subprocess.run(
            ["cargo", "build", "--release", "-p", "farandole-tensorflow"], cwd=ROOT, check=True
        )
        shutil.copy(target / "release" / OPS.name, OPS)
    _make()
    return maturin.build_wheel(directory, settings, metadata)


def build_sdist(directory: str, settings: Any = None) -> str:
    """Packs the files that git tracks, those of Maven and npm, and the metadata. Equal commits
    give equal bytes.
    """
    del settings
    _make()
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    files = {name: ROOT / name for name in listed.split("\0") if name}
    files |= {str(file.relative_to(ROOT)): file for file in MADE}
    with tempfile.TemporaryDirectory() as scratch:
        metadata = Path(scratch) / maturin.prepare_metadata_for_build_wheel(scratch) / "METADATA"
        files["PKG-INFO"] = metadata
        stem = f"farandole-{version()}"
        path = Path(directory) / f"{stem}.tar.gz"
        with (
            path.open("wb") as out,
            gzip.GzipFile("", "wb", mtime=epoch(), fileobj=out) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for inner, file in sorted(files.items()):
                _add(archive, f"{stem}/{inner}", file)
    return path.name


def _make() -> None:
    """Makes the files of Maven and npm where they are missing."""
    missing = [
        str(file.relative_to(ROOT)) for file in MADE if not file.exists() and file.suffix != ".css"
    ]
    if missing:
        subprocess.run(["make", *missing], cwd=ROOT, check=True)


def _add(archive: tarfile.TarFile, name: str, file: Path) -> None:
    """Adds one file without its owner and with one time for all."""
    content = file.read_bytes()
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    entry.mtime = epoch()
    entry.mode = 0o755 if os.access(file, os.X_OK) else 0o644
    archive.addfile(entry, io.BytesIO(content))


def version() -> str:
    """Returns the version of the package."""
    found = re.search(r'^__version__ = "(.+)"', (PACKAGE / "__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"no __version__ in {PACKAGE / '__init__.py'}")
    return found[1]


def epoch() -> int:
    """Returns the time of the build in seconds since 1970: `SOURCE_DATE_EPOCH`, else the time of
    the commit.
    """
    told = os.environ.get("SOURCE_DATE_EPOCH")
    if told is not None:
        return int(told)
    log = ["git", "log", "-1", "--format=%ct"]
    return int(subprocess.run(log, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
