// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Memory for tensors that operations use repeatedly.

use farandole_kernels::HostMemory;

use crate::Session;

impl Session {
    /// Allocates zeroed memory. If other processes of this host can access it, allreduces of
    /// tensors in it need no copies. Returns `None` if there is no such memory.
    pub fn allocate_memory(&self, bytes: usize) -> Option<HostMemory> {
        // Shareable memory costs a descriptor and a mapping, which a rank alone on its host does
        // not need.
        let together = self.world().own_placement().local_size > 1;
        if together && self.shares_memory {
            HostMemory::new_shareable(bytes)
        } else {
            HostMemory::try_new(bytes)
        }
    }
}
