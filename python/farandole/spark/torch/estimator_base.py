# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The parts of a fit that the estimators of PyTorch and Lightning share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from farandole.data.columns import check_shapes_fit
from farandole.spark.common.data.training_data import (
    columns_from_sample_arrays,
    create_transformation,
    read_example_rows,
)
from farandole.spark.common.estimator import FarandoleEstimator
from farandole.spark.common.param_checks import feature_arguments
from farandole.spark.torch import driver_checks
from farandole.spark.torch.columns.class_weights import (
    BALANCED,
    balanced_class_weights,
    given_class_weights,
)
from farandole.spark.torch.columns.loss_terms import check_weighable
from farandole.spark.torch.columns.losses import loss_output_form
from farandole.spark.torch.columns.model_calls import ModelCall
from farandole.spark.torch.columns.model_losses import ModelLoss, own_loss_arguments
from farandole.spark.torch.columns.tensors import create_torch_inputs
from farandole.spark.torch.fingerprint_parts import model_parts
from farandole.spark.torch.job import TrainingLoopOptions
from farandole.spark.torch.own_loss_trial import find_own_loss, try_own_loss
from farandole.spark.torch.params import TorchParams
from farandole.spark.torch.saving.persistence import (
    TorchEstimatorParamsReadable,
    TorchEstimatorParamsWritable,
)
from farandole.spark.torch.training.tensor_source import to_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farandole.data.columns import PreparedColumn
    from farandole.data.prepare import PreparedData as Prepared
    from farandole.runner.backend import Backend
    from farandole.spark.common.data.training_data import TrainingDataSpec
    from farandole.spark.common.runs.fingerprint import Fingerprint, FingerprintPart
    from farandole.spark.torch.columns.class_weights import ClassWeights
    from farandole.spark.torch.job import TorchInput, TorchLabel
    from farandole.spark.torch.model_trial import TriedModel
    from farandole.spark.torch.own_loss_trial import OwnLossTrial


@dataclass(frozen=True)
class SampledColumns:
    """The columns that training processes will see, and some rows of them.

    Attributes:
        columns: by name.
        rows: tensors of some rows, by name.
        inputs: arguments of the model.
        transformation: the user's transformation of rows, or `None`.
    """

    columns: dict[str, PreparedColumn]
    rows: dict[str, torch.Tensor]
    inputs: tuple[TorchInput, ...]
    transformation: Any


