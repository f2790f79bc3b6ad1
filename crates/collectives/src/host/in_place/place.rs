// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The places of a member's tensors, which it sends to the others, and the mapped memory of the
//! others.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use farandole_shm::{Region, RegionCard};

use super::super::UNIT;
use crate::buffer::Flat;
use crate::{Buffer, Memory};

/// A tensor in a member's shareable memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) card: RegionCard,
    pub(super) offset: u64,
}

impl Place {
    /// `shared: u32; pid, descriptor: u32; 0: u32; bytes, offset, nonce[2]: u64`, little endian, in
    /// one unit.
    pub(super) fn write(&self, unit: &mut Vec<u8>) {
        let start = unit.len();
        let RegionCard { pid, descriptor, bytes, nonce: [first, second] } = self.card;
        for word in [1, pid, descriptor, 0] {
            unit.extend(word.to_le_bytes());
        }
        for word in [bytes, self.offset, first, second] {
            unit.extend(word.to_le_bytes());
        }
        unit.resize(start + UNIT, 0);
    }

    /// Nothing for a tensor that is the member's alone.
    pub(super) fn read(unit: &[u8]) -> Option<Self> {
        let short = |at: usize| Some(u32::from_le_bytes(unit.get(at..at + 4)?.try_into().ok()?));
        let long = |at: usize| Some(u64::from_le_bytes(unit.get(at..at + 8)?.try_into().ok()?));
        if short(0)? != 1 {
            return None;
        }
        let nonce = [long(32)?, long(40)?];
        let card = RegionCard { pid: short(4)?, descriptor: short(8)?, bytes: long(16)?, nonce };
        Some(Self { card, offset: long(24)? })
    }
}

/// Memory of members, by nonce.
#[derive(Default)]
pub(in super::super) struct Regions {
    /// Memory of other members, mapped here.
    mapped: HashMap<[u64; 2], Memory>,
    /// For every member, this one included: whether all others could map its memory. All members
    /// have the same answers, which are never forgotten, because they cost next to nothing.
    judged: HashMap<[u64; 2], bool>,
}

impl Regions {
    pub(super) fn judged(&self, place: &Place) -> Option<bool> {
        self.judged.get(&place.card.nonce).copied()
    }

    pub(super) fn judge(&mut self, place: &Place, usable: bool) {
        self.judged.insert(place.card.nonce, usable);
        if !usable {
            self.mapped.remove(&place.card.nonce);
        }
    }

    /// Unmaps what its owner has freed.
    pub(super) fn sweep(&mut self) {
        self.mapped.retain(|_, memory| memory.region().is_some_and(|region| !region.retired()));
    }

    /// Maps another member's memory. True when that could be done.
    pub(super) fn map(&mut self, place: &Place) -> bool {
        if let Entry::Vacant(vacant) = self.mapped.entry(place.card.nonce) {
            let Ok(Some(memory)) = Memory::of_peer(&place.card) else { return false };
            vacant.insert(memory);
        }
        true
    }

    /// `bytes` bytes of another member's memory; nothing when they do not lie in it.
    pub(super) fn buffer(&self, place: &Place, bytes: usize) -> Option<Buffer> {
        let memory = self.mapped.get(&place.card.nonce)?;
        let offset = usize::try_from(place.offset).ok()?;
        let inside = offset.checked_add(bytes)? <= memory.len();
        let same = memory.region().map(Region::card) == Some(&place.card);
        (inside && same).then(|| memory.buffer().slice(offset, bytes))
    }
}

/// This member's tensors, if every one of them is reduced where it lies and others can work there.
pub(super) fn own(inputs: &Flat, outputs: &Flat) -> Option<(Vec<Place>, Vec<Memory>)> {
    let (inputs, outputs) = (inputs.buffers(), outputs.buffers());
    if inputs.len() != outputs.len() {
        return None;
    }
    let (mut places, mut memories) = (Vec::new(), Vec::new());
    for (input, output) in inputs.iter().zip(outputs).filter(|(input, _)| !input.is_empty()) {
        if input.address() != output.address() {
            return None;
        }
        let (memory, offset) = crate::buffer::home(output)?;
        places.push(Place { card: *memory.region()?.card(), offset: offset as u64 });
        memories.push(memory);
    }
    Some((places, memories))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_read_back_and_zeros_are_none() {
        let card = RegionCard { pid: 7, descriptor: 9, bytes: 1 << 40, nonce: [3, u64::MAX] };
        let place = Place { card, offset: 1 << 33 };
        let mut unit = Vec::new();
        place.write(&mut unit);
        assert_eq!(unit.len(), UNIT);
        assert_eq!(Place::read(&unit), Some(place));
        assert_eq!(Place::read(&[0; UNIT]), None);
    }

    #[test]
    fn only_what_lies_in_a_region_is_a_buffer() {
        let memory = Memory::shareable(1000).unwrap();
        let card = *memory.region().unwrap().card();
        let mut regions = Regions::default();
        let at = |offset| Place { card, offset };
        assert!(regions.map(&at(0)));
        assert_eq!(regions.buffer(&at(990), 10).unwrap().len(), 10);
        for (offset, bytes) in [(990, 11), (u64::MAX, 1), (5, usize::MAX)] {
            assert!(regions.buffer(&at(offset), bytes).is_none());
        }
        regions.sweep();
        assert!(regions.buffer(&at(0), 1).is_some());
        drop(memory);
        regions.sweep();
        assert!(regions.buffer(&at(0), 1).is_none() && !regions.map(&at(0)));
    }
}
