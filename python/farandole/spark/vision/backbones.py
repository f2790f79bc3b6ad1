# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Networks of torchvision and timm by name, and modules in memory. Nothing is downloaded."""

from __future__ import annotations

import copy
import difflib
import warnings
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from farandole._native import store as native
from farandole.spark.torch.random_numbers import hold_random_numbers
from farandole.spark.torch.saving import safetensors_bytes, state_bytes
from farandole.spark.vision.networks import count_channels, find_head_layer
from farandole.spark.vision.preprocessing import (
    RGB_CHANNELS,
    ImagePreprocessing,
    default_preprocessing,
)
from farandole.stores.store import Store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIBRARIES = ("torchvision", "timm")
_ZIP_MAGIC = b"PK"
_WITHOUT_AUXILIARY_HEADS = ("googlenet", "inception_v3")
"""Networks of torchvision that return more than logits by default."""
_MAX_NAMED_LAYERS = 3


class LoadedBackbone(NamedTuple):
    """A network for some classes.

    Attributes:
        network: returns logits.
        messages: sentences about the weights with which a fit begins.
        random_layers: names of the layers with random weights.
    """

    network: torch.nn.Module
    messages: tuple[str, ...] = ()
    random_layers: tuple[str, ...] = ()


class ImageBackbone(Protocol):
    """A network whose classes are not known yet."""

    @property
    def channels(self) -> int:
        """Number of channels of its images."""
        ...

    @property
    def is_pretrained(self) -> bool:
        """Whether its weights are not random."""
        ...

    def preprocessing(self, chosen: Mapping[str, Any]) -> ImagePreprocessing:
        """Returns size and scale of its images.

        Args:
            chosen: fields of the result that the user set.
        """
        ...

    def load_backbone(self, classes: Sequence[str], seed: int) -> LoadedBackbone:
        """Returns the network for some classes.

        Args:
            classes: their names.
            seed: seed of random weights.
        """
        ...


@dataclass(frozen=True)
class NamedBackbone:
    """A network of torchvision or timm.

    Attributes:
        name: name with the library, such as `torchvision:resnet18`.
        weights: path or URL of its weights; `None`: they are random.
    """

    name: str
    weights: str | None = None
    channels: int = RGB_CHANNELS

    @property
    def is_pretrained(self) -> bool:
        """Whether its weights are not random."""
        return self.weights is not None

    def preprocessing(self, chosen: Mapping[str, Any]) -> ImagePreprocessing:
        """Like `ImageBackbone.preprocessing`: timm's, or ImageNet's for torchvision."""
        return replace(self._stated_preprocessing(), **chosen)

    def _stated_preprocessing(self) -> ImagePreprocessing:
        library, _, name = self.name.partition(":")
        if library == "torchvision":
            return default_preprocessing(self.channels)
        import timm  # noqa: PLC0415 - it takes seconds, and few fits need it

        config: Any = timm.models.get_pretrained_cfg(name)
        if config is None:
            return default_preprocessing(self.channels)
        _, height, width = config.input_size
        return ImagePreprocessing(height, width, "crop", tuple(config.mean), tuple(config.std))

    def load_backbone(self, classes: Sequence[str], seed: int) -> LoadedBackbone:
        """Like `ImageBackbone.load_backbone`.

        Raises:
            FileNotFoundError: there is no file of weights.
            ValueError: the weights do not fit the network.
        """
        with hold_random_numbers(seed):
            network = create_named_network(self.name, len(classes))
        if self.weights is None:
            return LoadedBackbone(network, (f"the weights of {self.name} are random",))
        given = _read_weights(self.weights)
        found = find_head_layer(network, len(classes))
        head = () if found is None else (f"{found[0]}.weight", f"{found[0]}.bias")
        own = network.state_dict()
        wrong = [name for name in own if name not in given or given[name].shape != own[name].shape]
        strange = [name for name in given if name not in own]
        body = [name for name in wrong if name not in head] + strange
        if body:
            shown, more = body[:_MAX_NAMED_LAYERS], len(body) - _MAX_NAMED_LAYERS
            raise ValueError(
                f"the weights {self.weights} are not weights of {self.name}, they differ in "
                f"{', '.join(shown)}{f' and {more} more' if more > 0 else ''}"
            )
        network.load_state_dict(
            {name: value for name, value in given.items() if name not in wrong}, strict=False
        )
        if not wrong or found is None:
            return LoadedBackbone(network)
        message = f"the weights {self.weights} have other classes: {found[0]} is random"
        return LoadedBackbone(network, (message,), (found[0],))


