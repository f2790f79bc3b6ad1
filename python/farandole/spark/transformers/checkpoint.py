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
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import safetensors
import torch
import transformers

from farandole._native import store as native
from farandole.spark.torch.random_numbers import RANDOM_NUMBERS_LOCK, hold_random_numbers
from farandole.stores.pickle_policy import (
    ALLOW_PICKLE_VARIABLE,
    PickleNotAllowedError,
    resolve_pickle_decision,
)
from farandole.stores.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

_CONFIG_FILE, _TOKENIZER_FILE = "config.json", "tokenizer.json"
_WEIGHTS_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_ADAPTER_FILE = "adapter_config.json"
_PICKLED_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_FETCHED_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja")
_FETCHED_BYTES = 64 * 2**20
"""Bytes of a file that are in memory while it is fetched."""
_DEFAULT_MAX_LENGTH = 512
_IN_MEMORY = "in memory"
"""Name of a checkpoint that is no directory."""
_MAX_NAMED_LAYERS = 3
_ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flex_attention")
"""Kinds of attention that transformers itself has. It fetches any other from a hub."""
_LEFT_PADDED_KINDS = ("xlnet",)
"""Networks that read the end of a row, so that padding at the end changes their values."""


class UnusableProcessorError(ValueError):
    """The file of a tokenizer or image processor is understood, but it cannot be used."""


class LoadedNetwork(NamedTuple):
    """A network, and the weights in it that are random.

    Attributes:
        network: the network.
        random_layers: names of the layers with random weights.
        head_message: a sentence about the head, if its classes are not as in the checkpoint.
    """

    network: Any
    random_layers: tuple[str, ...]
    head_message: str = ""


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

    required_files: ClassVar[dict[str, str]] = {
        _CONFIG_FILE: "model",
        _TOKENIZER_FILE: "tokenizer",
    }
    """Files besides the weights, and the object whose `save_pretrained` writes each."""

    @classmethod
    def read_processor(cls, directory: Path, where: str) -> Any:
        """Returns the tokenizer of a directory.

        Args:
            directory: directory of the files.
            where: path for messages.

        Raises:
            ValueError: it is written in Python.
        """
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise UnusableProcessorError(
                f"the tokenizer of the checkpoint {where} is a {type(tokenizer).__name__}, which "
                "is written in Python: a tokenizer of the package tokenizers is needed"
            )
        return tokenizer

    @property
    def path(self) -> str | None:
        """The path as the user gave it; `None` if the checkpoint was in memory."""
        return None if self.name == _IN_MEMORY else self.name

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
        limits = [count_positions(self.config, self.padding_id), self.tokenizer.model_max_length]
        largest = min([one for one in limits if isinstance(one, int) and one > 0], default=2**30)
        if asked is not None and asked > largest:
            raise ValueError(
                f"max_length={asked} is more than the checkpoint {self.name} takes, which is "
                f"{largest} tokens"
            )
        return min(_DEFAULT_MAX_LENGTH, largest) if asked is None else asked

    def load_network(self, kind: Any, seed: int, **changes: Any) -> LoadedNetwork:
        """Returns the network, in float32, and the layers whose weights are random.

        Args:
            kind: a class such as `AutoModelForSequenceClassification`.
            seed: seed of the new weights.
            **changes: values of the configuration that differ.

        Raises:
            ValueError: the network has no such form, its weights cannot be read, or they are not
                the weights of its body.
        """
        config = self._copy_config()
        for name, value in changes.items():
            setattr(config, name, value)
        with hold_random_numbers(seed), quiet_transformers():
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
            except (ImportError, OSError, RuntimeError, ValueError) as error:
                raise ValueError(f"the checkpoint {self.name} is not loaded: {error}") from error
        # A run continues if the files are the same, also in another directory.
        network.config.name_or_path = ""
        for layer in network.modules():
            if hasattr(layer, "name_or_path"):
                layer.name_or_path = ""
        mismatched = [one[0] for one in found["mismatched_keys"]]
        names = sorted({name.rpartition(".")[0] for name in (*found["missing_keys"], *mismatched)})
        self._check_body(network, names)
        self._check_inputs(network)
        classes = changes.get("id2label")
        message = (
            ""
            if classes is None
            else _match_head(network, self.config.id2label, classes, names, seed)
        )
        return LoadedNetwork(network, tuple(names), message)

    def _copy_config(self) -> Any:
        """Returns a copy of the configuration, with the token for padded places."""
        config = copy.deepcopy(self.config)
        config.pad_token_id = self.padding_id
        return config

    def _check_body(self, network: Any, names: list[str]) -> None:
        """Refuses a network with random layers in its body.

        Args:
            network: the network.
            names: its random layers.

        Raises:
            ValueError: a layer besides the pooler, which is a part of the head, is in the body.
        """
        start = f"{network.base_model_prefix}."
        body = [name for name in names if name.startswith(start) and "pooler" not in name]
        if body:
            shown, more = body[:_MAX_NAMED_LAYERS], len(body) - _MAX_NAMED_LAYERS
            raise ValueError(
                f"the checkpoint {self.name} has no weights for {', '.join(shown)}"
                f"{f' and {more} more' if more > 0 else ''}, or weights of another shape: its "
                f"{_CONFIG_FILE} does not describe its weights"
            )

    def _check_inputs(self, network: Any) -> None:
        """Refuses a tokenizer with tokens that the network does not have.

        Raises:
            ValueError: there is such a token.
        """
        known = len(network.get_input_embeddings().weight)
        largest = max(*self.tokenizer.get_vocab().values(), self.padding_id)
        if largest >= known:
            raise ValueError(
                f"the tokenizer of the checkpoint {self.name} has the token "
                f"{self.tokenizer.convert_ids_to_tokens(largest)!r} with the id {largest}, but the "
                f"network has {known} tokens: enlarge it with model.resize_token_embeddings"
            )

    def tokenizer_files(self) -> dict[str, str]:
        """Returns the files of the tokenizer, text by name."""
        with tempfile.TemporaryDirectory(prefix="farandole-tokenizer-") as directory:
            self.tokenizer.save_pretrained(directory)
            return {one.name: one.read_text("utf-8") for one in sorted(Path(directory).iterdir())}


