# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Time and bytes until a language model has the same loss: gradients averaged in each step, by DDP
over Gloo and by `DistributedOptimizer`, and DiLoCo.

The ranks are on hosts that are network namespaces, shaped by `tc tbf`. The text is real: the
docstrings of installed packages. DDP trains for a fixed number of steps; the others train until the
loss on held-out text is that of DDP, or for four times as many steps. Evaluations are not timed.
Bytes are those that a host sent. Writes bench/results/low_communication.json.

    bench/low_communication.sh [--hosts 2] [--rate 2gbit] [--steps 600] [--sync-every 20]
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netns import bridge, run_ranks, run_world
from saved import save

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGES = ("numpy", "pandas", "sklearn", "pyspark")
"""Packages whose docstrings are the text."""
VOCABULARY, CONTEXT, EMBEDDING, HIDDEN = 8192, 8, 128, 1536
"""Words, words before the predicted one, and the widths of the model: about 6.3 M parameters."""
BATCH_ROWS = 16
HELD_OUT_SHARE = 0.05
HELD_OUT_ROWS = 8192
EVALUATE_EVERY = 20
"""Steps between evaluations."""
OUTER_MOMENTUM = 0.3
"""With `outer_lr=0.7`, an outer step is as long as the mean change in the end, 0.7 / (1 - 0.3). The
paper's 0.9 makes it seven times as long, which is for rounds of hundreds of steps."""
MAX_FACTOR = 4
"""Steps of DiLoCo, at most, as a multiple of those of DDP."""


def read_words() -> list[str]:
    """Returns the words of all docstrings, in the order of files."""
    words: list[str] = []
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        for path in sorted(Path(spec.submodule_search_locations[0]).rglob("*.py")):
            try:
                tree = ast.parse(path.read_text("utf-8"))
            except (SyntaxError, UnicodeDecodeError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                    text = ast.get_docstring(node) or ""
                    words += re.findall(r"[a-z]+|[0-9]+|[^\sa-z0-9]", text.lower())
    return words


def prepare_text(path: Path) -> None:
    """Writes the text as numbers of words; 0 is a rare word."""
    import torch  # noqa: PLC0415 - needed here only

    words = read_words()
    known = {word: i for i, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1), 1)}
    torch.save(torch.tensor([known.get(word, 0) for word in words]), path)


