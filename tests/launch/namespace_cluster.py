# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Hosts for tests and benches: Linux namespaces, each with a real sshd, joined by a switch.

A host has network, host name, IPC, mount and process namespaces of its own: everything that runs in
it can be counted, and ends with it. The root file system is this machine's, so interpreter and
package are at the same place on every host; `/run`, `/dev/shm`, `/etc/hosts`, `/etc/passwd` and
root's home (`/run/home`) are the host's own. The switch is a bridge in a network namespace of its
own. Nothing of it has a name outside: addresses, interfaces, mounts and files end with the
processes that hold the namespaces, and these end when this process closes the pipe to them, as it
does when it is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LIMIT = 60.0
"""The longest wait for anything here, in seconds."""
SUBNET = "10.231.78"
SUBNET_V6 = "fd31:78::"
HOME = "/run/home"
JOB = "/run/job"
"""The working directory of commands: on every host another folder at the same path."""
TOOLS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "ip": "iproute2",
    "bridge": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
}
"""Programs, and the Debian packages that have them."""
LISTENS = "0A"
"""The kernel's number for the state of a socket that listens."""
SEARCH = (
    f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)
NAMESPACES = ["--net", "--uts", "--ipc", "--mount", "--pid"]
# A child without a waiting parent must not stay in the list of processes: the first process ignores
# the ends of its children.
HOLD = "trap '' CHLD; echo ready; exec cat"

SSHD_CONFIG = f"""
HostKey /run/ssh/host_key
AuthorizedKeysFile {HOME}/.ssh/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PidFile none
LogLevel VERBOSE
MaxStartups 200
"""
RECORDER = """#!/bin/sh
printf '%s\\n' "$SSH_ORIGINAL_COMMAND" >> /run/commands
env >> /run/sessions
exec "$SHELL" -c "$SSH_ORIGINAL_COMMAND"
"""


def missing() -> str | None:
    """Returns the reason why this machine cannot have such hosts, with a remedy; `None` if it
    can.
    """
    if sys.platform != "linux":
        return "needs Linux"
    if os.geteuid() != 0:
        return "needs root, for namespaces: run it in a container or a virtual machine as root"
    absent = sorted(
        {package for tool, package in TOOLS.items() if shutil.which(tool, path=SEARCH) is None}
    )
    if absent:
        return f"needs the Debian packages {' '.join(absent)}: .ci/packages installs them"
    probe = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--", "sh", "-c"]
    probe.append(
        "mount -t tmpfs probe /run && ip link add probe type veth peer name eborp && ip link add "
        "type bridge"
    )
    done = subprocess.run(
        probe, capture_output=True, text=True, check=False, timeout=LIMIT, env={"PATH": SEARCH}
    )
    if done.returncode != 0:
        return (
            "needs namespaces with veth pairs and bridges, which this machine does not give: "
            f"{done.stderr.strip()}"
        )
    return None


def until(fits: Callable[[], bool], what: Callable[[], object] | str, limit: float = LIMIT) -> None:
    """Waits for something to become true.

    Args:
        fits: Whether it is.
        what: What is waited for, or a function that describes it at the end.
        limit: The longest wait, in seconds.
    """
    deadline = time.monotonic() + limit
    while not fits():
        if time.monotonic() > deadline:
            raise AssertionError(
                f"not within {limit:g} s: {what if isinstance(what, str) else what()}"
            )
        time.sleep(0.02)


