# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checkpoints in the layout of Hugging Face: a directory with config.json, tokenizer.json and
weights as safetensors.

The driver reads a checkpoint once. Training processes and tasks get the network from the driver.
Nothing is asked of a hub, and no code that a checkpoint contains is run.
"""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import safetensors
import torch
import transformers

from farandole._native import store as native
from farandole.stores.pickle_policy import (
    ALLOW_PICKLE_VARIABLE,
    PickleNotAllowedError,
    pickle_decision_from_env,
)
from farandole.stores.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

_CONFIG_FILE, _TOKENIZER_FILE = "config.json", "tokenizer.json"
_WEIGHTS_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_PICKLED_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_FETCHED_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja")
_FETCHED_BYTES = 64 * 2**20
"""Bytes of a file that are in memory while it is fetched."""
_DEFAULT_MAX_LENGTH = 512


class LoadedNetwork(NamedTuple):
    """A network, and the names of its weights that the checkpoint does not have."""

    network: Any
    fresh_names: tuple[str, ...]

    @property
    def fresh_layers(self) -> list[str]:
        """Names of the layers whose weights the checkpoint does not have."""
        return sorted({name.rpartition(".")[0] for name in self.fresh_names})


@dataclass(frozen=True)
class TextCheckpoint:
    """A checkpoint that is open: its files are local.

    Attributes:
        directory: directory of the files.
        name: path for messages.
        tokenizer: the tokenizer, one of the package tokenizers.
        config: configuration of the network.
        has_safetensors: whether the weights are safetensors.
    """

    directory: Path
    name: str
    tokenizer: Any
    config: Any
    has_safetensors: bool

    @property
    def padding_id(self) -> int:
        """Id of the token for padded places."""
        ids = (self.config.pad_token_id, self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((one for one in ids if isinstance(one, int) and one >= 0), 0)

    def resolve_max_length(self, asked: int | None) -> int:
        """Returns the largest number of tokens of a text.

        Args:
            asked: number that the user set; `None` stands for all that the network takes, at
                most 512.

        Raises:
            ValueError: the network takes fewer.
        """
        positions = getattr(self.config, "max_position_embeddings", None)
        if isinstance(positions, int) and "roberta" in self.config.model_type:
            positions -= self.padding_id + 1  # its positions begin after the id of the padding
        limits = [positions, self.tokenizer.model_max_length]
        largest = min([one for one in limits if isinstance(one, int) and one > 0], default=2**30)
        if asked is not None and asked > largest:
            raise ValueError(
                f"max_length={asked} is more than the checkpoint {self.name} takes, which is "
                f"{largest} tokens"
            )
        return min(_DEFAULT_MAX_LENGTH, largest) if asked is None else asked

    def load_network(self, kind: Any, seed: int, **changes: Any) -> LoadedNetwork:
        """Returns the network, in float32, and the names of the weights that are new and random.

        Args:
            kind: a class such as `AutoModelForSequenceClassification`.
            seed: seed of the new weights.
            **changes: values of the configuration that differ.

        Raises:
            ValueError: the network has no such form, or its weights cannot be read.
        """
        config = copy.deepcopy(self.config)
        config.pad_token_id = self.padding_id
        for name, value in changes.items():
            setattr(config, name, value)
        with torch.random.fork_rng(devices=[]), quiet_transformers():
            torch.manual_seed(seed)
            try:
                network, found = kind.from_pretrained(
                    self.directory,
                    config=config,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=self.has_safetensors,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                    dtype=torch.float32,
                )
            except (OSError, RuntimeError, ValueError) as error:
                raise ValueError(f"the checkpoint {self.name} is not loaded: {error}") from error
        # A run continues if the files are the same, also in another directory.
        network.config.name_or_path = ""
        for layer in network.modules():
            if hasattr(layer, "name_or_path"):
                layer.name_or_path = ""
        mismatched = [one[0] for one in found["mismatched_keys"]]
        return LoadedNetwork(network, tuple(sorted({*found["missing_keys"], *mismatched})))

    def tokenizer_files(self) -> dict[str, str]:
        """Returns the files of the tokenizer, text by name."""
        with tempfile.TemporaryDirectory(prefix="farandole-tokenizer-") as directory:
            self.tokenizer.save_pretrained(directory)
            return {one.name: one.read_text("utf-8") for one in sorted(Path(directory).iterdir())}


def check_checkpoint(name: str, value: Any) -> Any:
    """Checks a checkpoint as users give it: a path or URL, or a model with its tokenizer.

    Raises:
        TypeError: It is something else.
        ValueError: It is an empty path.
    """
    if isinstance(value, str | Path):
        if not str(value):
            raise ValueError(f"{name} must not be empty")
        return str(value)
    if isinstance(value, tuple | list) and len(value) == 2:  # noqa: PLR2004 - model and tokenizer
        model, tokenizer = value
        if all(hasattr(one, "save_pretrained") for one in value) and hasattr(model, "config"):
            return model, tokenizer
    raise TypeError(
        f"{name} must be the path of a directory, or (model, tokenizer) of transformers: {value!r}"
    )


@contextlib.contextmanager
def open_checkpoint(value: Any) -> Iterator[TextCheckpoint]:
    """Opens a checkpoint inside the context: reads tokenizer and configuration, and checks the
    files of the weights.

    Args:
        value: a result of `check_checkpoint`.

    Raises:
        FileNotFoundError: the directory or a file is missing; the message names it.
        PickleNotAllowedError: the weights are a pickle, and FARANDOLE_ALLOW_PICKLE is not 1.
        ValueError: a file is damaged; the message names it.
    """
    with contextlib.ExitStack() as stack:
        if not isinstance(value, str):
            made = stack.enter_context(tempfile.TemporaryDirectory(prefix="farandole-checkpoint-"))
            with quiet_transformers():
                for part in value:
                    part.save_pretrained(made)
            yield _read_checkpoint(Path(made), "in memory")
            return
        prefix = native.full_path(Store.create(value).prefix_path)  # pyright: ignore[reportAttributeAccessIssue]
        store = native.Store(prefix)
        if not store.exists():
            raise FileNotFoundError(f"the checkpoint does not exist: {value}")
        if store.local_path is not None:
            yield _read_checkpoint(Path(store.local_path), value)
            return
        made = stack.enter_context(tempfile.TemporaryDirectory(prefix="farandole-checkpoint-"))
        names = [name for name, _ in store.list()]
        _check_files(names, value)
        for name, size in store.list():
            is_wanted = name.endswith(_FETCHED_SUFFIXES) or name.startswith("pytorch_model")
            if "/" not in name and is_wanted:
                _fetch_file(store, name, size, Path(made))
        yield _read_checkpoint(Path(made), value)


def _fetch_file(store: native.Store, name: str, size: int, directory: Path) -> None:
    with (directory / name).open("wb") as file:
        for start in range(0, size, _FETCHED_BYTES):
            file.write(store.read_range(name, start, min(start + _FETCHED_BYTES, size)))


def _check_files(names: list[str], where: str) -> bool:
    """Returns whether the weights of a checkpoint are safetensors.

    Raises:
        FileNotFoundError: a file is missing.
        PickleNotAllowedError: the weights are a pickle.
    """
    for name, source in ((_CONFIG_FILE, "model"), (_TOKENIZER_FILE, "tokenizer")):
        if name not in names:
            raise FileNotFoundError(
                f"the checkpoint {where} has no {name}, which {source}.save_pretrained writes"
            )
    if _WEIGHTS_FILE in names or _INDEX_FILE in names:
        return True
    pickled = [name for name in _PICKLED_FILES if name in names]
    if not pickled:
        raise FileNotFoundError(f"the checkpoint {where} has no weights: no {_WEIGHTS_FILE}")
    if pickle_decision_from_env() is not True:
        raise PickleNotAllowedError(
            f"the weights of the checkpoint {where} are a pickle, {pickled[0]}, which may run "
            f"code: write {_WEIGHTS_FILE} with model.save_pretrained, or allow the pickle with "
            f"{ALLOW_PICKLE_VARIABLE}=1"
        )
    return False


def _read_checkpoint(directory: Path, where: str) -> TextCheckpoint:
    names = [path.name for path in directory.iterdir()]
    is_safe = _check_files(names, where)
    for name in _weight_files(directory, names, where) if is_safe else ():
        try:
            with safetensors.safe_open(directory / name, "pt"):
                pass
        except FileNotFoundError:
            raise FileNotFoundError(f"the checkpoint {where} has no {name}") from None
        except safetensors.SafetensorError as error:
            raise ValueError(f"{name} of the checkpoint {where} is damaged: {error}") from None
    try:
        config = transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{_CONFIG_FILE} or {_TOKENIZER_FILE} of the checkpoint {where} is not understood: "
            f"{error}"
        ) from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(
            f"the tokenizer of the checkpoint {where} is a {type(tokenizer).__name__}, which is "
            "written in Python: a tokenizer of the package tokenizers is needed"
        )
    return TextCheckpoint(directory, where, tokenizer, config, is_safe)


def _weight_files(directory: Path, names: list[str], where: str) -> list[str]:
    if _WEIGHTS_FILE in names:
        return [_WEIGHTS_FILE]
    try:
        return sorted(set(json.loads((directory / _INDEX_FILE).read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{_INDEX_FILE} of the checkpoint {where} is damaged: {error}") from None


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hides the bars and reports of transformers inside, which would break the lines of a fit."""
    log = transformers.utils.logging
    shown, verbosity = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if shown:
            log.enable_progress_bar()
