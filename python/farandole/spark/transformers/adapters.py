# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Adapters of PEFT in a network."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import peft

from farandole.spark.torch.random_numbers import hold_random_numbers

if TYPE_CHECKING:
    from farandole.spark.transformers.checkpoint import LoadedNetwork


_HEADS = ("classifier", "score")
"""Names of layers that PEFT trains and saves in every network for sequences."""


def add_adapter(
    loaded: LoadedNetwork,
    lora: int | peft.LoraConfig,
    seed: int,
    path: str | None,
    task_type: str | None = peft.TaskType.SEQ_CLS,
) -> Any:
    """Returns the network with adapters. Adapters are trained, and the layers whose weights the
    checkpoint lacks.

    Args:
        loaded: the network.
        lora: rank of the adapters, or their configuration.
        seed: seed of the weights of adapters.
        path: path of the checkpoint, which the file of saved adapters contains.
        task_type: decides which arguments PEFT passes on, unless `lora` says it; `None` passes all.

    Raises:
        ValueError: PEFT does not know which layers of such a network to adapt.
    """
    if isinstance(lora, int):
        config = peft.LoraConfig(r=lora, lora_alpha=2 * lora)
    else:
        config = copy.deepcopy(lora)  # PEFT writes into it
    config.task_type = config.task_type or task_type
    trained = {*(config.modules_to_save or ()), *map(_saved_layer, loaded.random_layers)}
    config.modules_to_save = sorted(trained) or None
    with hold_random_numbers(seed):
        try:
            made = peft.get_peft_model(loaded.network, config)
        except ValueError as error:
            raise ValueError(
                f"lora does not fit the network, a {type(loaded.network).__name__}: {error}"
            ) from error
    for adapter in made.peft_config.values():
        adapter.base_model_name_or_path = path
    return made


def _saved_layer(name: str) -> str:
    """Returns the layer that PEFT must save so that a random layer is saved: a head as one, because
    PEFT saves it as one.
    """
    head = name.partition(".")[0]
    return head if head in _HEADS else name
