// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A connection with the keys of its records.

use std::os::fd::OwnedFd;

use crate::handshake::key_exchange::ConnectionKeys;

/// A TCP connection after its handshake.
#[derive(Debug)]
pub(crate) struct SecuredConnection {
    pub(crate) socket: OwnedFd,
    /// Boxed, because the tables of the ciphers take a kilobyte, too much to move.
    pub(crate) keys: Box<ConnectionKeys>,
}
