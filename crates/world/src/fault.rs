// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Possible reactions of a trainer to an error.

/// The party at fault for an error, which determines the possible reaction. Every error of every
/// crate has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultOrigin {
    /// The call is wrong: correct it.
    Usage,
    /// A peer failed during an operation: roll back and form a new world.
    Peer,
    /// The world changed between operations: form a new world; nothing must be rolled back.
    Membership,
    /// The machine, the network or a file failed: repair it.
    Environment,
    /// Farandole has a bug: report it.
    Bug,
}
