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
from farandole.torch._buckets import Bucket
from farandole.torch._handles import synchronize
from farandole.torch._reducer import GradientReducer
from farandole.torch._state_comparison import (
    equal_and_others,
    fingerprint,
    parameter_lines,
    require_same_model,
)
from farandole.torch._state_transfer import Layout, Roles, move, room
from farandole.torch.functions import allgather_object, broadcast_value, described, packed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farandole.data.turns import Turns
    from farandole.torch._buckets import Options, Slot


_owners: list[weakref.ref[object]] = []
"""The fault-tolerant model or optimizer of this process, if there is one."""


def claim(owner: object) -> None:
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


class SafeBucket(Bucket):
    """Parameters whose gradients stay as they were until the step is over.

    Args:
        slots: The parameters, in the same order on all ranks.
        options: How gradients are reduced.
    """

    def __init__(self, slots: list[Slot], options: Options) -> None:
        self._own: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """Parameters, and the gradients that they had when the reduction of this step first
        started.
        """
        self._targets: dict[Slot, list[torch.Tensor]] = {}
        super().__init__(slots, options)

    def start(self) -> None:
        """Like `Bucket.start`, into other memory.

        Raises:
            ValueError: When a gradient cannot be reduced.
            FarandoleInternalError: When the world is broken already.
        """
        if not self._own:
            self._own = [(slot.parameter, slot.parameter.grad) for slot in self.slots]
        try:
            super().start()
        except FarandoleInternalError:
            self.rewind()  # it is to be started again, in another world
            raise

    def rewind(self) -> None:
        """Starts the reduction of this step again from the gradients of this rank."""
        self.started, self._handle, self._finish = False, None, None
        self._direct, self._flights, self._sparse = [], [], []
        for parameter, grad in self._own:
            parameter.grad = grad

    def forget(self) -> None:
        """Lets the gradients go that this rank began the step with."""
        self._own = []

    def _target(self, slot: Slot, grad: torch.Tensor) -> torch.Tensor:
        """Memory for the result that is not the gradient's: of two, where gradients stay from
        step to step.
        """
        targets = self._targets.setdefault(slot, [])
        for target in targets:
            if target.data_ptr() != grad.data_ptr():
                return target
        targets.append(torch.empty_like(grad))
        return targets[-1]

    def _put(self, parameter: torch.Tensor, reduced: torch.Tensor, sparse_dim: int) -> None:
        """Puts the result in the place of the gradient, which is not written to."""
        parameter.grad = reduced.to_sparse(sparse_dim) if sparse_dim else reduced


class TolerantReducer(GradientReducer):
    """Reduces gradients, again and again if need be, until all ranks of one world have them.

    Args:
        names: Every parameter and its name.
        groups: The parameters that need gradients, in units.
        options: How gradients are reduced.
        passes: Backward passes per reduction.
    """

    def __init__(
        self, names: dict[torch.Tensor, str], groups: Any, options: Options, *, passes: int
    ) -> None:
        self.tolerance: Tolerance
        """Function that brings this rank into the next world; set right after construction."""
        self.caught_up = False
        """Whether the step was finished with another rank's result, and is not to be taken."""
        super().__init__(names, groups, options, passes=passes, as_view=False)

    def finish(self, param_groups: list[dict[str, Any]]) -> None:
        """Like `GradientReducer.finish`; a lost rank has all others do it again in the next world.

        Raises:
            ValueError: When ranks disagree about a gradient.
            FarandoleInternalError: When a peer failed outside of an elastic job.
            WorkerDismissed: When this worker is not in the next world.
        """
        self._adopt(param_groups)
        self.caught_up = False
        try:
            self.caught_up = self.tolerance.complete(self._reduce, self._rewind)
        finally:
            for bucket in self._buckets:
                assert isinstance(bucket, SafeBucket)  # noqa: S101 - `_bucket` makes no other
                bucket.forget()
            self.reset()

    def _rewind(self) -> None:
        for bucket in self._buckets:
            assert isinstance(bucket, SafeBucket)  # noqa: S101 - as above
            bucket.rewind()

    def _bucket(self, slots: list[Slot]) -> Bucket:
        return SafeBucket(slots, self._options)

    def _complete(self, bucket: Bucket) -> None:
        """As in `GradientReducer`; a broken world is the business of `finish`, not of the
        backward pass.
        """
        if self.tolerance.changes:
            return  # they are for the next world
        try:
            super()._complete(bucket)
        except FarandoleUsageError:
            raise
        except FarandoleInternalError:
            return  # `finish` meets it again when it starts what was not started


