// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A world in one process, a host-memory device, faulty links (development only).
