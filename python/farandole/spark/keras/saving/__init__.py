# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Models, and the classes and functions that they use, as bytes and files."""
