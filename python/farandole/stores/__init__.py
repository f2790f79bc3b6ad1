# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Stores: the places of prepared data, checkpoints and logs. They work without Spark.

The public names are in `farandole.spark.common`, where Horovod has them.
"""
