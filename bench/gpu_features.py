# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Features of `farandole.torch` that training uses: every one must compute on the device the same
as on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import farandole.torch as hvd
from farandole.torch import compress

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEPS = 3


def network(device: str, normalize: bool = False) -> torch.nn.Module:
    """A small model with the same parameters on every rank and device."""
    torch.manual_seed(11)
    layers: list[torch.nn.Module] = [torch.nn.Linear(24, 48)]
    if normalize:
        layers.append(hvd.SyncBatchNorm(48))
    layers += [torch.nn.Tanh(), torch.nn.Linear(48, 8)]
    return torch.nn.Sequential(*layers).double().to(device)


def batches(device: str) -> list[torch.Tensor]:
    """This rank's batches."""
    generator = torch.Generator().manual_seed(100 + hvd.rank())
    return [
        torch.randn(16, 24, generator=generator, dtype=torch.float64).to(device)
        for _ in range(STEPS)
    ]


def values(model: torch.nn.Module) -> torch.Tensor:
    """All parameters and buffers, on the host."""
    states = [state.detach().double().cpu().flatten() for state in model.state_dict().values()]
    return torch.cat(states)


def trained(device: str, passes: int = 1, normalize: bool = False, **options: Any) -> torch.Tensor:
    """The parameters after some steps of an optimizer with these options."""
    model = network(device, normalize)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=passes,
        **options,
    )
    for batch in batches(device):
        optimizer.zero_grad()
        for _ in range(passes):
            model(batch).square().mean().backward()
        optimizer.step()
    return values(model)


def sparse(device: str) -> torch.Tensor:
    """The rows of an embedding after a step with sparse gradients."""
    torch.manual_seed(3)
    table = torch.nn.Embedding(30, 5, sparse=True).double().to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=0.5), named_parameters=table.named_parameters()
    )
    rows = torch.tensor([1, 4, 4, 7 + hvd.rank()], device=device)
    table(rows).square().sum().backward()
    optimizer.step()
    return values(table)


def on_another_stream(device: str) -> torch.Tensor:
    """The result of an operation whose input a side stream makes and whose result another uses."""
    if device == "cpu":
        return hvd.allreduce(torch.full((1 << 20,), 3.0 + hvd.rank()), name="side", op=hvd.Max)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        torch.cuda._sleep(20_000_000)  # noqa: SLF001 - the input must be late
        tensor = torch.full((1 << 20,), 3.0 + hvd.rank(), device=device)
        handle = hvd.allreduce_async(tensor, name="side", op=hvd.Max)
        del tensor
    with torch.cuda.stream(second):
        result = hvd.synchronize(handle) + 0
    second.synchronize()
    return result.cpu()


def spread(device: str) -> torch.Tensor:
    """The parameters and the momentum of rank 0 on every rank."""
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(hvd.rank())
    model(batches(device)[0]).square().mean().backward()
    optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.size() - 1)
    momenta = [state["momentum_buffer"].cpu().flatten() for state in optimizer.state.values()]
    return torch.cat([values(model), *momenta])


def restored(device: str) -> torch.Tensor:
    """The parameters of an elastic state that was committed, changed and restored."""
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
    for batch in batches(device)[:2]:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        state.sync()
        state.save()
    kept = values(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state.restore()
    assert torch.equal(values(model), kept)
    return kept


def gradients(device: str) -> torch.Tensor:
    """The gradients that flow back through an allgather, an alltoall and a reducescatter."""
    weight = torch.arange(24, dtype=torch.float64).reshape(12, 2).to(device).requires_grad_()
    factor = torch.arange(24 * hvd.size(), dtype=torch.float64).reshape(-1, 2).to(device)
    gathered = hvd.allgather(weight * (1 + hvd.rank()), name="back.gather")
    (gathered * factor).sum().backward()
    exchanged = hvd.alltoall(weight, name="back.exchange")
    (exchanged[0] if isinstance(exchanged, tuple) else exchanged).square().sum().backward()
    hvd.reducescatter(weight, name="back.scatter", op=hvd.Sum).square().sum().backward()
    assert weight.grad is not None
    return weight.grad.cpu()


def capture(device: str) -> torch.Tensor:
    """A collective in a capture is refused, and works after it."""
    tensor = torch.ones(64, device=device)
    if device != "cpu":
        graph = torch.cuda.CUDAGraph()
        hvd.allreduce(tensor, name="capture", op=hvd.Sum)
        refused = ""
        try:
            with torch.cuda.graph(graph):
                hvd.allreduce(tensor, name="capture", op=hvd.Sum)
        except ValueError as error:
            refused = str(error)
        assert "captur" in refused
    return hvd.allreduce(tensor, name="capture", op=hvd.Sum).cpu()


FEATURES: dict[str, Callable[[str], torch.Tensor]] = {
    "averages": trained,
    "sums": lambda device: trained(device, op=hvd.Sum),
    "Adasum": lambda device: trained(device, op=hvd.Adasum),
    "float16 on the wire": lambda device: trained(device, compression=hvd.Compression.fp16),
    "bfloat16 on the wire": lambda device: trained(device, compression=hvd.Compression.bf16),
    "PowerSGD": lambda device: trained(device, compression=compress.PowerSGD()),
    "top k": lambda device: trained(device, compression=compress.TopK()),
    "int8": lambda device: trained(device, compression=compress.Int8()),
    "buckets": lambda device: trained(device, gradient_as_bucket_view=True),
    "groups": lambda device: trained(device, groups=2),
    "two passes a step": lambda device: trained(device, passes=2),
    "factors": lambda device: trained(device, gradient_predivide_factor=2.0),
    "batch norm over ranks": lambda device: trained(device, normalize=True),
    "sparse gradients": sparse,
    "streams": on_another_stream,
    "broadcast of a state": spread,
    "elastic state": restored,
    "gradients of collectives": gradients,
    "a capture": capture,
}


SINGLE = {"PowerSGD"}
"""Features that compute in float32."""


def features(device: str, folder: Path) -> dict[str, Any]:
    """Describes the features whose results differ from the host's."""
    del folder
    hvd.init()
    wrong: list[str] = []
    for name, feature in FEATURES.items():
        try:
            expected, got = feature("cpu"), feature(device)
            # The order of sums in a product of matrices differs between devices.
            least = 1e-7 if name in SINGLE else 1e-10
            if not torch.allclose(got.double(), expected.double(), rtol=10 * least, atol=least):
                difference = float((got.double() - expected.double()).abs().max())
                wrong.append(f"{name} on rank {hvd.rank()}: differs by {difference:.1e}")
        except Exception as error:  # noqa: BLE001 - the other features are still of interest
            wrong.append(f"{name} on rank {hvd.rank()}: {type(error).__name__}: {error}")
    hvd.shutdown()
    return {"wrong": wrong}
