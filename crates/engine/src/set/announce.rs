// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Upward: a tensor is passed on when the whole subtree has announced it, merged into one item where all agree.
//!
//! Frame: lists seen, then items until the end: `0 slot version`, or `1 name count variant...` (see [`Variant`]).

use std::sync::Arc;
use std::time::Instant;

use super::{Entry, ProcessSet, Step, Stop, kind};
use crate::cache::CacheId;
use crate::signature::Signature;
use crate::tally::{Tally, Variant, Wish};
use crate::wire::{Malformed, Reader, Writer};

impl ProcessSet {
    /// What this member announces for a request of its own.
    pub(super) fn wish_of(&mut self, entry: &Entry, signature: Signature) -> Wish {
        let me = self.tree.me;
        if let Some((id, agreed)) = self.cache.find(&entry.name)
            && agreed.signature == signature
            && agreed.counts_of(me) == entry.rows
        {
            self.statistics.cache_hits += 1;
            return Wish::Known(id, Arc::clone(agreed));
        }
        Wish::Told(vec![Variant { signature, members: vec![me], rows: entry.rows.clone() }])
    }

    /// One source wants a tensor. When all sources do, it goes up, or at the coordinator, is decided.
    pub(super) fn announced(
        &mut self,
        source: u32,
        name: &Arc<str>,
        wish: Wish,
        members: &[u32],
        since: Instant,
    ) -> Step {
        if self.options.tracer.is_on() {
            self.trace_arrival(name, &wish, members);
        }
        let children = self.tree.children.len();
        if children == 0 {
            return self.complete(name, wish);
        }
        let (me, below) = ([self.tree.me], &self.tree.below);
        let tally = self.pending.entry(Arc::clone(name)).or_insert_with(|| Tally::new(since));
        tally.add(source, wish, members, |source| match (source as usize).checked_sub(1) {
            None => me.to_vec(),
            Some(child) => below[child].clone(),
        });
        if tally.sources.len() <= children {
            return Ok(());
        }
        match self.pending.remove(name) {
            Some(tally) => self.complete(name, tally.wish()),
            None => Ok(()),
        }
    }

    fn complete(&mut self, name: &Arc<str>, wish: Wish) -> Step {
        if self.is_coordinator() {
            self.decide(name, wish);
            return Ok(());
        }
        let wish = match wish {
            Wish::Known(id, _) if !self.cache.holds(id) => Wish::Told(wish.told(&self.tree.subtree)),
            wish => wish,
        };
        let mut writer = Writer(&mut self.upward);
        if writer.0.is_empty() {
            writer.number(self.lists);
        }
        wish.encode(name, &self.tree.subtree, &mut writer);
        Ok(())
    }

    /// Everything that became complete since the last poll travels in one frame.
    pub(crate) fn send_announcement(&mut self) -> Step<bool> {
        if self.upward.is_empty() {
            return Ok(false);
        }
        let frame = std::mem::take(&mut self.upward);
        self.send(0, kind::ANNOUNCE, &frame)?;
        self.upward = frame;
        self.upward.clear();
        Ok(true)
    }

    pub(super) fn on_announcement(&mut self, from: usize, frame: &[u8], now: Instant) -> Result<(), Stop> {
        let child = from.checked_sub(self.first_child()).ok_or(Malformed::Tag(kind::ANNOUNCE))?;
        let source = u32::try_from(child + 1).map_err(|_| Malformed::Overlong)?;
        let mut reader = Reader(frame);
        self.neighbours[from].seen = reader.number()?;
        let below = std::mem::take(&mut self.tree.below[child]);
        let read = self.items(source, &mut reader, &below, now);
        self.tree.below[child] = below;
        read?;
        let children = &self.neighbours[self.first_child()..];
        let seen = children.iter().map(|child| child.seen).min().unwrap_or(u64::MAX);
        self.cache.forget_until(seen);
        Ok(())
    }

    fn items(
        &mut self,
        source: u32,
        reader: &mut Reader<'_>,
        below: &[u32],
        now: Instant,
    ) -> Result<(), Stop> {
        while !reader.is_empty() {
            let (name, wish) = match reader.byte()? {
                0 => {
                    let id = CacheId { slot: reader.small()?, version: reader.small()? };
                    let agreed = self.cache.resolve(id).ok_or(Malformed::Cache(id.slot.into()))?;
                    (Arc::clone(&agreed.name), Wish::Known(id, Arc::clone(agreed)))
                }
                1 => {
                    let name = Arc::from(reader.text()?);
                    let variants = reader.count()?;
                    let variants = (0..variants)
                        .map(|_| Variant::decode(reader, below))
                        .collect::<Result<Vec<_>, _>>()?;
                    (name, Wish::Told(variants))
                }
                other => return Err(Malformed::Tag(other).into()),
            };
            if self.pending.get(&name).is_some_and(|tally| tally.sources.contains(&source)) {
                return Err(Malformed::Twice.into());
            }
            self.announced(source, &name, wish, below, now)?;
        }
        Ok(())
    }
}
