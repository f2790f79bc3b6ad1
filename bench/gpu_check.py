# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Everything that only a GPU can show, in a few minutes, each against torch in the same run.

Prints one line a check, `pass`, `FAIL` or `left out` with the numbers, and ends with 1 when one
failed. Where there is no GPU it says so and ends with 0. Needs the package, torch with CUDA and one
GPU.

    python bench/gpu_check.py [--only kernels nccl ranks training estimator faults sanitizer]
                              [--save FOLDER]

`--save` writes the lines as `gpu.json`, and what the ranks printed as `ranks.log`.

The ranks' part is also there for hosts without a GPU, so that it is known to work: `--rehearse`
runs it on the CPU.
"""

# ruff: noqa: PLC0415, BLE001, PLR2004 - torch is loaded where it is needed; a failed check must not end the others
from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PARTS = ["kernels", "nccl", "ranks", "training", "estimator", "faults", "sanitizer"]
SIZES = [(256 * (i % 9 + 1) + i % 4, 1024 if i % 8 == 0 else 96) for i in range(160)]
SEED = 7
AHEAD = 2_000_000
"""Cycles that hold a GPU for a millisecond: what is timed is put behind them, so that it waits
for no launch.
"""


class Page:
    """The lines, and whether one of them is bad."""

    def __init__(self) -> None:
        self.failed = 0
        self.lines: list[dict[str, str]] = []

    def line(self, result: str, name: str, detail: str) -> None:
        """Prints a line and keeps it."""
        self.lines.append({"result": result, "check": name.strip(), "detail": detail})
        print(f"{result:9}{name:44}{detail}", flush=True)

    def check(self, good: bool, name: str, detail: str) -> None:
        """Says how a check went."""
        self.failed += not good
        self.line("pass" if good else "FAIL", name, detail)

    def leave_out(self, name: str, reason: str) -> None:
        """Says why there is no such check."""
        self.line("left out", name, reason)

    def save(self, folder: Path) -> None:
        """Writes the lines, the GPU and the versions."""
        import torch

        about = {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": torch.cuda.is_available() and ".".join(map(str, torch.cuda.nccl.version())),
            "command": " ".join(["bench/gpu_check.py", *sys.argv[1:]]),
        }
        text = json.dumps({"about": about, "checks": self.lines}, indent=1)
        (folder / "gpu.json").write_text(text + "\n")


RANKS_LOG: list[Path] = []
"""The file for what ranks print, if it was asked for."""


def packages() -> list[str]:
    """Folders in which wheels of CUDA's libraries may be."""
    return [folder for folder in sys.path if (Path(folder) / "nvidia").is_dir()]


