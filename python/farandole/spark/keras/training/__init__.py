# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The parts of the training loop, which starts in `farandole.spark.keras.remote`."""
