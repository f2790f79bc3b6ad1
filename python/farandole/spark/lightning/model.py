# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TorchModel` of Lightning's estimator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole.spark.torch.model import TorchModel as PlainTorchModel

if TYPE_CHECKING:
    from collections.abc import Callable


class TorchModel(PlainTorchModel):
    """A model that adds predictions of the module's `forward` to DataFrames, like
    `farandole.spark.torch.TorchModel`.

    A subclass that overrides `get_prediction_fn` predicts in its own way, batch by batch.
    """

    def get_prediction_fn(self) -> Callable[..., Any]:
        """Returns the function that predicts: it takes the module and its inputs, and returns the
        outputs.

        The inputs are tensors as in `fit`, one per entry of `feature_columns`, rows first.
        """
        return _call_module

    def _custom_prediction_fn(self) -> Callable[..., Any] | None:
        function = self.get_prediction_fn()
        return None if function is _call_module else function


def _call_module(module: Any, *inputs: Any) -> Any:
    return module(*inputs)
