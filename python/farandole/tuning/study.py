# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Optuna studies whose trials are jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from farandole.common.counted_noun import format_counted_noun
from farandole.runner.backend import Backend, LocalBackend
from farandole.runner.foreign_backend import adapt_backend
from farandole.runner.job_slot_queue import SlotQueue
from farandole.tuning.trial_reports import parse_search_report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optuna import Study
    from optuna.trial import FrozenTrial, Trial

    from farandole.stores.store import Store


def optimize(
    study: Study,
    train: Callable[[dict[str, Any]], Any],
    space: Callable[[Trial], dict[str, Any]],
    *,
    backend: Backend | None = None,
    n_trials: int = 100,
    metric: str | None = None,
    slots: int | None = None,
    timeout: float | None = None,
    catch: Sequence[type[Exception]] = (),
    callbacks: Sequence[Callable[[Study, FrozenTrial], None]] = (),
) -> None:
    """Searches with trials that are jobs of several processes, as many at a time as there are
    slots.

    The reports of rank 0 go to the study's pruner. A pruned trial ends on all ranks at once. A
    study in a database or a file (`optuna.create_study(storage=..., load_if_exists=True)`)
    continues: trials that it has already finished count.

    Args:
        study: The study.
        train: Runs on every rank of a trial with its parameters; what rank 0 returns is the trial's
            value, or a dict with it under `metric`.
        space: Draws the parameters of a trial, such as `lambda trial: {"lr":
            trial.suggest_float("lr", 1e-4, 1)}`.
        backend: Backend that runs the trials; default: `LocalBackend()`.
        n_trials: Trials that the study has in the end, finished or pruned.
        metric: Name of the reported metric for the pruner; needed where more than one is
            reported.
        slots: Processes that may run at once; default: one trial at a time.
        timeout: Seconds after which no new trial begins.
        catch: Exceptions that make a trial fail without ending the search.
        callbacks: Called after each trial, as Optuna has it.

    Raises:
        ValueError: There are fewer slots than a trial has processes.
        FarandoleJobError: A trial failed with an exception that is not in `catch`.
        ImportError: Optuna is not installed.
    """
    optuna = _import_optuna()
    where = backend or LocalBackend()
    size = where.num_processes()
    slots = size if slots is None else slots
    if slots < size:
        raise ValueError(
            "a trial has "
            f"{format_counted_noun(size, 'process')}, so slots must be at least that: {slots}"
        )
    done = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    trials_left = n_trials - len(study.get_trials(deepcopy=False, states=done))
    if trials_left <= 0:
        return
    room = SlotQueue(lambda: slots)

    def run_trial(trial: Trial) -> Any:
        with room.hold_slots(size, lambda _: None):
            found = TrialBackend(where, trial, metric).run(train, (space(trial),))[0]
        return found[metric] if isinstance(found, Mapping) and metric is not None else found

    study.optimize(
        run_trial,
        n_trials=trials_left,
        n_jobs=min(trials_left, slots // size),
        timeout=timeout,
        catch=tuple(catch),
        callbacks=list(callbacks),
    )


class TrialBackend(Backend):
    """A backend whose jobs belong to an Optuna trial. Reports of rank 0 may prune it.

    For estimators, whose epochs count as reports:
    `estimator.setBackend(TrialBackend(LocalBackend(2), trial, "val_loss")).fit(frame)`.

    Args:
        backend: Backend that runs the jobs.
        trial: The trial.
        metric: The metric that the pruner gets; may be omitted if there is only one.

    Raises:
        optuna.TrialPruned: From `run`, if the pruner stops the trial. Its ranks have ended by then.
        ValueError: From `run`: the metric is missing, or there are several and none was named.
    """

    def __init__(self, backend: Backend, trial: Trial, metric: str | None = None) -> None:
        self._backend = adapt_backend(backend)
        self._trial = trial
        self._metric = metric

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = {},
        env: Mapping[str, str | None] | None = None,
        on_progress: Callable[[int, dict[str, Any]], None] | None = None,
    ) -> list[Any]:
        """Like `Backend.run`."""

        def handle_progress(rank: int, record: dict[str, Any]) -> None:
            if on_progress is not None:
                on_progress(rank, record)
            found = parse_search_report(rank, record)
            if found is not None:
                self._report_to_study(*found)

        return self._backend.run(fn, args, kwargs, env, handle_progress)

    def _report_to_study(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._metric is None and len(metrics) != 1:
            raise ValueError(
                f"name the metric that decides the trial, one of {', '.join(metrics) or 'none'}"
            )
        name = self._metric or next(iter(metrics))
        if name not in metrics:
            raise ValueError(f"the trial reported no {name!r}, but {', '.join(metrics)}")
        self._trial.report(metrics[name], step)
        if self._trial.should_prune():
            raise _import_optuna().TrialPruned(f"{name} was {metrics[name]:g} at step {step}")

    def num_processes(self) -> int:
        """Returns the number of workers."""
        return self._backend.num_processes()

    def check(self) -> None:
        """Like `Backend.check`."""
        self._backend.check()

    def through(self, store: Store) -> Backend:
        """Like `Backend.through`."""
        return TrialBackend(self._backend.through(store), self._trial, self._metric)


def _import_optuna() -> Any:
    try:
        import optuna  # noqa: PLC0415 - the package imports without it
    except ImportError as error:
        raise ImportError('this search needs Optuna: pip install "farandole[tuning]"') from error
    return optuna
