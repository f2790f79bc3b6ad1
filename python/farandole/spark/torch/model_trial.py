# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Calls a model on some rows before workers start, and finds out which types it takes and which
fields of its result are its outputs.

An input is float32 if the user gives no type. If the model does not take that, because it looks up
an input in an embedding, columns of integers become int64.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from farandole.spark.common.data.training_data import EXAMPLE_ROWS
from farandole.spark.torch.columns.tensors import describe_input_misfit, input_tensor
from farandole.spark.torch.random_numbers import hold_random_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from farandole.spark.torch.columns.model_calls import ModelCall
    from farandole.spark.torch.job import TorchInput

_INDEX_ARGUMENTS: dict[Any, tuple[int, str]] = {
    functional.embedding: (0, "input"),
    functional.embedding_bag: (0, "input"),
    functional.one_hot: (0, "tensor"),
    torch.embedding: (1, "indices"),
}
"""Position and name of the indices, by function."""


@dataclass(frozen=True)
class TriedModel:
    """The result of a trial.

    Attributes:
        inputs: the inputs, with the types that the model takes.
        call: the call, with the fields that are outputs.
        messages: decisions, for the user.
    """

    inputs: tuple[TorchInput, ...]
    call: ModelCall
    messages: tuple[str, ...] = ()


def try_model_call(
    call: ModelCall,
    inputs: Sequence[TorchInput],
    model: torch.nn.Module,
    rows: dict[str, torch.Tensor],
    *,
    has_dtypes: bool,
) -> TriedModel:
    """Calls a model on some rows, and decides types and outputs that the user left open.

    Args:
        call: the call, as the user describes it.
        inputs: inputs of the model.
        model: the model.
        rows: columns by name.
        has_dtypes: whether the user gave the types of the inputs.

    Raises:
        ValueError: the model does not take the rows; the message says which types it takes.
    """
    inputs, messages = tuple(inputs), ()
    tensors = _input_tensors(inputs, model, rows, EXAMPLE_ROWS)
    error = _call_error(call, model, tensors)
    if error is not None:
        integers = [
            not has_dtypes
            and model_input.dtype == "float32"
            and all(rows[name].dtype in _INTEGER_DTYPES for name in model_input.columns)
            for model_input in inputs
        ]
        lookups = find_lookup_inputs(call, model, tensors)
        wanted = [index for index, is_integer in enumerate(integers) if is_integer]
        for chosen in ([index for index in wanted if index in lookups], wanted):
            tried = _with_int64(tensors, chosen)
            failed = _call_error(call, model, tried) if chosen else error
            if failed is None:
                inputs = tuple(
                    replace(model_input, dtype="int64") if index in chosen else model_input
                    for index, model_input in enumerate(inputs)
                )
                names = ", ".join(inputs[index].short_name for index in chosen)
                messages = (f"the model does not take float32: int64 is used for {names}",)
                break
            if chosen and lookups.issubset(chosen):
                tensors, error = tried, failed  # the types fit: it is another error
        else:
            names = [one.short_name for one in inputs]
            raise ValueError(misfit_message(call, model, names, tensors, error)) from error
    result = call_on_rows(call, inputs, model, rows, EXAMPLE_ROWS)
    return TriedModel(inputs, replace(call, fields=call.output_fields(result)), messages)


_INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def call_on_rows(
    call: ModelCall,
    inputs: Sequence[TorchInput],
    model: torch.nn.Module,
    rows: dict[str, torch.Tensor],
    count: int,
) -> Any:
    """Returns the result of a model for some rows.

    Args:
        call: the call.
        inputs: inputs of the model.
        model: the model.
        rows: columns by name.
        count: number of rows to use, from the first row on.

    Raises:
        ValueError: the model does not take them.
    """
    tensors = _input_tensors(inputs, model, rows, count)
    try:
        with hold_evaluation_mode(model):
            return call.call_model(model, tensors)
    except Exception as error:
        names = [one.short_name for one in inputs]
        raise ValueError(misfit_message(call, model, names, tensors, error)) from error


def model_outputs(
    call: ModelCall,
    inputs: Sequence[TorchInput],
    model: torch.nn.Module,
    rows: dict[str, torch.Tensor],
    count: int = EXAMPLE_ROWS,
) -> list[torch.Tensor]:
    """Returns a model's outputs for some rows, one per label.

    Args:
        call: the call.
        inputs: inputs of the model.
        model: the model.
        rows: columns by name.
        count: number of rows to use, from the first row on.

    Raises:
        ValueError: it does not take them, or returns something else than a row of outputs for each.
    """
    outputs = call.output_tensors(call_on_rows(call, inputs, model, rows, count))
    for name, output in zip(call.labels, outputs, strict=True):
        if output.shape[:1] != (count,):
            raise ValueError(
                f"the model must return one row per row of its input: for {count} rows, its "
                f"output for column {name!r} has shape {tuple(output.shape)}"
            )
    return outputs


