# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The base of estimators whose network is made when the classes of the label are known: after the
rows are prepared, before workers start.
"""

# ruff: noqa: N802, SLF001 - Spark ML's manner; a fit has a copy of the estimator

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch

from farandole.common import argument_checks
from farandole.spark.common.parameter import DeclaredParams, Parameter
from farandole.spark.torch.estimator import TorchEstimator
from farandole.spark.torch.loss_probe import needs_probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from farandole.spark.common.data.existing_data import ExistingDataPaths

_OWN_PARAMS = (
    "model",
    "feature_cols",
    "label_cols",
    "label_shapes",
    "input_shapes",
    "input_dtypes",
    "output",
    "ragged",
    "loss_constructors",
    "transformation_fn",
    "transformation_edit_fields",
    "transformation_removed_fields",
    "train_minibatch_fn",
    "data_module",
)
"""Parameters of `TorchEstimator` whose values follow from the network and the columns."""


def _check_lora(name: str, value: Any) -> Any:
    """Returns the rank of adapters, or a `LoraConfig` of PEFT."""
    if find_spec("peft") is None:
        raise ValueError(f"{name} needs the package peft: pip install peft")
    import peft  # noqa: PLC0415 - it takes seconds, and few fits need it

    if isinstance(value, peft.LoraConfig):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a rank, such as 8, or a LoraConfig of peft: {value!r}")
    return argument_checks.check_whole_number(name, value)


def _check_optimizer_function(name: str, value: Any) -> Any:
    if not callable(value):
        raise TypeError(
            f"{name} must be a function of the trainable parameters that returns an optimizer, "
            f"such as torch.optim.AdamW or a partial of it: {value!r}"
        )
    return value


class FineTuningParams(DeclaredParams):
    """The parameters of estimators that fine-tune a network."""

    label_col: Parameter[str] = Parameter(
        "Column of labels.", argument_checks.check_nonempty_text, default=None
    )
    learning_rate: Parameter[float] = Parameter(
        "Learning rate of one process, without `optimizer`: of AdamW with a weight decay of 0.01.",
        argument_checks.check_positive_number,
        default=None,
    )
    optimizer: Parameter[  # pyright: ignore[reportIncompatibleVariableOverride]
        Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]
    ] = Parameter(
        "Function of the trainable parameters that returns an optimizer, such as "
        "`partial(torch.optim.AdamW, lr=2e-5)`.",
        _check_optimizer_function,
        default=None,
    )
    lora: Parameter[Any] = Parameter(
        "Trains adapters and the weights that the checkpoint lacks, and no others: the rank of the "
        "adapters, or a `LoraConfig` of PEFT.",
        _check_lora,
        default=None,
    )


class FineTuningEstimator(FineTuningParams, TorchEstimator):  # pyright: ignore[reportIncompatibleVariableOverride] - a function makes the optimizer
    """The base of estimators that make their network in a fit. A subclass implements
    `_prepare_fit`, and calls `_set_network` in `_create_framework_job`.
    """

    _required_params: ClassVar[tuple[str, ...]]
    """Names of the parameters that must be set."""
    _own_loss: ClassVar[type[torch.nn.Module]]

    # Attributes of the copy in a fit. Annotations would make them arguments of the constructor.
    _optimizer_function = cast("Any", None)
    _optimizer = cast("Any", None)

    def _prepare_fit(self) -> contextlib.AbstractContextManager[None]:
        """Sets the parameters of `TorchEstimator` and `_optimizer_function`. The copy of the
        estimator in a fit calls it, and fits in its context.
        """
        raise NotImplementedError

    def _fit(self, dataset: Any) -> Any:
        with self._copy_for_fit() as copied:
            return super(FineTuningEstimator, copied)._fit(dataset)

    def _fit_on_parquet(
        self, dataset_idx: int | None = None, given: ExistingDataPaths | None = None
    ) -> Any:
        with self._copy_for_fit() as copied:
            return super(FineTuningEstimator, copied)._fit_on_parquet(dataset_idx, given)

    @contextlib.contextmanager
    def _copy_for_fit(self) -> Iterator[Self]:
        """Yields a copy that has a `TorchEstimator`'s parameters.

        Raises:
            ValueError: a parameter does not fit.
        """
        for name in self._required_params:
            if self.getOrDefault(name) is None:
                raise ValueError(f"{name} is required")
        for name in _OWN_PARAMS:
            if self.isSet(name) and self.getOrDefault(name):
                raise ValueError(
                    f"{name} cannot be set: it follows from the network and the columns"
                )
        if self.getLearningRate() is not None and self.isSet("optimizer"):
            raise ValueError("at most one of learning_rate and optimizer may be set")
        loss = self.getLoss() or self._own_loss()
        if needs_probe(loss, self.getLossReduction()):
            raise ValueError(
                "the form of this loss is unknown: set loss_reduction to what it returns for a "
                'batch, "mean", "sum" or "per_batch"'
            )
        copied = self.copy()
        with copied._prepare_fit():
            # The checks before the rows are prepared need a model and its optimizer. These stand
            # for the network, which is made when the classes of the label are known.
            stand_in = torch.nn.Linear(1, 1)
            copied.setParams(model=stand_in, loss=loss)
            copied._optimizer = torch.optim.SGD(stand_in.parameters())
            yield copied

    def _set_network(self, network: torch.nn.Module) -> None:
        """Sets the model, and creates the optimizer of its trainable parameters."""
        self.setParams(model=network)
        trained = [one for one in network.parameters() if one.requires_grad]
        self._optimizer = self._optimizer_function(trained)

    def _get_optimizer(self) -> Any:
        return self.getOrDefault("optimizer") if self._optimizer is None else self._optimizer

    def getOptimizer(self) -> Any:
        """Returns the optimizer in a fit, else the value of `optimizer`."""
        return self._get_optimizer()
