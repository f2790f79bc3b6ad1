// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Records of logs, metrics and progress, bounded rings, the sink trait.
