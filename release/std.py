# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Compiles Rust's standard library for a target, where rustup has not installed it.

Usage: `python release/std.py TARGET LIBRARY`. `LIBRARY` is the folder `library` of the compiler's
sources, of the same version as the compiler. The result is a folder for `rustc --sysroot`. The
profile is the one with which the compiler's authors build the library. Only this step uses unstable
options (`RUSTC_BOOTSTRAP`), so a wheel that is built with the result has the same code of its
crates as one that is built with the library of rustup.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SYSROOT = ROOT / ".tools" / "sysroot"
BUILD = ROOT / "target" / "std"


def installed(target: str) -> bool:
    """Returns whether the compiler has the library for a target, as after `rustup target add`."""
    return any(Path(_rustc("--print", "target-libdir", "--target", target)).glob("libstd-*.rlib"))


def build(target: str, library: Path) -> Path:
    """Compiles the library and returns the folder of its files, in `SYSROOT`."""
    told = _rustc("--version", "--verbose")
    (commit,) = re.findall(r"^commit-hash: (.+)$", told, re.MULTILINE)
    places = {
        library: f"/rustc/{commit}/library",  # as in the library of rustup
        Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo")): "cargo",
    }
    flags = [f"--remap-path-prefix={place}={name}" for place, name in places.items()]
    env = {
        **os.environ,
        "CARGO_TARGET_DIR": str(BUILD),
        "RUSTC_BOOTSTRAP": "1",
        "RUSTFLAGS": " ".join(["-Zforce-unstable-if-unmarked", *flags]),
    }
    made = BUILD / target / "dist" / "deps"
    shutil.rmtree(made, ignore_errors=True)  # files of an older version would be found, too
    command = [
        "cargo",
        "rustc",
        "--locked",
        "--profile",
        "dist",
        "--target",
        target,
        "--crate-type",
        "rlib",
    ]
    command += [
        "--features",
        "panic-unwind,backtrace",
        "--manifest-path",
        str(library / "std" / "Cargo.toml"),
    ]
    subprocess.run(command, cwd=ROOT, env=env, check=True)
    place = SYSROOT / "lib" / "rustlib" / target / "lib"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for file in made.glob("*.rlib"):
        shutil.copy(file, place)
    return place


def _rustc(*arguments: str) -> str:
    """Returns what the compiler of `rust-toolchain.toml` prints."""
    return subprocess.run(
        ["rustc", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    build(sys.argv[1], Path(sys.argv[2]).resolve())
