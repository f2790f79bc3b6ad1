# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""No text of ours says `1 runs`: one helper of each language writes a count and its noun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from farandole.common.counted_noun import format_counted_noun

ROOT = Path(__file__).parents[2]

NOUNS = [
    "calls",
    "connections",
    "devices",
    "epochs",
    "executors",
    "files",
    "hosts",
    "jobs",
    "lines",
    "links",
    "nodes",
    "partitions",
    "processes",
    "ranks",
    "restarts",
    "row.groups",
    "runs",
    "slots",
    "tasks",
    "threads",
    "trials",
    "workers",
    "worlds",
]
# `{count} ranks` and `${count} more ranks`. Not `1 of {count} ranks`, which is no singular, not
# `{MAX_RANKS} ranks`, a constant, and not `Python {version} runs`, a verb.
HAND_WRITTEN = re.compile(
    r"(?<!of )(?<!Python )\$?\{(?![A-Z_]+\})[^{}\n]*\} +(?:(?:more|other|task) )?(?:"
    + "|".join(NOUNS)
    + r")\b"
)
# Texts that are shown as a table: the number is in a column and the noun is its head.
COLUMN = re.compile(r":>\d+[^{}]*\} files")
SOURCES = (
    "crates/*/src/**/*.rs",
    "python/farandole/**/*.py",
    "crates/ui/page/*.js",
    "jvm-shim/spark/src/main/resources/**/*.js",
)
DEVELOPMENT = re.compile(
    r"crates/(testkit|xtask)/|/tests?(/|\.rs$)|_tests?\.rs$|/simulation(/|\.rs$)|/costs\.rs$"
)


def hand_written_counts(text: str) -> list[str]:
    """The places of a text that write a plural after a count."""
    return [match[0] for match in HAND_WRITTEN.finditer(text) if not COLUMN.search(match[0])]


def test_every_count_in_our_texts_is_written_by_the_helper():
    found = {}
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        if DEVELOPMENT.search(name) or "/.venv/" in name:
            continue
        text = path.read_text().split("#[cfg(test)]\nmod tests {")[0]
        if counts := hand_written_counts(text):
            found[name] = counts
    assert not found


@pytest.mark.parametrize("noun", NOUNS)
def test_a_count_that_is_written_by_hand_is_found(noun):
    noun = noun.replace(".", " ")
    for text in (
        f"{{count}} {noun}",
        f"${{a.b}} {noun}",
        f"{{len(x):,}} more {noun}",
        f"{{}} {noun}",
    ):
        assert hand_written_counts(f"has {text} now") == [text]
    for text in (f"1 of {{count}} {noun}", f"{{MAX_COUNT}} {noun}", f"3 {noun}"):
        assert hand_written_counts(text) == []


@pytest.mark.parametrize(
    ("count", "noun", "expected"),
    [
        (0, "run", "0 runs"),
        (1, "run", "1 run"),
        (2, "run", "2 runs"),
        (1, "process", "1 process"),
        (3, "process", "3 processes"),
        (2, "batch", "2 batches"),
        (1294, "row", "1,294 rows"),
    ],
)
def test_only_one_thing_is_singular(count, noun, expected):
    assert format_counted_noun(count, noun) == expected
