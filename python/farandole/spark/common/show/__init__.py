# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Shows a fit: progress in a terminal or a notebook, charts, and reports."""
