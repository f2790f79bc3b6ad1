// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Streaming shuffled batches from Parquet, in a plan that is a pure function of seed and epoch.
