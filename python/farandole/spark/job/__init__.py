# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A job on Spark: its agents in Spark's tasks, and what the driver asks of the session."""
