# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Ray Tune: trials that are whole jobs of several ranks.

Each trial reserves all resources of its ranks in one placement group, so two trials never hold half
of what each needs. If Tune stops a trial, its ranks end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from farandole.common.argument_checks import make_minimum_check
from farandole.ray.adapter import resolve_gpu_count
from farandole.ray.backend import RayBackend, SpareActors
from farandole.ray.trial_ranks import LazilyUnpickledFunction, RankTuneSession, with_rank_session
from farandole.ray.utils import import_ray
from farandole.runner.gang import pickle_payload
from farandole.tuning.trial_reports import parse_search_report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["DistributedTrainableCreator", "trainable"]


def trainable(
    train: Callable[[dict[str, Any]], Any],
    num_workers: int = 1,
    *,
    use_gpu: bool = False,
    gpus_per_worker: int | None = None,
    cpus_per_worker: float = 1,
    env: Mapping[str, str | None] | None = None,
    pass_env: Sequence[str] = (),
    start_timeout: float | None = None,
    warm: bool | None = None,
    tune_session: bool = False,
) -> Any:
    """Returns a trainable for `ray.tune.Tuner`: each trial runs a function on its own ranks.

    Tune gets the reports of `farandole.tuning.report` on rank 0, and may stop the trial. It also
    gets the result of rank 0 if that is a dict.

    Args:
        train: Runs on every rank of a trial with the trial's configuration.
        num_workers: Ranks of a trial.
        use_gpu: Whether each rank gets GPUs.
        gpus_per_worker: GPUs of a rank; 1 by default with `use_gpu`.
        cpus_per_worker: CPUs that Ray reserves for a rank.
        env: Variables to set in the ranks.
        pass_env: As `RayBackend`.
        start_timeout: Seconds that the ranks of a trial may take to start.
        warm: As `RayBackend`: by default ranks start warm where the process of the search has
            imported torch.
        tune_session: Whether `ray.tune.report`, with checkpoints, `get_checkpoint` and
            `get_context` work in the ranks, as in the process of a trial. Each rank imports Ray
            Tune then.

    Returns:
        A trainable function with its resources.

    Raises:
        ValueError: A number is out of range, or `gpus_per_worker` contradicts `use_gpu`.
        ImportError: Ray is not installed.
    """
    import_ray()
    from farandole.runner import warm_workers  # noqa: PLC0415 - as above
    from ray import tune  # noqa: PLC0415 - Ray may be absent

    size = make_minimum_check(1)("num_workers", num_workers)
    bundle = {
        "CPU": cpus_per_worker,
        "GPU": resolve_gpu_count(gpus_per_worker, use_gpu, "gpus_per_worker"),
    }
    # The process of a trial does not load the function, so it imports no module of the user and
    # cannot know whether the function uses torch.
    packed = LazilyUnpickledFunction(pickle_payload(train, (), None))
    settings = {
        "use_gpu": use_gpu,
        "gpus_per_worker": gpus_per_worker,
        "cpus_per_worker": cpus_per_worker,
        "env": env,
        "pass_env": tuple(pass_env),
        "start_timeout": start_timeout,
        "warm": warm_workers.resolve_warm_worker_settings(warm, by_default=True) is not None,
        "verbose": 0,
    }

    def trial(config: dict[str, Any]) -> None:
        session = RankTuneSession.session_of_trial() if tune_session else None

        def handle_record(rank: int, record: dict[str, Any]) -> None:
            found = parse_search_report(rank, record)
            if found is not None:
                step, metrics = found
                tune.report({**metrics, "step": step})
            elif session is not None:
                session.forward_report(record)

        function = packed if session is None else with_rank_session(packed, session)
        backend = RayBackend(size, **settings).with_spare(SpareActors.spare_actors_of_process())
        try:
            returned = backend.run(function, (config,), on_progress=handle_record)[0]
        finally:
            if session is not None:
                session.remove_checkpoint_copies()
        if isinstance(returned, Mapping):
            tune.report(dict(returned))

    wanted = {name: number for name, number in bundle.items() if number}
    return tune.with_resources(
        trial, tune.PlacementGroupFactory([{}, *(dict(wanted) for _ in range(size))])
    )


def DistributedTrainableCreator(  # noqa: N802 - the name that Ray had
    func: Callable[[dict[str, Any]], Any],
    use_gpu: bool = False,
    num_hosts: int = 1,
    num_workers: int = 1,
    num_cpus_per_worker: int = 1,
    num_gpus_per_worker: int | None = None,
    timeout_s: float = 30,
    replicate_pem: bool = False,
    *,
    num_slots: int | None = None,
    num_cpus_per_slot: int | None = None,
    num_gpus_per_slot: int | None = None,
) -> Any:
    """Like `trainable`, with the arguments of the function that Ray had for Horovod.

    The training function reports with `ray.tune.report`: `trainable(..., tune_session=True)`.

    Args:
        func: Runs on every rank of a trial.
        use_gpu: As `trainable`.
        num_hosts: Times `num_workers`, it is the number of ranks; Ray places them.
        num_workers: Ranks for each of them.
        num_cpus_per_worker: As `trainable`.
        num_gpus_per_worker: As `trainable`.
        timeout_s: Seconds that the ranks of a trial may take to start.
        replicate_pem: Not used: there is no ssh.
        num_slots: The name of `num_workers` in Horovod's guide.
        num_cpus_per_slot: The same for `num_cpus_per_worker`.
        num_gpus_per_slot: The same for `num_gpus_per_worker`.

    Returns:
        A trainable function with its resources.
    """
    del replicate_pem
    each = num_workers if num_slots is None else num_slots
    return trainable(
        func,
        make_minimum_check(1)("num_hosts", num_hosts) * make_minimum_check(1)("num_workers", each),
        use_gpu=use_gpu,
        gpus_per_worker=num_gpus_per_worker if num_gpus_per_slot is None else num_gpus_per_slot,
        cpus_per_worker=num_cpus_per_worker if num_cpus_per_slot is None else num_cpus_per_slot,
        start_timeout=max(timeout_s, 30),
        tune_session=True,
    )
