// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! PartitionWriter: Arrow batches in, partitioned Parquet and manifest out.
