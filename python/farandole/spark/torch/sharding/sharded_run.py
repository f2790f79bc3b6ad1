# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The model of one rank under FSDP2, and its part of checkpoints."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import farandole.torch as hvd
import farandole.torch.distributed  # noqa: F401 - registers the backend
from farandole.common import heap
from farandole.numpy.plain_value_exchange import allgather_plain, broadcast_plain
from farandole.spark.torch.saving import state_bytes
from farandole.spark.torch.sharding.driver_state import (
    describe_optimizer_state,
    extra_module_states,
    is_divided_state,
    optimizer_tensor_name,
)
from farandole.spark.torch.sharding.state_files import (
    PARTS_DIRECTORY,
    StatePartReader,
    TensorRows,
    as_rows,
    delete_unused_parts,
    write_state_parts,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole.spark.torch.job import TorchTrainingJob, TorchUserObjects
    from farandole.spark.torch.sharding.driver_state import ShardedObjects


@contextlib.contextmanager
def hold_process_group() -> Iterator[None]:
    """Creates the default process group, and ends it at the end; a collective call.

    Raises:
        RuntimeError: This process has one.
    """
    if dist.is_initialized():
        raise RuntimeError(
            'strategy="fsdp" creates the default process group of torch.distributed, and this '
            "process has one: call torch.distributed.destroy_process_group() first"
        )
    dist.init_process_group("farandole", init_method="farandole://")
    try:
        yield
    finally:
        dist.destroy_process_group()


class ShardedRun:
    """The divided model of this rank and its optimizer, in the default process group.

    Attributes:
        objects: The user's objects; each parameter of the model has memory for the rows of this
            rank. `load_state` gives them their values.

    Args:
        job: The run.
        sharded: The user's objects without weights.
        device: Device of this rank.
    """

    def __init__(
        self, job: TorchTrainingJob, sharded: ShardedObjects, device: torch.device
    ) -> None:
        self._job, self._sharded, self._device = job, sharded, device
        self._rank, self._size = hvd.rank(), hvd.size()
        self._written: dict[str, Any] = {}
        # Small blocks would fill the holes of gathered units, so the heap would grow as if the
        # whole model were gathered.
        heap.map_large_blocks()
        self.objects: TorchUserObjects = sharded.restore_objects()
        self._mesh = init_device_mesh(device.type, (self._size,))
        self._divide_model()

    def _divide_model(self) -> None:
        model, optimizer = self.objects.model, self.objects.optimizer
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        modules = dict(model.named_modules())
        for path in self._sharded.units:
            fully_shard(modules[path], mesh=self._mesh)
        fully_shard(model, mesh=self._mesh)
        places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                places.setdefault(id(buffer), []).append((module, name))
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        # Without it, modules that share a parameter would have one each.
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.to_empty(device=self._device)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
        for (first, key), *others in places.values():
            for module, name in others:  # they shared a buffer
                module._buffers[name] = first._buffers[key]  # noqa: SLF001 - as `_apply` of torch does
        divided = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"][:] = [divided[names[id(each)]] for each in group["params"]]

    def load_state(self) -> dict[str, Any]:
        """Loads the checkpoint of the run, or its first state; a collective call.

        Returns:
            The rest of the checkpoint, without model and optimizer.

        Raises:
            ValueError: The checkpoint is damaged, or of another model, optimizer or strategy.
        """
        store = self._job.store
        found = store.read_checkpoint_to_resume() if self._rank == 0 else None
        found = broadcast_plain(found, 0) or self._sharded.start
        state = state_bytes.unpack_state(found)
        if "sharded" not in state:
            raise ValueError(
                f"the checkpoint of run {self._job.run_id!r} was written without "
                f'strategy="fsdp": choose another run_id, or move {store.run_path} elsewhere'
            )
        self._written = state.pop("sharded")
        reader = StatePartReader(store, self._written["parts"])
        found_damage = reader.find_damaged_part(self._rank, self._size)
        damaged = [name for name in allgather_plain(found_damage) if name is not None]
        if damaged:
            raise ValueError(
                f"a part of the checkpoint of run {self._job.run_id!r} is missing or damaged: "
                f"{store.run_path}/{damaged[0]}: choose another run_id, or move the run elsewhere"
            )
        reader.read_headers()
        try:
            self._load_model(reader, state.pop("extra"))
            self._load_optimizer(reader, state.pop("optimizer"))
        except (RuntimeError, ValueError, KeyError) as error:
            raise ValueError(
                f"the checkpoint of run {self._job.run_id!r} belongs to another model or "
                f"optimizer: choose another run_id, or move {store.run_path} elsewhere: {error}"
            ) from error
        return state

    def _load_model(self, reader: StatePartReader, extra: dict[str, Any]) -> None:
        model = self.objects.model
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                local, first = self._own_rows(parameter)
                self._fill_rows(reader, name, first, len(parameter), local)
            for name, buffer in model.named_buffers():
                rows = as_rows(buffer)
                self._fill_rows(reader, name, 0, len(rows), rows)
        if extra:
            model.load_state_dict(extra, strict=False)

    def _fill_rows(
        self, reader: StatePartReader, name: str, first: int, total: int, target: torch.Tensor
    ) -> None:
        host = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
        reader.read_rows(name, first, total, host)
        if host is not target:
            target.copy_(host)

    def _load_optimizer(self, reader: StatePartReader, described: dict[str, Any]) -> None:
        model, optimizer = self.objects.model, self.objects.optimizer
        for group, options in zip(optimizer.param_groups, described["groups"], strict=True):
            group.update(options)
        parameters = dict(model.named_parameters())
        for name, values in described["values"].items():
            parameter = parameters[name]
            optimizer.state[parameter] = dict(values)
            for key in described["divided"][name]:
                stored = optimizer_tensor_name(name, key)
                local, first = self._own_rows(parameter)
                rows = torch.empty_like(local, dtype=reader.row_shape(stored)[1])
                self._fill_rows(reader, stored, first, len(parameter), rows)
                optimizer.state[parameter][key] = DTensor.from_local(
                    rows,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )

    def _own_rows(self, tensor: Any) -> tuple[torch.Tensor, int]:
        """Returns the rows of this rank and the number of the first one, as `torch.chunk` divides
        them.
        """
        total = len(tensor)
        first = min(self._rank * -(-total // self._size), total)
        return tensor.to_local().detach(), first

    def write_parts(self) -> None:
        """Writes the rows of this rank to the run's directory; a collective call."""
        for module in self.objects.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        token = broadcast_plain(secrets.token_hex(8) if self._rank == 0 else None, 0)
        directory = f"{PARTS_DIRECTORY}/{token}"
        own = write_state_parts(self._job.store, directory, self._rank, self._own_tensors())
        parts = [part for parts in allgather_plain(own) for part in parts]
        self._written = {"directory": directory, "parts": parts}

    def _own_tensors(self) -> Iterator[TensorRows]:
        model, optimizer = self.objects.model, self.objects.optimizer
        for name, parameter in model.named_parameters():
            local, first = self._own_rows(parameter)
            yield TensorRows(name, first, len(parameter), local)
            for key, value in optimizer.state.get(parameter, {}).items():
                if is_divided_state(value, parameter):
                    local, first = self._own_rows(value)
                    stored = optimizer_tensor_name(name, key)
                    yield TensorRows(stored, first, len(parameter), local)
        if self._rank == 0:
            for name, buffer in model.named_buffers():
                rows = as_rows(buffer.detach())
                yield TensorRows(name, 0, len(rows), rows)

    def checkpoint_state(self, factor: float) -> dict[str, Any]:
        """Returns the state for a checkpoint, with the entries of the parts that were written last.

        Args:
            factor: Factor of the learning rates.
        """
        model, optimizer = self.objects.model, self.objects.optimizer
        return {
            "sharded": self._written,
            "optimizer": describe_optimizer_state(model, optimizer, factor),
            "extra": extra_module_states(model),
        }

    def delete_unused_parts(self) -> None:
        """Deletes the parts of replaced checkpoints, on rank 0."""
        if self._rank == 0:
            delete_unused_parts(
                self._job.store, self._written["directory"], state_bytes.unpack_state
            )
