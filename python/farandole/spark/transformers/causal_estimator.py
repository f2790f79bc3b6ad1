# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`CausalLanguageModel`: a language model is fine-tuned on texts, or on prompts and answers."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import transformers

from farandole.common import argument_checks
from farandole.spark.common.parameter import Parameter
from farandole.spark.transformers.causal_model import TextGenerator, create_causal_tokenization
from farandole.spark.transformers.causal_network import CausalNetwork, TokenMeanLoss, check_network
from farandole.spark.transformers.causal_tokenization import LearnedTokenCheck
from farandole.spark.transformers.estimator import TextEstimator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole.data.prepare import PreparedData as Prepared
    from farandole.runner.backend import Backend
    from farandole.spark.common.data.existing_data import ExistingDataPaths
    from farandole.spark.common.training_plan import FrameworkTrainingJob
    from farandole.spark.torch.columns.model_calls import ModelCall
    from farandole.spark.transformers.causal_tokenization import CausalTokenization
    from farandole.spark.transformers.checkpoint import TextCheckpoint

_UNUSED_PARAMS = ("label_col", "loss", "metrics", "sample_weight_col", "class_weight")
"""Parameters of other estimators that have no meaning for tokens."""


class CausalLanguageModel(TextEstimator):
    """An estimator that fine-tunes a language model on texts, or on prompts and their answers.

        CausalLanguageModel(checkpoint="/models/gpt", prompt_col="question", answer_col="answer",
                            epochs=2, num_proc=4, store="/data/farandole").fit(df)

    With `text_col`, each token of a text is learned. With `prompt_col` and `answer_col`, the tokens
    of the answer are learned, given the prompt. The loss of a step is the mean over the learned
    tokens of all processes. Texts of a batch are packed into few blocks, in which no text looks at
    another, so the result is the same as for padded texts. All other parameters are parameters of
    `TextClassifier`.

    The fitted model is a `TextGenerator`.
    """

    prompt_col: Parameter[str] = Parameter(
        "Column of prompts, which are given and not learned.",
        argument_checks.check_nonempty_text,
        default=None,
    )
    answer_col: Parameter[str] = Parameter(
        "Column of the answers to prompts, which are learned.",
        argument_checks.check_nonempty_text,
        default=None,
    )
    packing: Parameter[bool] = Parameter(
        "Whether the texts of a batch are put into few blocks; otherwise each is padded to the "
        "length of the longest. It changes the time of a step, and not its result.",
        argument_checks.check_boolean_flag,
        default=True,
    )

    _own_loss = TokenMeanLoss
    _network_kind = transformers.AutoModelForCausalLM
    _module_class = CausalNetwork
    _adapter_task = "CAUSAL_LM"
    _learns_features = True

    # An attribute of the copy in a fit, as in `TextEstimator`.
    _packing_message = cast("Any", "")

    def get_model_class(self) -> type[TextGenerator]:
        """Returns the class of the fitted model."""
        return TextGenerator

    def _fit(self, dataset: Any) -> Any:
        return super(CausalLanguageModel, self._copy_with_columns())._fit(dataset)

    def _fit_on_parquet(
        self, dataset_idx: int | None = None, given: ExistingDataPaths | None = None
    ) -> Any:
        copied = self._copy_with_columns()
        return super(CausalLanguageModel, copied)._fit_on_parquet(dataset_idx, given)

    def _copy_with_columns(self) -> CausalLanguageModel:
        """Returns a copy whose columns of texts and of labels are set.

        Raises:
            ValueError: the columns are missing or contradict each other, or a parameter has no
                meaning for tokens.
        """
        text, prompt, answer = self.getTextCol(), self.getPromptCol(), self.getAnswerCol()
        if (text is None) == (prompt is None) or (prompt is None) != (answer is None):
            raise ValueError("either text_col is required, or prompt_col and answer_col")
        if prompt is not None and prompt == answer:
            raise ValueError(f"prompt_col and answer_col are the same column: {prompt!r}")
        for name in _UNUSED_PARAMS:
            if self.isSet(name) and self.getOrDefault(name):
                raise ValueError(f"{name} cannot be set: a text has many tokens to learn")
        if self.getLossReduction() not in (None, "mean"):
            raise ValueError("loss_reduction cannot be set: the loss is a mean over tokens")
        copied = self.copy()
        copied.setParams(text_col=text or prompt, label_col=text or answer, loss_reduction="mean")
        return copied

    @contextlib.contextmanager
    def _open_checkpoint_for_fit(self) -> Iterator[TextEstimator]:
        with super()._open_checkpoint_for_fit() as opened:
            check = LearnedTokenCheck(cast("Any", opened.getTransformationFn()))
            opened.setParams(callbacks=[*opened.getCallbacks(), check])
            yield opened

    def _create_tokenization(self, checkpoint: TextCheckpoint) -> CausalTokenization:
        return create_causal_tokenization(
            self, checkpoint, self.getAnswerCol(), has_fixed_length=self.getInmemoryCacheAll()
        )

    def _network_changes(self, prepared: Prepared) -> dict[str, Any]:
        del prepared
        return {}

    def _set_network(self, network: Any) -> None:
        vocabulary = len(network.network.get_input_embeddings().weight)
        can_pack = check_network(network, vocabulary, self.getTransformationFn().max_length)
        network.packs_texts = can_pack and self.getPacking()
        if self.getPacking() and not can_pack:
            self._packing_message = (
                f"texts are padded and not packed: {type(network.network).__name__} cannot keep "
                "the texts of a block apart"
            )
        super()._set_network(network)

    def _create_framework_job(self, prepared: Prepared, backend: Backend) -> FrameworkTrainingJob:
        plan = super()._create_framework_job(prepared, backend)
        messages = [one for one in (self._packing_message,) if one]
        return replace(plan, messages=(*plan.messages, *messages))

    def _model_params(
        self, call: ModelCall, inputs: Any, form: str | None = None
    ) -> dict[str, Any]:
        params = super()._model_params(call, inputs, form)
        return params | {"answer_col": self.getAnswerCol()}
