// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Newtypes for numbers that could be confused.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! define_index_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// Returns the number as an index into a per-rank table.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

define_index_type! {
    /// Position in the world, `0..size`.
    ///
    /// ```compile_fail
    /// use farandole_world::{LocalRank, Rank};
    /// let rank: Rank = LocalRank(1); // a local rank is not a rank
    /// ```
    Rank
}
define_index_type! {
    /// Position among the ranks of one host, `0..local_size`.
    LocalRank
}
define_index_type! {
    /// Position among the ranks that share a local rank, `0..cross_size`.
    CrossRank
}
define_index_type! {
    /// A registered process set; 0 is the whole world.
    ProcessSetId
}
define_index_type! {
    /// A slot that asks for a rank: a Spark partition, a launcher's process number.
    TaskId
}

impl ProcessSetId {
    /// The set of all ranks.
    pub const GLOBAL: Self = Self(0);
}

/// Number of a world in its job: an elastic reset or a retried Spark stage makes the next one.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Generation(pub u64);

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Name of a job, in logs, run paths and handshakes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(pub String);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
