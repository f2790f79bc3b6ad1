# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""TensorFlow's data service on Spark; see `compute_worker`."""
