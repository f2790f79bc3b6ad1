# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The base of estimators whose network is made when the classes of the label are known: after the
rows are prepared, before workers start.
"""

# ruff: noqa: N802, SLF001 - Spark ML's manner; a fit has a copy of the estimator

from __future__ import annotations

import contextlib
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch

from farandole.common import argument_checks
from farandole.spark.common.parameter import DeclaredParams, Parameter
from farandole.spark.common.runs.digests import arrays_digest
from farandole.spark.common.runs.fingerprint import FingerprintPart
from farandole.spark.torch.estimator import TorchEstimator
from farandole.spark.torch.loss_probe import needs_probe
from farandole.spark.torch.saving.frozen_weights import PartlyFrozenNetwork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from farandole.data.prepare import PreparedData as Prepared
    from farandole.spark.common.data.existing_data import ExistingDataPaths

_WEIGHT_DECAY = 0.01
_MIN_CLASSES = 2
_NEUTRAL_ADAPTER_VALUES = ("base_model_name_or_path", "peft_version", "inference_mode")
"""Values of a configuration of PEFT that do not change the result."""

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
    _network_sources: ClassVar[str]
    """Parameters from which the parameters of `TorchEstimator` follow, for messages."""
    _own_loss: ClassVar[type[torch.nn.Module]]
    _makes_network = True

    # Attributes of the copy in a fit. Annotations would make them arguments of the constructor.
    _optimizer_function = cast("Any", None)
    _optimizer = cast("Any", None)

    def _prepare_fit(self) -> contextlib.AbstractContextManager[None]:
        """Sets the parameters of `TorchEstimator` and `_optimizer_function`. The copy of the
        estimator in a fit calls it, and fits in its context.
        """
        raise NotImplementedError

    def _check_required_params(self) -> None:
        for name in self._required_params:
            if self.getOrDefault(name) is None:
                raise ValueError(f"{name} is required")

    def _fit(self, dataset: Any) -> Any:
        with self._open_checkpoint_for_fit() as copied:
            return super(FineTuningEstimator, copied)._fit(dataset)

    def _fit_on_parquet(
        self, dataset_idx: int | None = None, given: ExistingDataPaths | None = None
    ) -> Any:
        with self._open_checkpoint_for_fit() as copied:
            return super(FineTuningEstimator, copied)._fit_on_parquet(dataset_idx, given)

    @contextlib.contextmanager
    def _open_checkpoint_for_fit(self) -> Iterator[Self]:
        """Yields a copy that has a `TorchEstimator`'s parameters, while the checkpoint is open.

        Raises:
            ValueError: a parameter does not fit.
        """
        self._check_required_params()
        for name in _OWN_PARAMS:
            if self.isSet(name) and self.getOrDefault(name):
                raise ValueError(f"{name} cannot be set: it follows from {self._network_sources}")
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

    def _choose_optimizer(self, learning_rate: float) -> None:
        """Sets the function that creates the optimizer.

        Args:
            learning_rate: used unless the user chose one.
        """
        self._optimizer_function = self.getOrDefault("optimizer") or partial(
            torch.optim.AdamW,
            lr=self.getLearningRate() or learning_rate,
            weight_decay=_WEIGHT_DECAY,
        )

    def _class_names(self, prepared: Prepared) -> list[str]:
        """Returns the names of the classes.

        Args:
            prepared: the rows.

        Raises:
            ValueError: there is one class.
        """
        label = self.getLabelCol()
        names = [str(one) for one in prepared.categories[label]]
        if len(names) < _MIN_CLASSES:
            raise ValueError(
                f"label column {label!r} has one class, {', '.join(names)}: a classifier needs two"
            )
        return names

    def _class_columns(self) -> dict[str, str]:
        """Returns the names of the fitted model's columns of classes that the user did not set."""
        label = self.getLabelCol()
        columns = {
            "probabilityCol": f"{label}__probability",
            "predictedLabelCol": f"{label}__predicted",
        }
        return {name: one for name, one in columns.items() if not self.isSet(name)}

    def _framework_fingerprint_parts(self) -> list[FingerprintPart]:
        parts, network = super()._framework_fingerprint_parts(), self.getModel()
        frozen = network.frozen_weights() if isinstance(network, PartlyFrozenNetwork) else {}
        if not frozen:
            return parts
        digest = arrays_digest(frozen)
        parts = [*parts, FingerprintPart("frozen weights", digest, digest[:8])]
        if network.has_adapter:
            parts.append(FingerprintPart.from_value("lora", describe_adapters(network.network)))
        return parts

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


def describe_adapters(network: Any) -> dict[str, Any]:
    """Returns the values that decide the result of adapters besides their weights, by name.

    Args:
        network: a network with adapters of PEFT.
    """
    (config,) = network.peft_config.values()
    plain = config.to_dict()
    return {name: plain[name] for name in sorted(plain) if name not in _NEUTRAL_ADAPTER_VALUES}


def describe_trained_share(network: torch.nn.Module) -> tuple[str, ...]:
    """Returns a sentence about the share of parameters that are trained; none if all are.

    Args:
        network: the network, perhaps with adapters.
    """
    counts = [
        (parameter.numel(), parameter.requires_grad)
        for name, parameter in network.named_parameters()
        if ".original_module." not in name  # PEFT's copy of a layer that is trained
    ]
    total = sum(size for size, _ in counts)
    trained = sum(size for size, is_trained in counts if is_trained)
    if trained == total:
        return ()
    return (f"{trained:,} of {total:,} parameters are trained ({trained / total:.1%})",)
