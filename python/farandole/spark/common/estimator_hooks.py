# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The methods of Horovod's estimators that subclasses override, and that every fit calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from farandole.spark.common.backend import CurrentStandardStream, SparkBackend
from farandole.spark.common.params import EstimatorParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farandole.stores.store import AbstractFilesystemStore


class EstimatorHooks(EstimatorParams):
    """The hooks of an estimator: their results and errors decide how a fit goes on.

    Each framework has one more, `_get_model_kwargs`, with Horovod's arguments: model, history,
    optimizer (not in Keras's), run id, metadata, and in Keras's the type of floats. It returns the
    arguments of the class that `get_model_class` returns.
    """

    _learns_features: ClassVar[bool] = False
    """Whether a feature may be a label, too, as the text of a language model is."""

    def get_model_class(self) -> type[Any]:
        """Returns the class of the fitted model; called when the training has ended."""
        raise NotImplementedError

    def _get_or_create_backend(self) -> Any:
        """Returns the backend of a fit: an object with `run(fn, args, kwargs, env)` and
        `num_processes()`. Called at the beginning of each fit.
        """
        if self.getBackend() is not None:
            return self.getBackend()
        verbose = self.getVerbose()
        streams: dict[str, Any] = {
            name: CurrentStandardStream(name) for name in ("stdout", "stderr") if verbose > 1
        }
        return SparkBackend(self.getNumProc(), verbose=verbose, **streams)

    def _check_metadata_compatibility(self, metadata: Mapping[str, Mapping[str, Any]]) -> None:
        """May refuse the columns of a DataFrame or a table, by raising an error. Called when they
        have been prepared, and not for data that exists already. This one accepts all: the model
        is tried on some rows.

        Args:
            metadata: description of the columns, by name, as of `get_simple_meta_from_parquet`.
        """

    def _check_params(self, metadata: Mapping[str, Mapping[str, Any]]) -> None:
        """May refuse parameters that do not fit the prepared data, by raising an error. Called
        before a model is tried. This one accepts all: parameters are checked before data is
        prepared.

        Args:
            metadata: description of the columns, by name, as of `get_simple_meta_from_parquet`.
        """

    def _has_checkpoint(self, run_id: str) -> bool:
        """Returns whether the store has a checkpoint of a run. The training processes look for
        themselves: the result decides only whether the fit says that the run continues.

        Args:
            run_id: name of the run.
        """
        store = cast("AbstractFilesystemStore", self.getStore())
        run = store.get_checkpoint_path(run_id)
        return run is not None and store.exists(f"{run}/{store.get_checkpoint_filename()}")
