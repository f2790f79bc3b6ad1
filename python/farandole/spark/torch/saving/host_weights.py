# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The weights of a module that predicts in Spark's Python workers: one copy for all workers of a
host.

The driver packs the weights as safetensors, apart from the module, and sends them once: by a
broadcast, or as a file of the session on Connect. A worker maps the host's one file of these bytes
(`farandole.spark.job.host_memory_files`) instead of reading its own copy. The mapping is private: a
module that changes a weight while it predicts gets a copy of that page.
"""

from __future__ import annotations

import hashlib
import io
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from farandole.spark.job import host_memory_files
from farandole.spark.job.connect_artifacts import (
    PrestagedFile,
    load_prestaged,
    prestage_if_large,
)
from farandole.spark.job.session_adapter import is_connect
from farandole.spark.torch.saving import safetensors_bytes, state_bytes
from farandole.spark.torch.saving.weight_references import (
    WeightReferencePickler,
    WeightReferenceUnpickler,
)

if TYPE_CHECKING:
    from pyspark.core.broadcast import Broadcast
    from pyspark.sql import SparkSession

MIN_SHARED_WEIGHT_BYTES = 4 << 20
"""Smaller weights are sent within the module."""
_MIN_SHARED_BUFFER_BYTES = 1 << 16
"""Smaller buffers that are not in the state of the module are sent within it."""
_HALF_PRECISION_MODULES = (
    torch.nn.Linear,
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
)
"""Modules that autocast runs in bfloat16, so that their weights can be stored in it."""


@dataclass(frozen=True)
class HostWeights:
    """Weights that were sent to the executors.

    Attributes:
        digest: SHA-256 of the bytes.
        source: the bytes, as safetensors, or where a task finds them.
    """

    digest: str
    source: bytes | PrestagedFile | Broadcast[bytes]

    def read_content(self) -> bytes:
        """Returns the bytes, in a task, and keeps no copy."""
        if isinstance(self.source, bytes | PrestagedFile):
            return load_prestaged(self.source)
        content = self.source.value
        # A broadcast variable keeps its value after the first read. With Spark's encryption, it
        # has no file for a second read.
        if getattr(self.source, "_path", None) is not None:
            vars(self.source).pop("_value", None)
        return content


@dataclass(frozen=True)
class PackedModule:
    """A module in two parts.

    Attributes:
        module: the pickle; without `weights`, it contains them.
        weights: the tensors, as safetensors.
    """

    module: bytes
    weights: bytes | None


def pack_module(module: torch.nn.Module, *, in_bfloat16: bool = False) -> PackedModule:
    """Packs a module, and its weights apart from it if they are large.

    Args:
        module: any.
        in_bfloat16: whether weights that are used in bfloat16 are stored so.
    """
    weights = {id(one): (name, one) for name, one in _named_tensors(module).items()}
    shared = dict(weights.values())
    size = sum(one.numel() * one.element_size() for one in shared.values())
    if size < MIN_SHARED_WEIGHT_BYTES or not _can_be_shared(shared):
        return PackedModule(state_bytes.pickle_with_tensors(module), None)
    pickled = io.BytesIO()
    WeightReferencePickler(pickled, shared).dump(module)
    halves = _half_precision_weights(module) if in_bfloat16 else set[int]()
    stored = {
        name: one.detach().to(torch.bfloat16) if id(one) in halves else one.detach()
        for name, one in shared.items()
    }
    return PackedModule(pickled.getvalue(), safetensors_bytes.dump_tensors(stored))


def send_weights(session: SparkSession, weights: bytes | None) -> HostWeights | None:
    """Sends weights to the executors.

    Args:
        session: in which the tasks will run.
        weights: of `pack_module`.
    """
    if weights is None:
        return None
    digest = hashlib.sha256(weights).hexdigest()
    if is_connect(session):
        return HostWeights(digest, prestage_if_large(session, weights))
    return HostWeights(digest, session.sparkContext.broadcast(weights))


def load_module(module: bytes | PrestagedFile, weights: HostWeights | None) -> torch.nn.Module:
    """Returns the module on the CPU, in a task. Runs code.

    Args:
        module: the pickle of `pack_module`.
        weights: the weights, if the pickle has references to them.
    """
    if weights is None:
        return state_bytes.unpickle_on_cpu(load_prestaged(module))
    descriptor = host_memory_files.open_host_memory_file(weights.digest, weights.read_content)
    if descriptor is None:
        tensors = safetensors_bytes.load_tensors(weights.read_content())
        return _restore_module(module, tensors)
    try:
        loaded = _restore_module(
            module, safetensors_bytes.map_tensors(f"/proc/self/fd/{descriptor}")
        )
    except BaseException:
        os.close(descriptor)
        raise
    # Other processes find the file as long as it is open here.
    weakref.finalize(loaded, os.close, descriptor)
    return loaded


def take_float32_inputs(module: torch.nn.Module) -> None:
    """Lets the layers whose weights are stored in bfloat16 compute in float32 where the model
    disables autocast. Without it, such a layer would not take its input.

    Args:
        module: a result of `load_module`.
    """
    for part in module.modules():
        if type(part) in _HALF_PRECISION_MODULES and part.weight.dtype is torch.bfloat16:
            part.register_forward_pre_hook(_widen_weights_outside_of_autocast)


def _widen_weights_outside_of_autocast(part: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
    given = inputs[0] if inputs else None
    if (
        torch.is_tensor(given)
        and given.dtype is torch.float32
        and not torch.is_autocast_enabled(given.device.type)
    ):
        part.float()


def _restore_module(module: bytes | PrestagedFile, tensors: Any) -> torch.nn.Module:
    return WeightReferenceUnpickler(io.BytesIO(load_prestaged(module)), tensors).load()


def _named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = module.state_dict(keep_vars=True)
    found = {name: one for name, one in state.items() if torch.is_tensor(one)}
    for name, buffer in module.named_buffers():  # also those that are not in the state
        is_large = buffer.numel() * buffer.element_size() >= _MIN_SHARED_BUFFER_BYTES
        if name not in found and is_large and _can_be_shared({name: buffer}):
            found[name] = buffer
    return found


def _can_be_shared(tensors: dict[str, torch.Tensor]) -> bool:
    """Returns whether all tensors are plain ones in the memory of this host."""
    return all(
        type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu"
        for one in tensors.values()
    ) and safetensors_bytes.can_store_as_safetensors(tensors)


def _half_precision_weights(module: torch.nn.Module) -> set[int]:
    """Returns the identities of the float32 weights that only modules use that autocast runs in
    bfloat16.
    """
    used: set[int] = set()
    elsewhere: set[int] = set()
    for part in module.modules():
        taken = used if type(part) in _HALF_PRECISION_MODULES else elsewhere
        taken.update(
            id(one) for one in part.parameters(recurse=False) if one.dtype is torch.float32
        )
    return used - elsewhere
