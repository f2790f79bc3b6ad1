# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The parts of a fit that the template `FarandoleEstimator._train` gets: the place where it runs,
and the job that a framework makes of prepared data.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from farandole.spark.common.model.output_columns import ModelOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from farandole.runner.backend import Backend
    from farandole.spark.common.runs.fingerprint import Fingerprint
    from farandole.spark.common.runs.tracking import ModelExample
    from farandole.spark.common.show.progress import ProgressDisplay


@dataclass(frozen=True)
class FitResources:
    """The backend of a fit, and the display of its progress."""

    backend: Backend
    shown: ProgressDisplay


@dataclass(frozen=True)
class FrameworkTrainingJob:
    """The job of a fit, and the functions of its framework that use the result.

    Attributes:
        job: description of the job, with `store`, `run_id`, `data`, `labels` and `file_paths`.
        fingerprint: fingerprint of the fit.
        train: trains one rank's part of the job; returns what rank 0 brings back.
        inputs: inputs of the model, with `columns`, `shape` and `dtype`.
        output_sizes: elements of one row of each output; `None` if the first prediction must find
            out.
        load_result: returns the trained model, given the result of rank 0.
        create_model_kwargs: returns the arguments of the fitted model's class, given the trained
            model, the history, the run's name and the description of the columns.
        create_example: returns some rows for MLflow, given the trained model.
        messages: decisions of the trial run, for the user.
        output_words: words about each output for the user; none if they are unknown.
        hold_inputs: returns the context in which files that workers need are in the run's
            directory; gives the job that names them.
        model_params: further parameters that only the fitted models of this framework have.
    """

    job: Any
    fingerprint: Fingerprint
    train: Callable[[Any], Any]
    inputs: Sequence[Any]
    output_sizes: Sequence[int] | None
    load_result: Callable[[Any], Any]
    create_model_kwargs: Callable[[Any, Any, str, Mapping[str, Any]], dict[str, Any]]
    create_example: Callable[[Any], ModelExample | None]
    messages: Sequence[str] = ()
    output_words: Sequence[str] = ()
    hold_inputs: Callable[[Any], AbstractContextManager[Any]] = nullcontext
    model_params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def outputs(self) -> list[ModelOutput] | None:
        """The description of the outputs for the fitted model."""
        if self.output_sizes is None:
            return None
        return [
            ModelOutput(label.column.dtype, bool(label.column.shape), size)
            for label, size in zip(self.job.labels, self.output_sizes, strict=True)
        ]
