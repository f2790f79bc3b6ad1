# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Words of Horovod's metadata and limits of its readers; those here have none of their own."""

PETASTORM_HDFS_DRIVER = "libhdfs"
METRIC_PRINT_FREQUENCY = 100
ARRAY = "array"
CUSTOM_SPARSE = "custom_sparse_format"
NOCHANGE = "nochange"
MIXED_SPARSE_DENSE_VECTOR = "mixed_sparse_dense_vector"
SPARSE_VECTOR = "sparse_vector"
DENSE_VECTOR = "dense_vector"
TOTAL_BUFFER_MEMORY_CAP_GIB = 4
BYTES_PER_GIB = 1 << 30
