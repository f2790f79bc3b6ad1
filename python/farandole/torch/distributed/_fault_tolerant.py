# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`FaultTolerantDataParallel`: DDP that finishes a step in which ranks are lost.

A communication hook starts the reduction of each bucket at once, into separate memory. At the end
of the backward pass, before DDP takes the results, a callback waits for all of them. If a rank is
lost, the callback brings this rank into the next world, as `farandole.torch._tolerant` describes,
and reduces the same gradients again.

The backward pass may have ended on some ranks and failed on others. In `DistributedOptimizer`, the
latter take the parameters of the former and skip their step. Here, each rank keeps the results of
its last reduction, and the latter get these. So they continue as if nothing had happened, and the
script may clip gradients, scale losses or use any optimizer.

- FT-1: A rank changes its parameters and its optimizer's state only in the script, except a new
  rank.
- FT-2: Each rank that has finished the most reductions has the results of the last one, if another
  rank lacks them. A new rank gets them before it gets the state, so it has them, too.
- FT-3: When ranks of a new world agree on the state, a rank that has one has the parameters from
  after its `steps`. So it counts a step with the results of another rank when the agreement has
  ended, not before: if the agreement fails, and all ranks that had finished the step are lost, the
  gradients are reduced again. And `rejoin` between a backward pass and the optimizer's step waits
  for the next backward pass.
- FT-4: A new rank has a state when all of it has come. If the transfer fails, the rank is still new
  in the next world.

