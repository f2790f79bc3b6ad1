# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`ImageClassifier`: a backbone is fine-tuned on a column of images.

It is a `TorchEstimator` whose model, inputs and transformation follow from the backbone. The
network is made when the classes are known: after the rows are prepared, before workers start.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch

from farandole.data.arrays import VARIABLE_WIDTH_DTYPES
from farandole.spark.common.runs.fingerprint import FingerprintPart
from farandole.spark.torch import driver_checks
from farandole.spark.torch.fine_tuning import FineTuningEstimator, describe_trained_share
from farandole.spark.vision.backbones import (
    ImageBackbone,
    ModuleBackbone,
    NamedBackbone,
    check_backbone_name,
)
from farandole.spark.vision.decoding import ImageDecoding
from farandole.spark.vision.model import ImageClassifierModel
from farandole.spark.vision.networks import ImageNetwork, find_head_layer
from farandole.spark.vision.params import ImageParams
from farandole.spark.vision.preprocessing import (
    MODE_BY_CHANNELS,
    ImagePreprocessing,
    change_processor_config,
)
from farandole.spark.vision.spark_images import describe_wrong_type, pack_image_column

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole.data.prepare import PreparedData as Prepared
    from farandole.runner.backend import Backend
    from farandole.spark.common.training_plan import FrameworkTrainingJob
    from farandole.spark.torch.columns.model_calls import ModelCall
    from farandole.spark.torch.estimator_base import SampledColumns

_PRETRAINED_LEARNING_RATE = 5e-5
_NEW_LEARNING_RATE = 1e-3
_TRIED_IMAGES = 2


