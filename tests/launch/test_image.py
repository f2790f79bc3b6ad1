# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The Dockerfile of the page kubeflow-trainer.md, line by line in a directory of its own with
chroot: this machine may have no Docker. Then its content is tried: ranks that reduce, and an sshd.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from tests.pages import ROOT, blocks_of
from tests.programs import program_path

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

(DOCKERFILE,) = [
    block.text
    for block in blocks_of("docs/user-guide/running/kubeflow-trainer.md")
    if block.kind == "dockerfile"
]
LIMIT: Final = 600.0
"""Seconds for a line, most of which downloads packages."""
CERTIFICATES: Final = "/run/certificates.crt"


def debian_mirror() -> str:
    """The mirror from which this machine installs packages."""
    lists = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    text = "\n".join(path.read_text() for path in lists if path.is_file())
    found = re.findall(r"^(?:URIs:|deb(?: \[[^\]]*\])?) (\S+debian/?)(?: |$)", text, re.MULTILINE)
    return found[0].rstrip("/")


class Image:
    """A root directory that the lines of a Dockerfile fill."""

    def __init__(self, root: Path) -> None:
        self.root, self.directory = root, "/"
        self.environment = {"HOME": "/root", "DEBIAN_FRONTEND": "noninteractive"}
        if "PIP_CERT" in os.environ:
            self.environment["PIP_CERT"] = CERTIFICATES

    def build(self, dockerfile: str, wheel: Path) -> None:
        """Carries out the lines of a Dockerfile."""
        for line in dockerfile.splitlines():
            instruction, _, rest = line.partition(" ")
            match instruction:
                case "FROM":
                    assert rest == "debian:bookworm-slim"
                    self._begin()
                case "RUN":
                    self.run("/bin/sh", "-c", rest)
                case "ENV":
                    name, _, value = rest.partition("=")
                    self.environment[name] = value
                case "COPY":
                    assert rest == "farandole-*.whl /tmp/"
                    shutil.copy(wheel, self.root / "tmp")
                case "WORKDIR":
                    self.directory = rest
                    (self.root / rest[1:]).mkdir(parents=True, exist_ok=True)
                case _:
                    pytest.fail(f"nothing carries out this line: {line}")

    def _begin(self) -> None:
        words = ["debootstrap", "--variant=minbase", "bookworm", str(self.root), debian_mirror()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        for name in ("proc", "dev"):
            subprocess.run(["mount", "--rbind", f"/{name}", str(self.root / name)], check=True)
            subprocess.run(["mount", "--make-rslave", str(self.root / name)], check=True)
        shutil.copy("/etc/resolv.conf", self.root / "etc")
        if "PIP_CERT" in os.environ:
            shutil.copy(os.environ["PIP_CERT"], self.root / CERTIFICATES[1:])

    def run(self, *words: str) -> str:
        """Runs a command inside; its output."""
        path = self.environment.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        changed = 'cd "$0" && exec "$@"'
        done = subprocess.run(
            ["chroot", str(self.root), "/bin/sh", "-c", changed, self.directory, *words],
            env={**self.environment, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout

    def remove(self) -> None:
        """Removes the directory, which has no mounts then."""
        for name in ("proc", "dev"):
            if (self.root / name).is_mount():
                subprocess.run(["umount", "-R", "-l", str(self.root / name)], check=True)
        shutil.rmtree(self.root)


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Image]:
    if os.geteuid() != 0:
        pytest.skip("chroot needs root")
    if shutil.which("debootstrap") is None:
        pytest.skip("not installed (Debian: debootstrap): debootstrap")
    made = Image(tmp_path / "image")
    made.root.mkdir()
    yield made
    made.remove()


def test_the_image_of_the_page_has_ranks_that_reduce_and_an_sshd(image: Image) -> None:
    (wheel,) = (ROOT / "dist").glob("farandole-*.whl")
    image.build(DOCKERFILE, wheel)
    program = program_path(__file__, "sum_of_ranks")
    shutil.copy(program, image.root / "app" / "train.py")
    printed = image.run("farandole", "run", "-np", "2", "python", "train.py")
    assert sorted(re.findall(r"rank \d of 2: [\d.]+", printed)) == [
        "rank 0 of 2: 3.0",
        "rank 1 of 2: 3.0",
    ]
    image.run("ssh-keygen", "-A")
    image.run("/usr/sbin/sshd", "-t")
    assert "strictmodes no" in image.run("/usr/sbin/sshd", "-T")
    assert "stricthostkeychecking false" in image.run("ssh", "-G", "pod")
    for program_name in ("pkill", "pgrep"):
        image.run("which", program_name)
    assert not list((image.root / "tmp").iterdir()), "the image does not contain the wheel twice"
