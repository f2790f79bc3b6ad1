# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Communication hooks for `DistributedDataParallel`: gradients are sent in a smaller form.

They work over a group of any backend: Farandole's, Gloo's, NCCL's.

Example:
    from farandole.torch.ddp_comm_hook import PowerSGDState, power_sgd_hook

    model = DistributedDataParallel(model)
    model.register_comm_hook(PowerSGDState(rank=4), power_sgd_hook)
"""

# No postponed annotations: DDP reads a hook's annotations.

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.utils.weak import WeakTensorKeyDictionary

from farandole.torch.compress import Compressor, GroupExchange, PowerSGD, Waiting


def fp16_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Averages gradients as float16; the state is the group, or `None` for the default one."""
    return _cast_and_average(process_group, bucket, torch.float16)


def bf16_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Averages gradients as bfloat16; the state is the group, or `None` for the default one."""
    return _cast_and_average(process_group, bucket, torch.bfloat16)


def _cast_and_average(
    group: dist.ProcessGroup | None, bucket: GradBucket, dtype: torch.dtype
) -> torch.futures.Future[torch.Tensor]:
    group = dist.group.WORLD if group is None else group
    assert group is not None  # noqa: S101 - DDP needs a default group
    buffer = bucket.buffer()
    # Divided first: a sum of halves may overflow where the average does not.
    narrow = (buffer / group.size()).to(dtype)
    future = dist.all_reduce(narrow, group=group, async_op=True).get_future()

    def restore_buffer(_: Any) -> torch.Tensor:
        return buffer.copy_(narrow)

    return future.then(restore_buffer)


class CompressorState:
    """The state of `compressor_hook` between steps.

    Args:
        compressor: Makes gradients smaller; one for each model.
        process_group: The ranks; the default group when `None`.
        start_step: Number of uncompressed steps before compression begins. With at least 2, DDP has
            rebuilt its buckets by then, so no state is lost when gradients change buckets.
    """

    def __init__(
        self,
        compressor: Compressor,
        process_group: dist.ProcessGroup | None = None,
        start_step: int = 2,
    ) -> None:
        self.compressor = compressor
        self.process_group = process_group
        self.start_step = start_step
        self.step = 0
        """Steps completed."""
        self._exchange: GroupExchange | None = None
        self._names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    @property
    def exchange(self) -> GroupExchange:
        """The ranks, once the group exists."""
        if self._exchange is None:
            self._exchange = GroupExchange(self.process_group)
        return self._exchange

    def name(self, parameter: torch.Tensor) -> str:
        """Names a parameter, the same on all ranks: DDP hands out buckets in one order."""
        name = self._names.get(parameter)
        if name is None:
            name = self._names[parameter] = str(len(self._names))
        return name


def compressor_hook(
    state: CompressorState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Averages gradients by a compressor.

    A compressor of several rounds waits here for all rounds except the last: callbacks would start
    rounds in different orders on different ranks.

    Callbacks hold neither the state nor the group. Gloo's threads drop them, perhaps after
    `destroy_process_group`, and a thread that drops the last reference to its group joins itself,
    which aborts the process.
    """
    exchange, buffer = state.exchange, bucket.buffer()
    compressor, size = state.compressor, exchange.size
    step = state.step
    if bucket.is_last():
        state.step += 1
    if step < state.start_step:
        buffer.div_(size)
        work = dist.all_reduce(buffer, group=exchange.group, async_op=True)
        return work.get_future().then(lambda _: buffer)
    gradients = [
        (state.name(parameter), gradient)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
    ]
    running = compressor.reduce(gradients, exchange)

    def store_results(results: list[torch.Tensor]) -> torch.Tensor:
        for (_, gradient), result in zip(gradients, results, strict=True):
            gradient.copy_(result)
        return buffer.div_(size)

    try:
        waiting: Waiting = next(running)
        for _ in range(compressor.rounds(size) - 1):
            waiting = running.send(waiting.wait())
    except StopIteration as end:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(store_results(end.value))
        return done

    def finish_last_round(future: Any) -> torch.Tensor:
        try:
            future.value()  # raises what went wrong; Gloo's own wait would wait for this callback
            running.send(waiting.result)
        except StopIteration as end:
            return store_results(end.value)
        finally:
            running.close()
        raise RuntimeError(f"{type(compressor).__name__} has more rounds than it says")

    assert waiting.future is not None  # noqa: S101 - operations of a group have one
    return waiting.future().then(finish_last_round)


class PowerSGDState(CompressorState):
    """The state of `power_sgd_hook` between steps.

    Args:
        rank: Columns of the factors.
        process_group: The ranks; the default group when `None`.
        start_step: As for `CompressorState`.
        error_feedback: Whether the error of the product is added to the next gradient.
        warm_start: Whether a step begins with the last step's factor instead of a random one.
        min_compression: Smallest ratio of the size of a matrix to the size of its factors.
    """

    def __init__(
        self,
        rank: int = 4,
        process_group: dist.ProcessGroup | None = None,
        start_step: int = 2,
        *,
        error_feedback: bool = True,
        warm_start: bool = True,
        min_compression: float = 2.0,
    ) -> None:
        compressor = PowerSGD(
            rank,
            error_feedback=error_feedback,
            warm_start=warm_start,
            min_compression=min_compression,
        )
        super().__init__(compressor, process_group, start_step)


def power_sgd_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages gradients by PowerSGD of some rank, with error feedback."""
    return compressor_hook(state, bucket)
