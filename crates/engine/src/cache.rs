// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Requests that were agreed on before, by number.
//!
//! All members of a set change their caches in the same order, that of the response lists, so after
//! list `n` all caches are equal. An announcement, though, was made after some earlier list: what a
//! list drops is kept aside until every child has seen that list.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use crate::hash::Map;
use crate::signature::{Call, Signature};

/// Something all ranks agreed on.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Agreed {
    pub(crate) name: Arc<str>,
    pub(crate) signature: Signature,
    /// Row counts, member by member; see [`Call::counts`](crate::signature::Call::counts).
    pub(crate) rows: Vec<u64>,
    /// Alltoall: this member's own rows, once members have told each other. Members announce the
    /// entry by number only as long as their rows are these.
    deal: OnceLock<Deal>,
}

/// Rows that a member sends to each member in an alltoall, and receives from each.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Deal {
    pub(crate) sends: Vec<u64>,
    pub(crate) receives: Vec<u64>,
}

impl Agreed {
    pub(crate) fn new(name: Arc<str>, signature: Signature, rows: Vec<u64>) -> Self {
        Self { name, signature, rows, deal: OnceLock::new() }
    }

    /// The same as something new: rows of an alltoall are not known.
    pub(crate) fn anew(self: Arc<Self>) -> Arc<Self> {
        if self.deal.get().is_none() {
            return self;
        }
        Arc::new(Self::new(Arc::clone(&self.name), self.signature.clone(), self.rows.clone()))
    }

    /// Returns whether it is an alltoall whose rows are not known.
    pub(crate) fn is_undealt(&self) -> bool {
        matches!(self.signature.call, Call::Alltoall { .. }) && self.deal.get().is_none()
    }

    /// Members have told each other their rows.
    pub(crate) fn deal(&self, deal: Deal) {
        // No other thread knows them: they are asked for once.
        let _known = self.deal.set(deal);
    }

    /// Rows that this member sends to each member in an alltoall; none while they are not known.
    pub(crate) fn sends(&self) -> &[u64] {
        self.deal.get().map_or(&[], |deal| &deal.sends)
    }

    /// Rows that this member receives from each.
    pub(crate) fn receives(&self) -> &[u64] {
        self.deal.get().map_or(&[], |deal| &deal.receives)
    }

    /// Rows that this member brought, as its request has them.
    pub(crate) fn brought_by(&self, me: u32) -> &[u64] {
        match self.signature.call {
            Call::Alltoall { .. } => self.sends(),
            _ => self.counts_of(me),
        }
    }

    /// The row counts of one member.
    pub(crate) fn counts_of(&self, member: u32) -> &[u64] {
        let counts = self.signature.call.counts();
        self.rows
            .get(member as usize * counts..)
            .and_then(|rows| rows.get(..counts))
            .unwrap_or_default()
    }
}

/// A cache entry, also after it was dropped: slots are used again, versions are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CacheId {
    pub(crate) slot: u32,
    pub(crate) version: u32,
}

const NONE: u32 = u32::MAX;

#[derive(Debug)]
struct Slot {
    version: u32,
    entry: Option<Arc<Agreed>>,
    newer: u32,
    older: u32,
}

/// Least recently used entries go first.
#[derive(Debug)]
pub(crate) struct Cache {
    capacity: usize,
    slots: Vec<Slot>,
    by_name: Map<Arc<str>, u32>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
    dropped: Map<CacheId, Arc<Agreed>>,
    dropped_at: VecDeque<(u64, CacheId)>,
}

