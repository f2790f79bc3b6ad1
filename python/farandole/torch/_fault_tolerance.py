# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Training that finishes a step in which ranks are lost:
`DistributedOptimizer(fault_tolerant=True)`.

Gradients are reduced into separate memory, so they still exist after a failed reduction. This needs
memory but no copy. If a rank is lost in step `s`, the others leave the broken world and join the
next one. There they compare the number of steps that each has finished. These numbers differ by at
most one, because no rank finishes step `s + 1` without the gradients of all ranks. Ranks that have
finished fewer steps, and new ranks, get the parameters and the state of the optimizer from the
ranks that have finished most; they are then after step `s`. The others reduce their gradients
again, over the present ranks. A new rank, or one that has caught up, joins them with its next
gradients.

A rank has a state when all of it has come. If a rank is lost while it sends, the transfer begins
again in the next world.

If workers are ready to join, or must leave, all ranks change worlds before the same reduction,
because the gradients of the previous step carry the news from every rank. So when the state is sent
to new ranks, the script has finished everything that it does after a step, such as a step of its
learning rate schedule. A call of `rejoin` between a reduction and its step waits for the next
reduction, for the same reason.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import torch

from farandole._native import engine
from farandole.common import basics
from farandole.common.elastic import leave_and_join
from farandole.common.exceptions import FarandoleInternalError, FarandoleUsageError
from farandole.common.util import Max
from farandole.torch._allgather import allgather
from farandole.torch._allreduce import allreduce_async_
from farandole.torch._buckets import GradientBucket
from farandole.torch._handles import synchronize
from farandole.torch._reducer import GradientReducer
from farandole.torch._state_comparison import (
    describe_parameters,
    fingerprint_bytes,
    require_same_model,
    split_equal_tensors,
)
from farandole.torch._state_transfer import (
    TensorLayouts,
    TransferRoles,
    allocate_optimizer_state,
    transfer_tensors,
)
from farandole.torch.functions import (
    allgather_object,
    broadcast_value,
    extract_state_tensors,
    pack_broadcast_value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farandole.data.row_assignment import RowAssignment
    from farandole.torch._buckets import GradientSlot, ReductionOptions


_owners: list[weakref.ref[object]] = []
"""The fault-tolerant model or optimizer of this process, if there is one."""


def claim_sole_fault_tolerant_owner(owner: object) -> None:
    """Notes the fault-tolerant model or optimizer of this process.

    With two of them, one would leave a world while the other waits in it.

    Raises:
        ValueError: The process has another one, which is not deleted.
    """
    if any(other() is not None for other in _owners):
        gc.collect()  # it may be in a cycle of references
    if any(other() is not None for other in _owners):
        raise ValueError(
            "a process can have one FaultTolerantDataParallel or "
            "DistributedOptimizer(fault_tolerant=True): delete the first one and all references "
            "to it before you create another"
        )
    _owners[:] = [weakref.ref(owner)]


class RestartableBucket(GradientBucket):
    """Parameters whose gradients stay as they were until the step is over.

    Args:
        slots: The parameters, in the same order on all ranks.
        options: Options of the reduction of gradients.
    """

    def __init__(self, slots: list[GradientSlot], options: ReductionOptions) -> None:
        self._own_gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """Parameters, and the gradients that they had when the reduction of this step first
        started.
        """
        self._targets: dict[GradientSlot, list[torch.Tensor]] = {}
        super().__init__(slots, options)

    def start_reduction(self) -> None:
        """Like `GradientBucket.start_reduction`, into other memory.

        Raises:
            ValueError: When a gradient cannot be reduced.
            FarandoleInternalError: When the world is broken already.
        """
        if not self._own_gradients:
            self._own_gradients = [(slot.parameter, slot.parameter.grad) for slot in self.slots]
        try:
            super().start_reduction()
        except FarandoleInternalError:
            self.restart_reduction()  # it is to be started again, in another world
            raise

    def restart_reduction(self) -> None:
        """Restarts the reduction of this step from the gradients of this rank."""
        self.started, self._handles, self._finish = False, [], None
        self._in_place_gradients, self._staged_gradients, self._sparse = [], [], []
        for parameter, grad in self._own_gradients:
            parameter.grad = grad

    def release_original_gradients(self) -> None:
        """Releases the gradients that this rank had at the beginning of the step."""
        self._own_gradients = []

    def _result_memory(self, slot: GradientSlot, grad: torch.Tensor) -> torch.Tensor:
        """Returns memory for the result, separate from the gradient; alternates between two if
        gradients stay from step to step.
        """
        targets = self._targets.setdefault(slot, [])
        for target in targets:
            if target.data_ptr() != grad.data_ptr():
                return target
        targets.append(torch.empty_like(grad))
        return targets[-1]

    def _store_gradient(
        self, parameter: torch.Tensor, reduced: torch.Tensor, sparse_dim: int
    ) -> None:
        """Replaces the gradient by the result; the memory of the gradient stays unchanged."""
        parameter.grad = reduced.to_sparse(sparse_dim) if sparse_dim else reduced


class FaultTolerantReducer(GradientReducer):
    """Reduces gradients, repeatedly if needed, until all ranks of one world have the result.

    Args:
        names: Every parameter and its name.
        groups: The parameters that need gradients, in units.
        options: Options of the reduction of gradients.
        passes: Backward passes per reduction.
    """

    def __init__(
        self, names: dict[torch.Tensor, str], groups: Any, options: ReductionOptions, *, passes: int
    ) -> None:
        self.tolerance: FaultTolerance
        """Function that brings this rank into the next world; set right after construction."""
        self.caught_up = False
        """Whether another rank's result finished the step, so the optimizer must not take it."""
        super().__init__(names, groups, options, passes=passes, as_view=False)

    def finish_reductions(self, param_groups: list[dict[str, Any]]) -> None:
        """Like `GradientReducer.finish_reductions`; after a loss, the others repeat it in a new
        world.

        Raises:
            ValueError: When ranks disagree about a gradient.
            FarandoleInternalError: When a peer failed outside of an elastic job.
            WorkerDismissed: When this worker is not in the next world.
        """
        self._adopt_new_parameters(param_groups)
        self.caught_up = False
        try:
            self.caught_up = self.tolerance.reduce_in_as_many_worlds(
                self._reduce_buckets, self._rewind_buckets
            )
        finally:
            for bucket in self._buckets:
                assert isinstance(bucket, RestartableBucket)  # noqa: S101 - `_make_bucket` makes no other
                bucket.release_original_gradients()
            self.reset_counts()

    def _rewind_buckets(self) -> None:
        for bucket in self._buckets:
            assert isinstance(bucket, RestartableBucket)  # noqa: S101 - as above
            bucket.restart_reduction()

    def _make_bucket(self, slots: list[GradientSlot]) -> GradientBucket:
        return RestartableBucket(slots, self._options)

    def _start_complete_bucket(self, bucket: GradientBucket) -> None:
        """Like `GradientReducer`, but ignores a broken world: `finish_reductions` handles it, not
        the backward pass.
        """
        if self.tolerance.is_change_due:
            return  # they are for the next world
        try:
            super()._start_complete_bucket(bucket)
        except FarandoleUsageError:
            raise
        except FarandoleInternalError:
            return  # `finish_step` finds the same failure when it starts the rest


class FaultTolerance:
    """Brings one rank from world to world, with the state of the ranks that have most steps.

    Args:
        optimizer: The optimizer; its parameters and its state are sent to new ranks.
        is_elastic: Whether another world can follow a broken one.
        others: Returns other tensors that are sent to new ranks, the same ones in the same order on
            all ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        is_elastic: bool,
        others: Callable[[], Sequence[torch.Tensor]] = tuple,
    ) -> None:
        self.steps = 0
        """Steps that training has finished, on this rank or before this rank joined."""
        self.is_change_due = False
        """Whether a rank knows that the world should change, before the next step's reduction."""
        self._change_flag = torch.zeros(1, dtype=torch.int32)
        self._optimizer = optimizer
        self._others = others
        self._is_elastic = is_elastic
        self._is_new = True
        self._has_whole_state = False
        """Whether parameters and state are of the same step."""
        self._shared: dict[str, Any] = {}
        self._received: dict[str, Any] = {}
        self._row_assignments: dict[str, RowAssignment] = {}
        """Row assignments of shared readers, of this rank or of other ranks."""
        self._host_changes: list[tuple[float, int]] = []

    def share_stateful_objects(self, objects: dict[str, Any]) -> None:
        """Sends objects with the state to new ranks, and loads the objects that have come for this
        rank.

        A reader of `farandole.data` continues with the right rows on all ranks when the world
        changes.

        Raises:
            TypeError: An object has no `state_dict` and `load_state_dict`.
        """
        for name, value in objects.items():
            if not callable(getattr(value, "state_dict", None)) or not callable(
                getattr(value, "load_state_dict", None)
            ):
                raise TypeError(
                    f"{name} has no state_dict and load_state_dict: {type(value).__name__}"
                )
        self._shared.update(objects)
        for name, value in objects.items():
            is_reader = hasattr(value, "take_turns")
            if name in self._received:
                state = self._received.pop(name)
                value.load_state_dict({**state, "left": ()} if is_reader else state)
            if is_reader:
                self._row_assignments[name] = value.take_turns(self._row_assignments.get(name))

    def count_step(self) -> None:
        """Counts a step, and the rows that were read for it."""
        self.steps += 1
        self._commit_shared_reader_rows()

    def _commit_shared_reader_rows(self) -> None:
        for books in self._row_assignments.values():
            books.commit_taken_pieces()

    def is_world_change_announced(self) -> bool:
        """Returns whether the registrar has announced that workers are to join or leave."""
        self._host_changes.extend(engine.host_changes())
        return bool(self._host_changes)

    def reduce_in_as_many_worlds(
        self, reduce: Callable[[], object], rewind: Callable[[], None]
    ) -> bool:
        """Reduces the gradients of a step, in as many worlds as needed.

        Args:
            reduce: Starts the remaining reductions, and waits for all.
            rewind: Makes `reduce` start from the beginning.

        Returns:
            Whether this rank has the result of another rank instead.

        Raises:
            FarandoleInternalError: When a peer failed outside of an elastic job.
            WorkerDismissed: When this worker is not in the next world.
        """
        if self.is_change_due:
            self.is_change_due = False
            if self.move_to_next_world():
                return True
        while True:
            try:
                self._change_flag[0] = self.is_world_change_announced()
                change_handle = allreduce_async_(self._change_flag, op=Max, name="tolerant.change")
                try:
                    reduce()
                finally:
                    synchronize(change_handle)
            except FarandoleUsageError:
                raise
            except FarandoleInternalError:
                self.is_change_due = False
                if self.move_on_from_broken_world():
                    return True
                rewind()
            else:
                self.is_change_due = bool(self._change_flag[0])
                return False

    def move_on_from_broken_world(self) -> bool:
        """Leaves a broken world for the next one; returns whether this rank took the state of
        another rank there.

        Raises:
            FarandoleInternalError: The error in progress, outside of an elastic job.
            WorkerDismissed: When this worker is not in the next world.
        """
        if not self._is_elastic:
            raise  # noqa: PLE0704 - called while the failure is handled
        return self.move_to_next_world()

    def move_to_next_world(self) -> bool:
        """Leaves the world for the next one, like `move_on_from_broken_world`."""
        leave_and_join()
        return self.agree_with_new_world()

    def move_to_world_when_due(self, is_step_due: bool) -> None:
        """Like `move_to_next_world`, but waits for the next reduction if the optimizer's step after
        the last reduction is still due.

        Until that step the parameters of this rank are older than `steps`, and no rank may take
        them.
        """
        if is_step_due:
            self.is_change_due = True
        else:
            self.move_to_next_world()

    def agree_with_new_world(self) -> bool:
        """Agrees with the ranks of a new world on the state; returns whether this rank got a step
        that it lacked.
        """
        before = self.steps
        while True:
            self._host_changes.clear()
            try:
                self._agree_on_state()
            except FarandoleUsageError:
                raise
            except FarandoleInternalError:
                if not self._is_elastic:
                    raise
                # A part of the state may have been received: the next world sends all of it.
                leave_and_join()
            else:
                return self.steps > before

    def _prepare_new_world(self) -> None:
        """Prepares a new world before its ranks agree on the state."""

    def _agree_on_state(self) -> None:
        self._prepare_new_world()
        self._agree_on_rows(self._catch_up_ranks(self._gather_statuses()))

    def _gather_statuses(self) -> list[list[int]]:
        """Returns each rank's number of finished steps, whether its state is of one step, and
        whether it is new.
        """
        own = torch.tensor([[self.steps, self._has_whole_state, self._is_new]], dtype=torch.int64)
        return allgather(own, name="tolerant.status").tolist()

    def _agree_on_rows(self, finishes: bool) -> None:
        """Agrees on the rows of each rank, once all ranks have the same state.

        Args:
            finishes: Whether this rank finishes a step if the agreement does not fail.
        """
        records = {name: books.to_record(finishes) for name, books in self._row_assignments.items()}
        everywhere = allgather_object(records, name="tolerant.turns")
        if finishes:
            self.count_step()
        for name in {name for each in everywhere for name in each}:
            of_all = [each.get(name) for each in everywhere]
            if name not in self._row_assignments:
                from farandole.data.row_assignment import RowAssignment  # noqa: PLC0415 - only where readers are shared

                self._row_assignments[name] = RowAssignment.from_records(of_all)
            self._row_assignments[name].adopt_agreed_records(of_all, basics.rank())

    def _catch_up_ranks(self, statuses: list[list[int]]) -> bool:
        """Brings ranks that are behind up to date; returns whether this rank must finish a step
        after that.
        """
        whole = [(steps, rank) for rank, (steps, is_whole, _) in enumerate(statuses) if is_whole]
        latest_step = max((steps for steps, _ in whole), default=0)
        if not whole and any(steps or not is_new for steps, _, is_new in statuses):
            raise RuntimeError(
                "all ranks that had the parameters and the state of the optimizer are lost; "
                "continue from a checkpoint"
            )
        if len(whole) == len(statuses) and all(steps == latest_step for steps, _ in whole):
            return False
        # When training begins, no rank has a state, and all ranks take the state of rank 0.
        senders = [rank for steps, rank in whole if steps == latest_step] or [0]
        takers = [rank for rank in range(len(statuses)) if rank not in senders]
        require_same_model(self._describe_model(), senders[0], takers)
        return self._update_ranks_behind(statuses, latest_step, senders)

    def _describe_model(self) -> list[str]:
        """Describes the parameters, which must be the same on senders and takers."""
        return describe_parameters(self._optimizer.param_groups)

    def _update_ranks_behind(
        self, statuses: list[list[int]], latest_step: int, senders: list[int]
    ) -> bool:
        """Like `_catch_up_ranks`, when some rank is behind.

        Args:
            statuses: The result of `_gather_statuses`.
            latest_step: Steps that the senders have finished.
            senders: The ranks that have the state after these steps.
        """
        takers = [rank for rank in range(len(statuses)) if rank not in senders]
        if basics.rank() in takers:
            self._has_whole_state = False
        self._send_state_to_ranks_behind(TransferRoles(senders, takers))
        self._mark_state_received(latest_step)
        return False

    def _mark_state_received(self, latest_step: int) -> None:
        """Notes that this rank has received the state after `latest_step` steps."""
        if self.steps < latest_step:
            # Rows read for the step that another rank has finished.
            self._commit_shared_reader_rows()
        self.steps, self._has_whole_state, self._is_new = latest_step, True, False

    def _send_state_to_ranks_behind(self, roles: TransferRoles) -> None:
        """Sends parameters, the optimizer's state and shared objects to the ranks that take them.

        If a tensor of the parameters or the state is equal on all senders, each sender sends a part
        of the tensor. The first sender sends everything else. If the tensors or options of a sender
        differ from the first sender's, that sender sends nothing. A rank that has trained before
        keeps its options: its script itself makes the changes that follow a step, such as a step of
        the learning rate schedule.

        Raises:
            ValueError: On all ranks, when a taker has other buffers than the first sender.
        """
        if not roles.takers:
            return
        source, takes = roles.senders[0], basics.rank() in roles.takers
        parameters = [
            parameter for group in self._optimizer.param_groups for parameter in group["params"]
        ]
        option_tensors: list[torch.Tensor] = []
        state_tensors: list[torch.Tensor] = []
        options = extract_state_tensors(
            [_group_options(group) for group in self._optimizer.param_groups], option_tensors
        )
        states = extract_state_tensors(
            [self._optimizer.state.get(parameter) for parameter in parameters], state_tensors
        )
        others = list(self._others())
        own = [
            TensorLayouts.from_tensors(tensors)
            for tensors in (parameters, others, state_tensors, option_tensors)
        ]
        description = None
        if basics.rank() == source:
            # States of objects that this rank has not shared yet are passed on.
            shared = {
                **self._received,
                **{name: value.state_dict() for name, value in self._shared.items()},
            }
            description = own, options, states, shared
        content = 0 if takes else fingerprint_bytes(pack_broadcast_value([options, states]))
        layouts, options, states, shared = broadcast_value(
            description, source, "tolerant.description"
        )
        roles = roles._replace(senders=self._agree_on_senders(roles, own, layouts, content))
        if takes:
            options, states, option_tensors, state_tensors = allocate_optimizer_state(
                options, states, self._optimizer.param_groups
            )
        state, other = [*parameters, *state_tensors], [*others, *option_tensors]
        shadows = [TensorLayouts(layout).meta_tensors() for layout in layouts]
        if not takes and basics.rank() not in roles.senders:
            state = shadows[0] + shadows[2]
        if not takes and basics.rank() != source:
            other = shadows[1] + shadows[3]
        equal, different = split_equal_tensors("tolerant.digests", state, roles)
        transfer_tensors("tolerant.state", equal, roles)
        transfer_tensors(
            "tolerant.other", [*different, *other], TransferRoles([source], roles.takers)
        )
        if takes:
            self._load_received_state(parameters, options, states, shared)

    def _agree_on_senders(
        self,
        roles: TransferRoles,
        own: list[TensorLayouts],
        layouts: list[TensorLayouts],
        content: int,
    ) -> list[int]:
        """Returns the senders whose descriptions of parameters, states and options equal the
        description of the first sender.

        Raises:
            ValueError: As `_send_state_to_ranks_behind`.
        """
        model, rest, state, _ = (one == other for one, other in zip(own, layouts, strict=True))
        fits = model and (rest if basics.rank() in roles.takers else state)
        everywhere = allgather(
            torch.tensor([[fits, content]], dtype=torch.int64), name="tolerant.fits"
        ).tolist()
        misfits = [rank for rank in roles.takers if not everywhere[rank][0]]
        if misfits:
            raise FarandoleUsageError(
                f"buffers must have the same shapes and data types on all ranks; those of rank "
                f"{roles.senders[0]} differ from those of ranks: {', '.join(map(str, misfits))}"
            )
        first = everywhere[roles.senders[0]]
        return [rank for rank in roles.senders if everywhere[rank] == first]

    def _load_received_state(
        self, parameters: list[torch.Tensor], options: list[Any], states: list[Any], shared: Any
    ) -> None:
        """Loads the received state into the optimizer."""
        for parameter, state in zip(parameters, states, strict=True):
            self._optimizer.state.pop(parameter, None)
            if state is not None:
                self._optimizer.state[parameter] = state
        if self._is_new:
            for own, group in zip(self._optimizer.param_groups, options, strict=True):
                own.update(group)
            self._received = dict(shared)
            self.share_stateful_objects(
                {name: value for name, value in self._shared.items() if name in shared}
            )


def _group_options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in sorted(group, key=str) if key != "params"}
