# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Searches over hyperparameters whose trials are jobs of several processes.

`optimize` runs an Optuna study, `fmin` a Hyperopt search, `farandole.ray.tune` makes trials of Ray
Tune, and the estimators work in Spark's `CrossValidator` and `TrainValidationSplit`. A training
function calls `report` to send its progress to the search.
"""

from farandole.tuning.hyperopt_search import fmin
from farandole.tuning.study import TrialBackend, optimize
from farandole.tuning.trial_reports import report

__all__ = ["TrialBackend", "fmin", "optimize", "report"]
