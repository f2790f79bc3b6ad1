// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The job's meeting point: registration, assignment, key-value, logs, metrics, results.
