# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Settings of a distributed optimizer."""

from __future__ import annotations

import dataclasses
from typing import Any

from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.util import Average


@dataclasses.dataclass(frozen=True)
class GradientReductionSettings:
    """Settings of a gradient reduction on any backend: the arguments of `DistributedOptimizer`
    by their names.
    """

    name: str | None = None
    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = None
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    op: int = Average
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    groups: Any = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True

    def __reduce__(self) -> Any:
        """Pickles the settings with their optimizer.

        Raises:
            TypeError: When the settings contain values that are valid only in this process.
        """
        if self.groups is not None and not isinstance(self.groups, int):
            raise TypeError(
                "an optimizer with groups of variables cannot be copied: its copy has other "
                "variables"
            )
        return GradientReductionSettings, tuple(
            getattr(self, field.name) for field in dataclasses.fields(self)
        )
