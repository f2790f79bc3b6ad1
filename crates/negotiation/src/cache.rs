// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Cache of agreed requests: ranks announce a cached request by its number.
//!
//! All members of a set change their caches in the order of the response lists, so after list `n`
//! all caches are equal (NE-1). A member may have made its announcement after an earlier list. So
//! entries that a list drops are kept aside until every child has seen that list.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use crate::hash::FastHashMap;
use crate::signature::{CollectiveCall, RequestSignature};

/// A request that all ranks agreed on.
#[derive(Debug, PartialEq, Eq)]
pub struct CachedResponse {
    /// Name of the tensor.
    pub name: Arc<str>,
    /// The request.
    pub signature: RequestSignature,
    /// Row counts, member by member; see [`CollectiveCall::row_counts_per_member`].
    pub rows: Vec<u64>,
    /// Alltoall: the rows that this member sends and receives, once the members have exchanged
    /// them. Members announce the entry by number only while their rows stay the same.
    splits: OnceLock<AlltoallSplits>,
}

/// Numbers of rows that a member sends to each member in an alltoall, and receives from each.
#[derive(Debug, PartialEq, Eq)]
pub struct AlltoallSplits {
    /// Rows for each member.
    pub sends: Vec<u64>,
    /// Rows from each member.
    pub receives: Vec<u64>,
}

impl CachedResponse {
    /// Returns a response; the rows of an alltoall are not known yet.
    pub fn new(name: Arc<str>, signature: RequestSignature, rows: Vec<u64>) -> Self {
        Self { name, signature, rows, splits: OnceLock::new() }
    }

    /// Returns the same response without the rows of an alltoall.
    pub fn without_splits(self: Arc<Self>) -> Arc<Self> {
        // Readers of a list create the entry without splits, so all members must exchange them
        // again.
        if self.splits.get().is_none() {
            return self;
        }
        Arc::new(Self::new(Arc::clone(&self.name), self.signature.clone(), self.rows.clone()))
    }

    /// Returns the bytes of this tensor in its operation.
    pub fn tensor_bytes(&self) -> u64 {
        let unit = self.signature.row_or_tensor_bytes();
        if self.signature.call.row_counts_per_member() == 0 {
            return unit;
        }
        self.rows.iter().fold(0u64, |sum, rows| sum.saturating_add(*rows)).saturating_mul(unit)
    }

    /// Returns whether this is an alltoall whose rows are not known yet.
    pub fn lacks_splits(&self) -> bool {
        matches!(self.signature.call, CollectiveCall::Alltoall { .. })
            && self.splits.get().is_none()
    }

    /// Stores the rows of an alltoall, after the members have exchanged them.
    pub fn set_splits(&self, deal: AlltoallSplits) {
        // Cannot fail: the rows are exchanged only once.
        let _known = self.splits.set(deal);
    }

    /// Returns the rows that this member sends to each member in an alltoall; empty while they are
    /// not known.
    pub fn alltoall_send_row_counts(&self) -> &[u64] {
        self.splits.get().map_or(&[], |deal| &deal.sends)
    }

    /// Returns the rows that this member receives from each member in an alltoall; empty while they
    /// are not known.
    pub fn alltoall_receive_row_counts(&self) -> &[u64] {
        self.splits.get().map_or(&[], |deal| &deal.receives)
    }

    /// Returns the row counts in this member's request.
    pub fn request_row_counts(&self, me: u32) -> &[u64] {
        match self.signature.call {
            CollectiveCall::Alltoall { .. } => self.alltoall_send_row_counts(),
            _ => self.member_row_counts(me),
        }
    }

    /// Returns the row counts of one member.
    pub fn member_row_counts(&self, member: u32) -> &[u64] {
        let counts = self.signature.call.row_counts_per_member();
        self.rows
            .get(member as usize * counts..)
            .and_then(|rows| rows.get(..counts))
            .unwrap_or_default()
    }
}

/// Identity of a cache entry. It stays valid after the entry is dropped: slots are reused, versions
/// are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheId {
    /// Place in the cache.
    pub slot: u32,
    /// Number of entries that the slot has held before.
    pub version: u32,
}

