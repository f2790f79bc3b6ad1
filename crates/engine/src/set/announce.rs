// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Upward: a tensor is passed on when the whole subtree has announced it, merged into one item
//! where all agree.
//!
//! Frame: lists seen, then items until the end: `0 slot version`, `3 slot version absent` where
//! members below have joined, `1 name count variant...` (see [`Variant`]), `2 member gather` for a
//! member that joins, or `4` when all below have and nothing more comes of them.

use std::sync::Arc;
use std::time::Instant;

use super::{Entry, ProcessSet, Step, Stop, kind};
use crate::cache::CacheId;
use crate::signature::Signature;
use crate::tally::{Tally, Variant, Wish};
use crate::wire::{Malformed, Reader, Writer};

impl ProcessSet {
    /// This member's announcement for a request of its own.
    pub(super) fn wish_of(&mut self, entry: &Entry, signature: Signature) -> Wish {
        let me = self.tree.me;
        if let Some((id, agreed)) = self.cache.find(&entry.name)
            && agreed.signature.covers(&signature)
            && agreed.brought_by(me) == entry.rows
        {
            self.statistics.cache_hits += 1;
            return Wish::Known(id, Arc::clone(agreed), Vec::new());
        }
        let rows = if signature.call.counts() > 0 { entry.rows.clone() } else { Vec::new() };
        Wish::Told(vec![Variant { signature, members: vec![me], rows }])
    }

    /// One source wants a tensor. When all sources do, it goes up, or at the coordinator, is
    /// decided.
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
            return self.complete(name, wish, &[source]);
        }
        let (me, below) = ([self.tree.me], &self.tree.below);
        let tally = self.pending.entry(Arc::clone(name)).or_insert_with(|| Tally::new(since));
        tally.add(source, wish, members, |source| match (source as usize).checked_sub(1) {
            None => me.to_vec(),
            Some(child) => below[child].clone(),
        });
        if tally.sources.len() + self.joins.gone(&tally.sources) <= children {
            return Ok(());
        }
        self.complete_pending(name)
    }

    /// All ranks that will submit this tensor have submitted it.
    pub(super) fn complete_pending(&mut self, name: &Arc<str>) -> Step {
        let Some(mut tally) = self.pending.remove(name) else { return Ok(()) };
        let sources = std::mem::take(&mut tally.sources);
        self.complete(name, tally.wish(), &sources)
    }

    fn complete(&mut self, name: &Arc<str>, mut wish: Wish, sources: &[u32]) -> Step {
        if let Wish::Known(_, _, absent) = &mut wish
            && self.joins.any()
        {
            let children = u32::try_from(self.tree.children.len()).unwrap_or(u32::MAX);
            let silent = (0..=children).filter(|source| !sources.contains(source));
            absent.extend(silent.flat_map(|source| self.stands_for(source)));
        }
        if self.is_coordinator() {
            return self.decide(name, wish);
        }
        let wish = match wish {
            Wish::Known(id, ..) if !self.cache.holds(id) => {
                Wish::Told(wish.told(&self.tree.subtree))
            }
            wish => wish,
        };
        let (mut writer, subtree) = self.upward();
        wish.encode(name, subtree, &mut writer);
        Ok(())
    }

    /// The announcement under construction, and its receiver.
    pub(super) fn upward(&mut self) -> (Writer<'_>, &[u32]) {
        let mut writer = Writer(&mut self.upward);
        if writer.0.is_empty() {
            writer.number(self.lists);
        }
        (writer, &self.tree.subtree)
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

    pub(super) fn on_announcement(
        &mut self,
        from: usize,
        frame: &[u8],
        now: Instant,
    ) -> Result<(), Stop> {
        let child = from.checked_sub(self.first_child()).ok_or(Malformed::Tag(kind::ANNOUNCE))?;
        let source = u32::try_from(child + 1).map_err(|_| Malformed::Overlong)?;
        let mut reader = Reader(frame);
        self.neighbours[from].seen = reader.number()?;
        // A copy: a join among the items asks the tree for the members behind the child.
        let below = self.tree.below[child].clone();
        self.items(source, &mut reader, &below, now)?;
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
                tag @ (0 | 3) => {
                    let id = CacheId { slot: reader.small()?, version: reader.small()? };
                    let absent =
                        if tag == 3 { some_of(reader.numbers()?, below)? } else { Vec::new() };
                    let agreed = self.cache.resolve(id).ok_or(Malformed::Cache(id.slot.into()))?;
                    (Arc::clone(&agreed.name), Wish::Known(id, Arc::clone(agreed), absent))
                }
                2 => {
                    let member = some_of(vec![reader.number()?], below)?;
                    let gather = reader.byte()? != 0;
                    member.into_iter().for_each(|member| self.joined(member, gather));
                    continue;
                }
                4 => {
                    self.gone(source)?;
                    continue;
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

/// Members that must be among those below the sender.
fn some_of(numbers: Vec<u64>, below: &[u32]) -> Result<Vec<u32>, Malformed> {
    let known = |number: u64| u32::try_from(number).ok().filter(|member| below.contains(member));
    numbers.into_iter().map(|number| known(number).ok_or(Malformed::Member(number))).collect()
}
