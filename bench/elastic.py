# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Time until training continues after a rank is lost, and the cost of fault tolerance in steps
without a fault.

Four workers train with `DistributedOptimizer(fault_tolerant=True)` in steps of about 60 ms; one
gets SIGKILL, or its host is cut off. Each rank notes when each step is finished, by the clock of
the machine. Between hosts is between namespaces, which needs root and Debian's packages
(.ci/packages). Cost is a ratio of steps taken in turns by the same processes. Peers' published
times to recover are torchft's 120 to 948 s at scale, and 105 s of commercial systems. Writes
bench/results/elastic.json, with --cost only bench/results/elastic-cost.json, and with --joins only
bench/results/elastic-joins.json.

    .venv/bin/python bench/elastic.py [--repeat 5] [--goodput 600]
    .venv/bin/python bench/elastic.py --cost
    .venv/bin/python bench/elastic.py --joins
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saved import save

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.launch.namespace_cluster import NamespaceCluster, missing, until

if TYPE_CHECKING:
    from collections.abc import Callable

STEP = 0.05
"""Seconds that a step sleeps: what a GPU would take, for two cores cannot compute on four ranks
at once.
"""
PEER_TIMEOUT = 5.0
LIMIT = 120.0

WORKER = """
import os, socket, sys, time
from pathlib import Path
import torch
import farandole.torch as hvd
notes, width = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
# From init on the others wait for a newcomer.
network = torch.nn.Linear(width, width)
hvd.init()
(notes / f"{os.getpid()}.began").write_text(str(time.monotonic()))
optimizer = torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters(),
    fault_tolerant=True)
note = (notes / f"{os.getpid()}-{socket.gethostname()}.steps").open("w", buffering=1)
inputs = torch.ones(1, width)
while not (notes / "enough").exists():
    optimizer.zero_grad()
    network(inputs).mean().backward()
    time.sleep(float(sys.argv[3]))
    optimizer.step()
    note.write(f"{time.monotonic()} {optimizer.steps} {hvd.size()}\\n")
# Ranks see the file after different steps: the first that ends lets the others end.
os._exit(0)
"""

COST = """
import json, statistics, sys, time
import torch
import torch.distributed as dist
import farandole.torch as hvd
from farandole._native import engine
from farandole.torch.distributed import FaultTolerantDataParallel
from farandole.torch.elastic import TorchState
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("farandole")
LAYERS, WIDTH, BATCH = 160, 400, 8
inputs, targets = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
def model():
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.ReLU())]
    return torch.nn.Sequential(*layers)
def make(**options):
    network = model()
    plain = torch.optim.SGD(network.parameters(), lr=0.001)
    return network, hvd.DistributedOptimizer(plain, named_parameters=network.named_parameters(),
        **options)
def make_ddp(wrap):
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.001)
    return wrap(network, optimizer), optimizer
def step_of(network, optimizer, after=lambda: None):
    def step():
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(network(inputs), targets).backward()
        optimizer.step()
        after()
    return step
if sys.argv[2] == "ddp":
    calls = {
        "ddp": step_of(*make_ddp(lambda network, _: DistributedDataParallel(network))),
        "fault_tolerant_ddp": step_of(*make_ddp(FaultTolerantDataParallel)),
    }
else:
    committed, background = make(), make()
    state = TorchState(*committed, step=0)
    behind = TorchState(*background, in_background=True, step=0)
    sources = [parameter.detach() for parameter in committed[0].parameters()]
    copies = [(torch.empty_like(source), source) for source in sources]
    memory = [(copy.data_ptr(), source.data_ptr(), source.nbytes) for copy, source in copies]
    calls = {
        "plain": step_of(*make()),
        "fault_tolerant": step_of(*make(fault_tolerant=True)),
        "commit": step_of(*committed, state.commit),
        "commit_in_background": step_of(*background, behind.commit),
        "copy": lambda: engine.copy_memory(memory),
    }
times = {name: [] for name in calls}
for _ in range(int(sys.argv[1])):
    for name, call in calls.items():
        hvd.barrier()
        for index in range(11):
            began = time.perf_counter()
            call()
            if index:
                times[name].append(time.perf_counter() - began)
if hvd.rank() == 0:
    print(json.dumps({name: statistics.median(each) for name, each in times.items()}), flush=True)
"""