const NO_SLOT: u32 = u32::MAX;

#[derive(Debug)]
struct CacheSlot {
    version: u32,
    entry: Option<Arc<CachedResponse>>,
    newer: u32,
    older: u32,
}

/// Cache of agreed requests. It drops the least recently used entry first.
#[derive(Debug)]
pub struct ResponseCache {
    capacity: usize,
    slots: Vec<CacheSlot>,
    by_name: FastHashMap<Arc<str>, u32>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
    dropped: FastHashMap<CacheId, Arc<CachedResponse>>,
    dropped_at: VecDeque<(u64, CacheId)>,
}

impl ResponseCache {
    /// Returns an empty cache for this number of entries; 0 turns it off.
    pub fn new(capacity: usize) -> Self {
        Self {
            // `NO_SLOT` must not become the number of a slot.
            capacity: capacity.min(NO_SLOT as usize - 1),
            slots: Vec::new(),
            by_name: FastHashMap::default(),
            free: Vec::new(),
            newest: NO_SLOT,
            oldest: NO_SLOT,
            dropped: FastHashMap::default(),
            dropped_at: VecDeque::new(),
        }
    }

    /// Returns the entry of this name.
    // Does not count as a use: ranks look up entries at different times, and their caches stay
    // equal (NE-1) only if nothing but lists changes the order.
    pub fn find_by_name(&self, name: &str) -> Option<(CacheId, &Arc<CachedResponse>)> {
        let slot = *self.by_name.get(name)?;
        let CacheSlot { version, entry, .. } = &self.slots[slot as usize];
        Some((CacheId { slot, version: *version }, entry.as_ref()?))
    }

    /// Returns the current entry of a slot.
    pub fn response_in_slot(&self, slot: u32) -> Option<&Arc<CachedResponse>> {
        self.slots.get(slot as usize)?.entry.as_ref()
    }

    /// Returns whether the entry is still in the cache.
    pub fn contains_id(&self, id: CacheId) -> bool {
        self.slots
            .get(id.slot as usize)
            .is_some_and(|slot| slot.version == id.version && slot.entry.is_some())
    }

    /// Returns the entry with this identity, even if it was dropped recently.
    pub fn resolve_id(&self, id: CacheId) -> Option<&Arc<CachedResponse>> {
        if self.contains_id(id) { self.response_in_slot(id.slot) } else { self.dropped.get(&id) }
    }

    /// Marks the entry as used most recently. A step of a list.
    pub fn mark_used(&mut self, slot: u32) {
        // The steps of a training loop repeat, so the most recent entry is often used again at
        // once.
        if self.newest != slot && self.response_in_slot(slot).is_some() {
            self.unlink_slot(slot);
            self.link_newest(slot);
        }
    }

