# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Models and optimizers as bytes.

`pickle_with_tensors` returns a pickle, which contains code: load it only if it came through the
job's own links. The result of `pack_state` contains only tensors and plain values, and loading it
runs no code.
"""

from __future__ import annotations

import io
from dataclasses import fields
from typing import Any

import torch

from farandole.common import pickling
from farandole.runner.pickle_errors import describe_unpicklable


def pickle_with_tensors(value: Any) -> bytes:
    """Pickles objects, tensors and functions of the main module included.

    Args:
        value: objects that share tensors go in one call.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=pickling)
    return buffer.getvalue()


def pickle_job_objects(objects: Any, **names: str) -> bytes:
    """Pickles the user's objects of a job in one.

    Args:
        objects: a dataclass of them.
        **names: the estimator's parameters, by those fields that are called otherwise.

    Raises:
        TypeError: something cannot be pickled; the message names the parameter and what inside of
            it.
    """
    try:
        return pickle_with_tensors(objects)
    except Exception as error:
        told = describe_unpicklable(
            {names.get(one.name, one.name): getattr(objects, one.name) for one in fields(objects)}
        )
        raise TypeError(f"cannot be pickled for the training processes: {told or error}") from error


def unpickle_on_cpu(data: bytes) -> Any:
    """Inverts `pickle_with_tensors`, with every tensor on the CPU. Runs code.

    Args:
        data: what `pickle_with_tensors` returned.
    """
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def pack_state(state: dict[str, Any]) -> bytes:
    """Serialises tensors and plain values.

    Args:
        state: nested dicts and lists of tensors, numbers, strings and `None`.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpack_state(data: bytes) -> dict[str, Any]:
    """Inverts `pack_state`, with every tensor on the CPU. Runs no code.

    Args:
        data: what `pack_state` returned.
    """
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def single_process_optimizer_state(
    optimizer: torch.optim.Optimizer, factor: float
) -> dict[str, Any]:
    """Returns the optimizer's state as one process would have it.

    Args:
        optimizer: as it trains on several processes.
        factor: by which its learning rates were multiplied.
    """
    state = optimizer.state_dict()
    # Steps of local SGD: a checkpoint is written when parameters are averaged.
    state["state"] = {key: value for key, value in state["state"].items() if isinstance(key, int)}
    groups = [{**group, "lr": group["lr"] / factor} for group in state["param_groups"]]
    return {**state, "param_groups": groups}
