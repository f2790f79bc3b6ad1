// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Locations of the tensors of a member, which it sends to the others, and the mapped memory of the
//! others.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use farandole_kernels::{Buffer, GatherList, HostMemory};
use farandole_shm::{RegionHandle, SharedRegion};

use super::super::chunk_sizes::UNIT_BYTES;

/// Location of a tensor in the shareable memory of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TensorLocation {
    pub(super) region: RegionHandle,
    pub(super) offset: u64,
}

impl TensorLocation {
    /// Encodes the location as `shared: u32; pid, descriptor: u32; 0: u32; bytes, offset, nonce[2]:
    /// u64`, little endian, in one unit.
    pub(super) fn encode_location_unit(&self, unit: &mut Vec<u8>) {
        let start = unit.len();
        let RegionHandle { pid, descriptor, bytes, nonce: [first, second] } = self.region;
        for word in [1, pid, descriptor, 0] {
            unit.extend(word.to_le_bytes());
        }
        for word in [bytes, self.offset, first, second] {
            unit.extend(word.to_le_bytes());
        }
        unit.resize(start + UNIT_BYTES, 0);
    }

    /// Decodes a location. Returns `None` for a tensor in private memory of the member.
    pub(super) fn decode_location_unit(unit: &[u8]) -> Option<Self> {
        let short = |at: usize| Some(u32::from_le_bytes(unit.get(at..at + 4)?.try_into().ok()?));
        let long = |at: usize| Some(u64::from_le_bytes(unit.get(at..at + 8)?.try_into().ok()?));
        if short(0)? != 1 {
            return None;
        }
        let nonce = [long(32)?, long(40)?];
        let region =
            RegionHandle { pid: short(4)?, descriptor: short(8)?, bytes: long(16)?, nonce };
        Some(Self { region, offset: long(24)? })
    }
}

/// Memory of members, by the nonce of the region.
#[derive(Default)]
pub(super) struct PeerRegions {
    /// Mapped memory of other members.
    // By nonce, because numbers of processes and descriptors are used again.
    mapped: HashMap<[u64; 2], HostMemory>,
    /// Whether all other members could map a region, for the regions of all members. All members
    /// have the same answers. The answers are never removed, because they take very little memory.
    verdicts: HashMap<[u64; 2], bool>,
}

impl PeerRegions {
    pub(super) fn recorded_mapping_verdict(&self, location: &TensorLocation) -> Option<bool> {
        self.verdicts.get(&location.region.nonce).copied()
    }

    pub(super) fn record_mapping_verdict(&mut self, location: &TensorLocation, usable: bool) {
        self.verdicts.insert(location.region.nonce, usable);
        if !usable {
            self.mapped.remove(&location.region.nonce);
        }
    }

    /// Unmaps the regions that their owners have freed.
    pub(super) fn unmap_retired_regions(&mut self) {
        self.mapped
            .retain(|_, memory| memory.shared_region().is_some_and(|region| !region.is_retired()));
    }

    /// Maps the memory of another member. Returns true if the memory is mapped.
    pub(super) fn map_region(&mut self, location: &TensorLocation) -> bool {
        if let Entry::Vacant(vacant) = self.mapped.entry(location.region.nonce) {
            let Ok(Some(memory)) = HostMemory::map_peer_region(&location.region) else {
                return false;
            };
            vacant.insert(memory);
        }
        true
    }

    /// Returns `bytes` bytes of the memory of another member; `None` if they are not inside it.
    pub(super) fn region_buffer(&self, location: &TensorLocation, bytes: usize) -> Option<Buffer> {
        let memory = self.mapped.get(&location.region.nonce)?;
        let offset = usize::try_from(location.offset).ok()?;
        let inside = offset.checked_add(bytes)? <= memory.len();
        let same =
            memory.shared_region().map(SharedRegion::region_handle) == Some(&location.region);
        (inside && same).then(|| memory.as_buffer().slice(offset, bytes))
    }
}

/// Returns the locations of this member's tensors and their memory; `None` unless every tensor is
/// reduced in place in memory that other members can use.
pub(super) fn own_locations(
    inputs: &GatherList,
    outputs: &GatherList,
) -> Option<(Vec<TensorLocation>, Vec<HostMemory>)> {
    let (inputs, outputs) = (inputs.buffers(), outputs.buffers());
    if inputs.len() != outputs.len() {
        return None;
    }
    let (mut places, mut memories) = (Vec::new(), Vec::new());
    for (input, output) in inputs.iter().zip(outputs).filter(|(input, _)| !input.is_empty()) {
        // The members overwrite the outputs, so a separate input would never be read.
        if input.address() != output.address() {
            return None;
        }
        let (memory, offset) = farandole_kernels::find_shareable_memory(output)?;
        places.push(TensorLocation {
            region: *memory.shared_region()?.region_handle(),
            offset: offset as u64,
        });
        memories.push(memory);
    }
    Some((places, memories))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_read_back_and_zeros_are_none() {
        let region = RegionHandle { pid: 7, descriptor: 9, bytes: 1 << 40, nonce: [3, u64::MAX] };
        let location = TensorLocation { region, offset: 1 << 33 };
        let mut unit = Vec::new();
        location.encode_location_unit(&mut unit);
        assert_eq!(unit.len(), UNIT_BYTES);
        assert_eq!(TensorLocation::decode_location_unit(&unit), Some(location));
        assert_eq!(TensorLocation::decode_location_unit(&[0; UNIT_BYTES]), None);
    }

    #[test]
    fn only_what_lies_in_a_region_is_a_buffer() {
        let memory = HostMemory::new_shareable(1000).unwrap();
        let region = *memory.shared_region().unwrap().region_handle();
        let mut regions = PeerRegions::default();
        let at = |offset| TensorLocation { region, offset };
        assert!(regions.map_region(&at(0)));
        assert_eq!(regions.region_buffer(&at(990), 10).unwrap().len(), 10);
        for (offset, bytes) in [(990, 11), (u64::MAX, 1), (5, usize::MAX)] {
            assert!(regions.region_buffer(&at(offset), bytes).is_none());
        }
        regions.unmap_retired_regions();
        assert!(regions.region_buffer(&at(0), 1).is_some());
        drop(memory);
        regions.unmap_retired_regions();
        assert!(regions.region_buffer(&at(0), 1).is_none() && !regions.map_region(&at(0)));
    }
}