impl Cache {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity.min(NONE as usize - 1),
            slots: Vec::new(),
            by_name: Map::default(),
            free: Vec::new(),
            newest: NONE,
            oldest: NONE,
            dropped: Map::default(),
            dropped_at: VecDeque::new(),
        }
    }

    /// The entry of this name.
    pub(crate) fn find(&self, name: &str) -> Option<(CacheId, &Arc<Agreed>)> {
        let slot = *self.by_name.get(name)?;
        let Slot { version, entry, .. } = &self.slots[slot as usize];
        Some((CacheId { slot, version: *version }, entry.as_ref()?))
    }

    /// The entry in a slot, now.
    pub(crate) fn current(&self, slot: u32) -> Option<&Arc<Agreed>> {
        self.slots.get(slot as usize)?.entry.as_ref()
    }

    /// Returns whether the entry is still here.
    pub(crate) fn holds(&self, id: CacheId) -> bool {
        self.slots
            .get(id.slot as usize)
            .is_some_and(|slot| slot.version == id.version && slot.entry.is_some())
    }

    /// The entry of this number, also if it was dropped lately.
    pub(crate) fn resolve(&self, id: CacheId) -> Option<&Arc<Agreed>> {
        if self.holds(id) { self.current(id.slot) } else { self.dropped.get(&id) }
    }

    /// List step: the entry was used.
    pub(crate) fn touch(&mut self, slot: u32) {
        if self.newest != slot && self.current(slot).is_some() {
            self.unlink(slot);
            self.link(slot);
        }
    }

    /// List step: all agreed on this under `list`. Takes the place of an entry of the same name.
    pub(crate) fn put(&mut self, entry: Arc<Agreed>, list: u64) {
        if self.capacity == 0 {
            return;
        }
        self.remove(&entry.name, list);
        if self.by_name.len() >= self.capacity {
            let oldest = self.oldest;
            self.drop_slot(oldest, list);
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { version: 0, entry: None, newer: NONE, older: NONE });
            u32::try_from(self.slots.len() - 1).unwrap_or(NONE)
        });
        self.by_name.insert(Arc::clone(&entry.name), slot);
        self.slots[slot as usize].entry = Some(entry);
        self.link(slot);
    }

    /// List step: the ranks no longer agree on this name.
    pub(crate) fn remove(&mut self, name: &str, list: u64) {
        if let Some(slot) = self.by_name.get(name) {
            self.drop_slot(*slot, list);
        }
    }

    /// All ranks that may still refer to entries dropped by lists up to `list` have seen those
    /// lists.
    pub(crate) fn forget_until(&mut self, list: u64) {
        while let Some((at, id)) = self.dropped_at.front() {
            if *at > list {
                break;
            }
            self.dropped.remove(id);
            self.dropped_at.pop_front();
        }
    }

    fn drop_slot(&mut self, slot: u32, list: u64) {
        self.unlink(slot);
        let place = &mut self.slots[slot as usize];
        let id = CacheId { slot, version: place.version };
        place.version = place.version.wrapping_add(1);
        if let Some(entry) = place.entry.take() {
            self.by_name.remove(&entry.name);
            self.dropped.insert(id, entry);
            self.dropped_at.push_back((list, id));
        }
        self.free.push(slot);
    }

    fn link(&mut self, slot: u32) {
        let newest = std::mem::replace(&mut self.newest, slot);
        self.slots[slot as usize].older = newest;
        self.slots[slot as usize].newer = NONE;
        match self.slots.get_mut(newest as usize) {
            Some(previous) => previous.newer = slot,
            None => self.oldest = slot,
        }
    }

    fn unlink(&mut self, slot: u32) {
        let (newer, older) = (self.slots[slot as usize].newer, self.slots[slot as usize].older);
        match self.slots.get_mut(newer as usize) {
            Some(place) => place.older = older,
            None => self.newest = older,
        }
        match self.slots.get_mut(older as usize) {
            Some(place) => place.newer = newer,
            None => self.oldest = newer,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::signature::tests::plain;

    fn entry(name: &str, dim: u64) -> Arc<Agreed> {
        Arc::new(Agreed::new(name.into(), plain(&[dim]), Vec::new()))
    }

    #[test]
    fn the_least_recently_used_entry_goes_first() {
        let mut cache = Cache::new(2);
        cache.put(entry("a", 1), 1);
        cache.put(entry("b", 1), 1);
        cache.touch(cache.find("a").unwrap().0.slot);
        cache.put(entry("c", 1), 2);
        assert!(
            cache.find("a").is_some() && cache.find("b").is_none() && cache.find("c").is_some()
        );
    }

    #[test]
    fn a_dropped_entry_is_known_until_all_children_have_seen_the_list_that_dropped_it() {
        let mut cache = Cache::new(1);
        cache.put(entry("a", 1), 1);
        let (id, _) = cache.find("a").unwrap();
        cache.put(entry("a", 2), 5);
        assert!(!cache.holds(id));
        assert_eq!(cache.resolve(id).unwrap().signature, plain(&[1]));
        assert_eq!(cache.find("a").unwrap().1.signature, plain(&[2]));
        cache.forget_until(4);
        assert!(cache.resolve(id).is_some());
        cache.forget_until(5);
        assert!(cache.resolve(id).is_none());
    }

    #[test]
    fn a_cache_without_capacity_keeps_nothing() {
        let mut cache = Cache::new(0);
        cache.put(entry("a", 1), 1);
        assert!(cache.by_name.is_empty());
    }

    proptest! {
        /// EN-4.
        #[test]
        fn equal_steps_give_equal_numbers(steps in prop::collection::vec((0u8..3, 0u8..12, 0u64..3), 0..200), capacity in 1usize..8) {
            let (mut one, mut two) = (Cache::new(capacity), Cache::new(capacity));
            for (list, (step, name, dim)) in (1u64..).zip(&steps) {
                let name = name.to_string();
                for cache in [&mut one, &mut two] {
                    match step {
                        0 => cache.put(entry(&name, *dim), list),
                        1 => cache.remove(&name, list),
                        _ => if let Some((id, _)) = cache.find(&name) { cache.touch(id.slot) },
                    }
                }
                two.forget_until(list);
                prop_assert!(one.by_name.len() <= capacity);
                prop_assert_eq!(one.find(&name), two.find(&name));
            }
        }
    }
}
