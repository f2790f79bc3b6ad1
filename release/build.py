# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Builds what a release uploads: a wheel for glibc 2.17, a source distribution, `farandole-horovod`
and `farandole-petastorm`.

Usage: `python release/build.py OUT [MACHINE]`, in a checkout whose changes are committed. `MACHINE`
is a key of `MACHINES`, `x86_64` if it is not given. The source distribution and the packages of
other names are the same for all machines and are written with the wheel for x86-64 only. The wheel
is built from the unpacked source distribution, which proves that nothing is missing in it. Files
contain neither a time nor a path of this machine, so a second build of the same commit gives the
same bytes. `release/compare.py` checks that.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import backend
import licenses
import std

GLIBC = "2.17"


@dataclass(frozen=True)
class Machine:
    """A kind of processor for which there is a wheel.

    Attributes:
        name: Its name in platform tags.
        code: Its number in the header of an ELF file.
        tune: C compiler's flag for code that runs on all such processors. zig takes `-mtune` for
            `-mcpu`, so `native` would use AVX everywhere.
    """

    name: str
    code: int
    tune: str

    @property
    def target(self) -> str:
        """The Rust target."""
        return f"{self.name}-unknown-linux-gnu"

    @property
    def policy(self) -> str:
        """The platform tag of the wheel."""
        return f"manylinux_{GLIBC.replace('.', '_')}_{self.name}"


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("x86_64", 62, "-mtune=x86_64"),
        Machine("aarch64", 183, "-mtune=generic"),
    )
}
FIRST = "x86_64"
"""The machine that gets what is the same for all."""
LIMIT = 15_000_000
"""Most bytes of the wheel."""
ROOT = backend.ROOT
WORK = ROOT / "target" / "dist"
TARGETS = ROOT / "target" / "zig"
"""Build directory of releases. It is kept, so that a second release compiles only this
workspace.
"""
BIN = Path(sys.executable).parent


def environment(tree: Path, machine: Machine) -> dict[str, str]:
    """Variables under which compilers put nothing of this machine into a file: no path, no time, no
    kind of processor.

    The crate aegis compiles C with `-mtune=native`, and with clang instead of zig if there is a
    clang. `CFLAGS` come after the flags of a crate and replace them. A program that fails, first in
    `PATH`, hides clang from the crate.
    """
    registry = os.environ.get("CARGO_HOME", str(Path.home() / ".cargo"))
    places = {str(tree): ".", registry: "cargo"}
    flags = [f"--remap-path-prefix={place}={name}" for place, name in places.items()]
    if not std.installed(machine.target):
        flags.append(f"--sysroot={std.SYSROOT}")
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
        "RUSTFLAGS": " ".join(flags),
        "CFLAGS": " ".join(
            [f"-ffile-prefix-map={place}={name}" for place, name in places.items()] + [machine.tune]
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


def wheel(tree: Path, out: Path, machine: Machine) -> Path:
    """Builds the wheel from the unpacked source distribution."""
    env = environment(tree, machine)
    ops = [
        "cargo",
        "zigbuild",
        "--locked",
        "--profile",
        "dist",
        "--target",
        f"{machine.target}.{GLIBC}",
    ]
    subprocess.run([*ops, "-p", "farandole-tensorflow"], cwd=tree, env=env, check=True)
    shutil.copy(
        TARGETS / machine.target / "dist" / backend.OPS.name, tree / backend.OPS.relative_to(ROOT)
    )
    crates = licenses.write(tree, backend.version(), machine.target)
    say(f"{crates} linked crates of others, each with a licence expression")
    command = [
        str(BIN / "maturin"),
        "build",
        "--locked",
        "--profile",
        "dist",
        "--zig",
        "--target",
        machine.target,
    ]
    command += [
        "--compatibility",
        machine.policy.removesuffix(f"_{machine.name}"),
        "--compression-level",
        "9",
    ]
    command += ["--sbom-include", "farandole.cdx.json", "--out", str(out)]
    subprocess.run(command, cwd=tree, env=env, check=True)
    (built,) = out.glob("farandole-*.whl")
    return built


def check(built: Path, machine: Machine) -> None:
    """Fails if the wheel is too large, contains a path of this machine or code for another
    processor, or needs a newer glibc than its name says.
    """
    size = built.stat().st_size
    if size > LIMIT:
        raise SystemExit(f"{built.name} has {size:,} bytes, expected at most {LIMIT:,}")
    with zipfile.ZipFile(built) as archive:
        for name in archive.namelist():
            content = archive.read(name)
            for place in (ROOT, Path.home()):
                if f"{place}/".encode() in content:
                    raise SystemExit(
                        f"{built.name}: {name} contains a path of this machine: {place}"
                    )
            if content.startswith(b"\x7fELF"):
                (code,) = struct.unpack_from("<H", content, 18)
                if code != machine.code:
                    raise SystemExit(
                        f"{built.name}: {name} has the ELF machine {code}, "
                        f"expected {machine.code} ({machine.name})"
                    )
    shown = subprocess.run(
        [str(BIN / "auditwheel"), "show", str(built)], check=True, capture_output=True, text=True
    ).stdout
    if f'the following platform tag: "{machine.policy}"' not in " ".join(shown.split()):
        raise SystemExit(f"auditwheel does not find {built.name} to be {machine.policy}:\n{shown}")
    say(f"{built.name}: {size / 1e6:.1f} MB, {machine.policy} by auditwheel")


def say(text: str) -> None:
    """Tells a step."""
    sys.stdout.write(f"release: {text}\n")
    sys.stdout.flush()


def main(out: Path, machine: Machine) -> None:
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
    first = machine.name == FIRST
    tree = source(out if first else WORK)
    check(wheel(tree, out, machine), machine)
    if first:
        uv = [str(BIN / "uv"), "build", "--quiet", "--wheel", "--out-dir", str(out)]
        for package in ("python/horovod-compat", "python/petastorm-compat"):
            subprocess.run([*uv, package], cwd=tree, env=environment(tree, machine), check=True)
    for file in sorted(out.glob("farandole*")):
        say(f"{file.name}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), MACHINES[(sys.argv[2:] or [FIRST])[0]])
