# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A FUSE file system that passes through to a directory and has the troubles of network mounts.

It speaks the kernel's protocol itself and runs in a process of its own, because a process whose
threads wait for a mount cannot serve it. The mount goes when the process is told to, when its
parent ends, or after `DEADLINE`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import stat
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

DEADLINE: Final = 600.0
"""Seconds after which a mount goes in any case."""

OPERATIONS: Final = {
    1: "lookup", 3: "getattr", 4: "setattr", 8: "mknod", 9: "mkdir", 10: "unlink", 11: "rmdir",
    12: "rename", 13: "link", 14: "open", 15: "read", 16: "write", 17: "statfs", 18: "release",
    20: "fsync", 25: "flush", 26: "init", 27: "opendir", 28: "readdir", 29: "releasedir",
    30: "fsyncdir", 34: "access", 35: "create", 45: "rename2",
}  # fmt: skip
READS: Final = ("lookup", "getattr", "open", "read", "opendir", "readdir")
WRITES: Final = ("write", "create", "mkdir", "mknod", "link")
_NO_ANSWER: Final = (2, 36, 42)
"""Forget, interrupt and batch forget."""
_DETACH: Final = 2
_libc = ctypes.CDLL(None, use_errno=True)


class TroubleMount:
    """A mount, for a test.

    Args:
        backing: directory that has the files.
        place: directory that the mount is seen at.
    """

    def __init__(self, backing: Path, place: Path) -> None:
        backing.mkdir(parents=True, exist_ok=True)
        place.mkdir(parents=True, exist_ok=True)
        self.place = place
        command = [sys.executable, __file__, str(backing), str(place)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the mount at {self.place} has ended"
        return json.loads(line)

    def _order(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def begin(self, number: int, operations: tuple[str, ...], seconds: float) -> None:
        """Lets operations fail for some seconds with an error number; 0 blocks them instead."""
        self._order(number=number, operations=operations, seconds=seconds)

    def skew(self, seconds: float) -> None:
        """Lets the server's clock, as files' times show it, be ahead."""
        self._order(skew=seconds)

    def end_trouble(self) -> int:
        """Ends the trouble; returns how many operations met it."""
        return self._order(end=True)["hits"]

    def close(self) -> None:
        """Unmounts and ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        _libc.umount2(os.fsencode(self.place), _DETACH)
        self._process.stdout.close()


class _Server:
    def __init__(self, backing: str, device: int) -> None:
        self.device = device
        self.paths = {1: backing}
        self.numbers = {backing: 1}
        self.trouble: tuple[int, frozenset[str], float] | None = None
        self.hits, self.ahead = 0, 0
        self.held: list[bytes] = []

    def serve(self) -> None:
        deadline = time.monotonic() + DEADLINE
        commands = sys.stdin.fileno()
        while time.monotonic() < deadline:
            ready = select.select([self.device, commands], [], [], 0.02)[0]
            if commands in ready:
                line = sys.stdin.readline()
                if not line:
                    return
                print(json.dumps(self.obey(json.loads(line))), flush=True)
            if self.held and not self.lasts():
                held, self.held = self.held, []
                for request in held:
                    self.answer(request)
            if self.device in ready:
                try:
                    request = os.read(self.device, (1 << 20) + 4096)
                except OSError as error:
                    if error.errno == errno.ENODEV:
                        return
                    continue  # the request was interrupted before it was read
                self.receive(request)

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if "skew" in order:
            self.ahead = int(order["skew"])
        elif "end" in order:
            self.trouble = None
        else:
            until = time.monotonic() + order["seconds"]
            self.trouble = order["number"], frozenset(order["operations"]), until
            self.hits = 0
        return {"hits": self.hits}

    def lasts(self) -> bool:
        return self.trouble is not None and time.monotonic() < self.trouble[2]

    def receive(self, request: bytes) -> None:
        code, unique = struct.unpack_from("<IQ", request, 4)
        if code in _NO_ANSWER:
            return
        if self.trouble is not None and self.lasts() and OPERATIONS.get(code) in self.trouble[1]:
            self.hits += 1
            if self.trouble[0]:
                self.reply(unique, self.trouble[0])
            else:
                self.held.append(request)
            return
        self.answer(request)

    def answer(self, request: bytes) -> None:
        code, unique, node = struct.unpack_from("<IQQ", request, 4)
        handler = getattr(self, OPERATIONS.get(code, "unknown"), None)
        if handler is None:
            self.reply(unique, errno.ENOSYS)
            return
        try:
            self.reply(unique, 0, handler(node, request[40:]) or b"")
        except OSError as error:
            self.reply(unique, error.errno or errno.EIO)

    def reply(self, unique: int, number: int, body: bytes = b"") -> None:
        with contextlib.suppress(FileNotFoundError):  # the caller was interrupted
            os.write(self.device, struct.pack("<IiQ", 16 + len(body), -number, unique) + body)

    def child(self, node: int, name: bytes) -> str:
        return os.path.join(self.paths[node], os.fsdecode(name.split(b"\0")[0]))

    def attributes(self, found: os.stat_result) -> bytes:
        times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
        return struct.pack(
            "<6Q10I",
            found.st_ino, found.st_size, found.st_blocks,
            *(one // 10**9 + self.ahead for one in times), *(one % 10**9 for one in times),
            found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0,
        )  # fmt: skip

    def entry(self, path: str) -> bytes:
        found = os.lstat(path)
        node = self.numbers.get(path)
        if node is None:
            node = len(self.paths) + 1
            self.paths[node], self.numbers[path] = path, node
        # Nothing is kept by the kernel, so that every look meets the trouble.
        return struct.pack("<4Q2I", node, 0, 0, 0, 0, 0) + self.attributes(found)

    def init(self, _: int, body: bytes) -> bytes:
        major, minor, ahead = struct.unpack_from("<3I", body)
        return struct.pack(
            "<4I2H2I2H8I", major, min(minor, 31), ahead, 1 << 5, 16, 12, 1 << 17, 1, 32, *[0] * 9
        )

    def lookup(self, node: int, body: bytes) -> bytes:
        return self.entry(self.child(node, body))

    def getattr(self, node: int, body: bytes) -> bytes:
        flags, _, file = struct.unpack_from("<IIQ", body)
        found = os.fstat(file) if flags & 1 else os.lstat(self.paths[node])
        return struct.pack("<QII", 0, 0, 0) + self.attributes(found)

    def setattr(self, node: int, body: bytes) -> bytes:
        fields = struct.unpack_from("<IIQQQQQQIIIIIIII", body)
        valid, file, size, mode = fields[0], fields[2], fields[3], fields[11]
        path: str | int = file if valid & 64 else self.paths[node]
        if valid & 8:
            os.truncate(path, size)
        if valid & 1:
            os.chmod(path, stat.S_IMODE(mode))
        if valid & 32:
            found = os.stat(path)
            accessed = fields[5] * 10**9 + fields[8] if valid & 16 else found.st_atime_ns
            changed = time.time_ns() if valid & 256 else fields[6] * 10**9 + fields[9]
            os.utime(path, ns=(accessed, changed))
        return struct.pack("<QII", 0, 0, 0) + self.attributes(os.stat(path))

    def mkdir(self, node: int, body: bytes) -> bytes:
        path = self.child(node, body[8:])
        os.mkdir(path, struct.unpack_from("<I", body)[0])
        return self.entry(path)

    def mknod(self, node: int, body: bytes) -> bytes:
        path = self.child(node, body[16:])
        os.mknod(path, struct.unpack_from("<I", body)[0])
        return self.entry(path)

    def unlink(self, node: int, body: bytes) -> None:
        path = self.child(node, body)
        os.unlink(path)
        self.numbers.pop(path, None)

    def rmdir(self, node: int, body: bytes) -> None:
        path = self.child(node, body)
        os.rmdir(path)
        self.numbers.pop(path, None)

    def rename(self, node: int, body: bytes, start: int = 8) -> None:
        to = struct.unpack_from("<Q", body)[0]
        old_name, new_name = body[start:].split(b"\0")[:2]
        old, new = self.child(node, old_name), self.child(to, new_name)
        os.rename(old, new)
        self.numbers.pop(new, None)
        for number, path in list(self.paths.items()):
            if path == old or path.startswith(f"{old}/"):
                if self.numbers.get(path) == number:
                    del self.numbers[path]
                    self.numbers[new + path[len(old) :]] = number
                self.paths[number] = new + path[len(old) :]

    def rename2(self, node: int, body: bytes) -> None:
        if struct.unpack_from("<I", body, 8)[0]:
            raise OSError(errno.EINVAL, "no flags")
        self.rename(node, body, 16)

    def link(self, node: int, body: bytes) -> bytes:
        path = self.child(node, body[8:])
        os.link(self.paths[struct.unpack_from("<Q", body)[0]], path)
        return self.entry(path)

    def open(self, node: int, body: bytes) -> bytes:
        flags = struct.unpack_from("<I", body)[0] & ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        return struct.pack("<QII", os.open(self.paths[node], flags & ~os.O_APPEND), 0, 0)

    def create(self, node: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        path = self.child(node, body[16:])
        file = os.open(path, (flags | os.O_CREAT) & ~os.O_APPEND, mode)
        return self.entry(path) + struct.pack("<QII", file, 0, 0)

    def read(self, _: int, body: bytes) -> bytes:
        file, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(file, size, offset)

    def write(self, _: int, body: bytes) -> bytes:
        file, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", os.pwrite(file, body[40 : 40 + size], offset), 0)

    def statfs(self, node: int, _: bytes) -> bytes:
        found = os.statvfs(self.paths[node])
        return struct.pack(
            "<5Q4I24x", found.f_blocks, found.f_bfree, found.f_bavail, found.f_files,
            found.f_ffree, found.f_bsize, found.f_namemax, found.f_frsize, 0,
        )  # fmt: skip

    def release(self, _: int, body: bytes) -> None:
        os.close(struct.unpack_from("<Q", body)[0])

    def fsync(self, _: int, body: bytes) -> None:
        os.fsync(struct.unpack_from("<Q", body)[0])

    def flush(self, _: int, __: bytes) -> None:
        pass

    def access(self, _: int, __: bytes) -> None:
        pass

    def opendir(self, _: int, __: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0)

    def readdir(self, node: int, body: bytes) -> bytes:
        _, start, size = struct.unpack_from("<QQI", body)
        text = b""
        names = sorted(os.scandir(self.paths[node]), key=lambda one: one.name)
        for number, one in enumerate(names[start:], start + 1):
            name = os.fsencode(one.name)
            kind = one.stat(follow_symlinks=False).st_mode >> 12
            item = struct.pack("<QQII", one.inode(), number, len(name), kind) + name
            item += b"\0" * (-len(item) % 8)
            if len(text) + len(item) > size:
                break
            text += item
        return text

    def releasedir(self, _: int, __: bytes) -> None:
        pass

    def fsyncdir(self, _: int, __: bytes) -> None:
        pass


def main(backing: str, place: str) -> None:
    """Mounts, serves and unmounts."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    if _libc.mount(b"trouble", os.fsencode(place), b"fuse.trouble", 0, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), place)
    try:
        print(json.dumps({"ready": True}), flush=True)
        _Server(backing, device).serve()
    finally:
        _libc.umount2(os.fsencode(place), _DETACH)
        os.close(device)  # what waits gets an error


if __name__ == "__main__":
    main(*sys.argv[1:])
