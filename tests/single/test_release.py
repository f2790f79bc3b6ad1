# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The checks of a released wheel that need no build."""

import platform
import re
import struct
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def build(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "release")
    names = ("build", "backend", "licenses", "std")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    import build

    yield build
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def wheel(directory, code):
    """A wheel with one library, of which there is only the begin of the header."""
    path = directory / "farandole-0-cp311-abi3-manylinux_2_17_aarch64.whl"
    header = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9) + struct.pack("<HH", 3, code)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("farandole/_native.abi3.so", header)
    return path


def test_a_library_for_another_processor_is_refused(build, tmp_path):
    with pytest.raises(
        SystemExit, match=r"_native.abi3.so has the ELF machine 62, expected 183 \(aarch64\)"
    ):
        build.check(wheel(tmp_path, 62), build.MACHINES["aarch64"])


def test_this_interpreter_has_the_code_of_its_machine(build):
    code = struct.unpack_from("<H", Path("/proc/self/exe").read_bytes(), 18)[0]
    assert code == build.MACHINES[platform.machine()].code


def test_the_sources_of_the_standard_library_are_those_of_the_compiler():
    channel = tomllib.loads((ROOT / "rust-toolchain.toml").read_text())["toolchain"]["channel"]
    script = (ROOT / ".ci/aarch64").read_text()
    assert re.search(r"^rust_version=(.+)$", script, re.MULTILINE)[1] == channel
    assert re.search(r"^rust_source=rust-src=([\d.]+)\+", script, re.MULTILINE)[1] == channel
