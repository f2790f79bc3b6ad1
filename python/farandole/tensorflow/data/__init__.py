# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Input pipelines of tf.data in separate processes; see `compute_service`."""
