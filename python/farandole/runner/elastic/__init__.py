# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Elastic jobs from Python: host discovery, and functions on workers that come and go."""
