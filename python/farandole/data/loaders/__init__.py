# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Loaders beside `ParquetLoader`: of frames, of mixes, of pools of rows, and of streams."""
