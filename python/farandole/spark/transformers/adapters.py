# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Adapters of PEFT in a network."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import peft
import torch

if TYPE_CHECKING:
    from farandole.spark.transformers.checkpoint import LoadedNetwork


def add_adapter(loaded: LoadedNetwork, lora: int | peft.LoraConfig, seed: int, name: str) -> Any:
    """Returns the network with adapters. Adapters are trained, and the layers whose weights the
    checkpoint lacks.

    Args:
        loaded: the network.
        lora: rank of the adapters, or their configuration.
        seed: seed of the weights of adapters.
        name: path of the checkpoint, which the file of saved adapters contains.

    Raises:
        ValueError: PEFT does not know which layers of such a network to adapt.
    """
    if isinstance(lora, int):
        config = peft.LoraConfig(r=lora, lora_alpha=2 * lora)
    else:
        config = copy.deepcopy(lora)  # PEFT writes into it
    config.task_type = config.task_type or peft.TaskType.SEQ_CLS
    trained = {*(config.modules_to_save or ()), *loaded.fresh_layers}
    config.modules_to_save = sorted(trained) or None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            made = peft.get_peft_model(loaded.network, config)
        except ValueError as error:
            raise ValueError(
                f"lora does not fit the network, a {type(loaded.network).__name__}: {error}"
            ) from error
    for adapter in made.peft_config.values():
        adapter.base_model_name_or_path = name
    return made
