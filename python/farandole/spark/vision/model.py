# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The fitted model of images: they are decoded in the tasks that predict.

A saved model of a checkpoint contains a checkpoint in the layout of Hugging Face, and a model of a
backbone by name the weights alone. Loading these runs no code of the file. A module in memory is
saved as a `TorchModel` saves it, with a pickle.
"""

# ruff: noqa: N802 - Spark ML's manner

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farandole.common import argument_checks
from farandole.spark.common.parameter import Parameter
from farandole.spark.torch.fine_tuned_model import (
    FineTunedModel,
    pack_pretrained_files,
    unpack_pretrained_files,
)
from farandole.spark.torch.saving import safetensors_bytes
from farandole.spark.torch.saving.persistence import TorchModelReader, TorchModelWriter
from farandole.spark.vision.backbones import create_named_network
from farandole.spark.vision.decoding import ImageDecoding
from farandole.spark.vision.networks import ImageNetwork, find_head_layer
from farandole.spark.vision.params import ImageColumnParams
from farandole.spark.vision.preprocessing import MODE_BY_CHANNELS
from farandole.spark.vision.spark_images import check_spark_type

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import torch
    from pyspark.sql import DataFrame

_OBJECT_PARAMS = (
    "model",
    "optimizer",
    "loss",
    "loss_constructors",
    "transformation_fn",
    "processor_config",
)
"""Parameters that are no plain values. A saved model has weights or a checkpoint instead."""
_PROCESSOR_FILE = "preprocessor_config.json"
_WEIGHTS_PART = "backbone.safetensors"


class ImageModelWriter(TorchModelWriter):
    """A writer of a model of images."""

    def split_plain_and_packed(
        self, values: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Like `ParamsWriter.split_plain_and_packed`: a part for each file of a checkpoint, or one
        of the weights of a backbone by name, or the parts of a `TorchModel`.
        """
        instance: Any = self.instance
        plain = {name: value for name, value in values.items() if name not in _OBJECT_PARAMS}
        if instance.getProcessorConfig() is not None:
            return plain, pack_pretrained_files(instance)
        if instance.getBackbone() is not None:
            state = instance.getModel().network.state_dict()
            weights = {name: one.detach().cpu() for name, one in state.items()}
            return plain, {_WEIGHTS_PART: safetensors_bytes.dump_tensors(weights)}
        return super().split_plain_and_packed(values)


class ImageModelReader(TorchModelReader):
    """A reader of a model of images."""

    def restore_packed_parts(self, loaded: Any, parts: dict[str, bytes], path: str) -> None:
        """Like `ParamsReader.restore_packed_parts`; runs no code of the file unless the model was
        a module in memory.
        """
        if self._given_module is not None and "state" not in parts:
            raise ValueError(
                f"read().model(module) is for models of a module in memory: {self.kind.__name__}."
                "load(path) makes the network of this model, and runs no code of the file"
            )
        if _PROCESSOR_FILE in parts:
            _restore_checkpoint(loaded, parts, self.allowed)
        elif _WEIGHTS_PART in parts:
            loaded.use_weights(safetensors_bytes.load_tensors(parts[_WEIGHTS_PART]))
        else:
            super().restore_packed_parts(loaded, parts, path)


def _restore_checkpoint(
    loaded: ImageClassifierModel, parts: Mapping[str, bytes], allow_pickle: bool | None
) -> None:
    # Networks of torchvision need no transformers.
    import transformers  # noqa: PLC0415

    from farandole.spark.transformers.checkpoint import open_checkpoint  # noqa: PLC0415
    from farandole.spark.vision.checkpoint import ImageCheckpoint  # noqa: PLC0415

    with (
        unpack_pretrained_files(parts) as directory,
        open_checkpoint(directory, allow_pickle, ImageCheckpoint) as checkpoint,
    ):
        kind = transformers.AutoModelForImageClassification
        found = checkpoint.load_network(kind, seed=0)
        if found.random_layers:
            raise ValueError(f"the checkpoint has no weights of {', '.join(found.random_layers)}")
        loaded.setParams(processor_config=checkpoint.processor_config)
        loaded.use_network(found.network)


