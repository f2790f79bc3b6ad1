// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Counters of an engine's work.

/// Counters of the work of an engine, over all process sets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStatistics {
    /// Control messages sent.
    pub frames_sent: u64,
    /// Control messages received.
    pub frames_received: u64,
    /// Response lists executed.
    pub lists: u64,
    /// Operations handed to communicators.
    pub operations: u64,
    /// Tensors in these operations.
    pub tensors: u64,
    /// Requests of this rank that were announced by cache number.
    pub cache_hits: u64,
}

impl EngineStatistics {
    pub(crate) fn sum_with(self, other: Self) -> Self {
        Self {
            frames_sent: self.frames_sent + other.frames_sent,
            frames_received: self.frames_received + other.frames_received,
            lists: self.lists + other.lists,
            operations: self.operations + other.operations,
            tensors: self.tensors + other.tensors,
            cache_hits: self.cache_hits + other.cache_hits,
        }
    }
}
