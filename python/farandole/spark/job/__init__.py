# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A job on Spark: its agents in Spark's tasks, and the driver's requests to the session."""