def count_positions(config: Any, padding_id: int) -> int | None:
    """Returns the number of tokens for which a network has positions; `None` if it is not limited.

    Args:
        config: configuration of the network.
        padding_id: id of the token for padded places.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        return None
    config = copy.deepcopy(config)
    config.pad_token_id = padding_id
    with RANDOM_NUMBERS_LOCK, torch.device("meta"):
        network = transformers.AutoModel.from_config(config, attn_implementation="eager")
    for name, layer in network.named_modules():
        padding = getattr(layer, "padding_idx", None)
        if "position" in name and padding is not None and len(layer.weight) == positions:
            return positions - padding - 1  # its positions begin after the padding's
    return positions


def _head_layer(network: Any) -> tuple[str, torch.nn.Linear] | None:
    """Returns the last layer of the head, which has a row for each class."""
    body = {id(layer) for layer in network.base_model.modules()}
    found = [
        (name, layer)
        for name, layer in network.named_modules()
        if isinstance(layer, torch.nn.Linear)
        and id(layer) not in body
        and layer.out_features == network.config.num_labels
    ]
    return found[-1] if found else None


def _match_head(
    network: Any, before: dict[int, str], after: dict[int, str], random_layers: list[str], seed: int
) -> str:
    """Gives the head of a checkpoint the classes of the data, and returns a sentence about it.

    Args:
        network: the network.
        before: names of the classes of the checkpoint, by row of the head.
        after: names of the classes of the data.
        random_layers: layers that are random already.
        seed: seed of the head's weights if the classes are others.
    """
    old, new = (
        [str(names[index]).removeprefix("LABEL_") for index in sorted(names)]
        for names in (before, after)
    )
    head = _head_layer(network)
    if head is None or head[0] in random_layers or len(new) == 1 or old == new:
        return ""
    name, layer = head
    with torch.no_grad(), hold_random_numbers(seed):
        if sorted(old) == sorted(new):
            rows = torch.tensor([old.index(one) for one in new])
            for weight in layer.parameters():
                weight.copy_(weight[rows])
            return f"the rows of {name} are in the order of the classes, {', '.join(new)}"
        layer.weight.normal_(std=getattr(network.config, "initializer_range", None) or 0.02)
        if layer.bias is not None:
            layer.bias.zero_()
    return f"the checkpoint has other classes, {', '.join(old)}: the weights of {name} are random"


def check_checkpoint(name: str, value: Any) -> Any:
    """Checks a checkpoint as users give it: a path or URL, or a model with its tokenizer.

    Raises:
        TypeError: It is something else.
        ValueError: It is an empty path, or a model with adapters.
    """
    if isinstance(value, str | Path):
        if not str(value):
            raise ValueError(f"{name} must not be empty")
        return str(value)
    if isinstance(value, tuple | list) and len(value) == 2:  # noqa: PLR2004 - model and tokenizer
        model, tokenizer = value
        if hasattr(model, "peft_config"):
            raise ValueError(
                f"{name} has a model with adapters: give the result of its merge_and_unload()"
            )
        if all(hasattr(one, "save_pretrained") for one in value) and hasattr(model, "config"):
            return model, tokenizer
    shown = repr(value) if isinstance(value, int | float) else _describe_types(value)
    raise TypeError(
        f"{name} must be the path of a directory, or (model, tokenizer) of transformers: {shown}"
    )


def _describe_types(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(type(one).__name__ for one in value)})"
    return type(value).__name__


@contextlib.contextmanager
def open_checkpoint(
    value: Any, allow_pickle: bool | None = None, kind: type[TextCheckpoint] = TextCheckpoint
) -> Iterator[Any]:
    """Opens a checkpoint inside the context: reads tokenizer and configuration, and checks the
    files of the weights.

    Args:
        value: a result of `check_checkpoint`.
        allow_pickle: whether weights may be a pickle; `None` asks FARANDOLE_ALLOW_PICKLE.
        kind: class of the result.

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
            yield _read_checkpoint(Path(made), _IN_MEMORY, allow_pickle, kind)
            return
        if value.startswith("hf://"):
            raise ValueError(
                f"the checkpoint {value} is a name of a hub, which is not asked: give the path of "
                "its files"
            )
        prefix = native.full_path(Store.create(value).prefix_path)  # pyright: ignore[reportAttributeAccessIssue]
        store = native.Store(prefix)
        if not store.exists():
            raise FileNotFoundError(
                f"the checkpoint does not exist: {value} (a directory or a store: no hub is asked)"
            )
        if store.local_path is not None:
            yield _read_checkpoint(Path(store.local_path), value, allow_pickle, kind)
            return
        made = stack.enter_context(tempfile.TemporaryDirectory(prefix="farandole-checkpoint-"))
        names = [name for name, _ in store.list()]
        is_safe = _check_files(names, value, allow_pickle, kind)
        for name, size in store.list():
            is_pickle = name.startswith("pytorch_model")
            is_wanted = not is_safe if is_pickle else name.endswith(_FETCHED_SUFFIXES)
            if "/" not in name and is_wanted:
                _fetch_file(store, name, size, Path(made))
        yield _read_checkpoint(Path(made), value, allow_pickle, kind)


