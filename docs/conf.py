# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Settings of the documentation site, which `make docs` builds."""

project = "Farandole"
copyright = "the Farandole authors"  # noqa: A001 - Sphinx's name
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
html_theme = "pydata_sphinx_theme"
html_title = "Farandole"
html_show_sourcelink = False
html_theme_options = {"navbar_align": "left", "navigation_with_keys": False, "show_prev_next": True}
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
nitpicky = True
suppress_warnings = [
    "misc.highlighting_failure",  # an ssh configuration has no highlighter
    "myst.header",  # the generated reference begins its entries at level two
]
