# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A Sphinx extension with one directive: `crate` copies a summary and a drawing from the opening
comment of a crate.

The summary is the first two paragraphs of the crate's `//!` comment, and the drawing its first
block of plain text. So the page cannot differ from the sources. A crate without a drawing is a
warning, which fails `make docs`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]

log = logging.getLogger(__name__)


def opening(path: str) -> Path:
    """Returns the file whose opening comment describes a crate, such as `crates/engine`."""
    library = ROOT / path / "src" / "lib.rs"
    return library if library.is_file() else library.with_name("main.rs")


def summary(path: str) -> tuple[str, str]:
    """Returns the first two paragraphs of a crate's opening comment, and its first drawing;
    empty if it has none.
    """
    lines = [
        line[3:].removeprefix(" ")
        for line in opening(path).read_text().splitlines()
        if line.startswith("//!")
    ]
    comment = "\n".join(lines)
    drawing = re.search(r"^```text\n.*?^```$", comment, re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", comment, flags=re.MULTILINE | re.DOTALL).split(
        "Invariants:"
    )[0]
    # rustdoc's links lead nowhere on a page
    text = re.sub(r"\[(`[^`\]]+`)\](?:\([^)]*\))?", r"\1", text)
    paragraphs = [one for one in text.split("\n\n") if one.strip() and not one.startswith("#")]
    return "\n\n".join(paragraphs[:2]), drawing[0] if drawing else ""


class Crate(SphinxDirective):
    """Writes the summary and the drawing of the crate in the directory that is its argument."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns them as nodes of the page."""
        (path,) = self.arguments
        self.env.note_dependency(str(opening(path)))
        text, drawing = summary(path)
        if not drawing:
            log.warning("a crate without a drawing: %s", path, type="crate", subtype="drawing")
        return self.parse_text_to_nodes(f"{text}\n\n{drawing}\n")


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive."""
    app.add_directive("crate", Crate)
    return {"parallel_read_safe": True}
