# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The trackers that the parameters of an estimator ask for, and the parameters that they log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole.spark.common.runs.fingerprint import TRAINING, VALIDATION
from farandole.spark.common.runs.tensorboard import TensorboardTracker
from farandole.spark.common.runs.tracking import (
    MlflowTracker,
    TrackedDataset,
    Tracker,
    TrackerGroup,
    WandbTracker,
)

if TYPE_CHECKING:
    from farandole.data.prepare import PreparedData
    from farandole.spark.common.params import EstimatorParams
    from farandole.spark.common.runs.fingerprint import Fingerprint


def create_trackers(
    estimator: EstimatorParams, job: Any, prepared: PreparedData, fingerprint: Fingerprint
) -> Tracker:
    """Returns the trackers of a run: MLflow, Weights & Biases and TensorBoard, if requested.

    Args:
        estimator: whose parameters ask for them.
        job: the run.
        prepared: its data.
        fingerprint: of the fit.
    """
    trackers: list[Tracker] = []
    if estimator.getMlflow():
        digests = {one.name: one.digest for one in fingerprint.parts}
        data = {
            "training": TrackedDataset(prepared.train_url, prepared.train_rows, digests[TRAINING])
        }
        if prepared.val_url is not None:
            data["validation"] = TrackedDataset(
                prepared.val_url, prepared.val_rows, digests[VALIDATION]
            )
        trackers.append(MlflowTracker(job.run_id, loggable_parameters(estimator), data))
    if estimator.getWandb():
        trackers.append(WandbTracker(job.run_id, loggable_parameters(estimator)))
    if estimator.getTensorboard():
        trackers.append(TensorboardTracker(job.store, loggable_parameters(estimator)))
    return TrackerGroup(trackers)


def loggable_parameters(estimator: EstimatorParams) -> dict[str, Any]:
    """Returns the parameters of an estimator whose values are numbers, words, or lists of them.

    Args:
        estimator: whose they are.
    """
    names = sorted(one.name for one in estimator.params)
    return {name: value for name in names if _is_plain_value(value := estimator.getOrDefault(name))}


def _is_plain_value(value: Any) -> bool:
    return isinstance(value, str | int | float) or (
        isinstance(value, list | tuple)
        and bool(value)
        and all(_is_plain_value(one) for one in value)
    )
