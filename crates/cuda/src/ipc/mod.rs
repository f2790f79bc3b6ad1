// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allreduce among processes that share one GPU, by CUDA IPC.
//!
//! Each member has a window: memory that the other members map. A tensor goes there piece by piece,
//! and every member reduces a piece directly from all windows into its output. The members
//! synchronize through an [`IpcMailbox`], about a page of shared host memory.
//!
//! ```text
//!   tensor --copy--> own window (2 pieces) ..all have filled piece k..> reduce windows --> output
//!                       ^                                                   |
//!                       +--------------- all have taken piece k ------------+
//! ```
//!
//! A window is memory of the driver's, not the tensor: frameworks have allocators whose memory
//! cannot be shown to others (expandable segments, `cudaMallocAsync`), and give a tensor's memory
//! to the next one when they like. Members wait for each other in the mailbox, by polls with a
//! deadline, and never on the GPU: an event of a process that died would not come, and nothing
//! could end a stream that waits for it.

mod communicator;
mod mailbox;
mod member_device;
mod pieces;
#[cfg(test)]
mod tests;
mod window;

use farandole_shm::{RegionHandle, SharedRegion};
use sha2::{Digest as _, Sha256};

pub(crate) use communicator::IpcCommunicator;
pub(crate) use mailbox::IpcMailbox;
pub(crate) use member_device::{GpuIpcDevice, piece_size_mib};

/// Bytes of an encoded [`RegionHandle`].
pub(crate) const REGION_HANDLE_BYTES: usize = 32;

/// Encodes a region's handle, which is sent to other processes.
pub(crate) fn encode_region_handle(handle: &RegionHandle) -> Vec<u8> {
    let [first, second] = handle.nonce;
    let numbers = [handle.bytes, first, second];
    let bytes = numbers.iter().flat_map(|number| number.to_le_bytes());
    handle
        .pid
        .to_le_bytes()
        .into_iter()
        .chain(handle.descriptor.to_le_bytes())
        .chain(bytes)
        .collect()
}

/// Returns the inverse of [`encode_region_handle`]; more bytes may follow.
pub(crate) fn decode_region_handle(bytes: &[u8]) -> Option<RegionHandle> {
    let (pid, rest) = bytes.split_first_chunk::<4>()?;
    let (descriptor, rest) = rest.split_first_chunk::<4>()?;
    let (numbers, _) = rest.split_first_chunk::<24>()?;
    let (bytes, nonce) = numbers.split_first_chunk::<8>()?;
    let (first, second) = nonce.split_first_chunk::<8>()?;
    Some(RegionHandle {
        pid: u32::from_le_bytes(*pid),
        descriptor: u32::from_le_bytes(*descriptor),
        bytes: u64::from_le_bytes(*bytes),
        nonce: [u64::from_le_bytes(*first), u64::from_le_bytes(*second.first_chunk::<8>()?)],
    })
}

/// Returns a number that is equal for processes that find each other's regions; 0 if no other
/// process finds the regions of this one.
pub(crate) fn region_namespace_id() -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let mut digest = Sha256::new();
    for kind in ["pid", "user", "ipc"] {
        let Ok(namespace) = std::fs::read_link(format!("/proc/self/ns/{kind}")) else { return 0 };
        digest.update(namespace.as_os_str().as_encoded_bytes());
    }
    // A trial with an own region shows whether /proc allows it at all.
    let found = SharedRegion::create(1)
        .and_then(|region| SharedRegion::open_peer_region(region.region_handle()));
    let (Ok(_), Ok(process)) = (found, std::fs::metadata("/proc/self")) else { return 0 };
    // It is root's where others may not look into the process.
    digest.update(process.uid().to_le_bytes());
    let digest = digest.finalize();
    // 0 stands for a process without neighbours.
    digest.first_chunk::<8>().map_or(0, |first| u64::from_le_bytes(*first) | 1)
}
