# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Input pipelines of tf.data on processes of their own; see `compute_service`."""