def checked(words: list[str], text: str = "") -> str:
    """Returns the output of a program, which must succeed."""
    done = subprocess.run(
        words,
        input=text,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env={"PATH": SEARCH},
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def children(pid: int) -> list[int]:
    """The processes that a process has started and that still exist."""
    with suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class Hold:
    """A process that holds namespaces until it is ended or this process is gone."""

    def __init__(self, *kinds: str) -> None:
        """Makes the namespaces."""
        words = ["unshare", *kinds, "--fork", "--kill-child", "--", "sh", "-c", HOLD]
        # At its end it complains of a mask of signals when its child was killed: what it says
        # counts only at its start.
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.holder = subprocess.Popen(words, text=True, env={"PATH": SEARCH}, **pipes)
        assert self.holder.stdout is not None
        if self.holder.stdout.readline() != "ready\n":
            raise RuntimeError(
                f"{' '.join(words)}: {self.holder.communicate(timeout=LIMIT)[1].strip()}"
            )
        (self.pid,) = children(self.holder.pid)

    def inside(self, *kinds: str) -> list[str]:
        """The words before a command that runs it in these namespaces."""
        return [str(shutil.which("nsenter", path=SEARCH)), "--target", str(self.pid), *kinds, "--"]

    def kill(self) -> None:
        """Kills every process of the namespaces, and does not wait for that."""
        if self.holder.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Ends every process of the namespaces, which end with them."""
        self.kill()
        # Its parent hears of the end only after every other process of the namespace has ended.
        try:
            self.holder.wait(LIMIT)
        finally:
            for pipe in (self.holder.stdin, self.holder.stdout, self.holder.stderr):
                if pipe is not None:
                    pipe.close()


@dataclass(frozen=True)
class Process:
    """A process of a host."""

    host: str
    pid: int
    """As this process's namespace numbers it."""
    argv: tuple[str, ...]
    environ: tuple[str, ...]

    def __str__(self) -> str:
        """Describes the process, for messages."""
        return f"{self.host}: {self.pid} {' '.join(self.argv)}"


class Running:
    """A command that runs in a host, its output in files so that no pipe can fill up."""

    def __init__(
        self, folder: Path, words: list[str], env: dict[str, str], terminal: int | None = None
    ) -> None:
        """Starts it; with a terminal, whose other end is given, it has that as its own."""
        folder.mkdir(parents=True)
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            streams = {
                "stdin": subprocess.DEVNULL if terminal is None else terminal,
                "stdout": out,
                "stderr": err,
            }
            self.process = subprocess.Popen(words, env=env, start_new_session=True, **streams)

    @property
    def pid(self) -> int:
        """The command itself: the process before it only waits for it."""
        until(
            lambda: bool(children(self.process.pid)) or self.process.poll() is not None,
            "the command to start",
        )
        found = children(self.process.pid)
        return found[0] if found else self.process.pid

    def send(self, number: int) -> None:
        """Sends the command a signal."""
        os.kill(self.pid, number)

    def wait(self, limit: float = LIMIT) -> int:
        """Its exit status; what it said when it does not end."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit:g} s: {self.output}") from None

    @property
    def lines(self) -> list[str]:
        """Lines of stdout so far, sorted: ranks write as they please."""
        return sorted(self.out.read_text(errors="replace").splitlines())

    @property
    def output(self) -> str:
        """The output of the command so far."""
        return self.out.read_text(errors="replace") + self.err.read_text(errors="replace")

    def until(self, *wanted: str, limit: float = LIMIT) -> None:
        """Waits until stdout has these lines."""

        def fits() -> bool:
            if set(wanted) <= set(self.lines):
                return True
            if self.process.poll() is not None and not set(wanted) <= set(self.lines):
                raise AssertionError(
                    f"ended with status {self.process.returncode} before {wanted}: {self.output}"
                )
            return False

        until(fits, lambda: f"{wanted} in {self.output}", limit)

    def stop(self) -> None:
        """Kills it, if it still runs."""
        if self.process.poll() is None:
            for pid in children(self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait(LIMIT)


class Host:
    """A host of the cluster."""

    def __init__(self, cluster: NamespaceCluster, number: int, name: str) -> None:
        """Makes its namespaces, files and network; no sshd yet."""
        self.cluster, self.number, self.name = cluster, number, name
        self.port = 22
        self.address, self.address_v6 = f"{SUBNET}.{number}", f"{SUBNET_V6}{number}"
        self.sshd: subprocess.Popen[bytes] | None = None
        self.hold = Hold(*NAMESPACES, "--mount-proc")
        self.root = Path(f"/proc/{self.hold.pid}/root")
        self._files()
        self._network()

    def _files(self) -> None:
        self._sh(
            f"hostname {self.name}; mount -t tmpfs -o mode=755 run /run; mount -t tmpfs -o "
            f"mode=1777 shm /dev/shm;mkdir -p -m 700 /run/sshd /run/ssh /run/etc {HOME}/.ssh "
            f"{JOB} /run/tmp"
        )
        accounts = []
        for line in Path("/etc/passwd").read_text().splitlines():
            fields = line.split(":")
            # sshd lets no account in whose password is locked; a star is no password, and no lock.
            accounts.append(
                ":".join([*fields[:5], HOME, "/bin/bash"]) if fields[0] == "root" else line
            )
        self.write("/run/etc/passwd", "\n".join(accounts) + "\n")
        self.write(
            "/run/etc/shadow", "root:*:19000:0:99999:7:::\nsshd:*:19000:0:99999:7:::\n", mode=0o600
        )
        self.write("/run/etc/resolv.conf", "")
        self.write("/run/etc/hosts", "")
        mounts = (
            f"mount --bind /run/etc/{name} /etc/{name}"
            for name in ("passwd", "shadow", "hosts", "resolv.conf")
        )
        self._sh("; ".join(mounts))

    def _network(self) -> None:
        near = f"port{self.number}"
        far = self.hold.pid
        switch = self.cluster.switch.inside("--net")
        checked(
            [*switch, "ip", "-batch", "-"],
            f"link add {near} type veth peer name eth0 netns {far}\n"
            f"link set {near} master switch\nlink set {near} up\n",
        )
        checked(
            [*self.hold.inside("--net"), "ip", "-batch", "-"],
            f"link set lo up\nlink set eth0 up\naddress add {self.address}/24 dev eth0\n"
            f"address add {self.address_v6}/64 dev eth0 nodad\n",
        )

    def _sh(self, script: str) -> str:
        return checked([*self.hold.inside(*NAMESPACES), "sh", "-e", "-c", script])

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Writes a file of this host; a relative path is below the working directory."""
        place = self.root / (Path(JOB) / path).relative_to("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(mode)

    def read(self, path: str) -> str:
        """A file of this host."""
        return (self.root / (Path(JOB) / path).relative_to("/")).read_text()

    def listen(
        self, *, port: int = 22, options: str = "", records: bool = False, env: str = ""
    ) -> None:
        """Starts its sshd.

        Args:
            port: Where it listens.
            options: More lines of its configuration.
            records: Whether it writes down the commands and environments of its sessions:
                `commands`, `sessions`.
            env: `NAME=VALUE ...` that its sessions have beside the usual.
        """
        self.port = port
        self.write("/run/ssh/host_key", self.cluster.host_key.read_text(), mode=0o600)
        if records:
            self.write("/run/record", RECORDER, mode=0o755)
        first = 'command="/run/record" ' if records else ""
        self.write(f"{HOME}/.ssh/authorized_keys", first + self.cluster.public_key, mode=0o600)
        config = f"Port {port}\n{SSHD_CONFIG}SetEnv TMPDIR=/run/tmp {env}\n{options}\n"
        self.write("/run/ssh/sshd_config", config)
        program = shutil.which("sshd", path=SEARCH)
        words = [
            *self.hold.inside(*NAMESPACES),
            str(program),
            "-D",
            "-f",
            "/run/ssh/sshd_config",
            "-E",
            "/run/sshd.log",
        ]
        self.sshd = subprocess.Popen(words, stdin=subprocess.DEVNULL, env={"PATH": SEARCH})
        until(
            lambda: ("0.0.0.0", port) in self.listening(),
            lambda: f"sshd of {self.name}: {self.read('/run/sshd.log')}",
        )

    @cached_property
    def _sshd_pid(self) -> int:
        assert self.sshd is not None
        return children(self.sshd.pid)[0]

    def without_package(self, *, interpreter: bool = True) -> None:
        """Hides the package from this host: where its environment was is a new, empty one, or
        nothing.

        Args:
            interpreter: Whether there is an environment at that place.
        """
        if sys.prefix == sys.base_prefix:
            raise RuntimeError(
                "this interpreter is no virtual environment's, and its machine's cannot be hidden"
            )
        folders = [
            folder
            for folder in os.environ.get("PYTHONPATH", "").split(":")
            if Path(folder).is_absolute()
        ]
        for folder in {sys.prefix, *folders}:
            self._sh(f"mount -t tmpfs -o mode=755 hidden '{folder}'")
        if interpreter:
            base = (
                Path(sys.base_prefix)
                / "bin"
                / f"python{sys.version_info.major}.{sys.version_info.minor}"
            )
            self._sh(f"'{base}' -m venv --without-pip '{sys.prefix}'")

    def mount(self, source: str | Path, target: str | Path) -> None:
        """Puts a file of this host in the place of another."""
        self._sh(f"mount --bind '{source}' '{target}'")

    def without_programs(self, *names: str) -> str:
        """A `PATH` of everything but these programs."""
        folder = self.root / "run/bin"
        folder.mkdir(exist_ok=True)
        for place in SEARCH.split(":")[1:]:
            for program in Path(place).iterdir() if Path(place).is_dir() else ():
                if program.name not in names:
                    with suppress(FileExistsError):
                        (folder / program.name).symlink_to(program)
        return f"{Path(sys.executable).parent}:/run/bin"

    def environment(self, **env: str) -> dict[str, str]:
        """Returns the environment that a user of this host has."""
        usual = {
            "PATH": SEARCH,
            "HOME": HOME,
            "USER": "root",
            "LOGNAME": "root",
            "SHELL": "/bin/bash",
        }
        usual |= {"LANG": "C.UTF-8", "TMPDIR": "/run/tmp", "OMP_NUM_THREADS": "1"}
        if os.environ.get("PYTHONPATH"):
            usual["PYTHONPATH"] = os.environ["PYTHONPATH"]
        return usual | env

    def _words(self, words: Iterable[object]) -> list[str]:
        change = ["sh", "-c", f'cd {JOB} && exec "$@"', "sh"]
        return [*self.hold.inside(*NAMESPACES), *change, *map(str, words)]

    def run(
        self, *words: object, text: str = "", limit: float = LIMIT, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command as a user of this host would."""
        return subprocess.run(
            self._words(words),
            input=text,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
            env=self.environment(**env),
        )

    def start(self, *words: object, terminal: int | None = None, **env: str) -> Running:
        """Starts a command; `stop` or the end of the cluster ends it."""
        prefix = [] if terminal is None else ["setsid", "--ctty", "--wait"]
        return self.cluster.started(
            self._words([*prefix, *words]), self.environment(**env), terminal
        )

    def processes(self) -> list[Process]:
        """Returns the live processes of this host, without the two that hold its namespaces and
        its sshd.
        """
        try:
            own = os.readlink(f"/proc/{self.hold.pid}/ns/pid")
        except OSError:
            return []
        kept = {self.hold.pid, self._sshd_pid if self.sshd else 0}
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in kept:
                continue
            with suppress(OSError):
                if os.readlink(entry / "ns" / "pid") != own:
                    continue
                state = (entry / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()[0]
                argv, environ = (
                    tuple(
                        part
                        for part in (entry / name).read_text(errors="replace").split("\0")
                        if part
                    )
                    for name in ("cmdline", "environ")
                )
                if state not in "ZX":
                    found.append(Process(self.name, int(entry.name), argv, environ))
        return found

    def listening(self) -> list[tuple[str, int]]:
        """Addresses and ports of TCP listeners on this host."""
        return [local for local, _, state, _ in self._tcp() if state == LISTENS]

    def connections(self) -> list[tuple[tuple[str, int], tuple[str, int]]]:
        """Both ends of the TCP connections that a process of this host has; those that the
        kernel winds up are not.
        """
        return [
            (local, remote)
            for local, remote, state, inode in self._tcp()
            if state != LISTENS and inode
        ]

    def _tcp(self) -> list[tuple[tuple[str, int], tuple[str, int], str, int]]:
        """Its TCP sockets: both ends, the state and the inode, which is 0 if no process has the
        socket.
        """
        found = []
        for family in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.hold.pid}/net/{family}").read_text().splitlines()[1:]:
                _, local, remote, state, *rest = line.split()
                found.append((end_of(local), end_of(remote), state, int(rest[5])))
        return found

    @property
    def is_on(self) -> bool:
        """Whether it has not been ended."""
        return self.hold.holder.poll() is None

    def cut(self) -> None:
        """Lets the switch drop everything from and to this host, as a broken distant cable
        would: no side notices.
        """
        self.cluster.on_switch("bridge", "link", "set", "dev", f"port{self.number}", "state", "0")

    def part(self) -> None:
        """Moves this host to a second switch: it reaches only the hosts that are there, too."""
        self.cluster.on_switch("ip", "link", "set", f"port{self.number}", "master", "island")

    def restore(self) -> None:
        """Ends `cut` and `part`."""
        self.cluster.on_switch("ip", "link", "set", f"port{self.number}", "master", "switch")
        self.cluster.on_switch("bridge", "link", "set", "dev", f"port{self.number}", "state", "3")

    def power_off(self) -> None:
        """Ends the host without a word to the network."""
        self.cut()
        self.end()

    def end(self) -> None:
        """Ends everything of this host; the kernel closes its connections."""
        self.hold.end()
        if self.sshd is not None:
            self.sshd.wait(LIMIT)


def end_of(words: str) -> tuple[str, int]:
    """Address and port of an end of a socket, as the kernel lists it."""
    address, port = words.split(":")
    return readable(address), int(port, 16)


def readable(address: str) -> str:
    """An address as people write it; the kernel writes it as words of its own byte order."""
    raw = b"".join(bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


class NamespaceCluster:
    """Hosts that reach each other, and nothing else."""

    def __init__(self, *names: str) -> None:
        """Makes the hosts; none has an sshd before `listen`."""
        self.hosts: dict[str, Host] = {}
        self.commands: list[Running] = []
        self.switch = Hold("--net", "--mount", "--pid")
        # Keys and outputs: a folder that is gone with the switch.
        self.folder = Path(f"/proc/{self.switch.pid}/root/run")
        try:
            self._start(names)
        except BaseException:
            self.close()
            raise

    def _start(self, names: tuple[str, ...]) -> None:
        checked(
            [
                *self.switch.inside("--mount"),
                "mount",
                "-t",
                "tmpfs",
                "-o",
                "mode=700",
                "cluster",
                "/run",
            ]
        )
        for name in ("switch", "island"):
            self.on_switch("ip", "link", "add", name, "type", "bridge", "mcast_snooping", "0")
            self.on_switch("ip", "link", "set", name, "up")
        for name in ("key", "host_key"):
            words = [
                "ssh-keygen",
                "-q",
                "-t",
                "ed25519",
                "-N",
                "",
                "-C",
                name,
                "-f",
                f"/run/{name}",
            ]
            checked([*self.switch.inside("--mount"), *words])
        self.host_key = self.folder / "host_key"
        self.public_key = (self.folder / "key.pub").read_text()
        for number, name in enumerate(names, 1):
            self.hosts[name] = Host(self, number, name)
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
        for host in self.hosts.values():
            lines += [f"{host.address} {host.name}", f"{host.address_v6} {host.name}-v6"]
        for host in self.hosts.values():
            host.write("/run/etc/hosts", "\n".join(lines) + "\n")

    def __getitem__(self, name: str) -> Host:
        """A host by its name."""
        return self.hosts[name]

    def on_switch(self, *words: str) -> str:
        """Runs a command in the network namespace of the switch."""
        return checked([*self.switch.inside("--net"), *words])

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Writes the same file on every host that is on, as a user copies a program there."""
        for host in self.hosts.values():
            if host.is_on:
                host.write(path, text, mode)

    def login(self, host: Host, *, key: str = f"{HOME}/.ssh/id_ed25519", config: str = "") -> None:
        """Lets a user of a host log in on the others: a key, what is known of their keys, and a
        configuration.
        """
        host.write(key, (self.folder / "key").read_text(), mode=0o600)
        words = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        known = []
        for other in self.hosts.values():
            names = (other.name, f"{other.name}-v6", other.address, other.address_v6)
            known += [
                f"{name if other.port == 22 else f'[{name}]:{other.port}'} {words}"
                for name in names
            ]
        host.write(f"{HOME}/.ssh/known_hosts", "\n".join(known) + "\n", mode=0o600)
        host.write(f"{HOME}/.ssh/config", config, mode=0o600)

    def started(self, words: list[str], env: dict[str, str], terminal: int | None) -> Running:
        """Starts a command that the cluster ends with itself."""
        self.commands.append(
            Running(self.folder / f"command-{len(self.commands)}", words, env, terminal)
        )
        return self.commands[-1]

    def processes(self) -> list[Process]:
        """The processes of all hosts, without the cluster's own."""
        return [process for host in self.hosts.values() for process in host.processes()]

    def until_quiet(self, limit: float = LIMIT) -> None:
        """Waits until no host has a process of its own."""
        until(lambda: not self.processes(), lambda: "; ".join(map(str, self.processes())), limit)

    def close(self) -> None:
        """Ends everything."""
        for command in self.commands:
            command.stop()
        holds = [*(host.hold for host in self.hosts.values()), self.switch]
        for hold in holds:
            hold.kill()
        for hold in holds:
            hold.end()
        for host in self.hosts.values():
            host.end()

    def __enter__(self) -> Self:
        """As it is."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends everything."""
        self.close()
