# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`FaultTolerantDataParallel`: DDP that finishes a step in which ranks are lost.

A communication hook starts the reduction of each bucket at once, into separate memory. At the end
of the backward pass, before DDP takes the results, a callback waits for all of them. If a rank is
lost, the callback brings this rank into the next world, as `farandole.torch._fault_tolerance`
describes, and reduces the same gradients again.

The backward pass may have ended on some ranks and failed on others. In `DistributedOptimizer`, the
ranks that failed take the parameters of the ranks that finished, and skip their step. Here, each
rank keeps the results of its last reduction, and sends them to the ranks that failed. So all ranks
continue as if nothing had happened, and the script may clip gradients, scale losses or use any
optimizer.

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

# No postponed annotations: DDP reads a hook's annotations.

import inspect
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from farandole._native import engine
from farandole.common import basics
from farandole.common.exceptions import FarandoleInternalError, FarandoleUsageError
from farandole.common.termination_notices import install_notice_handlers, is_elastic_worker
from farandole.common.util import Average
from farandole.torch._fault_tolerance import FaultTolerance, claim_sole_fault_tolerant_owner
from farandole.torch._gpu_tensors import gpu_and_stream_of
from farandole.torch._handles import ENGINE_DTYPES, table, to_engine_tensor
from farandole.torch._reduce import TensorReduction
from farandole.torch._state_comparison import describe_named_tensor, split_equal_tensors
from farandole.torch._state_transfer import TransferRoles, transfer_tensors
from farandole.torch.distributed._direct_group import (
    HAS_PYTHON_BACKENDS,
    BackendBase,
    DirectGroup,
)
from farandole.torch.distributed._reconfigurable_groups import ReconfigurableGroup
from farandole.torch.distributed._work import CompletedWork
from farandole.torch.sync_batch_norm import SyncBatchNorm

