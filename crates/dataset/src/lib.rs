// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Manifest, schema and shapes, lanes and shard plan: types and pure functions.
