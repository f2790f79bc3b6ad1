# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The driver's side of `strategy="fsdp"`: checks, the user's objects without weights, and the
weights in the run's directory.
"""

from __future__ import annotations

import contextlib
import io
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from farandole._native import store as native
from farandole.spark.torch.saving import state_bytes
from farandole.spark.torch.saving.safetensors_bytes import can_store_as_safetensors
from farandole.spark.torch.saving.weight_references import (
    WeightReferencePickler,
    WeightReferenceUnpickler,
)
from farandole.spark.torch.sharding.state_files import (
    PARTS_DIRECTORY,
    StatePartReader,
    TensorRows,
    as_rows,
    delete_unused_parts,
    write_state_parts,
)
from farandole.spark.torch.sharding.units import find_sharding_units

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farandole.spark.torch.job import TorchTrainingJob, TorchUserObjects

MIN_FSDP_TORCH = (2, 8)
"""The first torch release with every function of FSDP2 that training uses."""


@dataclass(frozen=True)
class ShardedObjects:
    """The user's objects of a job, without weights.

    Attributes:
        skeleton: A pickle with references in place of tensors.
        tensors: Shape and type of each tensor, by name.
        units: Paths of the modules whose parameters are gathered together.
        start: The first state, with the entries of its parts, as bytes of `pack_state`.
    """

    skeleton: bytes
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    units: tuple[str, ...]
    start: bytes = b""

    def restore_objects(self) -> TorchUserObjects:
        """Returns the objects with tensors that have no memory. Runs code."""
        empty = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (shape, dtype) in self.tensors.items()
        }
        objects = WeightReferenceUnpickler(io.BytesIO(self.skeleton), empty).load()
        objects.optimizer.state.clear()
        return objects


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters and buffers of a model by name, shared ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def optimizer_tensor_name(parameter: str, key: str) -> str:
    """Returns the name of a tensor in the state of the optimizer.

    Args:
        parameter: Name of the parameter.
        key: Key in its state.
    """
    return f"optimizer:{parameter}:{key}"


def is_divided_state(value: Any, parameter: torch.Tensor) -> bool:
    """Returns whether a value in the state of the optimizer is divided as its parameter is."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def describe_optimizer_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0
) -> dict[str, Any]:
    """Returns the state of the optimizer without the tensors that are divided.

    Args:
        model: The model.
        optimizer: The optimizer over its parameters.
        factor: Factor of the learning rates.
    """
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"lr": group["lr"] / factor}
        for group in optimizer.param_groups
    ]
    values = {
        name: {
            key: value
            for key, value in optimizer.state[parameter].items()
            if not is_divided_state(value, parameter)
        }
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }
    divided = {
        name: [
            key
            for key, value in optimizer.state[parameter].items()
            if is_divided_state(value, parameter)
        ]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }
    return {"groups": groups, "values": values, "divided": divided}


def extra_module_states(model: torch.nn.Module) -> dict[str, Any]:
    """Returns the states of modules with `get_extra_state`, by name."""
    found = model.state_dict()
    return {name: value for name, value in found.items() if name.endswith("_extra_state")}


def check_shardable(model: torch.nn.Module, names: Sequence[str] | None) -> None:
    """Refuses a model that FSDP cannot divide.

    Args:
        model: The user's.
        names: `fsdp_modules` of the user.

    Raises:
        ValueError: The message names the parameter or module.
    """
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(
                f'strategy="fsdp" needs the shapes of all parameters, and {name!r} has none before '
                "the first call of the model: call the model on some rows first"
            )
        if type(parameter) is not torch.nn.Parameter or not can_store_as_safetensors(
            {name: parameter}
        ):
            raise ValueError(
                f'strategy="fsdp" divides plain tensors by rows, and parameter {name!r} is a '
                f"{type(parameter).__name__} of {parameter.dtype}"
            )
        if parameter.dim() == 0:
            raise ValueError(
                f'strategy="fsdp" divides parameters by rows, and {name!r} is a single number: '
                "give it the shape (1,)"
            )
    for name, buffer in model.named_buffers():
        if not can_store_as_safetensors({name: buffer}):
            raise ValueError(f'strategy="fsdp" cannot send buffer {name!r} of {buffer.dtype}')
    _refuse_mixed_types(model, find_sharding_units(model, names))


