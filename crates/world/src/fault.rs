// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The reactions to an error that are open to a trainer.

/// The party at fault for an error, and so the possible reaction. Every error of every crate has
/// one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The caller asked for something wrong: correct the call.
    Usage,
    /// A peer failed mid-way: roll back and form a new world.
    Peer,
    /// The world changed between operations: form a new world, nothing to roll back.
    Membership,
    /// The machine, the network or a file refused: mend that.
    Environment,
    /// We are wrong: report it.
    Bug,
}
