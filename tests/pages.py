# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The code of the documentation: its blocks, and which of them are executed by a test."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
_BLOCK: Final = re.compile(
    r"(?:^ *<!-- not executed: (?P<why>[^\n]+) -->\n)?"
    r"^(?P<indent> *)```(?P<kind>[\w-]+)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_BEGINS: Final = re.compile(
    r"^\s*(?:[-*+>]\s+|\d+[.)]\s+)*(?:`{3,}|~{3,})\s*[\w-]+\s*$", re.MULTILINE
)
"""The line before a block, wherever it stands."""


@dataclass(frozen=True)
class Block:
    """A piece of code of a page."""

    page: str
    number: int
    """Among the blocks of its page that are written in the same language."""
    kind: str
    text: str
    why_not: str | None
    """Reason why no test executes it."""

    def __str__(self) -> str:
        """Names the page, the kind and the number of the block."""
        return f"{self.page}, {self.kind} block {self.number}"


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, whose path begins at the top of the repository. Those of lists are
    indented there.
    """
    return blocks_in((ROOT / page).read_text(), page)


def blocks_in(text: str, page: str) -> list[Block]:
    """The blocks of a text, which is that of a page."""
    numbers: dict[str, int] = {}
    found = []
    for match in _BLOCK.finditer(text):
        number = numbers.setdefault(match["kind"], 0)
        numbers[match["kind"]] += 1
        found.append(
            Block(page, number, match["kind"], textwrap.dedent(match["text"]), match["why"])
        )
    assert len(found) == len(_BEGINS.findall(text)), (
        f"{page} has a code block that is none of {found}"
    )
    return found


def all_blocks() -> list[Block]:
    """The blocks of all pages."""
    pages = [
        "README.md",
        *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
    ]
    return [block for page in pages for block in blocks_of(page)]
