# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fitted models of text: tokens are made of the texts in the tasks that predict.

A saved model contains a checkpoint in the layout of Hugging Face and plain parameters. Loading it
runs no code of the file.
"""

# ruff: noqa: N802 - Spark ML's manner

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import transformers

from farandole.common import argument_checks
from farandole.spark.common.parameter import Parameter
from farandole.spark.common.saving.persistence import ParamsReader, ParamsWriter
from farandole.spark.torch.fine_tuned_model import (
    FineTunedModel,
    pack_pretrained_files,
    unpack_pretrained_files,
)
from farandole.spark.transformers.checkpoint import (
    TextCheckpoint,
    count_positions,
    open_checkpoint,
    quiet_transformers,
)
from farandole.spark.transformers.networks import TextNetwork
from farandole.spark.transformers.params import TextColumnParams
from farandole.spark.transformers.tokenization import TextTokenization

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

_OBJECT_PARAMS = (
    "model",
    "optimizer",
    "loss",
    "loss_constructors",
    "transformation_fn",
    "tokenizer_files",
    "checkpoint",
)
"""Parameters that are no plain values. A saved model has a checkpoint instead."""


def create_tokenization(
    params: TextColumnParams, checkpoint: TextCheckpoint, *, has_fixed_length: bool = False
) -> TextTokenization:
    """Returns the function that makes tokens of a column of texts.

    Args:
        params: names the column and the lengths.
        checkpoint: has the tokenizer.
        has_fixed_length: whether every batch has `max_length` tokens a row.

    Raises:
        ValueError: the network takes fewer tokens than `max_length`.
    """
    return TextTokenization(
        text_col=params.getTextCol(),
        tokenizer=checkpoint.tokenizer.backend_tokenizer.to_str(),
        max_length=checkpoint.resolve_max_length(params.getMaxLength()),
        truncation_side=checkpoint.tokenizer.truncation_side,
        length_multiple=params.getLengthMultiple(),
        has_fixed_length=has_fixed_length,
    )


class TextModelWriter(ParamsWriter):
    """A writer of a model of text."""

    def split_plain_and_packed(
        self, values: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Like `ParamsWriter.split_plain_and_packed`; a part for each file of a checkpoint."""
        plain = {name: value for name, value in values.items() if name not in _OBJECT_PARAMS}
        return plain, pack_pretrained_files(cast("TextModel", self.instance))


class TextModelReader(ParamsReader["TextModel"]):
    """A reader of a model of text."""

    def restore_packed_parts(self, loaded: TextModel, parts: dict[str, bytes], path: str) -> None:
        """Like `ParamsReader.restore_packed_parts`; runs no code of the file."""
        del path
        with (
            unpack_pretrained_files(parts) as directory,
            open_checkpoint(directory, self.allowed) as checkpoint,
        ):
            loaded.use_checkpoint(checkpoint)