def _fetch_file(store: native.Store, name: str, size: int, directory: Path) -> None:
    with (directory / name).open("wb") as file:
        for start in range(0, size, _FETCHED_BYTES):
            file.write(store.read_range(name, start, min(start + _FETCHED_BYTES, size)))


def _check_files(
    names: list[str], where: str, allow_pickle: bool | None, kind: type[TextCheckpoint]
) -> bool:
    """Returns whether the weights of a checkpoint are safetensors.

    Raises:
        FileNotFoundError: a file is missing.
        PickleNotAllowedError: the weights are a pickle.
        ValueError: there are adapters.
    """
    for name, source in kind.required_files.items():
        if name not in names:
            raise FileNotFoundError(
                f"the checkpoint {where} has no {name}, which {source}.save_pretrained writes"
            )
    if _ADAPTER_FILE in names:
        raise ValueError(
            f"the checkpoint {where} has {_ADAPTER_FILE}: merge its adapters with "
            "merge_and_unload(), and write the result with save_pretrained"
        )
    if _WEIGHTS_FILE in names or _INDEX_FILE in names:
        return True
    pickled = [name for name in _PICKLED_FILES if name in names]
    if not pickled:
        raise FileNotFoundError(f"the checkpoint {where} has no weights: no {_WEIGHTS_FILE}")
    if resolve_pickle_decision(allow_pickle) is not True:
        raise PickleNotAllowedError(
            f"the weights of the checkpoint {where} are a pickle, {pickled[0]}, which may run "
            f"code: write {_WEIGHTS_FILE} with model.save_pretrained, or allow the pickle with "
            f"{ALLOW_PICKLE_VARIABLE}=1"
        )
    return False


