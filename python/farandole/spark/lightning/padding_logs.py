# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Removes the values that a module logs for a batch of padding.

Every rank has the same number of steps, so a rank without a row in the last step repeats one. The
module computes on it as on any other batch. Afterwards, logged values and the states of
torchmetrics get their values from before the batch.
"""

from __future__ import annotations

import copy
from typing import Any


class LoggedValuesBeforePadding:
    """The logged values from before a batch of padding.

    Args:
        trainer: Lightning's.
    """

    def __init__(self, trainer: Any) -> None:
        self._results = trainer._results  # noqa: SLF001 - there is no public API for logged values
        self._values = {key: _result_state(result) for key, result in (self._results or {}).items()}
        self._metrics = [
            (metric, copy.deepcopy(metric.metric_state))
            for metric in trainer.lightning_module.modules()
            if hasattr(metric, "metric_state")
        ]

    def restore(self) -> None:
        """Removes the values that were logged since this object was created."""
        for key, result in (self._results or {}).items():
            if not result.is_tensor:
                continue
            if key in self._values:
                for name, value in self._values[key].items():
                    setattr(result, name, value)
            elif result.meta.is_mean_reduction and result.meta.sync.should:
                # The mean over ranks has no part of this rank, which has logged nothing else.
                result.value = result.value * 0.0
                result.cumulated_batch_size = result.cumulated_batch_size * 0
        for metric, state in self._metrics:
            for name, value in state.items():
                setattr(metric, name, value)


def _result_state(result: Any) -> dict[str, Any]:
    if not result.is_tensor:
        return {}
    names = ("value", "cumulated_batch_size")
    return {name: getattr(result, name).clone() for name in names if hasattr(result, name)}
