# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A run that continues through the worlds of its job.

After a world fails, the remaining processes go back to the last commit: model, optimizer, position
in the data and sums of the epoch belong to one step, so each row of an epoch counts once. New
processes get them from rank 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from farandole.common.termination_notices import is_elastic_worker

if TYPE_CHECKING:
    from collections.abc import Callable

_Progress = TypeVar("_Progress", bound=Any)

COMMIT_INTERVAL_STEPS = 10
"""Steps from one commit to the next, at least; commits are also made at the ends of epochs."""


class ProgressAcrossWorlds(Generic[_Progress]):
    """A run in the worlds of its job; a job of fixed size has one world.

    Args:
        reached: progress at the start, a frozen dataclass that is the same on every rank.
        run: the framework's `elastic.run`.
        create_state: creates the framework's elastic state; takes the progress as `reached`.

    Attributes:
        reached: the progress so far.
        moves: whether the world may change.
    """

    def __init__(
        self,
        reached: _Progress,
        run: Callable[[Callable[[Any], None]], Callable[[Any], None]],
        create_state: Callable[..., Any],
    ) -> None:
        self.reached = reached
        self.moves = is_elastic_worker()
        self._run = run
        self._state = create_state(reached=reached) if self.moves else None

    def run_in_each_world(self, train: Callable[[], None]) -> None:
        """Calls a function that trains from the last commit to the end, in each world until one has
        finished.

        Args:
            train: the function; it begins with a collective call that reads the progress so far.
        """
        if self._state is None:
            train()
            return

        def train_in_world(state: Any) -> None:
            self.reached = state.reached
            train()

        self._run(train_in_world)(self._state)

    def commit_progress(self, **changes: Any) -> None:
        """Updates the progress of the run, and commits it if the world may change; a collective
        call.

        Args:
            **changes: new values of fields of the progress.
        """
        self.reached = replace(self.reached, **changes)
        if self._state is not None:
            self._state.reached = self.reached
            self._state.commit()
