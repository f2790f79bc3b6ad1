# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The fitted models of all frameworks: predictions, their columns, and their quality."""