    /// Inserts a response that all ranks agreed on in `list`, and replaces an entry of the same
    /// name. A step of a list.
    pub fn insert_response(&mut self, entry: Arc<CachedResponse>, list: u64) {
        if self.capacity == 0 {
            return;
        }
        // A name has one entry. The old one goes first, so that a full cache drops no other entry
        // for it.
        self.remove_name(&entry.name, list);
        if self.by_name.len() >= self.capacity {
            let oldest = self.oldest;
            self.drop_slot(oldest, list);
        }
        // All ranks must take the same slot. They freed the same slots in the same order (NE-1).
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(CacheSlot { version: 0, entry: None, newer: NO_SLOT, older: NO_SLOT });
            u32::try_from(self.slots.len() - 1).unwrap_or(NO_SLOT)
        });
        self.by_name.insert(Arc::clone(&entry.name), slot);
        self.slots[slot as usize].entry = Some(entry);
        self.link_newest(slot);
    }

    /// Removes the entry of a name that the ranks no longer agree on. A step of a list.
    pub fn remove_name(&mut self, name: &str, list: u64) {
        if let Some(slot) = self.by_name.get(name) {
            self.drop_slot(*slot, list);
        }
    }

    /// Forgets entries that lists up to `list` have dropped. All ranks that may refer to these
    /// entries must have seen these lists.
    pub fn forget_dropped_entries_until(&mut self, list: u64) {
        while let Some((at, id)) = self.dropped_at.front() {
            if *at > list {
                break;
            }
            self.dropped.remove(id);
            self.dropped_at.pop_front();
        }
    }

    fn drop_slot(&mut self, slot: u32, list: u64) {
        self.unlink_slot(slot);
        let place = &mut self.slots[slot as usize];
        let id = CacheId { slot, version: place.version };
        // A member that has not seen this list yet may announce the old entry. The version keeps it
        // apart from the next entry of the slot.
        place.version = place.version.wrapping_add(1);
        if let Some(entry) = place.entry.take() {
            self.by_name.remove(&entry.name);
            self.dropped.insert(id, entry);
            self.dropped_at.push_back((list, id));
        }
        self.free.push(slot);
    }

    fn link_newest(&mut self, slot: u32) {
        let newest = std::mem::replace(&mut self.newest, slot);
        self.slots[slot as usize].older = newest;
        self.slots[slot as usize].newer = NO_SLOT;
        match self.slots.get_mut(newest as usize) {
            Some(previous) => previous.newer = slot,
            None => self.oldest = slot,
        }
    }

    fn unlink_slot(&mut self, slot: u32) {
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

    fn entry(name: &str, dim: u64) -> Arc<CachedResponse> {
        Arc::new(CachedResponse::new(name.into(), plain(&[dim]), Vec::new()))
    }

    #[test]
    fn the_least_recently_used_entry_goes_first() {
        let mut cache = ResponseCache::new(2);
        cache.insert_response(entry("a", 1), 1);
        cache.insert_response(entry("b", 1), 1);
        cache.mark_used(cache.find_by_name("a").unwrap().0.slot);
        cache.insert_response(entry("c", 1), 2);
        assert!(
            cache.find_by_name("a").is_some()
                && cache.find_by_name("b").is_none()
                && cache.find_by_name("c").is_some()
        );
    }

    #[test]
    fn a_dropped_entry_is_known_until_all_children_have_seen_the_list_that_dropped_it() {
        let mut cache = ResponseCache::new(1);
        cache.insert_response(entry("a", 1), 1);
        let (id, _) = cache.find_by_name("a").unwrap();
        cache.insert_response(entry("a", 2), 5);
        assert!(!cache.contains_id(id));
        assert_eq!(cache.resolve_id(id).unwrap().signature, plain(&[1]));
        assert_eq!(cache.find_by_name("a").unwrap().1.signature, plain(&[2]));
        cache.forget_dropped_entries_until(4);
        assert!(cache.resolve_id(id).is_some());
        cache.forget_dropped_entries_until(5);
        assert!(cache.resolve_id(id).is_none());
    }

    #[test]
    fn a_cache_without_capacity_keeps_nothing() {
        let mut cache = ResponseCache::new(0);
        cache.insert_response(entry("a", 1), 1);
        assert!(cache.by_name.is_empty());
    }

    proptest! {
        /// EN-4.
        #[test]
        fn equal_steps_give_equal_numbers(steps in prop::collection::vec((0u8..3, 0u8..12, 0u64..3), 0..200), capacity in 1usize..8) {
            let (mut one, mut two) = (ResponseCache::new(capacity), ResponseCache::new(capacity));
            for (list, (step, name, dim)) in (1u64..).zip(&steps) {
                let name = name.to_string();
                for cache in [&mut one, &mut two] {
                    match step {
                        0 => cache.insert_response(entry(&name, *dim), list),
                        1 => cache.remove_name(&name, list),
                        _ => if let Some((id, _)) = cache.find_by_name(&name) { cache.mark_used(id.slot) },
                    }
                }
                two.forget_dropped_entries_until(list);
                prop_assert!(one.by_name.len() <= capacity);
                prop_assert_eq!(one.find_by_name(&name), two.find_by_name(&name));
            }
        }
    }
}