DDP itself communicates within a group of this process alone. Otherwise a new rank, which creates
its model while the others train, would wait for them in DDP's constructor. Ranks may therefore have
different buckets, and gradients are reduced by name.
"""

# No postponed annotations: DDP looks at those of a hook.

import inspect
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, GradBucket
from torch.nn.parallel import DistributedDataParallel

from farandole._native import engine
from farandole.common import basics
from farandole.common.exceptions import FarandoleInternalError, FarandoleUsageError
from farandole.common.notices import heed, is_elastic
from farandole.common.util import Average
from farandole.torch._device import spot
from farandole.torch._handles import DTYPES, table, usable
from farandole.torch._reduce import Reduction
from farandole.torch._state_comparison import described_line, equal_and_others
from farandole.torch._state_transfer import Roles, move
from farandole.torch._tolerant import Tolerance, claim
from farandole.torch.distributed._reconfigure import ReconfigurableGroup
from farandole.torch.distributed._work import Done

_BROADCASTS: Final = "buffers are not broadcast in each step; a new rank gets those of another rank"
_REFUSED: Final = {
    "broadcast_buffers": _BROADCASTS,
    "forward_sync_buffers": _BROADCASTS,
    "find_unused_parameters": (
        "DistributedOptimizer(fault_tolerant=True) accepts parameters that are not used"
    ),
    "static_graph": (
        "DistributedOptimizer(fault_tolerant=True) accepts parameters that are not used"
    ),
    "process_group": "all ranks of the world train together",
    "device_mesh": "all ranks of the world train together",
    "mixed_precision": "use torch.autocast",
    "delay_all_reduce_named_params": "all gradients are reduced in the backward pass",
    "param_to_hook_all_reduce": "all gradients are reduced in the backward pass",
}
"""Arguments of DDP that cannot be used, and why or what to do."""


class FaultTolerantDataParallel(DistributedDataParallel):
    """`DistributedDataParallel` for elastic jobs: if ranks are lost in a step, the others finish
    that step.

    The average then covers the remaining ranks. New ranks join between two steps. They get the
    parameters, the buffers and the optimizer's state, also when training begins. See
    `docs/user-guide/elastic.md`.

    All ranks create it right after `init_process_group("farandole")`, before any other collective.
    It needs as much additional memory as twice the gradients. When the world changes, the default
    group is created again with the new ranks.

    Args:
        module: The model. Each backward pass that is not in `no_sync()` counts as a step.
        optimizer: The optimizer of the model's parameters, which new ranks get the state of.
        **options: Other arguments of `DistributedDataParallel`, such as `device_ids` or
            `gradient_as_bucket_view`.

    Raises:
        ValueError: The default group is not of backend `farandole`, there are other groups, an
            option or a layer of the model cannot be used, or the process has such a model or
            optimizer already.
    """

    def __init__(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any
    ) -> None:
        _require_default_group()
        for name, reason in _REFUSED.items():
            if options.pop(name, None):
                raise ValueError(f"FaultTolerantDataParallel cannot be used with {name}: {reason}")
        if any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in module.modules()):
            raise ValueError(
                "FaultTolerantDataParallel cannot be used with SyncBatchNorm: use BatchNorm layers"
            )
        arguments = inspect.signature(DistributedDataParallel.__init__).parameters
        # Since 2.15 the other one warns.
        buffers = (
            "forward_sync_buffers" if "forward_sync_buffers" in arguments else "broadcast_buffers"
        )
        group = _group_of_one()
        claim(self)
        super().__init__(
            module, process_group=group, init_sync=False, **{buffers: False}, **options
        )

        def others() -> list[torch.Tensor]:
            own = {parameter for each in optimizer.param_groups for parameter in each["params"]}
            return [
                tensor for tensor in (*module.parameters(), *module.buffers()) if tensor not in own
            ]

        names = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name not in self.parameters_to_ignore
        }
        self._tolerance = _GradientTolerance(optimizer, is_elastic(), others, names)
        self.register_comm_hook(_Reducer(self._tolerance, names), _hook)
        heed()
        self._tolerance.enter()

    @property
    def steps(self) -> int:
        """Steps that training has finished, before this rank came included: backward passes but
        for `no_sync()`.
        """
        return self._tolerance.steps

    def share(self, **objects: Any) -> None:
        """Sends objects such as a schedule of learning rates to ranks that join later.

        On such a rank each object takes its state in this call.

        Args:
            **objects: Objects with `state_dict` and `load_state_dict`, under names that are the
                same on all ranks. A loader of `farandole.data` continues with the right rows
                whenever the world changes.

        Raises:
            TypeError: An object has no such methods.
        """
        self._tolerance.share(objects)

    def rejoin(self) -> None:
        """Leaves a world that another collective has found broken, for the next one.

        `backward` does so by itself. Call it where a collective of your own, such as the average of
        a metric, has raised `FarandoleInternalError`. Between `backward` and `optimizer.step()` it
        only has the next `backward` leave the world; collectives of your own fail until then.

        Raises:
            WorkerDismissed: When this worker is not in the next world.
        """
        self._tolerance.rejoin(self._tolerance.is_step_due)

    def join(self, *arguments: Any, **options: Any) -> Any:
        """Refused: every rank must take part in every step.

        Raises:
            ValueError: Always.
        """
        del arguments, options
        raise ValueError(
            "FaultTolerantDataParallel has no join(): give all ranks the same number of batches"
        )


class _GradientTolerance(Tolerance):
    """Like `Tolerance`, but a rank that is behind gets the results of a reduction, not the state
    after the step.

    Args:
        optimizer: As for `Tolerance`.
        is_elastic: As for `Tolerance`.
        others: As for `Tolerance`.
        parameters: The parameters whose gradients are reduced, by name.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        is_elastic: bool,
        others: Callable[[], list[torch.Tensor]],
        parameters: dict[str, torch.nn.Parameter],
    ) -> None:
        super().__init__(optimizer, is_elastic, others)
        self.results: dict[str, torch.Tensor] = {}
        """Results of the last finished reduction, or of one that this rank finishes after the
        agreement.
        """
        self.is_step_due = False
        """Whether the optimizer has not taken its step after the last reduction yet."""
        self._parameters = parameters
        self._generation = engine.world().generation
        store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no other name for it
        self._timeout = store.timeout
        this = weakref.ref(self)

        def note(*_: Any) -> None:
            tolerance = this()
            if tolerance is not None:
                tolerance.is_step_due = False

        optimizer.register_step_post_hook(note)

    def _prepare(self) -> None:
        """Creates the default group again: a new rank has just created it."""
        generation = engine.world().generation
        if generation != self._generation:
            if dist.is_initialized():  # it is not if this has failed before
                dist.destroy_process_group()
            dist.init_process_group("farandole", init_method="farandole://", timeout=self._timeout)
            self._generation = generation

    def _model(self) -> list[str]:
        return [
            *(described_line(name, each) for name, each in self._parameters.items()),
            *super()._model(),
        ]

    def _bring(self, told: list[list[int]], most: int, senders: list[int]) -> bool:
        if any(is_whole and steps < most for steps, is_whole, _ in told):
            self._deliver(
                Roles(senders, [rank for rank in range(len(told)) if rank not in senders])
            )
        is_new = not self._is_whole
        new = [
            rank
            for rank, (_, is_whole, _) in enumerate(told)
            if not is_whole and rank not in senders
        ]
        self._transfer(Roles(senders, new))
        if is_new:
            self._arrive(most)
        return self.steps < most

    def _deliver(self, roles: Roles) -> None:
        """Sends the results of the last reduction to those whose reduction has failed, and to
        new ranks.
        """
        results = self.results
        takes = basics.rank() in roles.takers
        if takes:
            results = {
                name: torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
                for name, parameter in self._parameters.items()
            }
        tensors = [results[name] for name in self._parameters]
        equal, different = equal_and_others("tolerant.digests", tensors, roles)
        move("tolerant.result", equal, roles)
        move("tolerant.result.first", different, Roles(roles.senders[:1], roles.takers))
        if takes:
            self.results = results


