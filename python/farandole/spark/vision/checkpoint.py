# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checkpoints of transformers for images: a directory with config.json, preprocessor_config.json
and weights as safetensors.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import peft
import torch
import transformers

from farandole.spark.transformers.adapters import add_adapter
from farandole.spark.transformers.checkpoint import (
    LoadedNetwork,
    TextCheckpoint,
    UnusableProcessorError,
)
from farandole.spark.vision.backbones import LoadedBackbone
from farandole.spark.vision.preprocessing import (
    RGB_CHANNELS,
    ImagePreprocessing,
    read_processor_config,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_CONFIG_FILE, PROCESSOR_FILE = "config.json", "preprocessor_config.json"
_ADAPTED_LAYERS = ("q_proj", "v_proj", "query", "value")
"""Names of the linear layers that adapters adapt unless a `LoraConfig` says otherwise: queries and
values of attention, as PEFT chooses for networks that it knows.
"""


class ImageCheckpoint(TextCheckpoint):
    """A checkpoint of images that is open. In place of a tokenizer it has the content of
    preprocessor_config.json.
    """

    required_files: ClassVar[dict[str, str]] = {
        _CONFIG_FILE: "model",
        PROCESSOR_FILE: "image processor",
    }

    @classmethod
    def read_processor(cls, directory: Path, where: str) -> dict[str, Any]:
        """Returns the content of preprocessor_config.json.

        Args:
            directory: directory of the files.
            where: path for messages.

        Raises:
            ValueError: it is damaged.
        """
        try:
            content = json.loads((directory / PROCESSOR_FILE).read_text("utf-8"))
        except ValueError as error:
            raise UnusableProcessorError(
                f"{PROCESSOR_FILE} of the checkpoint {where} is damaged: {error}"
            ) from None
        if not isinstance(content, dict):
            raise UnusableProcessorError(
                f"{PROCESSOR_FILE} of the checkpoint {where} is damaged: it is no object"
            )
        return content

    @property
    def processor_config(self) -> dict[str, Any]:
        """Content of preprocessor_config.json."""
        return self.tokenizer

    def _copy_config(self) -> Any:
        return copy.deepcopy(self.config)

    def _check_inputs(self, network: Any) -> None:
        """Accepts any network: the fit tries it on some images."""


@dataclass(frozen=True)
class CheckpointBackbone:
    """The network of a checkpoint.

    Attributes:
        checkpoint: the checkpoint, which is open.
        lora: rank of adapters or their configuration; `None`: there are none.
    """

    checkpoint: ImageCheckpoint
    lora: int | peft.LoraConfig | None = None
    is_pretrained: bool = True

    @property
    def channels(self) -> int:
        """Number of channels that the configuration states, else three."""
        return getattr(self.checkpoint.config, "num_channels", None) or RGB_CHANNELS

    def preprocessing(self, chosen: Mapping[str, Any]) -> ImagePreprocessing:
        """Like `ImageBackbone.preprocessing`: as the image processor states them.

        Raises:
            ValueError: it states no size, or an unknown scale.
        """
        try:
            return read_processor_config(self.checkpoint.processor_config, chosen)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise ValueError(
                f"{PROCESSOR_FILE} of the checkpoint {self.checkpoint.name} is not understood: "
                f"{error}"
            ) from error

    def load_backbone(self, classes: Sequence[str], seed: int) -> LoadedBackbone:
        """Like `ImageBackbone.load_backbone`; with adapters if there are any.

        Raises:
            ValueError: the weights cannot be read, or the adapters do not fit.
        """
        loaded = self.checkpoint.load_network(
            transformers.AutoModelForImageClassification,
            seed,
            num_labels=len(classes),
            id2label=dict(enumerate(classes)),
            label2id={name: index for index, name in enumerate(classes)},
            problem_type="single_label_classification",
        )
        messages = [loaded.head_message] if loaded.head_message else []
        if loaded.random_layers:
            names = ", ".join(loaded.random_layers)
            messages.insert(0, f"the checkpoint has no weights of {names}: they are random")
        network = loaded.network
        if self.lora is not None:
            config = _choose_adapted_layers(loaded, self.lora)
            network = add_adapter(loaded, config, seed, self.checkpoint.path, task_type=None)
        return LoadedBackbone(network, tuple(messages), loaded.random_layers)


def _choose_adapted_layers(loaded: LoadedNetwork, lora: int | peft.LoraConfig) -> peft.LoraConfig:
    """Returns the configuration of adapters.

    Raises:
        ValueError: only a rank is given, and the network has no attention.
    """
    if not isinstance(lora, int):
        return lora
    found = {
        name.rpartition(".")[2]
        for name, layer in loaded.network.base_model.named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    names = [name for name in _ADAPTED_LAYERS if name in found]
    if not names:
        raise ValueError(
            f"lora={lora} does not fit the network, a {type(loaded.network).__name__}: it has no "
            "queries and values of attention, so name its layers with "
            "LoraConfig(target_modules=[...])"
        )
    return peft.LoraConfig(r=lora, lora_alpha=2 * lora, target_modules=names)
