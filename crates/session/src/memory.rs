// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Memory for tensors that operations use repeatedly.

use farandole_collectives::Memory;

use crate::Session;

impl Session {
    /// Zeroed memory; where others of this host can work in it, allreduces of tensors in it need no
    /// copies. `None` where there is no such memory.
    pub fn memory(&self, bytes: usize) -> Option<Memory> {
        let together = self.world().seat().local_size > 1;
        if together && self.shares_memory {
            Memory::shareable(bytes)
        } else {
            Memory::try_new(bytes)
        }
    }
}