class TextModel(TextColumnParams, FineTunedModel):
    """The base of models that take a column of texts."""

    tokenizer_files: Parameter[Mapping[str, str]] = Parameter(
        "Files of the tokenizer, text by name.", argument_checks.accept_any_value, default=None
    )
    batch_size: Parameter[int] = Parameter(
        "Largest number of texts that are predicted at once.",
        argument_checks.make_minimum_check(1),
        default=64,
    )

    _writer_class = TextModelWriter
    _network_class: ClassVar[Any] = transformers.AutoModelForSequenceClassification
    _uses_pooler: ClassVar[bool] = True
    """Whether outputs depend on the layer that transformers puts behind the first token."""

    @classmethod
    def read(cls) -> TextModelReader:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the reader, which runs no code of the file."""
        return TextModelReader(cls)

    def use_checkpoint(self, checkpoint: TextCheckpoint) -> None:
        """Takes network and tokenizer of a checkpoint.

        Args:
            checkpoint: has all weights.

        Raises:
            ValueError: it lacks some.
        """
        loaded = checkpoint.load_network(self._network_class, seed=0)
        missing = [
            name for name in loaded.random_layers if self._uses_pooler or "pooler" not in name
        ]
        if missing:
            raise ValueError(
                f"the checkpoint {checkpoint.name} has no weights of {', '.join(missing)}"
            )
        self.setParams(
            model=self._wrap_network(loaded.network, checkpoint.padding_id),
            tokenizer_files=checkpoint.tokenizer_files(),
            transformation_fn=self._create_tokenization(checkpoint),
        )

    def _create_tokenization(self, checkpoint: TextCheckpoint) -> TextTokenization:
        """Returns the function that makes tokens."""
        return create_tokenization(self, checkpoint)

    def getTransformationFn(self) -> Any:
        """Returns the function that makes tokens, with the column and the lengths that are set.

        Raises:
            ValueError: the network takes fewer tokens than `max_length`.
        """
        function = self.getOrDefault("transformation_fn")
        if not isinstance(function, TextTokenization):
            return function
        length = self.getMaxLength() or function.max_length
        if length > function.max_length:
            module = self.getModel()
            limit = count_positions(module.network.config, module.padding_id)
            if limit is not None and length > limit:
                raise ValueError(f"max_length={length} is more than the model takes: {limit}")
        return replace(
            function,
            text_col=self.getTextCol(),
            max_length=length,
            length_multiple=self.getLengthMultiple(),
        )

    def getFeatureColumns(self) -> list[str] | None:
        """Returns the column of texts."""
        return None if self.getTextCol() is None else [self.getTextCol()]

    def _wrap_network(self, network: Any, padding_id: int) -> Any:
        """Returns the module that takes tokens as one tensor."""
        return TextNetwork(network, padding_id)

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes network and tokenizer in the layout of Hugging Face, for `from_pretrained`.
        Adapters are merged into the weights of the files; the model keeps them apart.

        Args:
            directory: on this host; it is made if it does not exist.

        Raises:
            ValueError: there is no model.
        """
        network = self._merged_network()
        Path(directory).mkdir(parents=True, exist_ok=True)
        with quiet_transformers():
            network.save_pretrained(directory)
        for name, text in (self.getTokenizerFiles() or {}).items():
            (Path(directory) / Path(name).name).write_text(text, "utf-8")

    def to_onnx(self, *_: Any, **__: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raises an error, because tokens are no columns.

        Raises:
            ValueError: always; the message says what to do.
        """
        raise ValueError(
            "a model of text takes tokens, which are no columns: write it with save_pretrained, "
            "and export the network from there"
        )

    def export(self, *_: Any, **__: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raises an error, because tokens are no columns.

        Raises:
            ValueError: always; the message says what to do.
        """
        self.to_onnx()

    @classmethod
    def from_mlflow(cls, uri: str, *, allow_pickle: bool | None = None) -> Self:
        """Raises an error, because MLflow has no tokenizer of the model.

        Args:
            uri: address of the model in MLflow.
            allow_pickle: as for other models.

        Raises:
            ValueError: always; the message says what to do.
        """
        del allow_pickle
        raise ValueError(
            f"{uri} has no tokenizer: save a model of text with write().save(path), and load it "
            f"with {cls.__name__}.load(path)"
        )


class CheckpointTextModel(TextModel):
    """The base of models that a checkpoint makes without training, at the first `transform`."""

    _opened_with = cast("Any", None)
    """Checkpoint and `max_length` at the time when the checkpoint was read."""

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Like `TextModel.save_pretrained`. It reads the checkpoint if no `transform` has.

        Args:
            directory: as there.

        Raises:
            ValueError: there is no checkpoint.
        """
        self._open_changed_checkpoint()
        super().save_pretrained(directory)

    def _open_changed_checkpoint(self) -> None:
        """Reads the checkpoint unless its network is here."""
        given = self.getCheckpoint(), self.getMaxLength()
        if self.getCheckpoint() is None:
            if self.getModel() is None:
                raise ValueError("checkpoint is required")
        elif self.getModel() is None or self._opened_with != given:
            with open_checkpoint(self.getCheckpoint()) as checkpoint:
                self.use_checkpoint(checkpoint)
            self._opened_with = given


class TextClassifierModel(TextModel):
    """A fitted `TextClassifier`: `transform` adds logits, probabilities and names of classes."""


class TextRegressorModel(TextModel):
    """A fitted `TextRegressor`: `transform` adds the predicted numbers."""
