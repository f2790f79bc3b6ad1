# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Builds what a release uploads: a wheel for x86-64 and glibc 2.17, a source distribution, and
`farandole-horovod`.

Usage: `python release/build.py OUT`, in a checkout whose changes are committed. The wheel is built
from the unpacked source distribution, which proves that nothing is missing in it. Files contain
neither a time nor a path of this machine, so a second build of the same commit gives the same
bytes. `release/compare.py` checks that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import backend
import licenses

TARGET = "x86_64-unknown-linux-gnu"
GLIBC = "2.17"
POLICY = "manylinux_2_17_x86_64"
TUNE = "-mtune=x86_64"
"""Code for every processor of the target. zig takes `-mtune` for `-mcpu`, so `native` would use
AVX everywhere.
"""
LIMIT = 15_000_000
"""Most bytes of the wheel."""
ROOT = backend.ROOT
WORK = ROOT / "target" / "dist"
TARGETS = ROOT / "target" / "zig"
"""Build directory of releases. It is kept, so that a second release compiles only this
workspace.
"""
BIN = Path(sys.executable).parent


def environment(tree: Path) -> dict[str, str]:
    """Variables under which compilers put nothing of this machine into a file: no path, no time, no
    kind of processor.

    The crate aegis compiles C with `-mtune=native`, and with clang instead of zig if there is a
    clang. `CFLAGS` come after the flags of a crate and replace them. A program that fails, first in
    `PATH`, hides clang from the crate.
    """
    registry = os.environ.get("CARGO_HOME", str(Path.home() / ".cargo"))
    places = {str(tree): ".", registry: "cargo"}
    hidden = WORK / "hidden"
    hidden.mkdir(exist_ok=True)
    (hidden / "clang").write_text("#!/bin/sh\nexit 1\n")
    (hidden / "clang").chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{hidden}:{os.environ['PATH']}",
        "PYO3_PYTHON": sys.executable,
        "CARGO_TARGET_DIR": str(TARGETS),
        "SOURCE_DATE_EPOCH": str(backend.epoch()),
        "RUSTFLAGS": " ".join(
            f"--remap-path-prefix={place}={name}" for place, name in places.items()
        ),
        "CFLAGS": " ".join(
            [f"-ffile-prefix-map={place}={name}" for place, name in places.items()] + [TUNE]
        ),
    }


def source(out: Path) -> Path:
    """Packs the source distribution into `out` and unpacks it into `WORK`; where its files are
    then.
    """
    name = backend.build_sdist(str(out))
    with tarfile.open(out / name) as archive:
        archive.extractall(WORK, filter="data")
    tree = WORK / name.removesuffix(".tar.gz")
    for file in tree.rglob("*"):
        # the time of the commit may be before that of an earlier build, which cargo would then keep
        os.utime(file)
    return tree


def wheel(tree: Path, out: Path) -> Path:
    """Builds the wheel from the unpacked source distribution."""
    env = environment(tree)
    ops = ["cargo", "zigbuild", "--locked", "--profile", "dist", "--target", f"{TARGET}.{GLIBC}"]
    subprocess.run([*ops, "-p", "farandole-tensorflow"], cwd=tree, env=env, check=True)
    shutil.copy(TARGETS / TARGET / "dist" / backend.OPS.name, tree / backend.OPS.relative_to(ROOT))
    crates = licenses.write(tree, backend.version(), TARGET)
    say(f"{crates} linked crates of others, each with a licence expression")
    command = [
        str(BIN / "maturin"),
        "build",
        "--locked",
        "--profile",
        "dist",
        "--zig",
        "--target",
        TARGET,
    ]
    command += ["--compatibility", POLICY.removesuffix("_x86_64"), "--compression-level", "9"]
    command += ["--sbom-include", "farandole.cdx.json", "--out", str(out)]
    subprocess.run(command, cwd=tree, env=env, check=True)
    (built,) = out.glob("farandole-*.whl")
    return built


def check(built: Path) -> None:
    """Fails if the wheel is too large, contains a path of this machine, or needs a newer glibc
    than its name says.
    """
    size = built.stat().st_size
    if size > LIMIT:
        raise SystemExit(f"{built.name} has {size:,} bytes, expected at most {LIMIT:,}")
    shown = subprocess.run(
        [str(BIN / "auditwheel"), "show", str(built)], check=True, capture_output=True, text=True
    ).stdout
    words = " ".join(shown.split())
    with zipfile.ZipFile(built) as archive:
        for name in archive.namelist():
            content = archive.read(name)
            for place in (ROOT, Path.home()):
                if f"{place}/".encode() in content:
                    raise SystemExit(
                        f"{built.name}: {name} contains a path of this machine: {place}"
                    )
    if f'the following platform tag: "{POLICY}"' not in words:
        raise SystemExit(f"auditwheel does not find {built.name} to be {POLICY}:\n{shown}")
    say(f"{built.name}: {size / 1e6:.1f} MB, {POLICY} by auditwheel")


def say(text: str) -> None:
    """Tells a step."""
    sys.stdout.write(f"release: {text}\n")
    sys.stdout.flush()


def main(out: Path) -> None:
    """Builds everything into `out`, which is emptied before."""
    # maturin, zig and cargo-zigbuild are called by name
    os.environ["PATH"] = f"{BIN}:{os.environ['PATH']}"
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    if changed.stdout:
        raise SystemExit(
            "commit or remove these changes first, a release is built from a commit:\n"
            f"{changed.stdout}"
        )
    for place in (out, WORK):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    tree = source(out)
    check(wheel(tree, out))
    uv = [
        str(BIN / "uv"),
        "build",
        "--quiet",
        "--wheel",
        "--out-dir",
        str(out),
        "python/horovod-compat",
    ]
    subprocess.run(uv, cwd=tree, env=environment(tree), check=True)
    for file in sorted(out.glob("farandole*")):
        say(f"{file.name}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
