# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Compressors on real ranks: what they return, and that training by them converges like training
without.
"""

import pytest
import torch

import farandole.torch as hvd
from farandole.torch import compress

MAKERS = {
    "fp16": compress.Fp16,
    "bf16": lambda: compress.Bf16(error_feedback=True),
    "int8": lambda: compress.Int8(64),
    "top_k": lambda: compress.TopK(0.05),
    "power_sgd": lambda: compress.PowerSGD(4),
}
TOLERANCES = {"fp16": 0.005, "bf16": 0.01, "int8": 0.01, "top_k": 0.05, "power_sgd": 0.02}
"""Permitted increase of the loss after training, which is about 0.1 without compression."""


def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def train(compression, **options):
    """Trains on this rank's half of the data; the loss and accuracy on all of it, and the
    parameters.
    """
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    named = list(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, named, compression=compression, **options)
    features, labels = digits()
    rank, size = hvd.rank(), hvd.size()
    mine, wanted = features[rank::size], labels[rank::size]
    order = torch.Generator().manual_seed(2)
    for _ in range(6):
        for rows in torch.randperm(len(mine) - 1, generator=order).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(mine[rows]), wanted[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        outputs = model(features)
        loss = torch.nn.functional.cross_entropy(outputs, labels).item()
        accuracy = (outputs.argmax(1) == labels).float().mean().item()
    return loss, accuracy, b"".join(parameter.detach().numpy().tobytes() for _, parameter in named)


def all_converge():
    results = {name: train(make()) for name, make in MAKERS.items()}
    results["none"] = train(hvd.Compression.none)
    results["int8, as view"] = train(compress.Int8(64), gradient_as_bucket_view=True)
    results["power_sgd, grouped"] = train(compress.PowerSGD(4), groups=2)
    return results


def test_training_converges_like_without_compression(pair):
    pytest.importorskip("sklearn")
    first, second = pair.run(all_converge)
    loss, accuracy, _ = first["none"]
    assert loss < 0.15
    assert accuracy > 0.95
    for name, (found, right, parameters) in first.items():
        tolerance = TOLERANCES.get(name.split(",")[0], 0.0)
        assert found <= loss + tolerance, f"{name}: loss {found:.4f}, without {loss:.4f}"
        assert right >= accuracy - 0.03, f"{name}: accuracy {right:.4f}, without {accuracy:.4f}"
        # Every rank has taken the same steps, bit by bit.
        assert parameters == second[name][2], name


def sums_are_near_the_truth():
    rank, size = hvd.rank(), hvd.size()
    shapes = [(40, 30), (7,), (), (0, 3), (64, 8, 3)]

    def gradients(of):
        generator = torch.Generator().manual_seed(of)
        return [torch.randn(shape, generator=generator) for shape in shapes]

    expected = [sum(parts) for parts in zip(*(gradients(r) for r in range(size)), strict=True)]
    nearness = {
        "fp16": 0.01,
        "bf16": 0.1,
        "int8": 0.1 * size,
        "everything": 1e-5,
        "full rank": 1e-3,
    }
    makers = {
        **{name: MAKERS[name] for name in ("fp16", "bf16", "int8")},
        "everything": lambda: compress.TopK(1.0),
        "full rank": lambda: compress.PowerSGD(40, min_compression=0.0),
    }
    answers = []
    for name, make in makers.items():
        for average in (False, True):
            exchange = compress.EngineExchange(f"near.{name}", hvd.global_process_set)
            named = [(str(i), gradient) for i, gradient in enumerate(gradients(rank))]
            kept = [gradient.clone() for _, gradient in named]
            results = make().start(named, exchange, average)()
            for (_, gradient), before, result, total in zip(
                named, kept, results, expected, strict=True
            ):
                assert torch.equal(gradient, before)
                assert result.shape == gradient.shape
                wanted = total / size if average else total
                assert torch.allclose(result, wanted, atol=nearness[name]), (name, result - wanted)
            answers.append(b"".join(result.numpy().tobytes() for result in results))
    return answers


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_near_the_truth_and_the_same_on_all_ranks(request, size):
    answers = request.getfixturevalue({2: "pair", 3: "trio"}[size]).run(sums_are_near_the_truth)
    assert all(answer == answers[0] for answer in answers)


def what_is_lost_is_sent_later():
    exchange = compress.EngineExchange("later", hvd.global_process_set)
    for make in (
        lambda: compress.TopK(0.1),
        lambda: compress.Int8(1000),
        lambda: compress.PowerSGD(1),
    ):
        compressor = make()
        generator = torch.Generator().manual_seed(hvd.rank())
        gradient = torch.randn(30, 20, generator=generator)
        truth = hvd.allreduce(gradient, op=hvd.Sum)
        total = torch.zeros_like(gradient)
        steps = 100
        for _ in range(steps):
            total += compressor.start([("g", gradient)], exchange, False)()[0]
        distance = (total / steps - truth).norm() / truth.norm()
        assert distance < 0.15, (type(compressor).__name__, distance)


def test_lost_parts_of_gradients_are_sent_later(pair):
    pair.run(what_is_lost_is_sent_later)


def own_compressors_and_mistakes():
    class Signs(compress.VectorCompressor):
        """The signs, and the mean magnitude."""

        splits = False

        def encode(self, vector, residual):
            whole = vector if residual is None else vector + residual
            scale = whole.abs().mean()
            if residual is not None:
                residual.copy_(whole - whole.sign() * scale)
            return torch.cat([whole.sign(), scale.view(1)])

        def add(self, payload, into):
            into += payload[:-1] * payload[-1]

    exchange = compress.EngineExchange("own", hvd.global_process_set)
    result = Signs().start([("g", torch.tensor([1.0, -1.0]))], exchange, True)()[0]
    assert result.tolist() == [1.0, -1.0]
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with pytest.raises(ValueError, match="needs op=Average or op=Sum"):
        hvd.DistributedOptimizer(optimizer, compression=compress.Int8(), op=hvd.Max)
    for wrong in (
        lambda: compress.TopK(0.0),
        lambda: compress.Int8(0),
        lambda: compress.PowerSGD(0),
    ):
        with pytest.raises(ValueError, match=": 0"):
            wrong()
    with pytest.raises(ValueError, match="float16"):
        compress.Cast(torch.float32)


def test_own_compressors_and_mistakes(pair):
    pair.run(own_compressors_and_mistakes)