def _refuse_mixed_types(model: torch.nn.Module, units: Sequence[str]) -> None:
    """Refuses units with trainable parameters of several types, which are gathered in one call."""
    modules = dict(model.named_modules())
    seen: set[int] = set()
    for path in (*units, ""):
        types: dict[torch.dtype, str] = {}
        for name, parameter in modules[path].named_parameters(prefix=path):
            if id(parameter) not in seen and parameter.requires_grad:
                types.setdefault(parameter.dtype, name)
            seen.add(id(parameter))
        if len(types) > 1:
            mixed = ", ".join(f"{name!r} of {dtype}" for dtype, name in types.items())
            raise ValueError(
                'strategy="fsdp" gathers the trainable parameters of a unit together, and '
                f"{path or 'the model'!r} has several types: {mixed}"
            )


def shard_objects(objects: TorchUserObjects, names: Sequence[str] | None) -> ShardedObjects:
    """Returns the user's objects without weights.

    Args:
        objects: The objects.
        names: `fsdp_modules` of the user.
    """
    tensors = model_tensors(objects.model)
    held = dict(tensors)
    for name, parameter in objects.model.named_parameters():
        for key, value in objects.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                held[optimizer_tensor_name(name, key)] = value
    pickled = io.BytesIO()
    WeightReferencePickler(pickled, held).dump(objects)
    return ShardedObjects(
        pickled.getvalue(),
        {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()},
        tuple(find_sharding_units(objects.model, names)),
    )


@contextlib.contextmanager
def hold_first_state(job: TorchTrainingJob, objects: TorchUserObjects) -> Iterator[Any]:
    """Writes the first state of a run, unless the run has a checkpoint. Gives the job with it.
    Deletes unused parts at the end.

    Args:
        job: The job.
        objects: The user's objects, with weights.
    """
    store, sharded = job.store, job.sharded
    assert sharded is not None  # noqa: S101 - the caller has asked
    directory = f"{PARTS_DIRECTORY}/start-{secrets.token_hex(8)}"
    run = native.Store(str(store.run_path))
    name = store.checkpoint_filename
    if not (run.exists(name) or run.exists(f"{name}.previous")):
        parts = write_state_parts(store, directory, 0, _whole_tensors(objects))
        start = {
            "sharded": {"directory": directory, "parts": parts},
            "optimizer": describe_optimizer_state(objects.model, objects.optimizer),
            "extra": extra_module_states(objects.model),
        }
        job = replace(job, sharded=replace(sharded, start=state_bytes.pack_state(start)))
    try:
        yield job
    finally:
        delete_unused_parts(store, None, state_bytes.unpack_state)


def _whole_tensors(objects: TorchUserObjects) -> Iterator[TensorRows]:
    model, optimizer = objects.model, objects.optimizer
    for name, tensor in model_tensors(model).items():
        rows = as_rows(tensor.detach())
        yield TensorRows(name, 0, len(rows), rows)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if is_divided_state(value, parameter):
                rows = as_rows(value.detach())
                yield TensorRows(optimizer_tensor_name(name, key), 0, len(rows), rows)


def load_trained_state(
    checkpoint: dict[str, Any], job: TorchTrainingJob, objects: TorchUserObjects
) -> None:
    """Loads the result of a run into the user's model and optimizer, one tensor at a time.

    Args:
        checkpoint: The state that rank 0 has returned.
        job: The job.
        objects: The user's objects.
    """
    reader = StatePartReader(job.store, checkpoint["sharded"]["parts"])
    damaged = reader.find_damaged_part()
    if damaged is not None:
        raise ValueError(f"a part of the trained model is damaged: {job.store.run_path}/{damaged}")
    reader.read_headers()
    model, optimizer = objects.model, objects.optimizer
    persistent = model.state_dict(keep_vars=True)
    chosen = {id(value) for value in persistent.values() if isinstance(value, torch.Tensor)}
    for name, tensor in model_tensors(model).items():
        if id(tensor) in chosen:
            target = as_rows(tensor.detach())
            reader.read_rows(name, 0, len(target), target)
    if checkpoint["extra"]:
        model.load_state_dict(checkpoint["extra"], strict=False)
    described = checkpoint["optimizer"]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group, options in zip(optimizer.param_groups, described["groups"], strict=True):
        indexes: list[int] = []
        for parameter in group["params"]:
            name, index = names[id(parameter)], sum(map(len, (g["params"] for g in groups)))
            index += len(indexes)
            indexes.append(index)
            if name not in described["values"]:
                continue
            states[index] = dict(described["values"][name])
            for key in described["divided"][name]:
                stored = optimizer_tensor_name(name, key)
                value = torch.empty(parameter.shape, dtype=reader.row_shape(stored)[1])
                reader.read_rows(stored, 0, len(value), value)
                states[index][key] = value
        groups.append({**options, "params": indexes})
    optimizer.load_state_dict({"state": states, "param_groups": groups})