class Tolerance:
    """Brings one rank from world to world, with the state of the ranks that have most steps.

    Args:
        optimizer: Its parameters and its state are sent to new ranks.
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
        """Steps that training has finished, on this rank or before it came."""
        self.changes = False
        """Whether some rank has heard that another world should come: before the next step's
        reduction.
        """
        self._told = torch.zeros(1, dtype=torch.int32)
        self._optimizer = optimizer
        self._others = others
        self._is_elastic = is_elastic
        self._is_new = True
        self._is_whole = False
        """Whether parameters and state are those of one step."""
        self._shared: dict[str, Any] = {}
        self._received: dict[str, Any] = {}
        self._turns: dict[str, Turns] = {}
        """The books of readers that are shared, here or by the others."""
        self._changes: list[tuple[float, int]] = []

    def share(self, objects: dict[str, Any]) -> None:
        """Sends objects with the state to new ranks, and loads the objects that have come for this
        rank.

        A reader of `farandole.data` continues with the right rows on all ranks when the world
        changes.

        Raises:
            TypeError: One has no `state_dict` and `load_state_dict`.
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
                self._turns[name] = value.take_turns(self._turns.get(name))

    def finished(self) -> None:
        """Counts a step, and the rows that were read for it."""
        self.steps += 1
        self._count()

    def _count(self) -> None:
        for books in self._turns.values():
            books.finished()

    def wants_change(self) -> bool:
        """Returns whether the registrar has told this rank that workers are to join or leave."""
        self._changes.extend(engine.host_changes())
        return bool(self._changes)

    def complete(self, reduce: Callable[[], None], rewind: Callable[[], None]) -> bool:
        """Reduces the gradients of a step, in as many worlds as it takes.

        Args:
            reduce: Starts the remaining reductions, and waits for all.
            rewind: Has `reduce` start from the beginning.

        Returns:
            Whether this rank has the result of another rank instead.

        Raises:
            FarandoleInternalError: When a peer failed outside of an elastic job.
            WorkerDismissed: When this worker is not in the next world.
        """
        if self.changes:
            self.changes = False
            if self.change():
                return True
        while True:
            try:
                self._told[0] = self.wants_change()
                told = allreduce_async_(self._told, op=Max, name="tolerant.change")
                try:
                    reduce()
                finally:
                    synchronize(told)
            except FarandoleUsageError:
                raise
            except FarandoleInternalError:
                self.changes = False
                if self.recover():
                    return True
                rewind()
            else:
                self.changes = bool(self._told[0])
                return False

    def recover(self) -> bool:
        """Leaves a broken world for the next one; whether this rank took the state of another
        there.

        Raises:
            FarandoleInternalError: The one that is being handled, outside of an elastic job.
            WorkerDismissed: When this worker is not in the next world.
        """
        if not self._is_elastic:
            raise  # noqa: PLE0704 - called while the failure is handled
        return self.change()

    def change(self) -> bool:
        """Leaves the world for the next one; as `recover`."""
        leave_and_join()
        return self.enter()

    def rejoin(self, is_step_due: bool) -> None:
        """Like `change`, but not before the next reduction if the optimizer's step after the last
        one is still due.

        Until then the parameters of this rank are older than `steps`, and no rank may take them.
        """
        if is_step_due:
            self.changes = True
        else:
            self.change()

    def enter(self) -> bool:
        """Agrees with the ranks of a new world on the state; whether this rank got a step there
        that it lacked.
        """
        before = self.steps
        while True:
            self._changes.clear()
            try:
                self._agree()
            except FarandoleUsageError:
                raise
            except FarandoleInternalError:
                if not self._is_elastic:
                    raise
                # Part of a state may have come: the next world brings all of it.
                leave_and_join()
            else:
                return self.steps > before

    def _prepare(self) -> None:
        """Forms what a world needs besides, before its ranks agree."""

    def _agree(self) -> None:
        self._prepare()
        self._deal(self._catch_up(self._statuses()))

    def _statuses(self) -> list[list[int]]:
        """Returns each rank's number of finished steps, whether its state is of one step, and
        whether it is new.
        """
        own = torch.tensor([[self.steps, self._is_whole, self._is_new]], dtype=torch.int64)
        return allgather(own, name="tolerant.status").tolist()

    def _deal(self, finishes: bool) -> None:
        """Agrees on the rows of each rank, once all ranks have the same state.

        Args:
            finishes: Whether this rank finishes a step if the agreement does not fail.
        """
        records = {name: books.record(finishes) for name, books in self._turns.items()}
        everywhere = allgather_object(records, name="tolerant.turns")
        if finishes:
            self.finished()
        for name in {name for each in everywhere for name in each}:
            of_all = [each.get(name) for each in everywhere]
            if name not in self._turns:
                from farandole.data.turns import Turns  # noqa: PLC0415 - only where readers are shared

                self._turns[name] = Turns.told(of_all)
            self._turns[name].agree(of_all, basics.rank())

    def _catch_up(self, told: list[list[int]]) -> bool:
        """Brings ranks that are behind up to date; returns whether this rank must finish a step
        after that.
        """
        whole = [(steps, rank) for rank, (steps, is_whole, _) in enumerate(told) if is_whole]
        most = max((steps for steps, _ in whole), default=0)
        if not whole and any(steps or not is_new for steps, _, is_new in told):
            raise RuntimeError(
                "all ranks that had the parameters and the state of the optimizer are lost; "
                "continue from a checkpoint"
            )
        if len(whole) == len(told) and all(steps == most for steps, _ in whole):
            return False
        # When training begins, no rank has a state, and all take that of rank 0.
        senders = [rank for steps, rank in whole if steps == most] or [0]
        takers = [rank for rank in range(len(told)) if rank not in senders]
        require_same_model(self._model(), senders[0], takers)
        return self._bring(told, most, senders)

    def _model(self) -> list[str]:
        """Describes the parameters, which must be the same on senders and takers."""
        return parameter_lines(self._optimizer.param_groups)

    def _bring(self, told: list[list[int]], most: int, senders: list[int]) -> bool:
        """Like `_catch_up`, when some rank is behind.

        Args:
            told: What `_statuses` returned.
            most: Steps that the senders have finished.
            senders: The ranks that have the state after them.
        """
        takers = [rank for rank in range(len(told)) if rank not in senders]
        if basics.rank() in takers:
            self._is_whole = False
        self._transfer(Roles(senders, takers))
        self._arrive(most)
        return False

    def _arrive(self, most: int) -> None:
        """Notes that this rank has the state after so many steps."""
        if self.steps < most:
            self._count()  # what was read for the step that another rank has finished
        self.steps, self._is_whole, self._is_new = most, True, False

    def _transfer(self, roles: Roles) -> None:
        """Sends parameters, the optimizer's state and shared objects to the ranks that take them.

        Parameters and tensors of the state that are equal on all senders come from all of them, a
        part from each. All else comes from the first sender. A sender whose state has other tensors
        or options than that one's sends nothing. A rank that has trained before keeps its options:
        what its script does after a step, such as a step of the schedule of learning rates, it does
        by itself.

        Raises:
            ValueError: On all ranks, when a taker has other buffers than the first sender.
        """
        if not roles.takers:
            return
        source, takes = roles.senders[0], basics.rank() in roles.takers
        parameters = [
            parameter for group in self._optimizer.param_groups for parameter in group["params"]
        ]
        kept: list[torch.Tensor] = []
        sent: list[torch.Tensor] = []
        options = described([_options_of(group) for group in self._optimizer.param_groups], kept)
        states = described([self._optimizer.state.get(parameter) for parameter in parameters], sent)
        others = list(self._others())
        own = [Layout.of(tensors) for tensors in (parameters, others, sent, kept)]
        description = None
        if basics.rank() == source:
            # States of objects that this rank has not shared yet are passed on.
            shared = {
                **self._received,
                **{name: value.state_dict() for name, value in self._shared.items()},
            }
            description = own, options, states, shared
        content = 0 if takes else fingerprint(packed([options, states]))
        layouts, options, states, shared = broadcast_value(
            description, source, "tolerant.description"
        )
        roles = roles._replace(senders=self._senders(roles, own, layouts, content))
        if takes:
            options, states, kept, sent = room(options, states, self._optimizer.param_groups)
        state, other = [*parameters, *sent], [*others, *kept]
        shadows = [Layout(layout).shadows() for layout in layouts]
        if not takes and basics.rank() not in roles.senders:
            state = shadows[0] + shadows[2]
        if not takes and basics.rank() != source:
            other = shadows[1] + shadows[3]
        equal, different = equal_and_others("tolerant.digests", state, roles)
        move("tolerant.state", equal, roles)
        move("tolerant.other", [*different, *other], Roles([source], roles.takers))
        if takes:
            self._take(parameters, options, states, shared)

    def _senders(
        self, roles: Roles, own: list[Layout], layouts: list[Layout], content: int
    ) -> list[int]:
        """Returns the senders whose parameters, states and options are described as those of the
        first one.

        Raises:
            ValueError: As `_transfer`.
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

    def _take(
        self, parameters: list[torch.Tensor], options: list[Any], states: list[Any], shared: Any
    ) -> None:
        """Makes the state that has come the optimizer's."""
        for parameter, state in zip(parameters, states, strict=True):
            self._optimizer.state.pop(parameter, None)
            if state is not None:
                self._optimizer.state[parameter] = state
        if self._is_new:
            for own, group in zip(self._optimizer.param_groups, options, strict=True):
                own.update(group)
            self._received = dict(shared)
            self.share({name: value for name, value in self._shared.items() if name in shared})


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in sorted(group, key=str) if key != "params"}
