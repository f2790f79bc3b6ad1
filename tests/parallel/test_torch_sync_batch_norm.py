# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""SyncBatchNorm on real ranks, against one BatchNorm that sees the whole batch."""

import copy
import threading

import torch

import farandole.torch as hvd

SHAPES = {"BatchNorm1d": [(4,), (4, 5)], "BatchNorm2d": [(4, 3, 2)], "BatchNorm3d": [(4, 2, 3, 2)]}


def parts_of(shape, dtype):
    """The batches of all ranks: of different sizes, the last rank's may be empty."""
    generator = torch.Generator().manual_seed(5)
    sizes = [3 + rank for rank in range(hvd.size())]
    if hvd.size() > 2:
        sizes[-1] = 0
    whole = torch.randn(sum(sizes), *shape, generator=generator, dtype=torch.float64) * 3 + 10
    return [part.to(dtype) for part in whole.split(sizes)]


def equals_batch_norm():
    rank = hvd.rank()
    for kind, shapes in SHAPES.items():
        for shape in shapes:
            for options in (
                {},
                {"momentum": None},
                {"affine": False},
                {"track_running_stats": False},
            ):
                for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
                    one = getattr(torch.nn, kind)(shape[0], **options).to(dtype)
                    if one.affine:
                        torch.nn.init.normal_(
                            one.weight, 1.0, 0.1, generator=torch.Generator().manual_seed(1)
                        )
                    together = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(one))
                    assert isinstance(together, hvd.SyncBatchNorm)
                    for _ in range(2):
                        compare(
                            one,
                            together,
                            parts_of(shape, dtype),
                            tolerance,
                            f"{kind} {shape} {options} {dtype}",
                        )
                    one.eval()
                    together.eval()
                    compare(
                        one,
                        together,
                        parts_of(shape, dtype),
                        tolerance,
                        f"eval {kind} {shape} {options} {dtype}",
                    )
    return rank


def compare(one, together, parts, tolerance, what):
    rank = hvd.rank()
    whole = torch.cat(parts).requires_grad_()
    mine = parts[rank].clone().requires_grad_()
    expected, found = one(whole), together(mine)
    below = slice(
        sum(len(part) for part in parts[:rank]), sum(len(part) for part in parts[: rank + 1])
    )

    def close(actual, wanted, name):
        assert torch.allclose(actual, wanted, rtol=tolerance, atol=tolerance), (
            f"{what}: {name}: {actual} {wanted}"
        )

    close(found, expected[below], "output")
    weight = torch.cos(torch.arange(expected.numel(), dtype=whole.dtype)).view(expected.shape)
    one.zero_grad()
    together.zero_grad()
    (expected * weight).sum().backward()
    (found * weight[below]).sum().backward()
    close(mine.grad, whole.grad[below], "gradient of the input")
    for name, parameter in together.named_parameters():
        # Every rank has the part of its own batch.
        close(
            hvd.allreduce(parameter.grad, op=hvd.Sum),
            getattr(one, name).grad,
            f"gradient of the {name}",
        )
    for name, buffer in together.named_buffers():
        if buffer is not None:
            close(buffer, getattr(one, name), name)


def test_outputs_gradients_and_running_statistics_equal_one_batch_norm(pair):
    pair.run(equals_batch_norm)


def test_a_rank_may_have_no_rows(trio):
    trio.run(equals_batch_norm)


def halves_and_misuse():
    layer = hvd.SyncBatchNorm(4)
    half = torch.randn(8, 4, 2, dtype=torch.bfloat16, requires_grad=True)
    output = layer(half)
    output.float().sum().backward()
    assert (output.dtype, half.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    channels_last = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
    assert layer(channels_last).shape == (2, 4, 3, 3)
    messages = []
    for wrong in (torch.randn(4), torch.randn(2, 5)):
        try:
            layer(wrong)
        except ValueError as error:
            messages.append(str(error))
    try:
        layer(torch.empty(0, 4))
    except ValueError as error:
        messages.append(str(error))
    return messages


def test_halves_stay_halves_and_misuse_is_an_error(pair):
    for messages in pair.run(halves_and_misuse):
        assert [
            "two dimensions" in messages[0],
            "4 channels" in messages[1],
            "more than one value" in messages[2],
        ] == [True] * 3


def layers_at_the_same_time():
    layers = [hvd.SyncBatchNorm(2) for _ in range(2)]
    inputs = [
        torch.full((2, 2), float(hvd.rank() + i * 10)) + torch.arange(2.0).view(2, 1)
        for i in range(2)
    ]
    for layer, tensor in zip(layers, inputs, strict=True):
        layer(tensor)  # numbers the layers alike on all ranks
    results = {}

    def work(i):
        for _ in range(50):
            results[i] = layers[i](inputs[i])

    order = [0, 1] if hvd.rank() == 0 else [1, 0]
    threads = [threading.Thread(target=work, args=(i,)) for i in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        whole = hvd.allgather(inputs[i])
        expected = torch.nn.functional.batch_norm(whole, None, None, training=True)
        assert torch.allclose(hvd.allgather(results[i]), expected, atol=1e-4)


def test_layers_may_run_at_the_same_time_in_different_order(pair):
    pair.run(layers_at_the_same_time)
