# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""An estimator's parameters as the plain values that travel to training processes."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from farandole.spark.common.transform import Transformation
from farandole.spark.torch.job import Data, Loop

if TYPE_CHECKING:
    from farandole.data.prepare import PreparedData as Prepared
    from farandole.spark.torch.params import TorchParams


def data_of(estimator: TorchParams, prepared: Prepared, columns: list[str]) -> Data:
    """Which rows a process reads, and how.

    Args:
        estimator: whose parameters count.
        prepared: the data.
        columns: that are read.
    """
    seed = estimator.getRandomSeed()
    if seed is None:
        seed = 0 if estimator.getDeterministic() else secrets.randbelow(2**31)
    return Data(
        train_url=prepared.train_url,
        val_url=prepared.val_url,
        train_rows=prepared.train_rows,
        val_rows=prepared.val_rows,
        columns={name: prepared.columns[name] for name in columns},
        batch_size=estimator.getBatchSize(),
        val_batch_size=estimator.getValBatchSize() or estimator.getBatchSize(),
        order_seed=seed,
        shuffle=estimator.getShuffle(),
        train_steps=estimator.getTrainStepsPerEpoch(),
        val_steps=estimator.getValidationStepsPerEpoch(),
        train_threads=estimator.getTrainReaderNumWorkers(),
        val_threads=estimator.getValReaderNumWorkers(),
        in_memory=estimator.getInmemoryCacheAll(),
    )


def loop_of(estimator: TorchParams) -> Loop:
    """How the training loop goes.

    Args:
        estimator: whose parameters count.
    """
    return Loop(
        epochs=estimator.getEpochs(),
        backward_passes=estimator.getBackwardPassesPerStep(),
        random_seed=estimator.getRandomSeed(),
        use_gpu=estimator.getUseGpu(),
        mp_start_method=estimator.getMpStartMethod(),
        precision=estimator.getPrecision(),
        clip_norm=estimator.getGradientClipNorm(),
        scheduler_interval=estimator.getLrSchedulerInterval(),
        early_stopping=estimator.getEarlyStopping(),
        best=estimator.getBestCheckpoint(),
        checkpoint_every=estimator.getCheckpointEvery(),
        compile=estimator.getCompile(),
        deterministic=estimator.getDeterministic(),
        max_steps=estimator.getMaxSteps(),
        max_time=estimator.getMaxTime(),
    )


def transformation_of(estimator: TorchParams) -> Transformation | None:
    """What becomes of rows before the model sees them.

    Args:
        estimator: whose parameters count.
    """
    function = estimator.getTransformationFn()
    if function is None:
        return None
    edits, removed = estimator.getTransformationEditFields(), estimator.getTransformationRemovedFields()
    return Transformation(function, edits or (), removed or ())
