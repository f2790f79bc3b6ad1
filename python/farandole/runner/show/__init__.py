# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What a job shows while it runs: epochs, ranks and events, for the run viewer and for Spark's Training tab."""
