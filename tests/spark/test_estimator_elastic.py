# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""An estimator on Spark loses half of its executors in the middle of a fit and gets new ones; it
learns as well.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.programs import program_path
from tests.spark.deployments import PATIENCE, drive

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 * PATIENCE)]

TORCH = program_path(__file__, "fit_digits_torch")
LIGHTNING = program_path(__file__, "fit_digits_lightning")
KERAS = program_path(__file__, "fit_digits_keras")


GOOD = 0.9
"""A share of right answers that each network exceeds without a disturbance."""


def fit(directory: Path, estimator: Path, *, disturbed: bool) -> tuple[float, str]:
    """Accuracy of a fit, and what its driver said."""
    notes = directory / f"notes-{disturbed}"
    notes.mkdir()
    env = {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch"}
    done = drive(estimator, directory, 420, NOTES=str(notes), DISTURBED=str(int(disturbed)), **env)
    accuracy, epochs, held = json.loads(done.stdout.strip().splitlines()[-1])
    assert epochs == 12
    assert not held
    return accuracy, done.stderr


@pytest.mark.parametrize(
    "estimator", [TORCH, KERAS, LIGHTNING], ids=["torch", "keras", "lightning"]
)
def test_half_of_the_executors_are_killed_in_the_middle_of_a_fit(
    tmp_path: Path, estimator: Path
) -> None:
    accuracy, told = fit(tmp_path, estimator, disturbed=True)
    sizes = [line.split()[-2] for line in told.splitlines() if "farandole: world" in line]
    assert sizes[0] == sizes[-1] == "4", told
    assert "2" in sizes, told
    assert "starting again" not in told
    assert accuracy > GOOD - 0.03
    if estimator is TORCH:  # the others would take as long again
        undisturbed, _ = fit(tmp_path, estimator, disturbed=False)
        assert undisturbed > GOOD
        assert accuracy > undisturbed - 0.03
