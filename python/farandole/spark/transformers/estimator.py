# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TextClassifier` and `TextRegressor`: a checkpoint is fine-tuned on a column of text.

They are a `TorchEstimator` whose model, inputs and transformation follow from the checkpoint. The
network is made when the classes are known: after the rows are prepared, before workers start.
"""

# ruff: noqa: N802, SLF001 - Spark ML's manner; a fit has a copy of the estimator

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
import transformers

from farandole.spark.common.runs.digests import arrays_digest
from farandole.spark.common.runs.fingerprint import FingerprintPart
from farandole.spark.torch import driver_checks
from farandole.spark.torch.estimator import TorchEstimator
from farandole.spark.torch.loss_probe import needs_probe
from farandole.spark.transformers.adapters import add_adapter, describe_adapters
from farandole.spark.transformers.checkpoint import (
    LoadedNetwork,
    TextCheckpoint,
    open_checkpoint,
)
from farandole.spark.transformers.model import (
    TextClassifierModel,
    TextRegressorModel,
    create_tokenization,
)
from farandole.spark.transformers.networks import TextNetwork
from farandole.spark.transformers.params import TextParams
from farandole.spark.transformers.tokenization import TextTokenization, TruncationReporter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole.data.prepare import PreparedData as Prepared
    from farandole.runner.backend import Backend
    from farandole.spark.common.data.existing_data import ExistingDataPaths
    from farandole.spark.common.training_plan import FrameworkTrainingJob
    from farandole.spark.torch.columns.model_calls import ModelCall
    from farandole.spark.torch.estimator_base import SampledColumns

_DEFAULT_LEARNING_RATE = 5e-5
_WEIGHT_DECAY = 0.01
_MIN_CLASSES = 2
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
"""Parameters of `TorchEstimator` whose values follow from the checkpoint and the columns."""


class TextEstimator(TextParams, TorchEstimator):  # pyright: ignore[reportIncompatibleVariableOverride] - a function makes the optimizer
    """The base of the estimators that fine-tune a checkpoint on texts."""

    _own_loss: ClassVar[type[torch.nn.Module]]
    _network_kind: ClassVar[Any] = transformers.AutoModelForSequenceClassification
    _module_class: ClassVar[type[TextNetwork]] = TextNetwork
    _adapter_task: ClassVar[str] = "SEQ_CLS"

    # Attributes of the copy in a fit. Annotations would make them arguments of the constructor.
    _checkpoint = cast("Any", None)
    _optimizer_function = cast("Any", None)
    _optimizer = cast("Any", None)

    def _fit(self, dataset: Any) -> Any:
        with self._open_checkpoint_for_fit() as opened:
            return super(TextEstimator, opened)._fit(dataset)

    def _fit_on_parquet(
        self, dataset_idx: int | None = None, given: ExistingDataPaths | None = None
    ) -> Any:
        with self._open_checkpoint_for_fit() as opened:
            return super(TextEstimator, opened)._fit_on_parquet(dataset_idx, given)

    def _check_required_params(self) -> None:
        for name in ("checkpoint", "text_col", "label_col", "store"):
            if self.getOrDefault(name) is None:
                raise ValueError(f"{name} is required")

    @contextlib.contextmanager
    def _open_checkpoint_for_fit(self) -> Iterator[TextEstimator]:
        """Yields a copy that has a `TorchEstimator`'s parameters, while the checkpoint is open.

        Raises:
            ValueError: a parameter does not fit.
            FileNotFoundError: a file of the checkpoint is missing.
        """
        self._check_required_params()
        for name in _OWN_PARAMS:
            if self.isSet(name) and self.getOrDefault(name):
                raise ValueError(
                    f"{name} cannot be set: it follows from checkpoint, text_col and label_col"
                )
        if self.getLearningRate() is not None and self.isSet("optimizer"):
            raise ValueError("at most one of learning_rate and optimizer may be set")
        loss = self.getLoss() or self._own_loss()
        if needs_probe(loss, self.getLossReduction()):
            raise ValueError(
                "the form of this loss is unknown: set loss_reduction to what it returns for a "
                'batch, "mean", "sum" or "per_batch"'
            )
        with open_checkpoint(self.getCheckpoint()) as checkpoint:
            tokenization = self._create_tokenization(checkpoint)
            copied = self.copy()
            copied._checkpoint = checkpoint
            copied._optimizer_function = copied.getOrDefault("optimizer") or partial(
                torch.optim.AdamW,
                lr=self.getLearningRate() or _DEFAULT_LEARNING_RATE,
                weight_decay=_WEIGHT_DECAY,
            )
            copied.setParams(
                feature_cols=[self.getTextCol()],
                label_cols=[self.getLabelCol()],
                categories=self._label_categories(),
                loss=loss,
                transformation_fn=tokenization,
                input_dtypes=["int64"],
                callbacks=[*self.getCallbacks(), TruncationReporter(tokenization)],
            )
            # The checks before the rows are prepared need a model and its optimizer. These stand
            # for the network, which is made when the classes of the label are known.
            stand_in = torch.nn.Linear(1, 1)
            copied.setParams(model=stand_in)
            copied._optimizer = torch.optim.SGD(stand_in.parameters())
            yield copied

    def _create_tokenization(self, checkpoint: TextCheckpoint) -> TextTokenization:
        """Returns the function that makes tokens."""
        return create_tokenization(self, checkpoint, has_fixed_length=self.getInmemoryCacheAll())

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

    def _label_categories(self) -> dict[str, Any]:
        """Returns the parameter `categories` with the label."""
        return self.getCategories()

    def _network_changes(self, prepared: Prepared) -> dict[str, Any]:
        """Returns the values of the network's configuration that the label decides.

        Args:
            prepared: the rows.
        """
        raise NotImplementedError

    def _create_framework_job(self, prepared: Prepared, backend: Backend) -> FrameworkTrainingJob:
        checkpoint: TextCheckpoint = self._checkpoint
        seed = self.getRandomSeed() or 0
        loaded = checkpoint.load_network(
            self._network_kind, seed, **self._network_changes(prepared)
        )
        network, lora = loaded.network, self.getLora()
        if lora is not None:
            network = add_adapter(loaded, lora, seed, checkpoint.path, self._adapter_task)
        has_adapter = lora is not None
        self._set_network(
            self._module_class(network, checkpoint.padding_id, has_adapter=has_adapter)
        )
        driver_checks.check_optimizer(self.getModel(), self.getOptimizer())
        plan = super()._create_framework_job(prepared, backend)
        messages = [*plan.messages, *_describe_beginning(loaded, self.getModel())]
        return replace(plan, messages=tuple(messages))

    def _framework_fingerprint_parts(self) -> list[FingerprintPart]:
        parts, network = super()._framework_fingerprint_parts(), self.getModel()
        if not isinstance(network, TextNetwork) or not network.has_adapter:
            return parts
        digest = arrays_digest(network.frozen_weights())
        return [
            *parts,
            FingerprintPart("frozen weights", digest, digest[:8]),
            FingerprintPart.from_value("lora", describe_adapters(network.network)),
        ]

    def _sample_columns(self, prepared: Prepared, backend: Backend) -> SampledColumns:
        sampled = super()._sample_columns(prepared, backend)
        # Batches differ in length.
        inputs = tuple(replace(one, ragged=True) for one in sampled.inputs)
        return replace(sampled, inputs=inputs)

    def _class_changing_options(self) -> tuple[str, ...]:
        return ()  # tokens are made of the text alone

    def _model_params(
        self, call: ModelCall, inputs: Any, form: str | None = None
    ) -> dict[str, Any]:
        tokenization = self.getTransformationFn()
        return super()._model_params(call, inputs, form) | {
            "apply_transformation": True,
            "transformation_fn": replace(tokenization, has_fixed_length=False),
            "text_col": self.getTextCol(),
            "max_length": tokenization.max_length,
            "length_multiple": self.getLengthMultiple(),
            "tokenizer_files": self._checkpoint.tokenizer_files(),
        }


class TextClassifier(TextEstimator):
    """An estimator that fine-tunes a checkpoint to classify texts.

        TextClassifier(checkpoint="/models/bert", text_col="review", label_col="stars", epochs=2,
                       num_proc=4, store="/data/farandole").fit(df)

    The texts are tokenized in the training processes, batch by batch. The label may hold words,
    integers or booleans; its values are the classes, and their names are in the configuration of
    the fitted network. All other parameters are parameters of `TorchEstimator`, except parameters
    that follow from the checkpoint, such as `model` and `feature_cols`.

    The fitted `TextClassifierModel` adds the columns `<label>__output` (logits),
    `<label>__probability` and `<label>__predicted`, the name of the class, unless
    `probabilityCol` and `predictedLabelCol` say otherwise.
    """

    _own_loss = torch.nn.CrossEntropyLoss

    def get_model_class(self) -> type[TextClassifierModel]:
        """Returns the class of the fitted model."""
        return TextClassifierModel

    def _label_categories(self) -> dict[str, Any]:
        return {self.getLabelCol(): None, **self.getCategories()}

    def _network_changes(self, prepared: Prepared) -> dict[str, Any]:
        label = self.getLabelCol()
        names = [str(one) for one in prepared.categories[label]]
        if len(names) < _MIN_CLASSES:
            raise ValueError(
                f"label column {label!r} has one class, {', '.join(names)}: a classifier needs two"
            )
        return {
            "num_labels": len(names),
            "id2label": dict(enumerate(names)),
            "label2id": {name: index for index, name in enumerate(names)},
            "problem_type": "single_label_classification",
        }

    def _model_params(
        self, call: ModelCall, inputs: Any, form: str | None = None
    ) -> dict[str, Any]:
        label = self.getLabelCol()
        columns = {
            "probabilityCol": f"{label}__probability",
            "predictedLabelCol": f"{label}__predicted",
        }
        chosen = {name: one for name, one in columns.items() if not self.isSet(name)}
        return super()._model_params(call, inputs, form) | chosen


class TextRegressor(TextEstimator):
    """An estimator that fine-tunes a checkpoint to predict a number from a text.

    Its parameters are the parameters of `TextClassifier`; the label is a column of numbers. The
    fitted `TextRegressorModel` adds the column `<label>__output`.
    """

    _own_loss = torch.nn.MSELoss

    def get_model_class(self) -> type[TextRegressorModel]:
        """Returns the class of the fitted model."""
        return TextRegressorModel

    def _network_changes(self, prepared: Prepared) -> dict[str, Any]:
        label = self.getLabelCol()
        if np.dtype(prepared.columns[label].dtype).kind not in "biuf":
            raise ValueError(f"label column {label!r} has no numbers, which a regressor learns")
        return {
            "num_labels": 1,
            "id2label": {0: label},
            "label2id": {label: 0},
            "problem_type": "regression",
        }


def _describe_beginning(loaded: LoadedNetwork, network: TextNetwork) -> Iterator[str]:
    """Yields sentences about the weights with which a fit begins."""
    if loaded.random_layers:
        names = ", ".join(loaded.random_layers)
        yield f"the checkpoint has no weights of {names}: they are random"
    if loaded.head_message:
        yield loaded.head_message
    if network.has_adapter:
        counts = [
            (parameter.numel(), parameter.requires_grad)
            for name, parameter in network.named_parameters()
            if ".original_module." not in name  # PEFT's copy of a layer that is trained
        ]
        trained = sum(size for size, is_trained in counts if is_trained)
        total = sum(size for size, _ in counts)
        yield f"{trained:,} of {total:,} parameters are trained ({trained / total:.1%})"
