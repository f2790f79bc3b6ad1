# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Settings of the documentation site, which `make docs` builds."""

import re
import sys
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.highlighting import lexers

sys.path.insert(0, str(Path(__file__).parent))

_PACKAGE = Path(__file__).parents[1] / "python" / "farandole" / "__init__.py"

project = "Farandole"
(release,) = re.findall(r'^__version__ = "(.+)"', _PACKAGE.read_text(), re.MULTILINE)
version = release
copyright = "the Farandole authors"  # noqa: A001 - Sphinx's name
extensions = ["myst_parser", "api_reference", "crate_page"]
lexers["ssh-config"] = TextLexer()  # Pygments has none for it
source_suffix = {".md": "markdown"}
html_theme = "pydata_sphinx_theme"
html_title = f"Farandole {release}"
html_show_sourcelink = False
html_theme_options = {
    "navbar_align": "left",
    "navbar_start": ["navbar-logo", "version-switcher"],
    "navigation_with_keys": False,
    "show_prev_next": True,
    # The browser reads the list from the root of the server, so pages of older versions show newer
    # ones, too.
    "switcher": {"json_url": "/switcher.json", "version_match": release},
    "check_switcher": False,
}
html_extra_path = ["switcher.json"]
linkcheck_timeout = 20
linkcheck_anchors = False  # pages that scripts build have no anchors in their source
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", ".*")
]  # annotations name types of Spark, torch and others, which have sites of their own
python_maximum_signature_line_length = 90
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
suppress_warnings = [
    # each framework's module exports ProcessSet and the operations, so a bare name has several
    # targets
    "ref.python",
]
