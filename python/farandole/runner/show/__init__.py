# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Progress of a running job: epochs, ranks and events, for the run viewer and for Spark's
Training tab.
"""
