# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Counts in texts for users."""


def format_counted_noun(count: int, noun: str) -> str:
    """Returns a count and its noun, such as `1 rank` and `1,294 rows`.

    Args:
        count: The number of things.
        noun: Their name in the singular.
    """
    is_sibilant = noun.endswith(("s", "ch", "x")) and not noun.endswith("epoch")
    plural = "es" if is_sibilant else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"
