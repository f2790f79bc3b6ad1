# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Hyperopt searches whose trials are jobs."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from farandole.common.counted_noun import format_counted_noun
from farandole.runner.backend import Backend, LocalBackend
from farandole.runner.foreign_backend import adapt_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def fmin(
    train: Callable[[Any], Any],
    space: Any,
    algo: Callable[..., Any] | None = None,
    max_evals: int = 100,
    *,
    backend: Backend | None = None,
    metric: str | None = None,
    slots: int | None = None,
    trials: Any = None,
    timeout: float | None = None,
    rstate: Any = None,
    catch: Sequence[type[Exception]] = (),
) -> dict[str, Any]:
    """Minimizes as `hyperopt.fmin` does, with trials that are jobs of several processes, several at
    a time.

    Hyperopt never stops a trial early, so `farandole.tuning.report` has no effect. If the search
    fails or is interrupted, running trials end at their next report.

    Args:
        train: Runs on every rank of a trial with a point of the space. What rank 0 returns is the
            loss, or a dict with it.
        space: The space, of `hyperopt.hp`.
        algo: Draws points; default: `hyperopt.tpe.suggest`.
        max_evals: Final number of trials, including finished ones of `trials`.
        backend: Backend that runs the trials; default: `LocalBackend()`.
        metric: The key of the loss in what rank 0 returns; default: `loss`.
        slots: Processes that may run at once; default: one trial at a time.
        trials: `hyperopt.Trials()` to continue; new trials are added.
        timeout: Seconds after which no new trial begins.
        rstate: A `numpy.random.Generator`, for a search that can be repeated.
        catch: Exceptions that make a trial fail without ending the search.

    Returns:
        The best point, as `hyperopt.fmin` returns it: `hyperopt.space_eval(space, point)` says what
        it stands for.

    Raises:
        ValueError: There are fewer slots than a trial has processes.
        FarandoleJobError: A trial failed with an exception that is not in `catch`.
        ImportError: Hyperopt is not installed.
    """
    hyperopt = _import_hyperopt()
    where = adapt_backend(backend or LocalBackend())
    size = where.num_processes()
    slots = size if slots is None else slots
    if slots < size:
        raise ValueError(
            "a trial has "
            f"{format_counted_noun(size, 'process')}, so slots must be at least that: {slots}"
        )
    points = _HyperoptTrials(hyperopt, space, algo, trials, rstate)
    until = float("inf") if timeout is None else time.monotonic() + timeout
    given_up = threading.Event()

    def check_search_running(_rank: int, _record: dict[str, Any]) -> None:
        if given_up.is_set():
            raise _SearchAbortedError

    def run_trial(point: Any) -> dict[str, Any]:
        return _trial_result(
            where.run(train, (point,), on_progress=check_search_running)[0], metric
        )

    running: dict[Future[dict[str, Any]], dict[str, Any]] = {}
    with ThreadPoolExecutor(slots // size, thread_name_prefix="farandole-trial") as pool:
        try:
            evals_left = max_evals - points.count_successful_trials()
            while evals_left > 0 or running:
                while evals_left > 0 and len(running) < slots // size:
                    trial = points.draw_trial() if time.monotonic() < until else None
                    if trial is None:
                        evals_left = 0
                        break
                    evals_left -= 1
                    running[pool.submit(run_trial, points.trial_point(trial))] = trial
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    points.record_outcome(running.pop(future), future, tuple(catch))
        except BaseException:
            given_up.set()
            raise
    return points.trials.argmin


class _SearchAbortedError(Exception):
    """Ends a trial whose search has ended."""


class _HyperoptTrials:
    """Draws trials, and notes how they ended, as Hyperopt keeps them."""

    def __init__(self, hyperopt: Any, space: Any, algo: Any, trials: Any, rstate: Any) -> None:
        import numpy as np  # noqa: PLC0415 - Hyperopt brings it

        self._hyperopt = hyperopt
        self._space = space
        self._algo = algo or hyperopt.tpe.suggest
        self._random = rstate or np.random.default_rng()
        self._domain = hyperopt.base.Domain(lambda _: None, space)
        self.trials = hyperopt.Trials() if trials is None else trials

    def count_successful_trials(self) -> int:
        """Returns the number of trials that have ended well."""
        return self.trials.count_by_state_unsynced(self._hyperopt.JOB_STATE_DONE)

    def draw_trial(self) -> dict[str, Any] | None:
        """Returns the next trial; `None` where there are no more points."""
        trials = self.trials
        numbers = trials.new_trial_ids(1)
        trials.refresh()
        drawn = self._algo(numbers, self._domain, trials, int(self._random.integers(2**31 - 1)))
        if not drawn:
            return None
        trials.insert_trial_docs(drawn)
        trials.refresh()
        trial = next(one for one in trials.trials if one["tid"] == numbers[0])
        self._set_trial_state(trial, self._hyperopt.JOB_STATE_RUNNING)
        trial["book_time"] = trial["refresh_time"]
        return trial

    def trial_point(self, trial: dict[str, Any]) -> Any:
        """Returns the point of a trial, as the training function gets it."""
        return self._hyperopt.space_eval(
            self._space, self._hyperopt.base.spec_from_misc(trial["misc"])
        )

    def record_outcome(
        self,
        trial: dict[str, Any],
        future: Future[dict[str, Any]],
        catch: tuple[type[Exception], ...],
    ) -> None:
        """Notes the outcome of a trial; raises exceptions that are not in `catch`."""
        error = future.exception()
        if error is None:
            trial["result"] = future.result()
            self._set_trial_state(trial, self._hyperopt.JOB_STATE_DONE)
            return
        trial["misc"]["error"] = (str(type(error)), str(error))
        self._set_trial_state(trial, self._hyperopt.JOB_STATE_ERROR)
        if not isinstance(error, catch):
            raise error

    def _set_trial_state(self, trial: dict[str, Any], state: int) -> None:
        trial["state"] = state
        trial["refresh_time"] = self._hyperopt.utils.coarse_utcnow()
        self.trials.refresh()


def _trial_result(found: Any, metric: str | None) -> dict[str, Any]:
    """Returns Hyperopt's record of a successful trial."""
    values = dict(found) if isinstance(found, Mapping) else {metric or "loss": found}
    return {"status": "ok", **values, "loss": float(values[metric or "loss"])}


def _import_hyperopt() -> Any:
    try:
        import hyperopt  # noqa: PLC0415 - the package imports without it
    except ImportError as error:
        raise ImportError(
            'this search needs Hyperopt: pip install "farandole[hyperopt]"'
        ) from error
    return hyperopt
