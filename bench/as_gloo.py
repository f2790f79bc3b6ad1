# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Steps of a program that asks for Gloo, on Gloo and with `FARANDOLE_AS_GLOO=1`: training by DDP,
FSDP 2, Accelerate and a pipeline of two stages, the forward pass and the generation of
tensor-parallel models, and messages.

The two engines take turns, each in processes of its own, which torchrun starts.

    python bench/as_gloo.py [--ranks 2] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from saved import save

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, WIDTH, BATCH = 16, 512, 8
"""16 layers of 512 x 512 and their biases: 4.2 M parameters."""
MICROBATCHES = 4
LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""A random model of 2 million parameters."""
TOKENS = 8
STEPS = 20
"""Steps of one turn; one more comes before they count."""
ENGINES = {"gloo": "0", "farandole": "1"}
"""The value of `FARANDOLE_AS_GLOO` for each."""


def make_model() -> Any:
    import torch  # noqa: PLC0415 - only ranks need it

    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def training_step(
    model: Any, optimizer: Any = None, backward: Callable[[Any], None] | None = None
) -> Callable[[], None]:
    """Returns a function of one step.

    Args:
        model: The model, wrapped.
        optimizer: The wrapped optimizer; by default, SGD.
        backward: Computes gradients of a loss; by default, the method of the loss.
    """
    import torch  # noqa: PLC0415 - only ranks need it

    rows = torch.randn(BATCH, WIDTH)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        if backward is None:
            loss.backward()
        else:
            backward(loss)
        optimizer.step()

    return step


def sharded_step(mesh: Any) -> Callable[[], None]:
    """Returns a step of FSDP 2."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    model = make_model()
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    return training_step(model)


def accelerate_step() -> Callable[[], None]:
    """Returns a step of a loop of Accelerate."""
    import torch  # noqa: PLC0415
    from accelerate import Accelerator  # noqa: PLC0415

    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    return training_step(model, optimizer, accelerator.backward)


def tensor_parallel_forward(mesh: Any) -> Callable[[], None]:
    """Returns a forward pass of a model whose layers are split by torch."""
    import torch  # noqa: PLC0415
    from torch.distributed.tensor.parallel import (  # noqa: PLC0415
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {str(i): RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(LAYERS)}
    model, rows = parallelize_module(make_model(), mesh, plan), torch.randn(BATCH, WIDTH)
    return torch.no_grad()(lambda: model(rows).sum().item())


def generation_step(folder: str) -> Callable[[], None]:
    """Returns the generation of `TOKENS` tokens by a random model that transformers has split."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**LLAMA, eos_token_id=None)).save_pretrained(folder)  # rank 0 does
    dist.barrier()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    prompt = torch.randint(0, LLAMA["vocab_size"], (1, 8))
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    return torch.no_grad()(lambda: model.generate(prompt, **options))


def pipeline_step() -> Callable[[], None]:
    """Returns a step of a pipeline of two stages and four microbatches, on ranks 0 and 1."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe  # noqa: PLC0415

    rank = dist.get_rank()
    group: Any = dist.new_group([0, 1])
    if rank > 1:
        return lambda: None
    part = make_model()[rank * LAYERS // 2 : (rank + 1) * LAYERS // 2]
    optimizer = torch.optim.SGD(part.parameters(), lr=1e-3)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)
    rows, target = torch.randn(2, MICROBATCHES * BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(rows)
        else:
            schedule.step(target=target)
        optimizer.step()

    return step


def message_exchange(size: int, count: int) -> Callable[[], None]:
    """Returns messages from rank 0 to rank 1 and back.

    Args:
        size: Bytes of a message.
        count: Number of pairs of messages.
    """
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    rank, message = dist.get_rank(), torch.zeros(size // 4)

    def exchange() -> None:
        for turn in range(2 * count if rank < 2 else 0):  # noqa: PLR2004 - two ranks talk
            if turn % 2 == rank:
                dist.send(message, 1 - rank)
            else:
                dist.recv(message, 1 - rank)

    return exchange


def measure(folder: str) -> None:
    """One rank; rank 0 prints the milliseconds of each step as JSON."""
    import torch.distributed as dist  # noqa: PLC0415 - only ranks need it
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    dist.init_process_group("gloo")
    engine = "farandole" if type(dist.group.WORLD).__name__ == "FarandoleGroup" else "gloo"
    if ENGINES[engine] != os.environ["FARANDOLE_AS_GLOO"]:
        sys.exit(f"as_gloo: the default group runs on {engine}")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    steps: dict[str, tuple[Callable[[], None], int]] = {
        "DDP": (training_step(DistributedDataParallel(make_model())), 1),
        "FSDP 2": (sharded_step(mesh), 1),
        "Accelerate": (accelerate_step(), 1),
        "tensor-parallel forward": (tensor_parallel_forward(mesh), 1),
        "token of tensor-parallel generation": (generation_step(folder), TOKENS),
        "pipeline of two stages": (pipeline_step(), 1),
        "send 4 B": (message_exchange(4, 100), 200),
        "send 64 MiB": (message_exchange(64 << 20, 1), 2),
    }
    found = {}
    for name, (step, parts) in steps.items():
        times = []
        for _ in range(STEPS + 1):
            dist.barrier()
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e3 / parts)
        found[name] = times[1:]
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="size of the world")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measure(arguments.folder)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={arguments.ranks}", __file__, "--worker"]
    times: dict[str, dict[str, list[float]]] = {engine: {} for engine in ENGINES}
    for engine, value in list(ENGINES.items()) * arguments.rounds:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "FARANDOLE_AS_GLOO": value}
        with tempfile.TemporaryDirectory() as folder:
            result = subprocess.run(
                [*command, "--folder", folder],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                check=True,
            )
        for name, taken in json.loads(result.stdout).items():
            times[engine].setdefault(name, []).extend(taken)
    rows = []
    print(f"median milliseconds of a step, {arguments.ranks} ranks on {os.cpu_count()} cores")
    for name in times["gloo"]:
        medians = {engine: statistics.median(times[engine][name]) for engine in ENGINES}
        ratio = medians["farandole"] / medians["gloo"]
        rows.append({"what": name, "ranks": arguments.ranks, "milliseconds": medians})
        print(
            f"{name:>35}: {medians['farandole']:8.3f}, Gloo {medians['gloo']:8.3f}, {ratio:.2f} x"
        )
    save("as_gloo", {"rows": rows})


if __name__ == "__main__":
    main()
