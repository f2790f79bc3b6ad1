# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Rules for the algorithms of allreduces, from their times, and the file of rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farandole.runner.bench import fastest_algorithm_rules, write_algorithm_rules

if TYPE_CHECKING:
    from pathlib import Path


def test_the_fastest_algorithm_of_each_size_is_chosen() -> None:
    times = {
        "direct": {4: 1.0, 1024: 3.0},
        "doubling": {4: 2.0, 1024: 1.0},
        "pipeline": {4: 9.0, 1024: 9.0, 1 << 20: 1.0},
    }
    assert fastest_algorithm_rules(times, [4, 1024, 1 << 20]) == "direct:4,doubling:1024,pipeline"


def test_a_small_difference_changes_no_algorithm() -> None:
    times = {"doubling": {4: 1.0, 64: 1.04, 256: 1.2}, "pipeline": {4: 1.5, 64: 1.0, 256: 1.0}}
    assert fastest_algorithm_rules(times, [4, 64, 256]) == "doubling:64,pipeline"


def test_larger_tensors_than_were_timed_get_no_algorithm_for_small_ones() -> None:
    times = {"direct": {4: 1.0, 64: 1.0}, "pipeline": {4: 2.0, 64: 2.0}}
    assert fastest_algorithm_rules(times, [4, 64]) == "direct:64"


def test_rules_of_other_shapes_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rules"
    write_algorithm_rules(path, "1x2", "pipeline")
    write_algorithm_rules(path, "2x2", "doubling:4,hierarchy")
    path.write_text("# by hand\n" + path.read_text())
    write_algorithm_rules(path, "1x2", "direct:64")
    assert path.read_text() == "# by hand\n2x2=doubling:4,hierarchy\n1x2=direct:64\n"
    assert list(tmp_path.iterdir()) == [path]
