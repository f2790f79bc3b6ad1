# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fitted model in words: its inputs, its outputs, its layers and their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farandole.spark.common.model.output_columns import ModelOutput

_MAX_LISTED_CLASSES = 8
"""Names of classes in one line."""
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class LayerSummary:
    """One layer of a model."""

    name: str
    kind: str
    form: str
    """Sizes and settings, as the framework writes them."""
    parameters: int
    trained: int
    """Number of parameters that training changes."""
    size: int
    """Bytes of the parameters."""


def torch_layers(module: Any) -> list[LayerSummary]:
    """Returns the layers of a torch module: those with their own parameters, and those without
    other layers.

    Args:
        module: of any kind. A parameter that two layers share counts where it comes first.
    """
    made: list[LayerSummary] = []
    seen: set[int] = set()
    for name, one in module.named_modules():
        own = [each for each in one.parameters(recurse=False) if id(each) not in seen]
        seen |= {id(each) for each in own}
        if not own and next(one.children(), None) is not None:
            continue
        made.append(
            LayerSummary(
                name=name or type(one).__name__,
                kind=type(one).__name__,
                form=one.extra_repr().replace("\n", " "),
                parameters=sum(each.numel() for each in own),
                trained=sum(each.numel() for each in own if each.requires_grad),
                size=sum(each.numel() * each.element_size() for each in own),
            )
        )
    return made


def describe_inputs(
    signature: Sequence[Mapping[str, Any]], categories: Mapping[str, Sequence[Any]]
) -> list[str]:
    """Returns a line about each input.

    Args:
        signature: of the model; of one that `fit` did not make, the columns alone.
        categories: of columns.
    """
    lines: list[str] = []
    for one in signature:
        if "shape" not in one:
            lines.append(", ".join(one["columns"]))
            continue
        sizes = [
            "rows",
            *("length" if one.get("ragged") else str(size) for size in one["shape"][1:]),
        ]
        words = [
            f"{name}: {len(categories[name])} categories"
            for name in one["columns"]
            if name in categories
        ]
        told = f" ({'; '.join(words)})" if words else ""
        lines.append(f"{', '.join(one['columns'])}: {one['dtype']} [{', '.join(sizes)}]{told}")
    return lines


def describe_fills(fill: Mapping[str, Any] | None, learned: Mapping[str, str]) -> list[str]:
    """Returns a line about each column whose missing values are replaced.

    Args:
        fill: values by column; `"*"` stands for all others.
        learned: which of them were learned, and as what.
    """
    lines: list[str] = []
    for name, value in sorted((fill or {}).items(), key=lambda one: one[0] == "*"):
        told = f" ({learned[name]})" if name in learned else ""
        shown = f"{value:.6g}" if isinstance(value, float) else repr(value)
        lines.append(f"{'all other columns' if name == '*' else name}: {shown}{told}")
    return lines


def describe_outputs(
    names: Sequence[str],
    outputs: Sequence[ModelOutput] | None,
    form: str | None,
    classes: Sequence[Any] | None,
) -> list[str]:
    """Returns a line about each output.

    Args:
        names: the columns that `transform` adds.
        outputs: their known properties.
        form: of the only output.
        classes: their names.
    """
    lines: list[str] = []
    for index, name in enumerate(names):
        words = [] if outputs is None else [_output_type_text(outputs[index])]
        words += [form] if form is not None and len(names) == 1 else []
        lines.append(f"{name}: {', '.join(words)}" if words else name)
    if classes:
        more = (
            f" and {len(classes) - _MAX_LISTED_CLASSES} more"
            if len(classes) > _MAX_LISTED_CLASSES
            else ""
        )
        lines.append(f"classes: {', '.join(map(str, classes[:_MAX_LISTED_CLASSES]))}{more}")
    return lines


def describe_layers(layers: Sequence[LayerSummary]) -> list[str]:
    """Returns a table of the layers, and the sum of their parameters.

    Args:
        layers: in the order of the model.
    """
    rows = [(one.name, one.kind, one.form, f"{one.parameters:,}") for one in layers]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    lines = [
        (
            f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {form:<{widths[2]}}  {number:>{widths[3]}}"
        ).rstrip()
        for name, kind, form, number in rows
    ]
    count, trained = sum(one.parameters for one in layers), sum(one.trained for one in layers)
    frozen = f", {count - trained:,} of them frozen" if count != trained else ""
    return [
        *lines,
        f"{count:,} parameters{frozen}, {_format_bytes(sum(one.size for one in layers))}",
    ]


def _output_type_text(output: ModelOutput) -> str:
    return output.kind if output.kind != "vector" else f"vector of {output.size}"


def _format_bytes(size: float) -> str:
    unit = min(len(_BYTE_UNITS) - 1, max(0, int(size).bit_length() - 1) // 10)
    return f"{size / (1 << 10 * unit):.3g} {_BYTE_UNITS[unit]}"