class TorchEstimatorBase(
    TorchParams, FarandoleEstimator, TorchEstimatorParamsReadable, TorchEstimatorParamsWritable
):
    """The base of the estimators of PyTorch and Lightning."""

    _flavor = "pytorch"

    def _check_settings(self) -> None:
        super()._check_settings()
        if not isinstance(self.getModel(), torch.nn.Module):
            raise ValueError(f"model must be a torch.nn.Module: {type(self.getModel()).__name__}")
        dtypes, inputs = self.getInputDtypes(), len(self._input_columns())
        if dtypes is not None and len(dtypes) != inputs:
            raise ValueError(f"input_dtypes needs one type per input {inputs}: {dtypes}")
        fields, labels = self.getOutput(), self.getLabelCols()
        if fields is not None and len(fields) != len(labels):
            raise ValueError(f"output needs one field per label column {len(labels)}: {fields}")

    def _check_optimizer(self) -> None:
        driver_checks.check_optimizer(self.getModel(), self.getOptimizer())
        driver_checks.check_scheduler(self.getLrScheduler(), self.getOptimizer())

    def _arguments(self) -> list[tuple[str, ...]]:
        """Returns the path of each input, see `feature_arguments`."""
        return feature_arguments(self.getFeatureCols())

    def _has_own_loss(self) -> bool:
        """Returns whether the model computes its loss."""
        return self.getLoss() is None and self.getLossConstructors() is None

    def _label_arguments(self) -> tuple[str, ...]:
        """Returns the arguments that take labels, of a model that computes its loss."""
        if not self._has_own_loss():
            return ()
        return own_loss_arguments(self.getModel(), self.getLabelCols(), self._arguments())

    def _refuse_options_of_losses(self) -> None:
        """Refuses options that need a loss apart from the model."""
        for name in ("loss_weights", "sample_weight_col", "class_weight", "train_minibatch_fn"):
            if self._has_own_loss() and self.getOrDefault(name) is not None:
                raise ValueError(
                    f"{name} needs the parameter loss: without it, the model computes its own loss "
                    "of a batch, which is one number"
                )

    def _label_losses(self) -> list[Any]:
        """Returns the losses, or their constructors, one per label."""
        loss, constructors = self.getLoss(), self.getLossConstructors()
        if loss is not None and constructors is not None:
            raise ValueError(
                "at most one of parameters loss and loss_constructors may be specified"
            )
        given = constructors if loss is None else loss
        if given is None:
            own_loss_arguments(self.getModel(), self.getLabelCols(), self._arguments())
            given = ModelLoss()
        losses = list(given) if isinstance(given, list | tuple) else [given]
        count = len(self.getLabelCols())
        losses = losses * count if len(losses) == 1 else losses
        if self.getClassWeight() is not None and count != 1:
            raise ValueError(f"class_weight is for one label column, there are {count}")
        for label_loss in losses:
            if not callable(label_loss):
                raise TypeError(f"loss must be a function of (output, label): {label_loss!r}")
        if len(losses) != count:
            raise ValueError(f"loss needs one loss, or one per label column {count}: {len(losses)}")
        return losses

    def _functions_by_metric(self) -> list[list[Any]]:
        metrics = self.getMetrics() or []
        return [list(one) if isinstance(one, list | tuple) else [one] for one in metrics]

    def _sample_columns(self, prepared: Prepared, backend: Backend) -> SampledColumns:
        """Reads some rows, and checks model and columns against each other."""
        driver_checks.refuse_max_norm_embeddings(self.getModel(), backend.max_processes())
        transformation, removed = create_transformation(self), self._removed_columns()
        groups, inputs = self._input_columns(), _present_groups(self._input_columns(), removed)
        names = self._column_roles().stored_columns
        arrays = read_example_rows(self, prepared, names, transformation)
        rows = to_tensors(arrays)
        columns = {name: prepared.columns[name] for name in names}
        if transformation is not None:
            remaining = [name for name in names if name not in removed]
            columns = columns_from_sample_arrays({name: arrays[name] for name in rows}, remaining)
        shapes, dtypes = (
            None if values is None else [values[groups.index(one)] for one in inputs]
            for values in (self.getInputShapes(), self.getInputDtypes())
        )
        labels, label_shapes = self._present_labels()
        check_shapes_fit(columns, inputs, shapes, "feature")
        check_shapes_fit(columns, [[name] for name in labels], label_shapes, "label")
        driver_checks.refuse_useless_weights(prepared, self.getSampleWeightCol())
        arguments = [self._arguments()[groups.index(one)] for one in inputs]
        made = create_torch_inputs(inputs, columns, shapes, dtypes, prepared, arguments)
        return SampledColumns(columns, rows, made, transformation)

    def _model_call(self, inputs: Sequence[TorchInput]) -> ModelCall:
        """Returns the call of the model, as the user describes it."""
        labels = tuple(self._present_labels()[0])
        return ModelCall(
            arguments=tuple(one.argument for one in inputs),
            labels=labels,
            fields=tuple(self.getOutput() or ()),
            label_arguments=self._label_arguments(),
        )

    def _try_own_loss(
        self,
        tried: TriedModel,
        labels: Sequence[TorchLabel],
        model: torch.nn.Module,
        sampled: SampledColumns,
        data: TrainingDataSpec,
        processes: int,
    ) -> tuple[OwnLossTrial, ModelLoss]:
        """Tries the own loss of the model, also on parts of rows if several processes or passes
        make a step.
        """
        trial = try_own_loss(tried, labels, model, sampled.rows)
        is_divided = processes > 1 or self.getBackwardPassesPerStep() > 1
        if not is_divided or self.getLossReduction() is not None:
            return trial, ModelLoss()
        return trial, find_own_loss(tried, trial.labels, model, data, sampled.transformation)

    def _removed_columns(self) -> frozenset[str]:
        """Returns the features and labels that the transformation may remove."""
        return frozenset()

    def _present_labels(self) -> tuple[list[str], list[list[int]] | None]:
        """Returns the labels that are not removed, and their shapes."""
        names, shapes, removed = self.getLabelCols(), self.getLabelShapes(), self._removed_columns()
        indices = [index for index, name in enumerate(names) if name not in removed]
        return (
            [names[index] for index in indices],
            None if shapes is None else [shapes[index] for index in indices],
        )

    def _job_fields(
        self, prepared: Prepared, fingerprint: Fingerprint, unseeded: int | None = None
    ) -> dict[str, Any]:
        unseeded = 0 if self.getDeterministic() else unseeded
        return {
            **super()._job_fields(prepared, fingerprint, unseeded),
            "loop": TrainingLoopOptions.from_estimator(self),
            "loss_reduction": self.getLossReduction(),
        }

    def _class_weights(
        self, prepared: Prepared, data: TrainingDataSpec, label: TorchLabel, loss: Any
    ) -> ClassWeights | None:
        """Returns the weights of the classes of the label, if there are any.

        Raises:
            ValueError: the label has no classes, or no such class.
        """
        value, name = self.getClassWeight(), label.column.name
        if value is None:
            return None
        check_weighable(loss)
        if label.column.element_count != 1:
            raise ValueError(
                f"class_weight needs one class per row, but column {name!r} has "
                f"{label.column.element_count} values"
            )
        if value != BALANCED:
            return given_class_weights(value, name, prepared.categories.get(name))
        for option in self._class_changing_options():
            if self.getOrDefault(option) is not None:
                raise ValueError(
                    f'class_weight="{BALANCED}" counts the classes in the data before training, '
                    f"and {option} may change them: set a dict of weights by class"
                )
        return balanced_class_weights(data, name, loss)

    def _class_changing_options(self) -> tuple[str, ...]:
        """Returns the options with which training rows may have other classes than the data."""
        return ("transformation_fn", "data_module")

    def _get_model_kwargs(
        self,
        model: torch.nn.Module,
        history: Any,
        optimizer: torch.optim.Optimizer | None,
        run_id: str,
        metadata: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Returns the arguments of the class that `get_model_class` returns; called when the
        training has ended.

        Args:
            model: the trained module.
            history: losses and metrics of each epoch.
            optimizer: the optimizer after the last step; `None` in the Lightning estimator.
            run_id: name of the run.
            metadata: description of the columns, by name.
        """
        return {
            "history": history,
            "model": model,
            "optimizer": optimizer,
            "feature_columns": self.getFeatureCols(),
            "input_shapes": self.getInputShapes(),
            "label_columns": self.getLabelCols(),
            "run_id": run_id,
            "_metadata": metadata,
            "loss": self.getLoss(),
            "loss_constructors": self.getLossConstructors(),
        }

    def _model_params(
        self, call: ModelCall, inputs: Sequence[TorchInput], form: str | None = None
    ) -> dict[str, Any]:
        """Returns the parameters of fitted models of PyTorch and Lightning that Horovod's models
        do not have.
        """
        known = {} if form is None or self._output_form() else {"output_form": form}
        return known | {
            "input_dtypes": [one.dtype for one in inputs],
            "output": list(call.fields) or None,
        }

    def _loss_output_form(self) -> str | None:
        loss = self.getLoss()
        return loss_output_form(loss[0] if isinstance(loss, list | tuple) and loss else loss)

    def _framework_fingerprint_parts(self) -> list[FingerprintPart]:
        return model_parts(self.getModel(), self.getOptimizer())


def _present_groups(groups: list[list[str]], removed: frozenset[str]) -> list[list[str]]:
    """Returns the columns of the inputs that are not removed.

    Raises:
        ValueError: an input has removed columns, and others.
    """
    for group in groups:
        gone = [name for name in group if name in removed]
        if gone and len(gone) < len(group):
            raise ValueError(
                f"transformation_removed_fields names {', '.join(gone)}, which is one input with "
                f"other columns: {', '.join(group)}. Remove all of them, or none"
            )
    return [group for group in groups if not removed.intersection(group)]