_BUFFER_BROADCAST_REASON: Final = (
    "buffers are not broadcast in each step; a new rank gets those of another rank"
)
_REFUSED_OPTIONS: Final = {
    "broadcast_buffers": _BUFFER_BROADCAST_REASON,
    "forward_sync_buffers": _BUFFER_BROADCAST_REASON,
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
"""Arguments of DDP that cannot be used, with the reason or an alternative."""


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
        optimizer: The optimizer of the model's parameters; new ranks get its state.
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
        for name, reason in _REFUSED_OPTIONS.items():
            if options.pop(name, None):
                raise ValueError(f"FaultTolerantDataParallel cannot be used with {name}: {reason}")
        synchronized = torch.nn.SyncBatchNorm, SyncBatchNorm
        if any(isinstance(layer, synchronized) for layer in module.modules()):
            raise ValueError(
                "FaultTolerantDataParallel cannot be used with SyncBatchNorm: use BatchNorm layers"
            )
        arguments = inspect.signature(DistributedDataParallel.__init__).parameters
        # Since 2.15 the other one warns.
        buffers = (
            "forward_sync_buffers" if "forward_sync_buffers" in arguments else "broadcast_buffers"
        )
        group = _single_process_group()
        claim_sole_fault_tolerant_owner(self)
        super().__init__(
            module, process_group=group, init_sync=False, **{buffers: False}, **options
        )

        def other_tensors() -> list[torch.Tensor]:
            own = {parameter for each in optimizer.param_groups for parameter in each["params"]}
            return [
                tensor for tensor in (*module.parameters(), *module.buffers()) if tensor not in own
            ]

        names = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name not in self.parameters_to_ignore
        }
        self._tolerance = _GradientFaultTolerance(
            optimizer, is_elastic_worker(), other_tensors, names
        )
        self.register_comm_hook(
            _FaultTolerantHookState(self._tolerance, names), _communication_hook
        )
        install_notice_handlers()
        self._tolerance.agree_with_new_world()

    @property
    def steps(self) -> int:
        """Number of steps that training has finished, also before this rank joined: backward passes
        outside `no_sync()`.
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
        self._tolerance.share_stateful_objects(objects)

    def rejoin(self) -> None:
        """Leaves a broken world for the next one.

        `backward` rejoins by itself. Call `rejoin` when a collective of the training script, such
        as the average of a metric, has raised `FarandoleInternalError`. Between `backward` and
        `optimizer.step()`, `rejoin` only makes the next `backward` leave the world; until then,
        collectives of the script fail.

        Raises:
            WorkerDismissed: When this worker is not in the next world.
        """
        self._tolerance.move_to_world_when_due(self._tolerance.is_step_due)

    def join(self, *arguments: Any, **options: Any) -> Any:
        """Raises an error: every rank must take part in every step.

        Raises:
            ValueError: Always.
        """
        del arguments, options
        raise ValueError(
            "FaultTolerantDataParallel has no join(): give all ranks the same number of batches"
        )


class _GradientFaultTolerance(FaultTolerance):
    """Like `FaultTolerance`, but a rank that is behind gets the results of a reduction, not the
    state after the step.

    Args:
        optimizer: As for `FaultTolerance`.
        is_elastic: As for `FaultTolerance`.
        others: As for `FaultTolerance`.
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

        def note_step_taken(*_: Any) -> None:
            tolerance = this()
            if tolerance is not None:
                tolerance.is_step_due = False

        optimizer.register_step_post_hook(note_step_taken)

    def _prepare_new_world(self) -> None:
        """Creates the default group again: a new rank has just created it."""
        generation = engine.world().generation
        if generation != self._generation:
            if dist.is_initialized():  # it is not if this has failed before
                dist.destroy_process_group()
            dist.init_process_group("farandole", init_method="farandole://", timeout=self._timeout)
            self._generation = generation

    def _describe_model(self) -> list[str]:
        return [
            *(describe_named_tensor(name, each) for name, each in self._parameters.items()),
            *super()._describe_model(),
        ]

    def _update_ranks_behind(
        self, statuses: list[list[int]], latest_step: int, senders: list[int]
    ) -> bool:
        if any(is_whole and steps < latest_step for steps, is_whole, _ in statuses):
            self._send_results(
                TransferRoles(
                    senders, [rank for rank in range(len(statuses)) if rank not in senders]
                )
            )
        is_new = not self._has_whole_state
        new = [
            rank
            for rank, (_, is_whole, _) in enumerate(statuses)
            if not is_whole and rank not in senders
        ]
        self._send_state_to_ranks_behind(TransferRoles(senders, new))
        if is_new:
            self._mark_state_received(latest_step)
        return self.steps < latest_step

    def _send_results(self, roles: TransferRoles) -> None:
        """Sends the results of the last reduction to the ranks whose reduction has failed, and to
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
        equal, different = split_equal_tensors("tolerant.digests", tensors, roles)
        transfer_tensors("tolerant.result", equal, roles)
        transfer_tensors(
            "tolerant.result.first", different, TransferRoles(roles.senders[:1], roles.takers)
        )
        if takes:
            self.results = results


class _BucketReduction:
    """A bucket of DDP in one reduction.

    Args:
        bucket: The bucket that DDP passes to its hook.
        names: Names of the parameters.
        memory: Returns memory for the result, for a tensor of its shape, dtype and device.
    """

    def __init__(
        self,
        bucket: GradBucket,
        names: dict[torch.Tensor, str],
        memory: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        buffer = bucket.buffer()
        self._wire = to_engine_tensor(buffer)
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

    def start_reductions(self) -> None:
        """Starts the remaining reductions.

        Raises:
            FarandoleInternalError: When the world is broken already.
        """
        size, dtype = self._wire.element_size(), ENGINE_DTYPES[self._wire.dtype]
        arguments = (
            *TensorReduction(Average).engine_arguments,
            False,
            gpu_and_stream_of(self._wire),
        )
        source, target = self._wire.data_ptr(), self.memory.data_ptr()
        for name, start, count in self._parts[len(self._handles) :]:
            addresses = source + start * size, target + start * size
            described = (f"allreduce.{name}", dtype, (count,), *addresses)
            keep = (self._wire, self.memory)
            self._handles.append(
                table.submit_operation(keep, len, engine.allreduce, *described, *arguments)
            )

    def wait_for_reductions(self) -> None:
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

    def reset_reductions(self) -> None:
        """Restarts the reduction from the gradients of this rank."""
        self._handles = []

    def reduced_gradients(self) -> dict[str, torch.Tensor]:
        """Returns the reduced gradients, flat, by the names of their parameters."""
        return {name: self.memory[start : start + count] for name, start, count in self._parts}

    def copy_results(self, results: dict[str, torch.Tensor]) -> None:
        """Takes the results of another rank."""
        for name, result in self.reduced_gradients().items():
            result.copy_(results[name])

    def give_result_to_ddp(self) -> None:
        """Gives the result to DDP."""
        self.future.set_result(self.memory.to(self._device))


class _FaultTolerantHookState:
    """The state of the hook.

    Args:
        tolerance: Brings this rank into the next world.
        parameters: The parameters whose gradients are reduced, by name.
    """

    def __init__(
        self, tolerance: _GradientFaultTolerance, parameters: dict[str, torch.nn.Parameter]
    ) -> None:
        self._tolerance = tolerance
        self._names: dict[torch.Tensor, str] = {
            parameter: name for name, parameter in parameters.items()
        }
        self._pieces: list[_BucketReduction] = []
        self._last_result_memory: list[torch.Tensor] = []
        """Memory with the results of the last reduction."""
        self._free_memory: list[torch.Tensor] = []
        """Memory with the results of the reduction before the last one, to be used again."""

    def start_bucket_reduction(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts the reduction of a bucket; the last bucket also queues `_finish_step` for the end
        of the backward pass.
        """
        if bucket.index() == 0:
            self._pieces = []  # a backward pass may have ended with an error
        piece = _BucketReduction(bucket, self._names, self._allocate_result)
        self._pieces.append(piece)
        if not self._tolerance.is_change_due:
            try:
                piece.start_reductions()
            except FarandoleUsageError:
                raise
            except FarandoleInternalError:
                pass  # `_finish_step` finds the same failure when it starts the rest
        if bucket.is_last():
            # DDP adds its own callback, which takes the results, after this hook.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_step)  # noqa: SLF001 - the only way there
        return piece.future

    def _finish_step(self) -> None:
        pieces, self._pieces = self._pieces, []
        if self._tolerance.reduce_in_as_many_worlds(
            lambda: _run_reductions(pieces), lambda: _reset_all_reductions(pieces)
        ):
            for piece in pieces:
                piece.copy_results(self._tolerance.results)
        else:
            self._tolerance.count_step()
        self._tolerance.results = {
            name: result for piece in pieces for name, result in piece.reduced_gradients().items()
        }
        self._free_memory, self._last_result_memory = (
            self._last_result_memory,
            [piece.memory for piece in pieces],
        )
        self._tolerance.is_step_due = True
        for piece in pieces:
            piece.give_result_to_ddp()

    def _allocate_result(self, like: torch.Tensor) -> torch.Tensor:
        """Returns memory for results, other than the memory of the last reduction."""
        for index, memory in enumerate(self._free_memory):
            if (memory.shape, memory.dtype, memory.device) == (like.shape, like.dtype, like.device):
                return self._free_memory.pop(index)
        return torch.empty_like(like)