TRANSFER = """
import json, statistics, sys, time
import torch
import farandole.torch as hvd
from farandole.torch._state_transfer import TransferRoles, transfer_tensors
torch.set_num_threads(1)
hvd.init()
tensors = [torch.full((24 << 20,), float(hvd.rank())) for _ in range(4)]
ways = {"by three": TransferRoles([0, 1, 2], [3]), "by one": TransferRoles([0], [1, 2, 3])}
times = {way: [] for way in ways}
for number in range(int(sys.argv[1]) + 1):
    for way, roles in ways.items():
        hvd.barrier()
        began = time.perf_counter()
        transfer_tensors(f"{way}.{number}", tensors, roles)
        took = hvd.allreduce(torch.tensor([time.perf_counter() - began], dtype=torch.float64),
            op=hvd.Max)
        if number:
            times[way].append(took.item())
if hvd.rank() == 0:
    print(json.dumps({way: statistics.median(each) for way, each in times.items()}), flush=True)
"""


class Run:
    """A job whose ranks note their steps."""

    def __init__(
        self, folder: Path, start: Callable[..., subprocess.Popen[Any]], width: int = 64
    ) -> None:
        """Starts it."""
        self.notes = folder / "notes"
        self.notes.mkdir(parents=True)
        script = folder / "worker.py"
        script.write_text(WORKER)
        self.process = start(sys.executable, script, self.notes, width, STEP)

    def steps(self) -> dict[str, list[tuple[float, int, int]]]:
        """By process: when each step was finished, which, and in a world of how many."""
        found = {}
        for note in self.notes.glob("*.steps"):
            whole = note.read_text().rpartition("\n")[0]
            told = (line.split() for line in whole.splitlines())
            found[note.stem] = [(float(at), int(step), int(size)) for at, step, size in told]
        return found

    def last(self) -> int:
        """The last step that any process has finished."""
        return max(step for told in self.steps().values() for _, step, _ in told[-1:])

    def kill(self, name: str) -> None:
        """Sends SIGKILL to a process of this host."""
        os.kill(int(name.partition("-")[0]), signal.SIGKILL)

    def until_size(self, size: int, after: float, ranks: int) -> float:
        """Returns the time at which all ranks had finished a step in a world of this size that
        began later.
        """
        firsts: list[float] = []

        def fits() -> bool:
            if self.process.poll() is not None:
                sys.exit(f"elastic: the job ended with status {self.process.returncode}")
            found = [
                next((at for at, _, now in told if at > after and now == size), None)
                for told in self.steps().values()
            ]
            firsts[:] = sorted(at for at in found if at is not None)
            return len(firsts) >= ranks

        until(
            fits,
            lambda: (
                f"a step of {size} ranks: "
                f"{ ({pid: told[-1:] for pid, told in self.steps().items()}) }"
            ),
            LIMIT,
        )
        return firsts[ranks - 1]

    def end(self) -> None:
        """Ends the job."""
        (self.notes / "enough").touch()
        try:
            self.process.wait(30.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def here(folder: Path, *flags: object, width: int = 64) -> Run:
    """A job of this host."""

    def start(*words: object) -> subprocess.Popen[Any]:
        command = [
            sys.executable,
            "-m",
            "farandole",
            "run",
            "--peer-timeout",
            PEER_TIMEOUT,
            *flags,
            *words,
        ]
        with (folder / "said").open("wb") as said:
            return subprocess.Popen([*map(str, command)], stdout=said, stderr=said)

    return Run(folder, start, width)


def killed_here(folder: Path) -> float:
    """SIGKILL to one of four on this host, until the other three have finished a step."""
    run = here(folder, "-np", 4, "--min-np", 2, "--blacklist-cooldown-range", 600, 600)
    run.until_size(4, 0.0, 4)
    time.sleep(random.uniform(1.0, 1.2))
    began = time.monotonic()
    run.kill(max(run.steps()))
    took = run.until_size(3, began, 3) - began
    run.end()
    return took


def spare_here(folder: Path) -> float:
    """SIGKILL to one of four with a spare, until four have finished a step again."""
    run = here(folder, "-np", 4, "--min-np", 2, "--spares", 1, "-H", "localhost:5")
    run.until_size(4, 0.0, 4)
    time.sleep(8.0)  # the spare has imported everything
    began = time.monotonic()
    run.kill(min(run.steps()))
    took = run.until_size(4, began, 4) - began
    run.end()
    return took


def joins_here(folder: Path) -> tuple[float, float, float]:
    """A new worker with 1 GB of parameters and momentum: the survivors' longest pause, a usual
    step, and a first one.

    The first step is that of processes that begin together, from `init` on: like a new worker, they
    get their memory from the system, but they transfer no state.
    """
    width = 11_180  # 125 M parameters, and as many numbers of momentum
    run = here(folder, "-np", 2, "--min-np", 1, "-H", "localhost:2", width=width)
    run.until_size(2, 0.0, 2)
    time.sleep(5.0)
    before = run.steps()
    began = {path.stem: float(path.read_text()) for path in run.notes.glob("*.began")}
    first = max(told[0][0] - began[name.partition("-")[0]] for name, told in before.items())
    victim = min(before)
    began = time.monotonic()
    run.kill(victim)
    run.until_size(1, began, 1)
    alone = time.monotonic()
    run.until_size(2, alone, 2)
    (told,) = (told for pid, told in run.steps().items() if pid in before and pid != victim)
    times = [at for at, _, _ in told if at > alone]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    run.end()
    return max(pauses), statistics.median(pauses), first


def between_hosts(folder: Path, fault: str) -> float:
    """One of four on two hosts gets SIGKILL, or both of one host are cut off, until the others
    have finished a step.
    """
    with NamespaceCluster("head", "h1", "h2") as cluster:
        for name in ("h1", "h2"):
            cluster[name].listen()
        cluster.login(cluster["head"])
        flags = ("-np", 4, "--min-np", 2, "-H", "h1:2,h2:2", "--blacklist-cooldown-range", 600, 600)
        flags += ("--peer-timeout", PEER_TIMEOUT)

        def start(*words: object) -> subprocess.Popen[Any]:
            # The cluster's hosts see this machine's files.
            return (
                cluster["head"]
                .start(sys.executable, "-m", "farandole", "run", *flags, *words)
                .process
            )

        run = Run(folder, start)
        run.until_size(4, 0.0, 4)
        time.sleep(random.uniform(1.0, 1.2))
        victims = [
            process.pid
            for process in cluster["h2"].processes()
            if "worker.py" in " ".join(process.argv[:2])
        ]
        began = time.monotonic()
        if fault == "SIGKILL":
            os.kill(victims[0], signal.SIGKILL)
            took = run.until_size(3, began, 3) - began
        else:
            cluster["h2"].cut()
            took = run.until_size(2, began, 2) - began
        run.end()
        return took


def undisturbed(run: Run, seconds: float) -> float:
    """Steps in a second, while nothing happens for some seconds."""
    first, began = run.last(), time.monotonic()
    time.sleep(seconds)
    return (run.last() - first) / (time.monotonic() - began)


def goodput(folder: Path, seconds: float, quiet: float) -> tuple[float, int]:
    """Steps with one SIGKILL a minute, as a share of those without, and the kills. A spare replaces
    each lost worker.

    The job is undisturbed for `quiet` seconds before the first SIGKILL, and for as long when all
    four are at work again after the last one.
    """
    run = here(
        folder,
        "-np",
        4,
        "--min-np",
        2,
        "--spares",
        1,
        "-H",
        "localhost:5",
        "--blacklist-cooldown-range",
        1,
        1,
    )
    run.until_size(4, 0.0, 4)
    time.sleep(10.0)  # the spare has imported everything
    rates = [undisturbed(run, quiet)]
    first, began, kills = run.last(), time.monotonic(), 0
    while time.monotonic() < began + seconds:
        time.sleep(min(60.0, max(0.1, began + seconds - time.monotonic())))
        alive = [
            pid
            for pid, told in run.steps().items()
            if told and told[-1][0] > time.monotonic() - 1.0
        ]
        run.kill(random.choice(alive))
        kills += 1
    run.until_size(4, time.monotonic(), 4)
    done = (run.last() - first) / (time.monotonic() - began)
    time.sleep(10.0)
    rates.append(undisturbed(run, quiet))
    run.end()
    return done / statistics.mean(rates), kills


def cost(folder: Path, rounds: int) -> dict[str, float]:
    """Ratios of steps that are fault tolerant, or followed by a commit, to those that are neither;
    two ranks.

    DDP's step that is fault tolerant is compared with DDP's on this backend, in a job of its own: a
    process has one model or optimizer that is fault tolerant. A commit copies all parameters, so it
    costs at least as much as their copy alone, which both ranks make at the same time here.
    """
    script = folder / "cost.py"
    script.write_text(COST)
    times: dict[str, float] = {}
    for kind in ("optimizer", "ddp"):
        command = [
            sys.executable,
            "-m",
            "farandole",
            "run",
            "-np",
            "2",
            sys.executable,
            str(script),
            str(rounds),
            kind,
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        (line,) = (line for line in done.stdout.splitlines() if "{" in line)
        times |= json.loads(line[line.index("{") :])
    ratios = {
        name: times[name] / times["plain"]
        for name in ("fault_tolerant", "commit", "commit_in_background")
    }
    ratios["copying all parameters"] = 1.0 + times["copy"] / times["plain"]
    return ratios | {"fault_tolerant_ddp": times["fault_tolerant_ddp"] / times["ddp"]}


def transfer(folder: Path, rounds: int) -> dict[str, float]:
    """Seconds in which 384 MiB come to 1 of 4 ranks from the others, and to 3 of 4 from one, as it
    was done formerly.

    Until the slowest rank has finished. The memory of all ranks is in use before.
    """
    script = folder / "transfer.py"
    script.write_text(TRANSFER)
    command = [
        sys.executable,
        "-m",
        "farandole",
        "run",
        "-np",
        "4",
        sys.executable,
        str(script),
        str(rounds),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if "{" in line)
    return json.loads(line[line.index("{") :])


class Table:
    """Rows, printed as they come."""

    def __init__(self) -> None:
        """An empty one."""
        self.rows: list[dict[str, Any]] = []

    def row(self, what: str, value: float, limit: float, unit: str, *, least: bool = False) -> None:
        """Adds a row."""
        met = value >= limit if least else value <= limit
        self.rows.append(
            {"what": what, "value": round(value, 3), "limit": limit, "unit": unit, "met": met}
        )
        bound = "at least" if least else "at most"
        print(
            f"{what:66} {value:8.3f} {unit:3} {bound} {limit:g}  {'' if met else 'MISSED'}",
            flush=True,
        )

    def middle(self, what: str, measure: Callable[[Path], float], times: int, limit: float) -> None:
        """Adds the median of several measurements, in seconds."""
        found = []
        for _ in range(times):
            with tempfile.TemporaryDirectory() as folder:
                found.append(measure(Path(folder)))
        self.row(what, statistics.median(found), limit, "s")

    def joins(self) -> None:
        """Adds the pause when a worker joins."""
        with tempfile.TemporaryDirectory() as folder:
            pause, usual, first = joins_here(Path(folder))
        self.row("a worker joins, 1 GB: the survivors' longest pause", pause, usual + 1.0, "s")
        print(f"    a first step of processes that begin together took {first:.3f} s", flush=True)
        print(f"    a usual one took {usual:.3f} s", flush=True)

    def transfer(self, rounds: int) -> None:
        """Adds how long the state takes to a rank that joins; there is no goal."""
        with tempfile.TemporaryDirectory() as folder:
            for way, took in transfer(Path(folder), rounds).items():
                what = f"384 MiB of state to a rank that joins three, sent {way}"
                self.rows.append({"what": what, "value": round(took, 3), "unit": "s"})
                print(f"{what:66} {took:8.3f} s", flush=True)

    def costs(self, rounds: int) -> None:
        """Adds what it costs without a fault."""
        with tempfile.TemporaryDirectory() as folder:
            for name, ratio in cost(Path(folder), rounds).items():
                self.row(f"cost of {name} without a fault, 25 M parameters", ratio, 1.03, "x")

    def losses(self, repeat: int) -> None:
        """Adds how soon training continues."""
        self.middle("SIGKILL of 1 of 4 here -> a step of the 3 survivors", killed_here, repeat, 0.3)
        self.middle("SIGKILL of 1 of 4 here -> a step of 4, by a spare", spare_here, repeat, 1.5)
        reason = missing()
        if reason is not None:
            print(f"between hosts: {reason}")
            return
        what = "SIGKILL of 1 of 4 on 2 hosts -> a step of the 3 survivors"
        self.middle(what, lambda folder: between_hosts(folder, "SIGKILL"), repeat, 0.6)
        what = f"a host of 2 cut off -> a step, peer timeout {PEER_TIMEOUT:g} s"
        self.middle(
            what,
            lambda folder: between_hosts(folder, "cut"),
            max(1, repeat // 2),
            PEER_TIMEOUT + 1.0,
        )

    def goodput(self, seconds: float, quiet: float) -> None:
        """Adds the share of useful steps."""
        with tempfile.TemporaryDirectory() as folder:
            share, kills = goodput(Path(folder), seconds, quiet)
        self.row(f"goodput with {kills} SIGKILLs in {seconds:g} s", share, 0.99, "x", least=True)
        print(
            "    published by peers, at a larger scale: 120 to 948 s to recover (torchft), 105 s "
            "(commercial systems)"
        )


def main() -> None:
    """Measures, prints the table and saves it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--goodput", type=float, default=600.0, help="seconds of the run with a SIGKILL a minute"
    )
    parser.add_argument(
        "--quiet",
        type=float,
        default=60.0,
        help="seconds without a SIGKILL, before that run and after",
    )
    parser.add_argument("--keep", action="store_true", help="leave bench/results as it is")
    parser.add_argument(
        "--rounds",
        type=int,
        default=8,
        help="of the cost (ten steps of each kind) and the transfer",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--cost", action="store_true", help="measure only the cost without a fault")
    only.add_argument(
        "--joins", action="store_true", help="measure only what a worker that joins costs"
    )
    arguments = parser.parse_args()
    table, name = Table(), "elastic"
    if arguments.joins:
        name = "elastic-joins"
        for _ in range(arguments.repeat):
            table.joins()
        table.transfer(arguments.rounds)
    elif arguments.cost:
        name = "elastic-cost"
        table.costs(arguments.rounds)
    else:
        table.losses(arguments.repeat)
        table.joins()
        table.transfer(arguments.rounds)
        table.costs(arguments.rounds)
        table.goodput(arguments.goodput, arguments.quiet)
    if not arguments.keep:
        save(name, {"rows": table.rows})


if __name__ == "__main__":
    main()
