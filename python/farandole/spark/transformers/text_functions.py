# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Models of text that add columns of their own, as functions of columns and of SQL."""

# ruff: noqa: SLF001 - a prediction has a copy of the model

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from farandole.common import argument_checks
from farandole.spark.common.model import column_function
from farandole.spark.job.session_adapter import SparkSessionAdapter
from farandole.spark.transformers.model import TextModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession
    from pyspark.sql.types import DataType


class TextFunctionModel(TextModel):
    """The base of models of text whose columns are not outputs of a network by label."""

    def _added_columns(self) -> dict[str, DataType]:
        """Returns the type of each column that `transform` adds, by name."""
        raise NotImplementedError

    def _source_columns(self) -> list[str]:
        """Returns the columns that a prediction reads."""
        return [self.getTextCol()]

    def _prepare_prediction(self) -> Self:
        """Returns the model, ready to predict."""
        return self

    def udf(self, output: str | None = None) -> Callable[..., Any]:
        """Returns the model as a function of columns, in the order in which `transform` reads them.

        Args:
            output: the column of `transform` that the function returns; without it, all of them.

        Raises:
            ValueError: there is no such column, or a parameter is missing.
        """
        session = SparkSessionAdapter.from_active_session().session
        function = self._create_column_function(session, output)
        return column_function.default_to_columns(self._source_columns(), function)

    def register(self, spark: SparkSession, name: str, output: str | None = None) -> None:
        """Makes the model a function of SQL in a session: `SELECT name(question) FROM rows`.

        Args:
            spark: the session, classic or Connect.
            name: name of the function.
            output: as for `udf`.

        Raises:
            ValueError: as `udf`.
        """
        argument_checks.check_nonempty_text("name", name)
        spark.udf.register(name, self._create_column_function(spark, output))

    def _create_column_function(
        self, session: SparkSession, output: str | None
    ) -> Callable[..., Any]:
        ready, added = self._prepare_prediction(), self._added_columns()
        if output is not None and output not in added:
            raise ValueError(f"the model has no output column {output!r}: {', '.join(added)}")
        given: Any = column_function.FunctionColumns(self._source_columns(), session)
        predictor = ready._create_predictor(given)
        prediction = column_function.ColumnPrediction(predictor, tuple(added), output)
        return column_function.make_column_function(prediction, list(added.values()))