def microseconds(call: Callable[[], object], repeat: int = 30) -> float:
    """The median of a call's time on the GPU."""
    import torch

    for _ in range(3):
        call()
    times: list[float] = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD)  # noqa: SLF001
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def kernels(page: Page, timed: bool = True) -> None:
    """Right results, and the speed of packing next to that of a copy, unless something else runs
    that makes it slow.
    """
    import torch

    from farandole._native import cuda
    from farandole.torch._handles import ENGINE_DTYPES

    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    began = time.monotonic()
    ours = cuda.GpuKernels(0, "", packages(), f"{cache}/farandole/kernels")
    page.check(True, "kernels compiled or found", f"{time.monotonic() - began:.2f} s")
    stream = torch.cuda.current_stream().cuda_stream
    torch.manual_seed(SEED)
    tensors = [torch.randn(shape, device="cuda") for shape in SIZES]
    total = sum(tensor.nbytes for tensor in tensors)
    listed = [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]
    source, target = (torch.empty(total, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy = 2 * total / microseconds(lambda: target.copy_(source)) if timed else 0.0
    f32 = ENGINE_DTYPES[torch.float32]
    for dtype, least in [(torch.float32, 0.85), (torch.bfloat16, 0.80), (torch.float16, 0.80)]:
        number = ENGINE_DTYPES[dtype]
        packed = torch.empty(
            cuda.packed_buffer_bytes([count for _, count in listed], number),
            dtype=torch.uint8,
            device="cuda",
        )
        before = [tensor.clone() for tensor in tensors]

        def move(pack: bool, number: int = number, packed: torch.Tensor = packed) -> None:
            ours.pack_tensors(pack, listed, f32, number, packed.data_ptr(), 1.0, stream)

        move(True)
        for tensor in tensors:
            tensor.zero_()
        move(False)
        same = all(
            torch.equal(a, b.to(dtype).float()) for a, b in zip(tensors, before, strict=True)
        )
        page.check(same, f"160 tensors as {dtype} and back", f"{total / 1e6:.0f} MB")
        if timed:
            moved = 2 * (total + sum(tensor.numel() for tensor in tensors) * dtype.itemsize)
            speed = moved / (microseconds(lambda: move(True)) + microseconds(lambda: move(False)))
            page.check(
                speed >= least * copy,
                f"  speed next to a copy's, at least {least:.0%}",
                f"{speed / copy:.0%} of {copy / 1e3:.0f} GB/s",
            )
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
    wrong = [case for case, good in reductions(ours, ENGINE_DTYPES, stream) if not good]
    page.check(
        not wrong, "reductions of 4 buffers, every type", ", ".join(wrong) or "the host's results"
    )
    a, b = (torch.randn(1_000_003, device="cuda") for _ in range(2))
    out, scratch = (
        torch.empty_like(a),
        torch.empty(ours.adasum_scratch(a.numel()), dtype=torch.uint8, device="cuda"),
    )
    ours.adasum_vectors(
        f32, a.data_ptr(), b.data_ptr(), out.data_ptr(), a.numel(), scratch.data_ptr(), stream
    )
    x, y = a.double(), b.double()
    dot = x @ y
    exact = (1 - dot / (2 * (x @ x))) * x + (1 - dot / (2 * (y @ y))) * y
    error = float((out.double() - exact).abs().max())
    page.check(error < 1e-5, "Adasum of two vectors", f"largest difference {error:.1e}")


def reductions(ours: Any, dtypes: dict[Any, int], stream: int) -> Iterator[tuple[str, bool]]:
    """Each case, and whether the kernel gives what torch gives on the host, joined in the same
    order.
    """
    import torch

    floats = (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
    for dtype in (*floats, torch.int32, torch.int64, torch.uint8):
        parts = [(torch.rand(99_991) * 100).to(dtype) for _ in range(4)]
        wide = [
            part.float() if dtype.itemsize <= 2 and dtype.is_floating_point else part
            for part in parts
        ]
        for op, join in [(1, torch.add), (3, torch.minimum), (4, torch.maximum)]:
            expected = join(join(join(wide[0], wide[1]), wide[2]), wide[3]).to(dtype)
            there = [part.cuda() for part in parts]
            out = torch.empty_like(there[0])
            addresses = [part.data_ptr() for part in there]
            ours.reduce(dtypes[dtype], op, addresses, 1.0, 1.0, out.data_ptr(), out.numel(), stream)
            # torch does not compare floats of eight bits.
            yield (
                f"{dtype} by {op}",
                torch.equal(out.cpu().view(torch.uint8), expected.view(torch.uint8)),
            )


def nccl(page: Page) -> None:
    """Measures the time that our communicator adds to NCCL, with one rank."""
    import torch
    import torch.distributed as dist

    from farandole._native import cuda
    from farandole.torch._handles import ENGINE_DTYPES

    ring = cuda.SingleMemberNccl(0, "", packages())
    tensor = torch.ones(1 << 18, device="cuda")
    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=0, world_size=1)

        def theirs() -> None:
            dist.all_reduce(tensor)
            torch.cuda.synchronize()

        def timed(call: Callable[[], None]) -> float:
            times: list[float] = []
            for _ in range(300):
                began = time.perf_counter()
                call()
                times.append((time.perf_counter() - began) * 1e6)
            return statistics.median(times)

        number = ENGINE_DTYPES[torch.float32]
        mine = timed(lambda: ring.allreduce(tensor.data_ptr(), tensor.nbytes, number))
        other = timed(theirs)
        dist.destroy_process_group()
    page.check(
        mine <= other + 15,
        "NCCL, 1 rank, 1 MiB: at most 15 us more",
        f"{mine:.1f} us, torch {other:.1f} us",
    )
    page.check(bool((tensor == 1).all()), "  its result", "a sum of one")
    one_rank(page, "cuda")


def one_rank(page: Page, device: str) -> None:
    """An allreduce of one rank through the engine, and a host that does not wait."""
    _, notes = launch(1, "engine", device)
    if not notes:
        page.check(False, "the engine, 1 rank, 1 MiB", "the rank ended without a result")
        return
    note = notes[0]
    added = (note["ours"] - note["theirs"]) * 1e3
    if device == "cuda":
        detail = f"{note['ours'] * 1e3:.1f} us, torch {note['theirs'] * 1e3:.1f} us"
        page.check(added <= 15, "the engine, 1 rank, 1 MiB: at most 15 us more", detail)
        longest = max(note["held"].values())
        detail = f"{longest:.2f} ms behind a kernel of {note['ahead']:.0f} ms"
        page.check(
            longest < note["ahead"] / 4,
            "  the host waits for no kernel, in gathers neither",
            detail,
        )
    page.check(note["good"]["allreduce"], "  its result", "a sum of one")
    for name, ms in note["gathers"].items():
        page.check(note["good"][name], f"  {name} of the same", f"{ms * 1e3:.1f} us")


DETOURS = ("go through host memory: ", "cannot use CUDA IPC")
"""Words of the log where NCCL or CUDA IPC was to be used and is not."""


def launch(
    ranks: int, role: str, device: str, more: dict[str, str] | None = None
) -> tuple[int, list[Any]]:
    """Runs ranks of this file with these variables besides; the exit status and what they wrote
    down. The status is not 0 where tensors of a GPU went another way than asked for.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "farandole", "run", "-np", str(ranks), sys.executable]
        command += [__file__, "--role", role, "--device", device, "--folder", folder]
        env = {**os.environ, **(more or {})}
        printed, status = Path(folder, "printed"), 124
        with printed.open("w") as file, suppress(subprocess.TimeoutExpired):
            status = subprocess.run(
                command, timeout=600, stdout=file, stderr=file, check=False, env=env
            ).returncode
        text = printed.read_text(errors="replace")
        notes = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    for log in RANKS_LOG:
        with log.open("a") as file:
            file.write(f"--- {ranks} x {role} {more or ''}: status {status}\n{text}\n")
    if not notes:
        print(text[-4000:], file=sys.stderr)
    asked = "FARANDOLE_GPU_TENSORS" not in env and device == "cuda"
    detour = [word for word in DETOURS if asked and word in text]
    if detour:
        print(f"{role}: tensors on GPUs {detour[0]}...", file=sys.stderr)
    return status or 125 * bool(detour), notes


def ranks(page: Page, device: str) -> None:
    """Several ranks with tensors on one GPU: results, and speed next to Gloo's."""
    import torch

    gpus = torch.cuda.device_count() if device == "cuda" else 1
    shared = {"CUDA_VISIBLE_DEVICES": "0"} if gpus > 1 else {}
    worlds = [(count, "on one device", shared) for count in (2, 4)]
    worlds += [(count, "with a GPU each", {}) for count in (2, 4) if count <= gpus]
    for count, where, env in worlds:
        status, notes = launch(count, "correct", device, more=env)
        wrong = [case for note in notes for case in note["wrong"]]
        good = status == 0 and len(notes) == count and not wrong
        detail = ", ".join(wrong[:5]) or f"status {status}"
        page.check(good, f"{count} ranks {where}, operations and types", detail)
    for count, way in ((1, "NCCL"), (2, "CUDA IPC")) if device == "cuda" else ((2, "host"),):
        status, notes = launch(count, "features", device, more=shared)
        wrong = [case for note in notes for case in note["wrong"]]
        good = status == 0 and len(notes) == count and not wrong
        detail = "; ".join(wrong[:5]) or f"status {status}"
        page.check(good, f"features of training, {count} x {way}", detail)
    _, ours = launch(2, "speed", device, more=shared)
    _, theirs = launch(2, "gloo", device, more=shared)
    if device == "cuda":
        _, copied = launch(2, "speed", device, more={**shared, "FARANDOLE_GPU_TENSORS": "copied"})
        ratio = copied[0]["ms"] / ours[0]["ms"] if ours and copied else 0.0
        page.check(ratio >= 1, "64 MiB, 2 ranks, as by torch's copies", f"{ratio:.1f} x as fast")
        _, staged = launch(2, "speed", device, more={**shared, "FARANDOLE_GPU_TENSORS": "staged"})
        ratio = staged[0]["ms"] / ours[0]["ms"] if ours and staged else 0.0
        page.check(ratio > 2, "64 MiB by CUDA IPC, next to host memory", f"{ratio:.1f} x as fast")
    if ours and theirs:
        ratio = theirs[0]["ms"] / ours[0]["ms"]
        # Ours is to be that much quicker where Gloo copies from and to a GPU.
        name = (
            "64 MiB by CUDA IPC, at least 10 x Gloo"
            if device == "cuda"
            else "64 MiB, 2 ranks, next to Gloo"
        )
        page.check(ratio >= 10 or device == "cpu", name, f"{ratio:.1f} x, {ours[0]['ms']:.2f} ms")
    else:
        page.check(False, "64 MiB by CUDA IPC, at least 10 x Gloo", "a rank ended without a result")


def training(page: Page, device: str) -> None:
    """Measures the cost of the optimizer with one rank, and two ranks against one with the
    double batch.
    """
    _, alone = launch(1, "train", device)
    if alone:
        cost = alone[0]["wrapped"] / alone[0]["plain"] - 1
        page.check(
            cost <= 0.02,
            "a step with 1 rank costs at most 2 % more",
            f"{cost:+.1%} of {alone[0]['plain']:.1f} ms",
        )
    else:
        page.check(
            False, "a step with 1 rank costs at most 2 % more", "the rank ended without a result"
        )
    _, pair = launch(2, "alike", device)
    worst = max((note["difference"] for note in pair), default=float("inf"))
    page.check(
        worst < 1e-4, "2 ranks are 1 rank with the double batch", f"largest difference {worst:.1e}"
    )
    registered(page, device)


def registered(page: Page, device: str) -> None:
    """Gradients as views of memory that NCCL registers, next to torch's own memory."""
    name = "gradients in memory that NCCL registers"
    _, plain = launch(1, "views", device)
    _, given = launch(1, "views", device, more={"FARANDOLE_NCCL_MEMORY": "1"})
    if not plain or not given:
        page.check(False, name, "the rank ended without a result")
        return
    same = max(abs(one / other - 1) for one in plain[0]["learnt"] for other in given[0]["learnt"])
    wanted = 2 if device == "cuda" else 0
    detail = (
        f"{given[0]['ms']:.1f} ms, torch's {plain[0]['ms']:.1f} ms; parameters differ by {same:.1e}"
    )
    page.check(given[0]["given"] == wanted and plain[0]["given"] == 0 and same < 1e-6, name, detail)


def estimator(page: Page, device: str) -> None:
    """Measures the rows that a TorchEstimator's reader delivers; the goal is a million rows a
    second for a GPU.
    """
    name = "a TorchEstimator's GPU gets 1 M rows/s"
    try:
        from gpu_estimator import GOAL, measure
    except ImportError as error:
        page.leave_out(name, str(error))
        return
    note = measure(device, 4_000_000 if device == "cuda" else 100_000)
    fed, resident = note["fed"] / 1e6, note["resident"] / 1e6
    detail = (
        f"{fed:.2f} M rows/s, {resident:.2f} M from memory of the "
        f"{'GPU' if device == 'cuda' else 'host'}"
    )
    page.check(
        note["fed"] >= GOAL or device == "cpu",
        name if device == "cuda" else "a TorchEstimator is fed",
        detail,
    )


def faults(page: Page, device: str) -> None:
    """A rank that is killed, and how soon the other one hears."""
    _, notes = launch(2, "die", device)
    seconds = notes[0]["seconds"] if notes else float("inf")
    page.check(seconds < 5, "a killed rank: an error within 5 s", f"{seconds:.2f} s")


def sanitizer(page: Page) -> None:
    """The kernels under NVIDIA's own checks."""
    for tool in ("memcheck", "racecheck"):
        name = f"compute-sanitizer, {tool}"
        # Not calls that fail: torch asks the driver for functions that an older one lacks, and goes
        # without.
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        command += ["--report-api-errors", "no"] if tool == "memcheck" else []
        command += [sys.executable, __file__]
        try:
            done = subprocess.run(
                [*command, "--role", "kernels"],
                timeout=900,
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError:
            page.leave_out(name, "compute-sanitizer is not installed")
            continue
        said = (done.stdout + done.stderr).strip().splitlines() or ["nothing was said"]
        page.check(done.returncode == 0, name, f"status {done.returncode}: {said[-1]}")


def role(name: str, device: str, folder: Path) -> None:
    """One rank of a check, or the kernels alone."""
    if name == "kernels":
        page = Page()
        kernels(page, timed=False)
        sys.exit(int(page.failed > 0))
    from gpu_roles import ROLES

    note = ROLES[name](device, folder)
    if note is not None:
        rank = os.environ.get("RANK", "0")
        (folder / f"{rank}.json").write_text(json.dumps(note))


def check_part(page: Page, part: str, device: str) -> None:
    """Runs one part; what it raises is a failed check."""
    alone: dict[str, Callable[[Page], None]] = {
        "kernels": kernels,
        "nccl": nccl,
        "sanitizer": sanitizer,
    }
    together: dict[str, Callable[[Page, str], None]] = {
        "ranks": ranks,
        "training": training,
        "faults": faults,
        "estimator": estimator,
    }
    if device == "cpu":
        together["nccl"] = one_rank
    with suppress(KeyboardInterrupt):
        try:
            if part in together:
                together[part](page, device)
            elif device == "cuda":
                alone[part](page)
        except Exception as error:
            page.check(False, part, f"{type(error).__name__}: {error}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rehearse", action="store_true", help="the ranks' part on the CPU")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="where to write the results")
    for hidden in ("--role", "--device", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if arguments.role:
        role(arguments.role, arguments.device or "cuda", Path(arguments.folder or "."))
        return 0
    import torch

    device = "cpu" if arguments.rehearse else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing was checked")
        return 0
    page = Page()
    if arguments.save:
        arguments.save.mkdir(parents=True, exist_ok=True)
        RANKS_LOG.append(arguments.save / "ranks.log")
        RANKS_LOG[0].unlink(missing_ok=True)
    for part in arguments.only:
        check_part(page, part, device)
        if arguments.save:
            page.save(arguments.save)
    if torch.cuda.device_count() < 2:
        page.leave_out(
            "NCCL among several GPUs", "one GPU is here; `ranks` tries it where there are more"
        )
    if arguments.save:
        page.save(arguments.save)
    print(f"{page.failed} failed" if page.failed else "all passed")
    return int(page.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