def sent_bytes(card: str) -> int:
    """Returns the bytes that a card of this namespace has sent; /sys may be that of another one."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == card:
            return int(numbers.split()[8])
    raise ValueError(f"no card {card} in this namespace")


def make_model() -> Any:
    """Returns a feed-forward language model (Bengio et al. 2003)."""
    import torch  # noqa: PLC0415 - only ranks need it

    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, EMBEDDING),
        torch.nn.Flatten(),
        torch.nn.Linear(CONTEXT * EMBEDDING, HIDDEN),
        torch.nn.GELU(),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.GELU(),
        torch.nn.Linear(HIDDEN, EMBEDDING),
        torch.nn.Linear(EMBEDDING, VOCABULARY),
    )


def measure(arguments: argparse.Namespace) -> None:
    """One rank: trains by each method; rank 0 prints a line of JSON for each."""
    import torch  # noqa: PLC0415 - only ranks need it
    import torch.distributed as dist  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    import farandole.torch as hvd  # noqa: PLC0415
    from farandole.torch.compress import Int8  # noqa: PLC0415

    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo")
    words = torch.load(arguments.text)
    windows = words.unfold(0, CONTEXT + 1, 1)
    boundary = int(len(windows) * (1 - HELD_OUT_SHARE))
    held = windows[boundary :: max(1, (len(windows) - boundary) // HELD_OUT_ROWS)]

    def evaluate(model: Any) -> float:
        with torch.no_grad():
            outputs = model(held[:, :-1])
            return torch.nn.functional.cross_entropy(outputs, held[:, -1]).item()

    def train(
        model: Any, optimizer: Any, steps: int, goal: float | None, synchronize: Callable[[], None]
    ) -> dict[str, Any]:
        drawn = torch.Generator().manual_seed(100 + hvd.rank())
        seconds, sent, losses = 0.0, 0, []
        for _ in range(0, steps, EVALUATE_EVERY):
            hvd.barrier()
            began, before = time.perf_counter(), sent_bytes(arguments.card)
            for _step in range(EVALUATE_EVERY):
                rows = windows[torch.randint(boundary, (BATCH_ROWS,), generator=drawn)]
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1]).backward()
                optimizer.step()
            synchronize()
            hvd.barrier()
            seconds += time.perf_counter() - began
            sent += sent_bytes(arguments.card) - before
            losses.append(evaluate(model))
            if goal is not None and hvd.broadcast_object(losses[-1]) <= goal:
                break
        return {
            "steps": len(losses) * EVALUATE_EVERY,
            "seconds": seconds,
            "bytes": sent,
            "loss": losses[-1],
            "losses": losses,
        }

    def adamw(model: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=arguments.lr)

    def print_row(method: str, row: dict[str, Any]) -> None:
        if hvd.rank() == 0:
            print(json.dumps({"method": method, **row}), flush=True)

    plain = DistributedDataParallel(make_model())
    reference = train(plain, adamw(plain), arguments.steps, None, lambda: None)
    print_row("DDP over Gloo", reference)
    goal = hvd.broadcast_object(reference["loss"])
    model = make_model()
    averaged = hvd.DistributedOptimizer(adamw(model), model.named_parameters())
    print_row(
        "DistributedOptimizer",
        train(model, averaged, MAX_FACTOR * arguments.steps, goal, lambda: None),
    )
    model = make_model()
    local = hvd.DiLoCo(
        adamw(model),
        model.named_parameters(),
        sync_every=arguments.sync_every,
        compression=Int8(),
        outer_momentum=OUTER_MOMENTUM,
    )
    print_row("DiLoCo", train(model, local, MAX_FACTOR * arguments.steps, goal, lambda: None))
    dist.destroy_process_group()
    hvd.shutdown()


def shared_options(arguments: argparse.Namespace) -> list[str]:
    """Returns the options for the processes of hosts and ranks."""
    names = ("rate", "steps", "sync_every", "lr", "text")
    return [
        word
        for name in names
        for word in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))
    ]


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains in a world of hosts and returns a row per method."""
    rows = []
    for line in run_world(arguments.hosts, shared_options(arguments), script=__file__):
        if line.startswith("{"):
            rows.append(json.loads(line))
            show(rows[-1], rows[0])
        else:
            print(line)
    return rows


def show(row: dict[str, Any], reference: dict[str, Any]) -> None:
    """Prints a row next to DDP's."""
    reached = row["loss"] <= reference["loss"]
    row["of_ddp_seconds"] = row["seconds"] / reference["seconds"]
    row["ddp_bytes_over_own"] = reference["bytes"] / max(1, row["bytes"])
    print(
        f"{row['method']:<21} {row['steps']:>5} steps {row['seconds']:>7.1f} s "
        f"{row['bytes'] / 1e6:>9.1f} MB sent  loss {row['loss']:.3f}  "
        f"{row['of_ddp_seconds']:.3f} x the time, 1/{row['ddp_bytes_over_own']:.0f} of the bytes"
        f"{'' if reached else '  (the loss was not reached)'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, help="hosts of one rank each")
    parser.add_argument("--rate", default="2gbit", help="what tc shapes each host to; 0: nothing")
    parser.add_argument("--steps", type=int, default=600, help="steps of DDP")
    parser.add_argument("--sync-every", type=int, default=20, help="steps between outer steps")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's learning rate")
    parser.add_argument("--keep", action="store_true", help="print only, and write no file")
    for own in ("--agent", "--card", "--text"):
        parser.add_argument(own, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measure(arguments)
        return
    if arguments.agent is not None:
        worker = [__file__, "--worker", *shared_options(arguments)]
        run_ranks(int(arguments.agent), arguments.rate, worker, card_option="--card")
        return
    # The first process of a namespace ignores what it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("low_communication: ended by SIGTERM"))
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    with tempfile.TemporaryDirectory() as folder:
        arguments.text = os.path.join(folder, "words.pt")  # noqa: PTH118 - an option is a string
        prepare_text(Path(arguments.text))
        bridge()
        rows = run(arguments)
    if not arguments.keep:
        save(
            "low_communication",
            {"hosts": arguments.hosts, "rate": arguments.rate, "rows": rows},
            began=began,
        )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("low_communication: interrupted")