class ImageClassifierModel(ImageColumnParams, FineTunedModel):
    """A fitted `ImageClassifier`: `transform` adds logits, probabilities and names of classes."""

    image_channels: Parameter[int] = Parameter(
        "Number of channels of the images that the network takes.",
        argument_checks.make_minimum_check(1),
        default=3,
    )
    backbone: Parameter[str] = Parameter(
        "Name of the network, of torchvision or timm.",
        argument_checks.check_nonempty_text,
        default=None,
    )
    processor_config: Parameter[Mapping[str, Any]] = Parameter(
        "Content of preprocessor_config.json, of a checkpoint of transformers.",
        argument_checks.accept_any_value,
        default=None,
    )
    batch_size: Parameter[int] = Parameter(
        "Largest number of images that are predicted at once.",
        argument_checks.make_minimum_check(1),
        default=64,
    )

    _writer_class = ImageModelWriter

    @classmethod
    def read(cls) -> ImageModelReader:
        """Returns the reader, which runs no code of the file unless the model was a module in
        memory.
        """
        return ImageModelReader(cls)

    def use_network(self, network: torch.nn.Module) -> None:
        """Takes a network that returns logits, with the scale of pixels that is set.

        Args:
            network: takes (rows, channels, height, width).
        """
        mean, std = self.getImageMean() or [0.0], self.getImageStd() or [1.0]
        self.setParams(model=ImageNetwork(network, mean, std).eval())

    def use_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Takes the weights of the backbone that is set.

        Args:
            weights: tensors by name.

        Raises:
            ValueError: they are not weights of the backbone.
        """
        name = self.getBackbone()
        head = find_head_layer(create_named_network(name, 1), 1)
        rows = None if head is None else weights.get(f"{head[0]}.weight")
        if rows is None:
            raise ValueError(f"the saved weights are not weights of {name}")
        network = create_named_network(name, len(rows))
        try:
            network.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"the saved weights are not weights of {name}: {error}") from None
        self.use_network(network)

    def getTransformationFn(self) -> Any:
        """Returns the function that decodes images, with the column and the size that are set."""
        function = self.getOrDefault("transformation_fn")
        if (function is not None and not isinstance(function, ImageDecoding)) or (
            self.getImageCol() is None or self.getImageSize() is None
        ):
            return function
        height, width = self.getImageSize()
        return ImageDecoding(
            image_col=self.getImageCol(),
            height=height,
            width=width,
            mode=MODE_BY_CHANNELS[self.getImageChannels()],
            resize_mode=self.getResizeMode() or "stretch",
            root=self.getImageRoot(),
        )

    def getFeatureColumns(self) -> list[str] | None:
        """Returns the column of images."""
        return None if self.getImageCol() is None else [self.getImageCol()]

    def _check_feature_columns(self, dataset: DataFrame, *, raw: bool = False) -> None:
        super()._check_feature_columns(dataset, raw=True)
        if not raw:
            check_spark_type(dataset.schema, self.getImageCol())

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes network and image processor in the layout of Hugging Face, for `from_pretrained`.
        Adapters are merged into the weights of the files; the model keeps them apart.

        Args:
            directory: on this host; it is made if it does not exist.

        Raises:
            ValueError: there is no model, or it is no network of transformers.
        """
        network = self._merged_network()
        if self.getProcessorConfig() is None:
            raise ValueError(
                "save_pretrained needs a network of transformers: save this model with write(), "
                "or the weights, getModel().network.state_dict()"
            )
        from farandole.spark.transformers.checkpoint import (  # noqa: PLC0415 - as above
            quiet_transformers,
        )

        Path(directory).mkdir(parents=True, exist_ok=True)
        with quiet_transformers():
            network.save_pretrained(directory)
        text = json.dumps(dict(self.getProcessorConfig()), indent=2)
        (Path(directory) / _PROCESSOR_FILE).write_text(text, "utf-8")