class ImageClassifier(ImageParams, FineTuningEstimator):  # pyright: ignore[reportIncompatibleVariableOverride] - a function makes the optimizer
    """An estimator that fine-tunes a backbone to classify images.

        ImageClassifier(checkpoint="/models/vit", image_col="photo", label_col="species", epochs=2,
                        num_proc=4, store="/data/farandole").fit(df)

    The images are files as bytes, paths, or structs of Spark's source `image`. They are decoded in
    the training processes, batch by batch. The label may hold words, integers or booleans; its
    values are the classes. All other parameters are parameters of `TorchEstimator`, except
    parameters that follow from the backbone, such as `model` and `feature_cols`.

    The fitted `ImageClassifierModel` adds the columns `<label>__output` (logits),
    `<label>__probability` and `<label>__predicted`, the name of the class, unless
    `probabilityCol` and `predictedLabelCol` say otherwise.
    """

    _required_params: ClassVar[tuple[str, ...]] = ("image_col", "label_col", "store")
    _network_sources: ClassVar[str] = "checkpoint or backbone, image_col and label_col"
    _own_loss = torch.nn.CrossEntropyLoss

    # Attributes of the copy in a fit. Annotations would make them arguments of the constructor.
    _opened_backbone = cast("Any", None)
    _preprocessing = cast("Any", None)

    def get_model_class(self) -> type[ImageClassifierModel]:
        """Returns the class of the fitted model."""
        return ImageClassifierModel

    def _fit(self, dataset: Any) -> Any:
        name = self.getImageCol()
        return super()._fit(dataset if name is None else pack_image_column(dataset, name))

    @contextlib.contextmanager
    def _prepare_fit(self) -> Iterator[None]:
        """Like `FineTuningEstimator._prepare_fit`, while the checkpoint is open.

        Raises:
            ValueError: a parameter does not fit.
            FileNotFoundError: a file of the checkpoint is missing.
        """
        self._refuse_options_of_backbones()
        with self._open_backbone() as backbone:
            mode = MODE_BY_CHANNELS.get(backbone.channels)
            if mode is None:
                raise ValueError(
                    f"the backbone takes images of {backbone.channels} channels: 1, 3 and 4 are "
                    "supported"
                )
            used = self._choose_preprocessing(backbone)
            for name, numbers in (("image_mean", used.mean), ("image_std", used.std)):
                if len(numbers) not in (1, backbone.channels):
                    raise ValueError(
                        f"{name} needs one number, or one for each of {backbone.channels} "
                        f"channels: {list(numbers)}"
                    )
            decoding = ImageDecoding(
                image_col=self.getImageCol(),
                height=used.height,
                width=used.width,
                mode=mode,
                resize_mode=used.resize_mode,
                root=self.getImageRoot(),
                threads=self.getTrainReaderNumWorkers(),
                augmentations=self.getAugmentations(),
            )
            _try_augmentations(decoding, backbone.channels)
            self._opened_backbone, self._preprocessing = cast("Any", backbone), used
            begins_pretrained = backbone.is_pretrained and not self.getFreezeBackbone()
            self._choose_optimizer(
                _PRETRAINED_LEARNING_RATE if begins_pretrained else _NEW_LEARNING_RATE
            )
            self.setParams(
                feature_cols=[self.getImageCol()],
                label_cols=[self.getLabelCol()],
                categories={self.getLabelCol(): None, **self.getCategories()},
                transformation_fn=decoding,
                input_shapes=[[-1, backbone.channels, used.height, used.width]],
                input_dtypes=["uint8"],
            )
            yield

    def _refuse_options_of_backbones(self) -> None:
        """Refuses options that do not go together.

        Raises:
            ValueError: naming them.
        """
        checkpoint, backbone = self.getCheckpoint(), self.getBackbone()
        if (checkpoint is None) == (backbone is None):
            raise ValueError("one of checkpoint and backbone is required, and not both")
        if isinstance(backbone, str):
            check_backbone_name(backbone)
        elif self.getBackboneWeights() is not None:
            raise ValueError("backbone_weights needs a backbone by name, such as torchvision:NAME")
        if self.getLora() is not None and checkpoint is None:
            raise ValueError("lora needs a checkpoint of transformers")
        if self.getLora() is not None and self.getFreezeBackbone():
            raise ValueError("lora cannot be combined with freeze_backbone")

    @contextlib.contextmanager
    def _open_backbone(self) -> Iterator[ImageBackbone]:
        given = self.getBackbone()
        if isinstance(given, str):
            yield NamedBackbone(given, self.getBackboneWeights())
            return
        if given is not None:
            yield ModuleBackbone(given)
            return
        if find_spec("transformers") is None:
            raise ImportError(
                "checkpoint needs the package transformers: pip install transformers",
                name="transformers",
            )
        # Networks of torchvision need no transformers.
        from farandole.spark.transformers.checkpoint import open_checkpoint  # noqa: PLC0415
        from farandole.spark.vision.checkpoint import (  # noqa: PLC0415
            CheckpointBackbone,
            ImageCheckpoint,
        )

        with open_checkpoint(self.getCheckpoint(), kind=ImageCheckpoint) as checkpoint:
            yield CheckpointBackbone(checkpoint, self.getLora())

    def _choose_preprocessing(self, backbone: ImageBackbone) -> ImagePreprocessing:
        """Returns the preprocessing as the user set it, and otherwise as the backbone states it."""
        asked: dict[str, Any] = {
            "resize_mode": self.getResizeMode(),
            "mean": None if self.getImageMean() is None else tuple(self.getImageMean()),
            "std": None if self.getImageStd() is None else tuple(self.getImageStd()),
        }
        if self.getImageSize() is not None:
            asked["height"], asked["width"] = self.getImageSize()
        return backbone.preprocessing(
            {name: value for name, value in asked.items() if value is not None}
        )

    def _create_framework_job(self, prepared: Prepared, backend: Backend) -> FrameworkTrainingJob:
        classes, used = self._class_names(prepared), self._preprocessing
        loaded = self._opened_backbone.load_backbone(classes, self.getRandomSeed() or 0)
        head = None
        if self.getFreezeBackbone():
            head = _find_only_trained_layer(loaded.network, len(classes))
        network = ImageNetwork(
            loaded.network,
            used.mean,
            used.std,
            trained_head=head,
            has_adapter=self.getLora() is not None,
        )
        _try_network(network, self._opened_backbone.channels, used, len(classes))
        self._set_network(network)
        driver_checks.check_optimizer(self.getModel(), self.getOptimizer())
        plan = super()._create_framework_job(prepared, backend)
        messages = [*plan.messages, *loaded.messages, *describe_trained_share(network)]
        return replace(plan, messages=tuple(messages))

    def _framework_fingerprint_parts(self) -> list[FingerprintPart]:
        parts = super()._framework_fingerprint_parts()
        decoding = self.getTransformationFn()
        if isinstance(decoding, ImageDecoding):
            # The number of threads and the directory of the images do not change the result.
            pixels = replace(decoding, threads=1, root=None, augmentations=None)
            parts = [*parts, FingerprintPart.from_value("transformation_fn", pixels)]
            if decoding.augmentations is not None:
                changes = FingerprintPart.from_value("augmentations", decoding.augmentations)
                parts.append(changes)
        return parts

    def _sample_columns(self, prepared: Prepared, backend: Backend) -> SampledColumns:
        name = self.getImageCol()
        kind = prepared.columns[name].dtype
        if kind not in VARIABLE_WIDTH_DTYPES:
            raise ValueError(describe_wrong_type(name, kind))
        return super()._sample_columns(prepared, backend)

    def _class_changing_options(self) -> tuple[str, ...]:
        return ()  # pixels are made of the image alone

    def _model_params(
        self, call: ModelCall, inputs: Any, form: str | None = None
    ) -> dict[str, Any]:
        used, given = self._preprocessing, self.getBackbone()
        known: dict[str, Any] = {
            "apply_transformation": True,
            "transformation_fn": replace(self.getTransformationFn(), augmentations=None, threads=1),
            "image_col": self.getImageCol(),
            "image_root": self.getImageRoot(),
            "image_size": [used.height, used.width],
            "resize_mode": used.resize_mode,
            "image_mean": list(used.mean),
            "image_std": list(used.std),
            "image_channels": self._opened_backbone.channels,
            "backbone": given if isinstance(given, str) else None,
        }
        if given is None:
            config = self._opened_backbone.checkpoint.processor_config
            known["processor_config"] = change_processor_config(config, used)
        found = {name: value for name, value in known.items() if value is not None}
        return super()._model_params(call, inputs, form) | self._class_columns() | found