class _Piece:
    """A bucket of DDP in one reduction.

    Args:
        bucket: As DDP gives it to its hook.
        names: Of the parameters.
        memory: Gives memory for the result; gets a tensor like it.
    """

    def __init__(
        self,
        bucket: GradBucket,
        names: dict[torch.Tensor, str],
        memory: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        buffer = bucket.buffer()
        self._wire = usable(buffer)
        self._device = buffer.device
        self._parts: list[tuple[str, int, int]] = []
        """The name of each gradient, where it begins in the buffer, and its number of elements."""
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            start = (gradient.data_ptr() - buffer.data_ptr()) // buffer.element_size()
            self._parts.append((names[parameter], start, gradient.numel()))
        self.memory = memory(self._wire)
        devices: list[int | str | torch.device] = [] if buffer.is_cpu else [buffer.device]
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self._handles: list[int] = []

    def start(self) -> None:
        """Starts the remaining reductions.

        Raises:
            FarandoleInternalError: When the world is broken already.
        """
        size, dtype = self._wire.element_size(), DTYPES[self._wire.dtype]
        arguments = (*Reduction(Average).arguments, False, spot(self._wire))
        source, target = self._wire.data_ptr(), self.memory.data_ptr()
        for name, start, count in self._parts[len(self._handles) :]:
            addresses = source + start * size, target + start * size
            described = (f"allreduce.{name}", dtype, (count,), *addresses)
            keep = (self._wire, self.memory)
            self._handles.append(table.submit(keep, len, engine.allreduce, *described, *arguments))

    def land(self) -> None:
        """Waits for the started reductions.

        Raises:
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        failure: Exception | None = None
        for handle in self._handles:
            try:
                table.synchronize(handle)
            except Exception as error:  # noqa: BLE001 - raised below; the others are still written to
                failure = failure or error
        if failure is not None:
            raise failure

    def rewind(self) -> None:
        """Starts the reduction from the gradients of this rank again."""
        self._handles = []

    def results(self) -> dict[str, torch.Tensor]:
        """Returns the reduced gradients, flat, by the names of their parameters."""
        return {name: self.memory[start : start + count] for name, start, count in self._parts}

    def take(self, results: dict[str, torch.Tensor]) -> None:
        """Takes the results of another rank."""
        for name, result in self.results().items():
            result.copy_(results[name])

    def settle(self) -> None:
        """Gives the result to DDP."""
        self.future.set_result(self.memory.to(self._device))


class _Reducer:
    """The state of the hook.

    Args:
        tolerance: Brings this rank into the next world.
        parameters: Those whose gradients are reduced, by name.
    """

    def __init__(
        self, tolerance: _GradientTolerance, parameters: dict[str, torch.nn.Parameter]
    ) -> None:
        self._tolerance = tolerance
        self._names: dict[torch.Tensor, str] = {
            parameter: name for name, parameter in parameters.items()
        }
        self._pieces: list[_Piece] = []
        self._last: list[torch.Tensor] = []
        """Memory with the results of the last reduction."""
        self._free: list[torch.Tensor] = []
        """Memory with those of the one before."""

    def add(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts the reduction of a bucket; the last one has `_finish` called at the end of the
        backward pass.
        """
        if bucket.index() == 0:
            self._pieces = []  # a backward pass may have ended with an error
        piece = _Piece(bucket, self._names, self._memory)
        self._pieces.append(piece)
        if not self._tolerance.changes:
            try:
                piece.start()
            except FarandoleUsageError:
                raise
            except FarandoleInternalError:
                pass  # `_finish` meets it again when it starts what was not started
        if bucket.is_last():
            # DDP adds its own callback, which takes the results, after this hook.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # noqa: SLF001 - the only way there
        return piece.future

    def _finish(self) -> None:
        pieces, self._pieces = self._pieces, []
        if self._tolerance.complete(lambda: _reduce(pieces), lambda: _rewind(pieces)):
            for piece in pieces:
                piece.take(self._tolerance.results)
        else:
            self._tolerance.finished()
        self._tolerance.results = {
            name: result for piece in pieces for name, result in piece.results().items()
        }
        self._free, self._last = self._last, [piece.memory for piece in pieces]
        self._tolerance.is_step_due = True
        for piece in pieces:
            piece.settle()

    def _memory(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for results that is not that of the last reduction."""
        for index, memory in enumerate(self._free):
            if (memory.shape, memory.dtype, memory.device) == (like.shape, like.dtype, like.device):
                return self._free.pop(index)
        return torch.empty_like(like)


def _hook(state: _Reducer, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook, called when the gradients of a bucket are computed."""
    return state.add(bucket)


def _reduce(pieces: list[_Piece]) -> None:
    failure: Exception | None = None
    for step in (_Piece.start, _Piece.land):
        for piece in pieces:
            try:
                step(piece)
            except Exception as error:  # noqa: BLE001 - raised below; what was started must be waited for
                failure = failure or error
    if failure is not None:
        raise failure


def _rewind(pieces: list[_Piece]) -> None:
    for piece in pieces:
        piece.rewind()


def _require_default_group() -> None:
    if not dist.is_initialized() or dist.get_backend() != "farandole":
        raise ValueError('FaultTolerantDataParallel needs init_process_group("farandole") first')
    if isinstance(dist.group.WORLD, ReconfigurableGroup):
        raise ValueError(
            "FaultTolerantDataParallel cannot be used with enable_reconfigure=True: it changes "
            "the group"
        )
    if len(dist.distributed_c10d._world.pg_map) > 1:  # noqa: SLF001 - torch has no other list of groups
        raise ValueError(
            "FaultTolerantDataParallel cannot be used with groups of new_group: they end with "
            "their world"
        )


class _AloneBackend(Backend):
    """Collectives of this process alone, as far as DDP uses them."""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Returns the backend's name."""
        return "farandole"

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Done:
        """Leaves the tensors as they are."""
        del tensors, opts
        return Done()


def _group_of_one() -> dist.ProcessGroup:
    group = dist.ProcessGroup(0, 1)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(kind)  # noqa: SLF001 - as torch does for groups of such backends
    backend = _AloneBackend(0, 1)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, backend)  # noqa: SLF001 - as above
    return group
