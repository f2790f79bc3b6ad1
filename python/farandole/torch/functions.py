# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Broadcast of parameters, optimizer state and objects from one rank to all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import torch

from farandole.common import basics, pickling
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.numpy import plain_value_exchange
from farandole.torch._allgather import allgather_rows_and_counts
from farandole.torch._broadcast import broadcast_, broadcast_async_
from farandole.torch._handles import synchronize


def broadcast_tensors(
    named: Sequence[tuple[str | None, torch.Tensor]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrites all tensors by the root's tensors, contiguous or not, all at once."""
    handles: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for name, tensor in named:
            dense = tensor.detach().contiguous()
            handles.append((broadcast_async_(dense, root_rank, name, process_set), tensor, dense))
        for handle, tensor, dense in handles:
            synchronize(handle)
            if dense.data_ptr() != tensor.data_ptr():
                tensor.copy_(dense)


def broadcast_parameters(
    params: Any, root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Sends the parameters of one rank to all ranks, so that all start from the same model.

    Args:
        params: A mapping such as `model.state_dict()`, or a list of tensors or of `(name, tensor)`
            pairs such as `list(model.named_parameters())`.
        root_rank: The global rank whose values count.
        process_set: The ranks that take part; this one must be a member.

    Raises:
        ValueError: When `params` is something else, e.g. a generator, or holds an object that is no
            tensor.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    named: list[tuple[str | None, Any]]
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, list):
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(
            "params must be a mapping, or a list of tensors or (name, tensor) pairs: "
            f"{type(params)!r}"
        )
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"params must hold tensors; {name!r} is a {type(tensor).__name__}")
    broadcast_tensors(named, root_rank, process_set)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's object on every rank; it is sent by cloudpickle over links that the job's
    key secures.

    Unnamed calls are numbered like unnamed operations, and ranks that call something else get an
    error. Horovod names them after the type of `obj`, and hangs if ranks pass different types.

    Args:
        obj: The object to send; ignored on other ranks.
        root_rank: The global rank that sends.
        name: Names the operation across ranks.
        process_set: The ranks that take part; this one must be a member.

    Returns:
        `obj` itself on the root, a copy elsewhere.

    Raises:
        ValueError: When an argument is wrong.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    size_name, data_name = (
        (None, None) if name is None else (f"object.{name}.size", f"object.{name}.data")
    )
    is_root = basics.rank() == root_rank
    data = _dump_object(obj) if is_root else None
    size = torch.tensor([0 if data is None else data.numel()], dtype=torch.int64).view(
        _OBJECT_SHAPE
    )
    broadcast_(size, root_rank, size_name, process_set)
    if data is None:
        data = torch.empty(int(size), dtype=torch.uint8).view(_OBJECT_SHAPE)
    broadcast_(data, root_rank, data_name, process_set)
    return obj if is_root else _load_object(data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the objects of all ranks, in the order of ranks; they are sent as in
    `broadcast_object`.

    Args:
        obj: This rank's object.
        name: Names the operation across ranks.
        process_set: The ranks that take part; this one must be a member.

    Returns:
        One object per member; this rank's own is a copy too.

    Raises:
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    whole, rows = allgather_rows_and_counts(
        _dump_object(obj), None if name is None else f"object.{name}", process_set
    )
    return [_load_object(part) for part in torch.split(whole, rows)]


_OBJECT_SHAPE = (-1, 1, 1, 1)
"""Shape of sent objects. No other operation uses it, so an unnamed tensor of another rank does not
match an object.
"""


def _dump_object(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickling.pickle_by_value(obj)), dtype=torch.uint8).view(
        _OBJECT_SHAPE
    )


def _load_object(data: torch.Tensor) -> Any:
    return cloudpickle.loads(data.view(-1).numpy().data)


class _TensorPlaceholder:
    """Stands for a tensor in a described optimizer state."""

    def __init__(self, index: int, shape: Sequence[int], dtype: torch.dtype, on_host: bool) -> None:
        self.index = index
        self.shape = shape
        self.dtype = dtype
        self.on_host = on_host


def broadcast_value(value: Any, root_rank: int, name: str) -> Any:
    """Returns the root's value on every rank.

    If `plain.pack_plain` takes the value, it is sent without pickle; types of tensors and results
    of `extract_state_tensors` count as plain. Any other value is pickled.

    Args:
        value: The value to send; ignored on other ranks.
        root_rank: The rank that sends.
        name: Names the operation across ranks.
    """
    packed = _pack_or_pickle(value) if basics.rank() == root_rank else None
    packed = plain_value_exchange.broadcast_plain(packed, root_rank, name)
    if basics.rank() == root_rank:
        return value
    return (
        plain_value_exchange.unpack_plain(packed, _from_plain_form)
        if isinstance(packed, bytes)
        else cloudpickle.loads(packed[0])
    )


def _pack_or_pickle(value: Any) -> bytes | tuple[bytes, str]:
    try:
        return plain_value_exchange.pack_plain(value, _plain_form)
    except TypeError:
        return pickling.pickle_by_value(value), "pickled"


def pack_broadcast_value(value: Any) -> bytes:
    """Returns the bytes that `broadcast_value` sends for a value. If they are pickled, equal
    values may differ.
    """
    packed = _pack_or_pickle(value)
    return packed if isinstance(packed, bytes) else packed[0]


def _plain_form(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, _TensorPlaceholder):
        return [value.index, list(value.shape), _plain_form(value.dtype), value.on_host]
    raise TypeError(f"no plain form of a {type(value).__name__}")


def _from_plain_form(form: Any) -> Any:
    if isinstance(form, str):
        dtype = getattr(torch, form, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"a peer names {form!r} as a data type of tensors, but it is not one")
        return dtype
    index, shape, dtype, on_host = form
    return _TensorPlaceholder(index, shape, _from_plain_form(dtype), on_host)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None
) -> None:
    """Sends an optimizer's state and options (learning rate, momentum, ...) from one rank to all
    ranks.

    It takes no step and changes no gradient, also if the state is empty. Afterwards every rank has
    the state of the root. Horovod fills an empty state with a real step, which may change
    parameters.

    Args:
        optimizer: Plain or distributed; the same parameters in the same groups on all ranks.
        root_rank: The rank whose state counts.
        model: Not needed; accepted for compatibility with Horovod.

    Raises:
        ValueError: On all ranks, when the optimizer is an `LBFGS`, or some rank's groups differ
            from the root's.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    del model
    if hasattr(optimizer, "consolidate_state_dict"):
        raise ValueError(
            "an optimizer with shard_states=True has a part of the states on each rank: broadcast "
            "the state before it is wrapped, or load the same state on all ranks"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "the state of an LBFGS optimizer cannot be broadcast: it is bound to the last "
            "evaluation"
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    layout = [len(group["params"]) for group in optimizer.param_groups]
    tensors: list[torch.Tensor] = []
    description = None
    if basics.rank() == root_rank:
        options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        states = [optimizer.state.get(parameter) for parameter in parameters]
        common = {key: optimizer.state[key] for key in _common_state_keys(optimizer)}
        description = (
            layout,
            extract_state_tensors(options, tensors),
            extract_state_tensors(states, tensors),
            extract_state_tensors(common, tensors),
        )
    expected, options, states, common = broadcast_value(
        description, root_rank, "optimizer.description"
    )
    everywhere = plain_value_exchange.allgather_plain(layout, "optimizer.layout")
    misfits = [
        f"rank {rank}: {found}" for rank, found in enumerate(everywhere) if found != expected
    ]
    if misfits:
        raise ValueError(
            f"parameters per group must be {expected} as on rank {root_rank}: {'; '.join(misfits)}"
        )
    if basics.rank() != root_rank:
        slots: dict[int, torch.Tensor] = {}
        for group, received in zip(optimizer.param_groups, options, strict=True):
            group.update(
                rebuild_state(received, group["params"][0] if group["params"] else None, slots)
            )
        for parameter, received in zip(parameters, states, strict=True):
            optimizer.state.pop(parameter, None)
            if received is not None:
                optimizer.state[parameter] = rebuild_state(received, parameter, slots)
        for key in _common_state_keys(optimizer):
            del optimizer.state[key]
        optimizer.state.update(rebuild_state(common, parameters[0] if parameters else None, slots))
        tensors = [slots[index] for index in range(len(slots))]
    broadcast_tensors(
        [(f"optimizer.{index}", tensor) for index, tensor in enumerate(tensors)], root_rank
    )


def _common_state_keys(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns the keys of an optimizer's state that belong to no parameter."""
    return [key for key in optimizer.state if not isinstance(key, torch.Tensor)]


def extract_state_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Copies nested dicts, lists and tuples with slots instead of tensors; collects the tensors."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _TensorPlaceholder(len(tensors) - 1, tuple(value.shape), value.dtype, value.is_cpu)
    if isinstance(value, Mapping):
        return {key: extract_state_tensors(entry, tensors) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        entries = [extract_state_tensors(entry, tensors) for entry in value]
        return entries if isinstance(value, list) else tuple(entries)
    return value


def rebuild_state(
    value: Any, parameter: torch.Tensor | None, slots: dict[int, torch.Tensor]
) -> Any:
    """Inverts `extract_state_tensors`: fills slots with fresh tensors, on the parameter's device if
    they were on a device.
    """
    if isinstance(value, _TensorPlaceholder):
        device = "cpu" if value.on_host or parameter is None else parameter.device
        slots[value.index] = torch.empty(value.shape, dtype=value.dtype, device=device)
        return slots[value.index]
    if isinstance(value, dict):
        return {key: rebuild_state(entry, parameter, slots) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        entries = [rebuild_state(entry, parameter, slots) for entry in value]
        return entries if isinstance(value, list) else tuple(entries)
    return value
