# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TextGenerator`: a language model that continues the texts of a column, and measures texts."""

# ruff: noqa: N802, SLF001 - Spark ML's manner; a prediction has a copy of the model

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import transformers
from pyspark.sql.types import DataType, DoubleType, StringType

from farandole.common import argument_checks
from farandole.data.columns import ColumnRoles, check_columns_present
from farandole.data.lazy_pyarrow import pa
from farandole.spark.common.model.output_columns import add_predictions
from farandole.spark.common.parameter import Parameter
from farandole.spark.torch.predict import TorchPredictor
from farandole.spark.torch.random_numbers import hold_random_numbers
from farandole.spark.transformers.causal_network import (
    CausalNetwork,
    check_network,
    find_end_tokens,
)
from farandole.spark.transformers.causal_tokenization import (
    CausalTokenization,
    find_special_tokens,
)
from farandole.spark.transformers.checkpoint import count_positions
from farandole.spark.transformers.model import CheckpointTextModel, create_tokenization
from farandole.spark.transformers.params import ROW_CLASS_PARAMS
from farandole.spark.transformers.text_functions import TextFunctionModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from pyspark.sql import DataFrame

    from farandole.spark.transformers.checkpoint import TextCheckpoint
    from farandole.spark.transformers.params import TextColumnParams

_OWN_GENERATION_OPTIONS = (
    "max_new_tokens", "max_length", "eos_token_id", "pad_token_id", "num_return_sequences",
    "return_dict_in_generate", "streamer", "input_ids", "inputs", "attention_mask",
)  # fmt: skip
"""Arguments of `generate` that follow from the model and its other parameters."""


def create_causal_tokenization(
    params: TextColumnParams,
    checkpoint: TextCheckpoint,
    answer_col: str | None,
    *,
    has_fixed_length: bool = False,
) -> CausalTokenization:
    """Returns the function that makes tokens of texts, or of prompts and answers.

    Args:
        params: names the column and the lengths.
        checkpoint: has the tokenizer.
        answer_col: column of answers; `None` if there are none.
        has_fixed_length: whether every batch has `max_length` tokens a row.

    Raises:
        ValueError: the network takes fewer tokens than `max_length`.
    """
    plain = create_tokenization(params, checkpoint, has_fixed_length=has_fixed_length)
    special = find_special_tokens(checkpoint.tokenizer)
    return CausalTokenization(
        **plain.__getstate__(),
        answer_col=answer_col,
        start_tokens=special.start_tokens,
        end_tokens=special.end_tokens,
        start_id=special.start_id,
    )