def misfit_message(
    call: ModelCall,
    model: torch.nn.Module,
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    error: Exception,
) -> str:
    """Returns the message about a model that does not accept its inputs. If it accepts them with
    other types, the message contains the value of `input_dtypes`.

    Args:
        call: the call.
        model: the model.
        names: names of the inputs.
        tensors: tensors of the inputs.
        error: exception of the model.
    """
    floats = [one.float() for one in tensors]
    lookups = sorted(find_lookup_inputs(call, model, floats))
    for tried in (floats, _with_int64(floats, lookups), [one.long() for one in tensors]):
        dtypes = [str(one.dtype).removeprefix("torch.") for one in tried]
        same = all(one.dtype == other.dtype for one, other in zip(tried, tensors, strict=True))
        if not same and _call_error(call, model, tried) is None:
            wanted = ", ".join(f'"{dtype}"' for dtype in dtypes)
            return (
                describe_input_misfit(names, tensors, error)
                + f". It takes other types: set input_dtypes=[{wanted}]"
            )
    return describe_input_misfit(names, tensors, error)


@contextlib.contextmanager
def hold_evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Holds a model in evaluation mode, without gradients, and keeps torch's random numbers.

    Args:
        model: the model.
    """
    # A frozen layer may be in evaluation mode while the others are not.
    modes = [(one, one.training) for one in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), hold_random_numbers():
            yield
    finally:
        for layer, training in modes:
            layer.training = training


def find_lookup_inputs(
    call: ModelCall, model: torch.nn.Module, tensors: Sequence[torch.Tensor]
) -> set[int]:
    """Returns the positions of the inputs that a model uses as indices of an embedding.

    Args:
        call: the call.
        model: the model.
        tensors: tensors of the inputs, of floats.
    """
    tracer = _LookupTracer(tensors)
    with contextlib.suppress(Exception), hold_evaluation_mode(model), tracer:
        call.call_model(model, tensors)
    return tracer.found


class _LookupTracer(TorchFunctionMode):
    """Follows inputs through a model, and replaces indices that are floats by integers, so that the
    model continues.

    Args:
        tensors: the inputs.

    Attributes:
        found: positions of the inputs that became indices.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.found: set[int] = set()
        self._sources: dict[int, set[int]] = {
            id(tensor): {index} for index, tensor in enumerate(tensors)
        }
        # The identity of a tensor is only valid while the tensor exists.
        self._held_tensors: list[torch.Tensor] = list(tensors)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls a function of torch."""
        del types
        by_position, by_keyword = list(args), dict(kwargs or {})
        position, name = _INDEX_ARGUMENTS.get(func, (None, ""))
        if position is not None:
            arguments: Any = by_position if position < len(by_position) else by_keyword
            key: Any = position if position < len(by_position) else name
            index = arguments[key]
            if index.is_floating_point() and id(index) in self._sources:
                self.found |= self._sources[id(index)]
                arguments[key] = index.long()
        result = func(*by_position, **by_keyword)
        origins: set[int] = set()
        for tensor in _tensors_in([*args, *(kwargs or {}).values()]):
            origins |= self._sources.get(id(tensor), set())
        for tensor in _tensors_in([result]) if origins else ():
            self._held_tensors.append(tensor)
            self._sources[id(tensor)] = origins | self._sources.get(id(tensor), set())
        return result


def _tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _input_tensors(
    inputs: Sequence[TorchInput],
    model: torch.nn.Module,
    rows: dict[str, torch.Tensor],
    count: int,
) -> list[torch.Tensor]:
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    return [input_tensor(rows, one, count, device) for one in inputs]


def _call_error(
    call: ModelCall, model: torch.nn.Module, tensors: Sequence[torch.Tensor]
) -> Exception | None:
    """Returns the exception of a model, or `None`."""
    try:
        with hold_evaluation_mode(model):
            call.call_model(model, tensors)
    except Exception as error:  # noqa: BLE001 - a model may raise any exception
        return error
    return None


def _with_int64(tensors: Sequence[torch.Tensor], chosen: Sequence[int]) -> list[torch.Tensor]:
    return [one.long() if index in chosen else one for index, one in enumerate(tensors)]
