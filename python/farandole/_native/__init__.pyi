# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The extension module; each submodule mirrors one file of `python/src`."""

__version__: str