def _check_generation(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(
            f"{name} must be a dict of arguments of transformers' generate, such as "
            f"{{'do_sample': True}}: {value!r}"
        )
    taken = [option for option in value if option in _OWN_GENERATION_OPTIONS]
    if taken:
        raise ValueError(
            f"{name} cannot have {', '.join(taken)}, which follows from the model and its other "
            "parameters"
        )
    return dict(value)


@dataclass(frozen=True, kw_only=True)
class CausalPredictor(TorchPredictor):
    """A language model in tasks."""

    max_new_tokens: int
    prompt_room: int
    """Largest number of tokens of a prompt."""
    generation: dict[str, Any]
    """Arguments of transformers' `generate`."""
    generates: bool
    """Whether texts are continued."""
    measures: bool
    """Whether the perplexity of texts is computed."""
    answer_col: str | None = None
    """Column of answers whose perplexity is computed, given the prompts."""
    start_id: int | None = None
    """Id of the token with which an empty prompt begins."""

    def predict_batches(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields every batch with generated texts, perplexities, or both.

        Args:
            batches: with the column of texts and any others.
        """
        for batch in batches:
            columns: list[pa.Array] = []
            prompts = self._read_column(batch, self.groups[0][0])
            if self.generates:
                columns.append(pa.array(self.generate_texts(prompts), pa.string()))
            if self.measures:
                answers = (
                    None if self.answer_col is None else self._read_column(batch, self.answer_col)
                )
                measured = self.measure_perplexities(prompts, answers)
                columns.append(pa.array(measured, pa.float64()))
            names = [*batch.schema.names, *(f"output{index}" for index in range(len(columns)))]
            yield pa.RecordBatch.from_arrays([*batch.columns, *columns], names=names)

    def generate_texts(self, prompts: list[str]) -> list[str]:
        """Returns the continuation of each prompt.

        Args:
            prompts: texts.

        Raises:
            ValueError: a prompt has no token, and the tokenizer has none for the beginning.
        """
        rows = self._tokenization.tokenize_prompts(prompts, self.prompt_room)
        if self.start_id is not None:
            rows = [row or [self.start_id] for row in rows]
        if not all(rows):
            raise ValueError(
                f"column {self.groups[0][0]!r} has a prompt without tokens, such as an empty text, "
                "and the tokenizer has no token for the beginning of a text"
            )
        made: list[list[int]] = [[] for _ in rows]
        for chosen in self._batches_by_length([len(row) for row in rows]):
            found = self._generate_tokens([rows[index] for index in chosen])
            for index, ids in zip(chosen, found, strict=True):
                made[index] = ids
        return self._tokenization.decode_tokens(made)

    def measure_perplexities(
        self, texts: list[str], answers: list[str] | None
    ) -> list[float | None]:
        """Returns the perplexity of each text, or of each answer given its prompt; `None` for one
        without a token that has a token before it.

        Args:
            texts: texts, or prompts.
            answers: the answers, or `None`.
        """
        lengths = [
            len(text) + (0 if answers is None else len(answers[row]))
            for row, text in enumerate(texts)
        ]
        made: list[float | None] = [None] * len(texts)
        name = self.groups[0][0]
        for chosen in self._batches_by_length(lengths):
            some = [texts[index] for index in chosen]
            tokens = (
                self._tokenization.tokenize_texts(some)
                if answers is None
                else self._tokenization.tokenize_answers(some, [answers[index] for index in chosen])
            )
            (losses,) = self.call_model(self._find_model(), {name: tokens}, len(some))
            counts = (tokens[:, 1:] >= 0).sum(axis=1)
            for index, total, count in zip(chosen, losses.sum(axis=1), counts, strict=True):
                if count:
                    # Beyond the largest number of float64, the perplexity is infinite.
                    with np.errstate(over="ignore"):
                        made[index] = float(np.exp(np.float64(total / count)))
        return made

    def _batches_by_length(self, lengths: list[int]) -> Iterator[list[int]]:
        """Yields the numbers of rows of about the same length, at most `batch_size` at once."""
        order = sorted(range(len(lengths)), key=lambda row: lengths[row])
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]

    def _generate_tokens(self, rows: list[list[int]]) -> list[list[int]]:
        """Returns the new tokens of each row, without the token at which it ends."""
        import torch  # noqa: PLC0415 - loaded in tasks, when there are rows

        module = self._find_model()
        network, device = module.network, self._model_device(module)
        width = max(len(row) for row in rows)
        ids = torch.full((len(rows), width), module.padding_id)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, width - len(row) :] = torch.tensor(row)
            mask[number, width - len(row) :] = 1
        ends = find_end_tokens(network, self._tokenization.end_tokens)
        options = {"do_sample": False, "num_beams": 1, **self.generation}
        seed = zlib.crc32(ids.numpy().tobytes())  # a repeated task draws the same texts
        gpus = _cuda_devices(device)
        with self._inference_mode(module), hold_random_numbers(seed, gpus=gpus):
            found = network.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=self.max_new_tokens,
                pad_token_id=module.padding_id,
                eos_token_id=ends or None,
                **options,
            )
        return [_cut_at_end(row[width:], ends) for row in found.tolist()]

    def _read_column(self, batch: pa.RecordBatch, name: str) -> list[str]:
        """Returns the texts of a column, with the replacements of nulls."""
        from farandole.spark.common.model.arrow_arrays import feature_arrays  # noqa: PLC0415

        return feature_arrays(batch, self.columns, [name], self.encoding, texts=True)[name].tolist()

    @cached_property
    def _tokenization(self) -> CausalTokenization:
        change = self._unpickle_transformation
        if change is None:
            raise ValueError("the model has no tokenizer: apply_transformation is not set")
        return cast("Any", change.function)


def _cuda_devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _cut_at_end(ids: list[int], ends: list[int]) -> list[int]:
    stop = next((number for number, token in enumerate(ids) if token in ends), len(ids))
    return ids[:stop]


class TextGenerator(CheckpointTextModel, TextFunctionModel):
    """A language model: `transform` continues the texts of a column, or measures them.

        TextGenerator(checkpoint="/models/gpt", text_col="question").transform(df)

    It is the fitted model of `CausalLanguageModel`, and takes any checkpoint of a causal language
    model without training. `transform` adds the column `generated`, and with `perplexity_col` the
    perplexity of each text, or of each answer if `answer_col` is set. Without `generated_col`,
    `perplexity_col` adds the perplexity alone.
    """

    answer_col: Parameter[str] = Parameter(
        "Column of answers whose perplexity is measured, given the prompts in `text_col`.",
        argument_checks.check_nonempty_text,
        default=None,
    )
    generated_col: Parameter[str] = Parameter(
        "Column of generated texts to add.",
        argument_checks.check_nonempty_text,
        default="generated",
    )
    perplexity_col: Parameter[str] = Parameter(
        "Column of perplexities to add.", argument_checks.check_nonempty_text, default=None
    )
    max_new_tokens: Parameter[int] = Parameter(
        "Largest number of tokens of a generated text.",
        argument_checks.make_minimum_check(1),
        default=64,
    )
    generation: Parameter[dict[str, Any]] = Parameter(
        "Arguments of transformers' `generate`, such as `{'do_sample': True, 'top_p': 0.9}`; "
        "without them, the most likely token is taken each time.",
        _check_generation,
        default=None,
    )
    batch_size: Parameter[int] = Parameter(
        "Largest number of texts that are generated or measured at once.",
        argument_checks.make_minimum_check(1),
        default=16,
    )

    _network_class = transformers.AutoModelForCausalLM

    def _wrap_network(self, network: Any, padding_id: int) -> CausalNetwork:
        return CausalNetwork(network, padding_id)

    def getTransformationFn(self) -> Any:
        """Returns the function that makes tokens, with the columns and the lengths that are set.

        Raises:
            ValueError: the network takes fewer tokens than `max_length`.
        """
        function = super().getTransformationFn()
        if not isinstance(function, CausalTokenization):
            return function
        return replace(function, answer_col=self.getAnswerCol())

    def use_checkpoint(self, checkpoint: TextCheckpoint) -> None:
        """Like `TextModel.use_checkpoint`.

        Args:
            checkpoint: as there.

        Raises:
            ValueError: as there, or the network looks at later tokens.
        """
        super().use_checkpoint(checkpoint)
        module = self.getModel()
        vocabulary = len(module.network.get_input_embeddings().weight)
        check_network(module, vocabulary, self.getOrDefault("transformation_fn").max_length)

    def _create_tokenization(self, checkpoint: TextCheckpoint) -> CausalTokenization:
        return create_causal_tokenization(self, checkpoint, self.getAnswerCol())

    def _added_columns(self) -> dict[str, DataType]:
        """Returns the type of each column that `transform` adds, by name."""
        measured, generated = self.getPerplexityCol(), self.getGeneratedCol()
        if measured is None:
            return {generated: StringType()}
        if not self.isSet("generated_col"):
            return {measured: DoubleType()}
        if measured == generated:
            raise ValueError(f"generated_col and perplexity_col are the same column: {measured!r}")
        return {generated: StringType(), measured: DoubleType()}

    def _source_columns(self) -> list[str]:
        """Returns the columns that a prediction reads."""
        answers = self.getAnswerCol() if self.getPerplexityCol() is not None else None
        return [self.getTextCol(), *([] if answers is None else [answers])]

    def _prepare_prediction(self) -> TextGenerator:
        """Returns a copy that is ready to predict; reads the checkpoint if no prediction has.

        Raises:
            ValueError: a parameter is missing, or has no meaning here.
        """
        if self.getTextCol() is None:
            raise ValueError("text_col is required")
        for name in ROW_CLASS_PARAMS:
            if self.getOrDefault(name) is not None:
                raise ValueError(f"{name} cannot be set: a text has no class")
        self._open_changed_checkpoint()
        copied = self.copy()
        copied.setParams(
            label_columns=[self.getTextCol()], input_dtypes=["int64"], apply_transformation=True
        )
        return copied

    def _transform(self, dataset: DataFrame) -> DataFrame:
        ready, added = self._prepare_prediction(), self._added_columns()
        check_columns_present(
            ColumnRoles(tuple(self._source_columns()), ()), dataset.columns, "DataFrame"
        )
        for name in self._source_columns():
            kind = dataset.schema[name].dataType
            if not isinstance(kind, StringType):
                raise ValueError(
                    f"text column {name!r} has type {kind.simpleString()}: texts are needed"
                )
        taken = [name for name in added if name in dataset.columns]
        if taken:
            raise ValueError(f"the DataFrame already has an output column: {', '.join(taken)}")
        ready._explain_slow_first_prediction(dataset.sparkSession)
        predict = ready._create_predictor(dataset).predict_batches
        return add_predictions(dataset, list(added), list(added.values()), predict)

    def _create_predictor(self, dataset: DataFrame) -> CausalPredictor:
        module, function = self.getModel(), self.getTransformationFn()
        limit = count_positions(module.network.config, module.padding_id)
        new, added = self.getMaxNewTokens(), self._added_columns()
        generates = StringType() in added.values()
        if generates and limit is not None and new >= limit:
            raise ValueError(
                f"max_new_tokens={new} leaves no token for a text: the network takes {limit} tokens"
            )
        return CausalPredictor(
            **vars(super()._create_predictor(dataset)),
            max_new_tokens=new,
            prompt_room=min(function.max_length, 2**30 if limit is None else limit - new),
            generation=self.getGeneration() or {},
            generates=generates,
            measures=DoubleType() in added.values(),
            answer_col=self.getAnswerCol(),
            start_id=function.start_id,
        )

    def evaluate(self, *_: Any, **__: Any) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raises an error, because texts have no classes.

        Raises:
            ValueError: always; the message says what to do.
        """
        raise ValueError(
            "a text has no class: set perplexity_col, and take the mean of the logarithms of the "
            "column that transform adds"
        )

    def importance(self, *_: Any, **__: Any) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raises an error, as `evaluate` does.

        Raises:
            ValueError: always.
        """
        raise ValueError("importance is for a label of a row, and a text has many tokens")
