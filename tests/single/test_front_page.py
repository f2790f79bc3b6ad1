# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""README.md is short, and its numbers are those of the page about performance."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text()
MAX_LINES = 120
MEASURED = re.compile(r"(\d+(?:\.\d+)?) (ms|s|x as fast)\b")


def measured_numbers(text):
    """Returns the numbers with a unit of a text."""
    return {(Decimal(number), unit) for number, unit in MEASURED.findall(text)}


def is_published(number, unit, published):
    """Returns whether a published number is this one, when it is rounded."""
    return any(unit == other and number == found.quantize(number) for found, other in published)


def test_the_front_page_is_short_and_has_a_picture_and_five_doors():
    assert len(README.splitlines()) <= MAX_LINES
    (picture,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert (ROOT / picture).is_file()
    doors = README.partition("\n## Five doors\n")[2].partition("\n## ")[0]
    names = re.findall(r"^- \*\*([^*]+)\*\*:", doors, re.MULTILINE)
    assert names == ["A DataFrame on Spark", "A script", "Parquet", "Ray", "Databricks"]


def test_each_number_of_the_front_page_is_on_the_page_about_performance():
    rows = [line for line in README.splitlines() if line.startswith("| ") and "`python " in line]
    assert len(rows) == 3
    published = measured_numbers(PERFORMANCE)
    for row in rows:
        (command,) = re.findall(r"`(python [^`]+)`", row)
        assert command in PERFORMANCE
        assert (ROOT / command.split()[1]).is_file()
        cells = row.strip("|").split("|")[1:3]
        numbers = measured_numbers(" ".join(cells))
        assert numbers, row
        assert [found for found in numbers if not is_published(*found, published)] == [], row
    assert [word for word in ("Horovod", "Gloo", "petastorm") if word not in "".join(rows)] == []
