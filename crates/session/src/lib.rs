// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The worker's side: joins registrar, transports and engine behind init().