@dataclass(frozen=True)
class ModuleBackbone:
    """A module in memory. Its last layer gets as many outputs as there are classes.

    Attributes:
        module: the module.
    """

    module: torch.nn.Module
    is_pretrained: bool = True

    @property
    def channels(self) -> int:
        """Number of channels of its first convolution, else three."""
        return count_channels(self.module)

    def preprocessing(self, chosen: Mapping[str, Any]) -> ImagePreprocessing:
        """Like `ImageBackbone.preprocessing`: of networks that state none."""
        return replace(default_preprocessing(self.channels), **chosen)

    def load_backbone(self, classes: Sequence[str], seed: int) -> LoadedBackbone:
        """Like `ImageBackbone.load_backbone`; the module itself is not changed.

        Raises:
            ValueError: the module has other classes, and its last layer cannot be replaced.
        """
        network, count = copy.deepcopy(self.module), len(classes)
        found = find_head_layer(network)
        if found is None or found[1].weight.shape[0] == count:
            return LoadedBackbone(network)
        name, layer = found
        if not isinstance(layer, torch.nn.Linear) or not name:
            raise ValueError(
                f"the last layer of backbone, {name or type(layer).__name__}, has "
                f"{layer.weight.shape[0]} outputs for {count} classes, and only a linear layer "
                "inside of it is replaced: give a module that returns a logit for each class"
            )
        with hold_random_numbers(seed):
            made = torch.nn.Linear(layer.in_features, count, bias=layer.bias is not None)
        parent, _, own = name.rpartition(".")
        setattr(network.get_submodule(parent), own, made.to(layer.weight.dtype))
        message = f"{name} had {layer.out_features} outputs: it is random, with {count}"
        return LoadedBackbone(network, (message,), (name,))


def check_backbone_name(name: str) -> None:
    """Refuses the name of a network that is not there.

    Args:
        name: name with the library.

    Raises:
        ValueError: the name is unknown; the message has similar ones.
        ImportError: the library is not installed.
    """
    library, _, own = name.partition(":")
    if library not in LIBRARIES or not own:
        raise ValueError(
            f"backbone must be torchvision:NAME, timm:NAME, or a torch.nn.Module: {name!r}"
        )
    if find_spec(library) is None:
        raise ImportError(f"backbone={name!r} needs {library}: pip install {library}", name=library)
    known = _known_names(library)
    if own not in known:
        similar = difflib.get_close_matches(own, known)
        hint = f", similar are {', '.join(similar)}" if similar else ""
        raise ValueError(f"{library} has no network for images of the name {own!r}{hint}")


def _known_names(library: str) -> list[str]:
    if library == "timm":
        import timm  # noqa: PLC0415 - it takes seconds, and few fits need it

        return timm.list_models()
    from torchvision import models  # noqa: PLC0415 - as above

    return models.list_models(module=models)


def create_named_network(name: str, classes: int) -> torch.nn.Module:
    """Returns a network of torchvision or timm with random weights.

    Args:
        name: name with the library.
        classes: number of classes.

    Raises:
        ValueError: the name is unknown.
        ImportError: the library is not installed.
    """
    check_backbone_name(name)
    library, _, own = name.partition(":")
    if library == "timm":
        import timm  # noqa: PLC0415 - it takes seconds, and few fits need it

        return timm.create_model(own, pretrained=False, num_classes=classes)
    from torchvision import models  # noqa: PLC0415 - as above

    options = (
        {"aux_logits": False, "init_weights": False} if own in _WITHOUT_AUXILIARY_HEADS else {}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of init_weights
        return models.get_model(own, weights=None, num_classes=classes, **options)


def _read_weights(path: str) -> dict[str, torch.Tensor]:
    """Returns the weights in a file of safetensors, or in a zip of torch, by name. Runs no code of
    the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is of another kind, or damaged.
    """
    whole = native.full_path(Store.create(path).prefix_path)  # pyright: ignore[reportAttributeAccessIssue]
    directory, _, name = whole.rpartition("/")
    try:
        content = bytes(native.Store(directory).read(name))
    except FileNotFoundError:
        raise FileNotFoundError(f"backbone_weights: there is no file {path}") from None
    try:
        if content.startswith(_ZIP_MAGIC):
            found = state_bytes.unpack_state(content)
        else:
            found = safetensors_bytes.load_tensors(content)
    except Exception as error:
        raise ValueError(
            f"backbone_weights must be safetensors, or a state_dict that torch.save wrote: {path} "
            f"is neither, or damaged: {error}"
        ) from error
    if not all(isinstance(one, torch.Tensor) for one in found.values()):
        raise ValueError(f"backbone_weights must have tensors by name: {path} has other values")
    return found
