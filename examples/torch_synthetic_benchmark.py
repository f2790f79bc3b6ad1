# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Measures training throughput of a residual network on random images, per process and in total.

farandole run -np 2 python examples/torch_synthetic_benchmark.py
"""

import argparse
import timeit

import torch
from torch.nn import functional as F  # noqa: N812

import farandole.torch as hvd

BLOCKS = {"resnet8": (1, 1, 1), "resnet20": (3, 3, 3), "resnet56": (9, 9, 9)}

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--model", choices=BLOCKS, default="resnet20", help="network to train")
parser.add_argument("--image-size", type=int, default=32, help="height and width of images")
parser.add_argument("--batch-size", type=int, default=32, help="images of a batch on each process")
parser.add_argument(
    "--num-warmup-batches", type=int, default=10, help="batches that are not measured"
)
parser.add_argument(
    "--num-batches-per-iter", type=int, default=10, help="batches of one measurement"
)
parser.add_argument("--num-iters", type=int, default=10, help="measurements")
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
parser.add_argument(
    "--use-adasum", action="store_true", help="combine the processes' steps by Adasum"
)
parser.add_argument(
    "--no-cuda", action="store_true", help="train on the CPU even if there is a GPU"
)
arguments = parser.parse_args()


class Block(torch.nn.Module):
    """Two convolutions beside a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = torch.nn.BatchNorm2d(outputs)
        self.conv2 = torch.nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = torch.nn.BatchNorm2d(outputs)
        self.around = torch.nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = torch.nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds what the convolutions find to what comes around them."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.around(x))


def network(blocks: tuple[int, ...], classes: int = 1000) -> torch.nn.Module:
    """A residual network of as many blocks for each of its widths."""
    layers: list[torch.nn.Module] = [
        torch.nn.Conv2d(3, 16, 3, padding=1, bias=False),
        torch.nn.BatchNorm2d(16),
    ]
    width = 16
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage and not block else 1
            layers.append(Block(width, 16 << stage, stride))
            width = 16 << stage
    return torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(width, classes)
    )


hvd.init()
torch.manual_seed(0)
device = torch.device("cpu")
if torch.cuda.is_available() and not arguments.no_cuda:
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
else:
    torch.set_num_threads(1)

model = network(BLOCKS[arguments.model]).to(device)
scale = 1 if arguments.use_adasum else hvd.size()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * scale)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none,
    op=hvd.Adasum if arguments.use_adasum else hvd.Average,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

images = torch.randn(
    arguments.batch_size, 3, arguments.image_size, arguments.image_size, device=device
)
labels = torch.randint(1000, (arguments.batch_size,), device=device)


def step() -> None:
    """Trains on one batch."""
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


def log(text: str) -> None:
    """Prints on one process."""
    if hvd.rank() == 0:
        print(text, flush=True)


log(
    f"model {arguments.model}, {sum(parameter.numel() for parameter in model.parameters())} "
    "parameters"
)
log(f"batch size {arguments.batch_size}, {hvd.size()} processes on {device.type}")
timeit.timeit(step, number=arguments.num_warmup_batches)
rates = []
for i in range(arguments.num_iters):
    seconds = timeit.timeit(step, number=arguments.num_batches_per_iter)
    rates.append(arguments.batch_size * arguments.num_batches_per_iter / seconds)
    log(f"iteration {i}: {rates[-1]:.1f} images/sec per process")

# The slowest process counts, and all know the same numbers.
mean = hvd.allreduce(torch.tensor(rates, dtype=torch.float64), name="rates", op=hvd.Min)
spread = 1.96 * mean.std(correction=0).item()
log(f"images/sec per process: {mean.mean():.1f} +- {spread:.1f}")
log(
    f"total images/sec on {hvd.size()} processes: {hvd.size() * mean.mean():.1f} +- "
    f"{hvd.size() * spread:.1f}"
)
