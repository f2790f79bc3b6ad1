# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TextClassifier` and `TextRegressor`: a checkpoint is fine-tuned on a column of text.

They are a `TorchEstimator` whose model, inputs and transformation follow from the checkpoint. The
network is made when the classes are known: after the rows are prepared, before workers start.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
import transformers

from farandole.spark.torch import driver_checks
from farandole.spark.torch.fine_tuning import FineTuningEstimator, describe_trained_share
from farandole.spark.transformers.adapters import add_adapter
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
    from farandole.spark.common.training_plan import FrameworkTrainingJob
    from farandole.spark.torch.columns.model_calls import ModelCall
    from farandole.spark.torch.estimator_base import SampledColumns

_DEFAULT_LEARNING_RATE = 5e-5


class TextEstimator(TextParams, FineTuningEstimator):  # pyright: ignore[reportIncompatibleVariableOverride] - a function makes the optimizer
    """The base of the estimators that fine-tune a checkpoint on texts."""

    _required_params: ClassVar[tuple[str, ...]] = ("checkpoint", "text_col", "label_col", "store")
    _network_sources: ClassVar[str] = "checkpoint, text_col and label_col"
    _network_kind: ClassVar[Any] = transformers.AutoModelForSequenceClassification
    _module_class: ClassVar[type[TextNetwork]] = TextNetwork
    _adapter_task: ClassVar[str] = "SEQ_CLS"

    # An attribute of the copy in a fit. An annotation would make it an argument of the constructor.
    _checkpoint = cast("Any", None)

    @contextlib.contextmanager
    def _prepare_fit(self) -> Iterator[None]:
        """Like `FineTuningEstimator._prepare_fit`, while the checkpoint is open.

        Raises:
            ValueError: a parameter does not fit.
            FileNotFoundError: a file of the checkpoint is missing.
        """
        with open_checkpoint(self.getCheckpoint()) as checkpoint:
            tokenization = self._create_tokenization(checkpoint)
            self._checkpoint = checkpoint
            self._choose_optimizer(_DEFAULT_LEARNING_RATE)
            self.setParams(
                feature_cols=[self.getTextCol()],
                label_cols=[self.getLabelCol()],
                categories=self._label_categories(),
                transformation_fn=tokenization,
                input_dtypes=["int64"],
                callbacks=[*self.getCallbacks(), TruncationReporter(tokenization)],
            )
            yield

    def _create_tokenization(self, checkpoint: TextCheckpoint) -> TextTokenization:
        """Returns the function that makes tokens."""
        return create_tokenization(self, checkpoint, has_fixed_length=self.getInmemoryCacheAll())

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
        names = self._class_names(prepared)
        return {
            "num_labels": len(names),
            "id2label": dict(enumerate(names)),
            "label2id": {name: index for index, name in enumerate(names)},
            "problem_type": "single_label_classification",
        }

    def _model_params(
        self, call: ModelCall, inputs: Any, form: str | None = None
    ) -> dict[str, Any]:
        return super()._model_params(call, inputs, form) | self._class_columns()


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
    yield from describe_trained_share(network)
