// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Memory that NCCL gives and communicators register: the other members' kernels, and switches, may
//! then work on it where it lies, and NCCL copies it nowhere.
//!
//! Released memory serves the next request for as much on the same stream, as in torch's own
//! allocator. It returns to the device when the process ends: an earlier return would have to wait
//! for all its users, and every communicator would have to deregister it.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::time::Duration;

use farandole_collectives::CollectiveOperation;
use farandole_kernels::{Buffer, MemoryKind};
use parking_lot::Mutex;

use super::{Comm, CommunicatorStream, NcclLibrary};
use crate::{Error, Result};

/// A child of a fork may find the lock taken for ever.
const FORKED_LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// All that was given. The process's, not a session's: gradients outlive sessions, and what one
/// rank takes from an old one must be registered as what another has from the new one.
static ALLOCATED_BLOCKS: Mutex<Vec<NcclMemoryBlock>> = Mutex::new(Vec::new());

struct NcclMemoryBlock {
    ordinal: u32,
    /// Stream whose order the users of the memory keep.
    stream: usize,
    start: usize,
    bytes: usize,
    /// Whether a caller holds the block.
    in_use: bool,
}

impl NcclMemoryBlock {
    fn contains_buffer(&self, buffer: &Buffer) -> bool {
        let end = self.start.saturating_add(self.bytes);
        let first = buffer.address().addr();
        buffer.memory_kind() == MemoryKind::Device(self.ordinal)
            && (self.start..end).contains(&first)
            && buffer.len() <= end - first
    }
}

/// Memory of a device, for as long as its owner wants it.
pub struct NcclMemory {
    start: usize,
    bytes: usize,
}

impl NcclMemory {
    /// Returns its start, in the device's addresses.
    pub fn start_address(&self) -> usize {
        self.start
    }

    /// Returns the size in bytes; never 0.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for NcclMemory {
    fn drop(&mut self) {
        if let Some(mut given) = ALLOCATED_BLOCKS.try_lock_for(FORKED_LOCK_TIMEOUT)
            && let Some(block) = given.iter_mut().find(|block| block.start == self.start)
        {
            block.in_use = false;
        }
    }
}

impl NcclLibrary {
    /// Returns whether this version gives memory and registers it.
    pub fn supports_registration(&self) -> bool {
        self.function_table().allocate.is_some() && self.function_table().register.is_some()
    }

    /// Returns memory of a device, at least one byte, for work in the order of this stream. Its
    /// content is undefined.
    ///
    /// # Errors
    /// `Nccl` when there is none left, or this version gives none.
    pub fn allocate_memory(
        &self,
        device: &impl CommunicatorStream,
        stream: usize,
        bytes: usize,
    ) -> Result<NcclMemory> {
        let (ordinal, bytes, function) = (device.device_ordinal(), bytes.max(1), "ncclMemAlloc");
        let left = |block: &&mut NcclMemoryBlock| {
            !block.in_use && (block.ordinal, block.stream, block.bytes) == (ordinal, stream, bytes)
        };
        if let Some(block) = ALLOCATED_BLOCKS.lock().iter_mut().find(left) {
            block.in_use = true;
            return Ok(NcclMemory { start: block.start, bytes });
        }
        let (mut start, mut status) = (null_mut(), super::NCCL_INVALID_USAGE);
        let asked = device.with_current_device(&mut || {
            if let Some(allocate) = self.function_table().allocate {
                // SAFETY: the place lives across the call.
                status = unsafe { allocate(&raw mut start, bytes) };
            }
        });
        asked.map_err(|error| Error::Nccl { function, reason: error.to_string() })?;
        self.check_status(function, status)?;
        let start = start.expose_provenance();
        ALLOCATED_BLOCKS.lock().push(NcclMemoryBlock {
            ordinal,
            stream,
            start,
            bytes,
            in_use: true,
        });
        Ok(NcclMemory { start, bytes })
    }
}

/// The memory that one communicator has registered, by its start.
#[derive(Default)]
pub(super) struct RegisteredBlocks(Vec<usize>);

impl RegisteredBlocks {
    /// Registers the memory of an operation for as long as the communicator lives; false if it must
    /// not do more. All members have theirs registered, or none: NCCL wants it so, and to fail is
    /// to fail for all.
    pub(super) fn register_operation_buffers(
        &mut self,
        nccl: &NcclLibrary,
        comm: Comm,
        operation: &CollectiveOperation,
        goes_on: impl Fn() -> bool,
    ) -> Result<bool> {
        let Some(register) = nccl.function_table().register else { return Ok(true) };
        let given = ALLOCATED_BLOCKS.lock();
        let blocks = operation_buffers(operation)
            .filter_map(|buffer| given.iter().find(|block| block.contains_buffer(buffer)));
        let wanted: Vec<_> = blocks.map(|block| (block.start, block.bytes)).collect();
        drop(given);
        // Without the lock: a registration may take long, and other threads allocate meanwhile.
        for (start, bytes) in wanted {
            if self.0.contains(&start) {
                continue;
            }
            // Registration may take longer than the limit for the communicator's end.
            if !goes_on() {
                return Ok(false);
            }
            let mut handle = null_mut();
            // SAFETY: the memory is there until the process ends, and the communicator while it
            // continues.
            let status = unsafe {
                register(comm, with_exposed_provenance_mut(start), bytes, &raw mut handle)
            };
            nccl.check_status("ncclCommRegister", status)?;
            self.0.push(start);
        }
        Ok(goes_on())
    }
}

/// Returns the buffers that an operation is about.
fn operation_buffers(operation: &CollectiveOperation) -> impl Iterator<Item = &Buffer> {
    let segments = match operation {
        CollectiveOperation::Allreduce { segments, .. }
        | CollectiveOperation::Broadcast { segments, .. }
        | CollectiveOperation::Allgather { segments, .. }
        | CollectiveOperation::Reducescatter { segments, .. } => segments.as_slice(),
        CollectiveOperation::Alltoall { segment, .. } => std::slice::from_ref(segment),
        CollectiveOperation::Barrier => &[],
    };
    segments.iter().flat_map(|segment| [&segment.input, &segment.output])
}

#[cfg(test)]
mod tests;
