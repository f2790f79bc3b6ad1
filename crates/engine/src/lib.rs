// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Queue, negotiation, fusion and completion: one engine per process.