def _communication_hook(
    state: _FaultTolerantHookState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook, called when the gradients of a bucket are computed."""
    return state.start_bucket_reduction(bucket)


def _run_reductions(pieces: list[_BucketReduction]) -> None:
    failure: Exception | None = None
    for step in (_BucketReduction.start_reductions, _BucketReduction.wait_for_reductions):
        for piece in pieces:
            try:
                step(piece)
            except Exception as error:  # noqa: BLE001 - raised below, after the started operations have ended
                failure = failure or error
    if failure is not None:
        raise failure


def _reset_all_reductions(pieces: list[_BucketReduction]) -> None:
    for piece in pieces:
        piece.reset_reductions()


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


class _SingleProcessBackend(BackendBase):
    """The collectives that DDP uses, in a group of this process alone."""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Returns the backend's name."""
        return "farandole"

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> CompletedWork:
        """Leaves the tensors as they are."""
        del tensors, opts
        return CompletedWork()


def _single_process_group() -> dist.ProcessGroup:
    if not HAS_PYTHON_BACKENDS:
        return DirectGroup(_SingleProcessBackend(0, 1))
    group = dist.ProcessGroup(0, 1)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(kind)  # noqa: SLF001 - as torch does for groups of such backends
    backend = _SingleProcessBackend(0, 1)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, backend)  # noqa: SLF001 - as above
    return group
