# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`DistributedOptimizer.overlap_forward`: the step of a layer waits until the next forward pass
needs the layer.

Gradients of the last layers come first in a backward pass and are needed last in the next forward
pass. So their reduction may continue during that forward pass, if the gradients of the first layers
overtake it: Jayarajan et al. 2019, "Priority-based Parameter Propagation for Distributed DNN
Training" (P3); Peng et al. 2019, "A Generic Communication Scheduler for Distributed DNN Training
Acceleration" (ByteScheduler). Each parameter's step uses the gradient and the options of its own
step, so the result is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from farandole.common.rank_progress import OWN_PROGRESS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from farandole.torch._buckets import GradientBucket
    from farandole.torch._forward_overlap import ForwardOverlap
    from farandole.torch._reducer import GradientReducer


class DeferredSteps:
    """Takes the step of each bucket of gradients when a module reads the bucket's parameters.

    Args:
        reducer: Reduces the gradients.
        overlap: The hooks of the model.
        take_step: Takes the wrapped optimizer's step on all parameters of its groups.
    """

    def __init__(
        self, reducer: GradientReducer, overlap: ForwardOverlap, take_step: Callable[[], Any]
    ) -> None:
        self._reducer = reducer
        self._overlap = overlap
        self._take_step = take_step
        self._has_priorities = False
        reducer.divide_large_gradients()

    @property
    def is_pending(self) -> bool:
        """Whether parameters have not taken their last step yet."""
        return self._overlap.is_pending

    def finish(self) -> None:
        """Takes all steps that are missing.

        Raises:
            ValueError: When ranks disagree about a gradient.
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        self._overlap.wait_for_all()

    def start_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Starts all reductions, takes the step of those parameters for which no module waits, and
        leaves the others to the next forward pass. Afterwards gradients are `None`, or will be.

        Raises:
            As `finish`.
        """
        if self._overlap.is_ready and not self._has_priorities:
            self._reducer.set_priorities(self._overlap.first_positions())
            self._has_priorities = True
        groups = [
            {key: _copy_option(value) for key, value in group.items()}
            for group in optimizer.param_groups
        ]
        with OWN_PROGRESS.measure_reduction():
            buckets = self._reducer.finish_undeferred_reductions(
                optimizer.param_groups, self._defers
            )
        waiting = {slot.parameter for bucket in buckets for slot in bucket.slots}
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._take_part_of_step(
            optimizer, groups, {parameter for parameter in parameters if parameter not in waiting}
        )
        pending: dict[torch.Tensor, Callable[[], None]] = {}
        for bucket in buckets:
            finish = self._make_deferred_step(optimizer, groups, bucket)
            pending |= {slot.parameter: finish for slot in bucket.slots}
        self._overlap.defer(pending)

    def _defers(self, bucket: GradientBucket) -> bool:
        return self._overlap.is_ready and all(
            self._overlap.reads(slot.parameter) for slot in bucket.slots
        )

    def _make_deferred_step(
        self,
        optimizer: torch.optim.Optimizer,
        groups: list[dict[str, Any]],
        bucket: GradientBucket,
    ) -> Callable[[], None]:
        """Returns a function that takes the step of a bucket, once."""
        versions = [
            (slot, slot.parameter.grad, slot.parameter.grad._version)  # noqa: SLF001 - torch's count of changes
            for slot in bucket.slots
            if slot.parameter.grad is not None
        ]

        is_done = False

        def finish() -> None:
            nonlocal is_done
            is_present, is_done = not is_done, True
            # A world that is lost has reset its buckets: their gradients are lost with it.
            if not (is_present and bucket.started):
                return
            changed = [
                slot.name
                for slot, grad, version in versions
                if slot.parameter.grad is grad and grad._version != version  # noqa: SLF001 - as above
            ]
            with OWN_PROGRESS.measure_reduction():
                self._reducer.finish_bucket(bucket)
            if changed:
                raise RuntimeError(
                    "gradients were changed in place while they were reduced: "
                    f"{', '.join(changed)}. After overlap_forward, the step clears gradients: "
                    "leave out zero_grad(set_to_none=False), or call "
                    "optimizer.wait_for_parameters() first"
                )
            self._take_part_of_step(optimizer, groups, {slot.parameter for slot in bucket.slots})

        return finish

    def _take_part_of_step(
        self,
        optimizer: torch.optim.Optimizer,
        groups: list[dict[str, Any]],
        parameters: Collection[torch.Tensor],
    ) -> None:
        """Takes the step of some parameters, with the options that the groups had at the step."""
        parts = [
            {**group, "params": [each for each in group["params"] if each in parameters]}
            for group in groups
        ]
        parts = [part for part in parts if part["params"]]
        if not parts:
            return
        present = optimizer.param_groups
        optimizer.param_groups = parts
        try:
            self._take_step()
        finally:
            optimizer.param_groups = present
        for parameter in parameters:
            parameter.grad = None


def require_separable_optimizer(make_optimizer: Callable[[list[Any]], Any]) -> None:
    """Refuses an optimizer whose step on two parameters is not the steps on each.

    Args:
        make_optimizer: Returns an optimizer of the kind without a state, over the given parameters.

    Raises:
        ValueError: The optimizer mixes parameters, as by a norm of all gradients.
    """
    generator = torch.Generator().manual_seed(1)
    starts = [torch.randn(4, 6, generator=generator) for _ in range(2)]
    gradients = [[torch.randn(4, 6, generator=generator) for _ in starts] for _ in range(3)]
    # An optimizer that is still warming up does not move.
    known = {"capturable": False, "lr": 0.1}

    def train(batches: list[list[int]]) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(start.clone()) for start in starts]
        optimizer = make_optimizer(parameters)
        options = dict(optimizer.param_groups[0])
        options |= {key: value for key, value in known.items() if key in options}
        options.pop("params")
        for gradient in gradients:
            for batch in batches:
                optimizer.param_groups = [
                    {**options, "params": [parameters[index] for index in batch]}
                ]
                for index in batch:
                    parameters[index].grad = gradient[index].clone()
                optimizer.step()
        return [parameter.detach() for parameter in parameters]

    cause: Exception | None = None
    try:
        whole_steps, single_steps = train([[0, 1]]), train([[0], [1]])
        is_separable = all(map(torch.equal, whole_steps, single_steps))
    except (RuntimeError, ValueError, TypeError) as error:  # it takes no dense gradients, say
        cause, is_separable = error, False
    if not is_separable:
        raise ValueError(
            "overlap_forward needs an optimizer whose step on each parameter depends on that "
            "parameter and its gradient alone, such as SGD or AdamW"
        ) from cause


def _copy_option(value: Any) -> Any:
    """Copies an option of a group, which a schedule may change before the step is taken."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