def _read_checkpoint(
    directory: Path, where: str, allow_pickle: bool | None, kind: type[TextCheckpoint]
) -> TextCheckpoint:
    try:
        names = [path.name for path in directory.iterdir()]
    except NotADirectoryError:
        raise NotADirectoryError(f"the checkpoint {where} is no directory") from None
    is_safe = _check_files(names, where, allow_pickle, kind)
    for name in _weight_files(directory, names, where) if is_safe else ():
        try:
            with safetensors.safe_open(directory / name, "pt"):
                pass
        except FileNotFoundError:
            raise FileNotFoundError(f"the checkpoint {where} has no {name}") from None
        except safetensors.SafetensorError as error:
            raise ValueError(f"{name} of the checkpoint {where} is damaged: {error}") from None
    _check_config_file(directory / _CONFIG_FILE, where)
    try:
        config = transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        processor = kind.read_processor(directory, where)
    except UnusableProcessorError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{' or '.join(kind.required_files)} of the checkpoint {where} is not understood: "
            f"{error}"
        ) from error
    return kind(directory, where, processor, config, is_safe)


def _check_config_file(path: Path, where: str) -> None:
    """Refuses a configuration with which transformers fetches code from a hub, or computes other
    values.

    Raises:
        ValueError: it is such a configuration, or damaged.
    """
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} of the checkpoint {where} is damaged: {error}") from None
    for name, value in _iterate_values(config):
        if "attn_implementation" in name and value not in (None, *_ATTENTIONS):
            raise ValueError(
                f"{path.name} of the checkpoint {where} asks for {name}={value!r}, which would be "
                f"code from a hub: it may be {', '.join(_ATTENTIONS)}"
            )
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind in _LEFT_PADDED_KINDS:
        raise ValueError(
            f"the checkpoint {where} is a network of the kind {kind}, which pads texts at their "
            "beginning: this is not supported"
        )


def _iterate_values(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the plain values inside of JSON, each with the key that it is below."""
    if isinstance(value, dict):
        for key, inner in value.items():
            below = name if "attn_implementation" in name else key
            yield from _iterate_values(inner, below)
    elif isinstance(value, list):
        for inner in value:
            yield from _iterate_values(inner, name)
    else:
        yield name, value


def _weight_files(directory: Path, names: list[str], where: str) -> list[str]:
    if _WEIGHTS_FILE in names:
        return [_WEIGHTS_FILE]
    try:
        return sorted(set(json.loads((directory / _INDEX_FILE).read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{_INDEX_FILE} of the checkpoint {where} is damaged: {error}") from None


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hides the bars and reports of transformers inside, which would break the lines of a fit. One
    thread at a time is inside.
    """
    with RANDOM_NUMBERS_LOCK, _hidden_messages():
        yield


@contextlib.contextmanager
def _hidden_messages() -> Iterator[None]:
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
