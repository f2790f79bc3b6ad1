# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The base of fitted models whose network may have adapters, and which are saved in the layout of
Hugging Face.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from farandole.spark.torch.model import TorchModel

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping


class FineTunedModel(TorchModel):
    """The base of models of `FineTuningEstimator`."""

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes the model in the layout of Hugging Face, for `from_pretrained`. Adapters are
        merged into the weights of the files; the model keeps them apart.

        Args:
            directory: on this host; it is made if it does not exist.

        Raises:
            ValueError: there is no model.
        """
        raise NotImplementedError

    def save_adapter(self, directory: str | os.PathLike[str]) -> None:
        """Writes the adapters alone, as `peft.PeftModel.from_pretrained` reads them.

        Args:
            directory: on this host; it is made if it does not exist.

        Raises:
            ValueError: the model has no adapters.
        """
        if not getattr(self.getModel(), "has_adapter", False):
            raise ValueError("the model has no adapters: fit with lora, and save before merging")
        self.getModel().network.save_pretrained(directory)

    def merge_adapter(self) -> Self:
        """Adds the adapters to the weights of the network, and removes them. Predictions stay the
        same up to rounding.

        Returns:
            The object.
        """
        self.getModel().merge_adapter()
        return self

    def _merged_network(self) -> Any:
        """Returns the network without adapters, which are merged into a copy.

        Raises:
            ValueError: there is no model.
        """
        if self.getModel() is None:
            raise ValueError("model is required")
        network = self.getModel().network
        if getattr(self.getModel(), "has_adapter", False):
            return copy.deepcopy(network).merge_and_unload()
        return network


def pack_pretrained_files(model: FineTunedModel) -> dict[str, bytes]:
    """Returns the files that `save_pretrained` of a model writes, by name.

    Args:
        model: the model.
    """
    with tempfile.TemporaryDirectory(prefix="farandole-checkpoint-") as directory:
        model.save_pretrained(directory)
        return {one.name: one.read_bytes() for one in sorted(Path(directory).iterdir())}


@contextlib.contextmanager
def unpack_pretrained_files(parts: Mapping[str, bytes]) -> Iterator[str]:
    """Yields a directory with files of a checkpoint.

    Args:
        parts: results of `pack_pretrained_files`.
    """
    with tempfile.TemporaryDirectory(prefix="farandole-checkpoint-") as directory:
        for name, content in parts.items():
            # A name must not lead out of the directory.
            (Path(directory) / Path(name).name).write_bytes(content)
        yield directory
