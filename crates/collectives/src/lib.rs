// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Buffers, dtypes, devices, communicators; the algorithms and kernels of every operation.
