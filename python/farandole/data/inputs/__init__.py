# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The rows that a preparation or a loader starts from: files, frames, tables and queries, as
record batches.
"""
