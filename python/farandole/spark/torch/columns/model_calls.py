# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Calls models: inputs by position or by keyword, and outputs of any structure with names.

A model returns a tensor, a tuple of tensors, or a structure whose parts have names: a dict, a
dataclass, a named tuple, or a `ModelOutput` of transformers. The parts of a structure are its
fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farandole.spark.torch.job import TorchInput

_LOSS_FIELD = "loss"


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """The way a model takes its inputs and returns its outputs.

    Attributes:
        arguments: path of each input, see `nest_by_path`; all are empty if the model takes its
            inputs by position.
        labels: names of the label columns, one per output.
        fields: field of the result for each label; without fields, they follow from the result.
        label_arguments: argument for each label, of a model that returns its own loss.
    """

    arguments: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...]
    fields: tuple[str, ...] = ()
    label_arguments: tuple[str, ...] = ()

    def call_model(
        self,
        model: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor] = (),
    ) -> Any:
        """Returns the result of a model.

        Args:
            model: the model, or a function that takes the same arguments.
            inputs: tensors of the inputs.
            labels: labels for the model's own loss; none if the model gets no labels.
        """
        positional, by_keyword = self.arrange_inputs(inputs)
        if labels:
            by_keyword |= zip(self.label_arguments, labels, strict=True)
        return model(*positional, **by_keyword)

    def arrange_inputs(
        self, inputs: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Returns the positional arguments and the keyword arguments for some inputs.

        Args:
            inputs: tensors of the inputs.
        """
        if not any(self.arguments):
            return list(inputs), {}
        return [], nest_by_path(self.arguments, inputs)

    def output_tensors(self, result: Any) -> list[torch.Tensor]:
        """Returns the outputs in the result of a model, one per label.

        Args:
            result: result of the model.

        Raises:
            ValueError: the result does not have these outputs.
        """
        fields = self.output_fields(result)
        if not fields:
            return flat_outputs(result, len(self.labels))
        found = result_fields(result) or {}
        return [found[name] for name in fields]

    def split_own_loss(self, result: Any) -> tuple[torch.Tensor, Any]:
        """Returns the loss in the result of a model that got labels, and the result without it.

        Args:
            result: result of the model.

        Raises:
            ValueError: there is no loss.
        """
        found = result_fields(result)
        values = list(result) if found is None and isinstance(result, list | tuple) else []
        losses = [
            (name, part)
            for name, part in (found.items() if found is not None else enumerate(values))
            if isinstance(part, torch.Tensor)
            and part.numel() == 1
            and (_is_loss(str(name), part) or (found is None and part.dim() == 0))
        ]
        if len(losses) != 1:
            raise ValueError(
                f"the model gets labels as {', '.join(self.label_arguments)} and returns no loss: "
                f"it returns {_describe_type(result)}"
                + ("" if found is None else f" with the fields {_describe_fields(found)}")
            )
        name, loss = losses[0]
        if found is not None:
            return loss.reshape(()), result
        rest = [one for index, one in enumerate(values) if index != name]
        return loss.reshape(()), rest[0] if len(rest) == 1 else tuple(rest)

    def select_outputs(self, result: Any) -> list[torch.Tensor]:
        """Like `output_tensors`, but also takes outputs that the user's code has selected.

        Args:
            result: result of the model, a tensor of it, or a list of tensors.
        """
        if result_fields(result) is None:
            return flat_outputs(result, len(self.labels))
        return self.output_tensors(result)

    def output_fields(self, result: Any) -> tuple[str, ...]:
        """Returns the field of the result for each label; none if the result is a tensor, or a
        tuple of tensors.

        Args:
            result: result of the model.

        Raises:
            ValueError: a field is missing, or it is unclear which fields are the outputs.
        """
        found = result_fields(result)
        if found is None:
            if self.fields:
                raise ValueError(
                    f"output={_quote_names(self.fields)} names fields, but the model returns "
                    f"{_describe_type(result)}, which has none: leave output out"
                )
            return ()
        tensors = {name: one for name, one in found.items() if isinstance(one, torch.Tensor)}
        if self.fields:
            missing = [name for name in self.fields if name not in tensors]
            if missing:
                raise ValueError(
                    f"output={_quote_names(self.fields)}: the model returns "
                    f"{type(result).__name__} without a tensor {', '.join(missing)}; its fields "
                    f"are {_describe_fields(found)}"
                )
            return self.fields
        outputs = {name: one for name, one in tensors.items() if not _is_loss(name, one)}
        if outputs.keys() >= set(self.labels):
            return self.labels
        if len(outputs) == len(self.labels) == 1:
            return tuple(outputs)
        if isinstance(result, tuple) and len(result) == len(tensors) == len(self.labels):
            return tuple(found)  # a named tuple is a tuple, too
        raise ValueError(self._describe_choice(result, found, list(outputs)))

    def _describe_choice(self, result: Any, found: dict[str, Any], names: list[str]) -> str:
        columns = ", ".join(map(repr, self.labels))
        wanted = f"label column{'s' if len(self.labels) > 1 else ''} {columns}"
        problem = (
            f"the model returns {type(result).__name__} with the fields {_describe_fields(found)}"
        )
        if len(names) < len(self.labels):
            return (
                f"{problem}: {len(names)} of them can be compared with labels, and there are "
                f"{len(self.labels)} label columns, {columns}"
            )
        example = _quote_names(names[: len(self.labels)])
        return f"{problem}. Set output to the one for {wanted}, such as output={example}"


def nest_by_path(paths: Sequence[tuple[str, ...]], values: Sequence[Any]) -> dict[str, Any]:
    """Returns values as a dict, in which a path of several names leads through dicts.

    Args:
        paths: path of each value: `("ids",)`, or `("text", "ids")` for `{"text": {"ids": ...}}`.
        values: one per path.
    """
    made: dict[str, Any] = {}
    for path, value in zip(paths, values, strict=True):
        parent = made
        for name in path[:-1]:
            parent = parent.setdefault(name, {})
        parent[path[-1]] = value
    return made


def inputs_by_key(inputs: Sequence[TorchInput], tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Returns the inputs of a batch as a dict: by argument, or by name if the model takes its
    inputs by position.

    Args:
        inputs: the inputs.
        tensors: one per input.
    """
    return nest_by_path([one.argument or (one.name,) for one in inputs], tensors)


def tensors_of_batch(inputs: Sequence[TorchInput], batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors of a batch in the order of the inputs.

    Args:
        inputs: the inputs.
        batch: a result of `inputs_by_key`, which may have more keys.
    """
    found = []
    for model_input in inputs:
        value: Any = batch
        for name in model_input.argument or (model_input.name,):
            value = value[name]
        found.append(value)
    return found


def result_fields(result: Any) -> dict[str, Any] | None:
    """Returns the fields of a model's result by name; `None` if it has no names.

    Args:
        result: result of a model.
    """
    if isinstance(result, Mapping):
        return {str(name): one for name, one in result.items()}
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {one.name: getattr(result, one.name) for one in dataclasses.fields(result)}
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return dict(zip(result._fields, result, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
    return None


def flat_outputs(value: Any, labels: int) -> list[torch.Tensor]:
    """Returns a model's outputs without names as a list, one per label.

    Args:
        value: output of the model: a tensor, or a tuple or list of tensors.
        labels: expected number of outputs.

    Raises:
        ValueError: the output has another type, or another number of tensors.
    """
    outputs = [value] if isinstance(value, torch.Tensor) else value
    if isinstance(outputs, list | tuple):
        outputs = [one for one in outputs if one is not None]  # such as a loss without labels
    if not isinstance(outputs, list) or not all(
        isinstance(output, torch.Tensor) for output in outputs
    ):
        raise ValueError(
            "the model must return a tensor, a tuple of tensors, or tensors with names (a dict, a "
            f"dataclass, a named tuple, a ModelOutput), it returned {_describe_type(value)}"
        )
    if len(outputs) != labels:
        raise ValueError(
            f"label column count {labels} must equal the count of model outputs {len(outputs)}"
        )
    return outputs


def _is_loss(name: str, value: torch.Tensor) -> bool:
    return name == _LOSS_FIELD and value.numel() == 1


def _quote_names(names: Sequence[str]) -> str:
    quoted = ", ".join(f'"{name}"' for name in names)
    return quoted if len(names) == 1 else f"[{quoted}]"


def _describe_fields(found: Mapping[str, Any]) -> str:
    return (
        ", ".join(
            f"{name} {tuple(part.shape)}"
            if isinstance(part, torch.Tensor)
            else f"{name} ({_describe_type(part)})"
            for name, part in found.items()
        )
        or "none"
    )


def _describe_type(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {', '.join(type(each).__name__ for each in value)}"
    return type(value).__name__