def _try_augmentations(decoding: ImageDecoding, channels: int) -> None:
    """Tries the augmentations on a black image.

    Raises:
        ValueError: they fail, or return another shape or type.
    """
    shape = (1, channels, decoding.height, decoding.width)
    decoding.augment_rows({decoding.image_col: np.zeros(shape, np.uint8)}, 0, 0)


def _find_only_trained_layer(network: torch.nn.Module, classes: int) -> str:
    found = find_head_layer(network, classes)
    if found is None or not found[0]:
        raise ValueError(
            "freeze_backbone needs a last layer with an output for each class: the backbone has "
            "none"
        )
    return found[0]


def _try_network(
    network: ImageNetwork, channels: int, used: ImagePreprocessing, classes: int
) -> None:
    """Tries the network on black images.

    Raises:
        ValueError: it does not take them, or returns something else than logits.
    """
    shape = (_TRIED_IMAGES, channels, used.height, used.width)
    network.eval()
    try:
        with torch.no_grad():
            found = network(torch.zeros(shape, dtype=torch.uint8))
    except Exception as error:
        raise ValueError(
            f"the backbone does not take images of {tuple(shape[1:])}, as image_size says: {error}"
        ) from error
    finally:
        network.train()
    wanted = (_TRIED_IMAGES, classes)
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != wanted:
        shown = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise ValueError(
            f"the backbone must return a logit for each of {classes} classes, {wanted} for "
            f"{_TRIED_IMAGES} images: it returned {shown}"
        )
