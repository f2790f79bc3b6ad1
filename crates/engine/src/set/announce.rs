// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Announcements, upward: a node announces a tensor when its whole subtree has announced it. If all
//! members agree, they are merged into one item.
//!
//! Frame: number of lists seen, then items until the end. `0 slot version` is a cached request. `3
//! slot version absent` is a cached request without the members below that have joined. `1 name
//! count variant...` is a full request (see [`RequestVariant`]). `2 member gather` is a member that
//! joins. `4` means that all members below have joined and announce nothing more.

use std::sync::Arc;
use std::time::Instant;

use farandole_negotiation::{
    Announcement, AnnouncementTally, CacheId, FrameReader, FrameWriter, MalformedFrame,
    RequestSignature, RequestVariant,
};

use super::{FrameFailure, PendingEntry, ProcessSet, StepResult, frame_kinds};

impl ProcessSet {
    /// Returns the announcement of this member's request.
    pub(super) fn own_announcement(
        &mut self,
        entry: &PendingEntry,
        signature: RequestSignature,
    ) -> Announcement {
        let me = self.tree.me;
        if let Some((id, agreed)) = self.cache.find_by_name(&entry.name)
            && agreed.signature.covers_request(&signature)
            && agreed.request_row_counts(me) == entry.rows
        {
            self.statistics.cache_hits += 1;
            return Announcement::Cached(id, Arc::clone(agreed), Vec::new());
        }
        let rows = if signature.call.row_counts_per_member() > 0 {
            entry.rows.clone()
        } else {
            Vec::new()
        };
        Announcement::Explicit(vec![RequestVariant { signature, members: vec![me], rows }])
    }

    /// Records the announcement of one source. When all sources have announced the tensor, it goes
    /// up, or is decided if this is the coordinator.
    pub(super) fn record_announcement(
        &mut self,
        source: u32,
        name: &Arc<str>,
        announcement: Announcement,
        members: &[u32],
        since: Instant,
    ) -> StepResult {
        if self.options.tracer.is_enabled() {
            self.trace_arrival(name, &announcement, members);
        }
        let children = self.tree.children.len();
        // A leaf needs no tally: its own announcement is the one of its subtree.
        if children == 0 {
            return self.queue_or_decide_announcement(name, announcement, &[source]);
        }
        let (me, below) = ([self.tree.me], &self.tree.below);
        let tally =
            self.pending.entry(Arc::clone(name)).or_insert_with(|| AnnouncementTally::new(since));
        tally.add_announcement(source, announcement, members, |source| {
            match (source as usize).checked_sub(1) {
                None => me.to_vec(),
                Some(child) => below[child].clone(),
            }
        });
        if tally.sources.len() + self.joins.count_fully_joined_sources(&tally.sources) <= children {
            return Ok(());
        }
        self.complete_pending_tensor(name)
    }

    /// Completes a tensor after all ranks that will submit it have submitted it.
    pub(super) fn complete_pending_tensor(&mut self, name: &Arc<str>) -> StepResult {
        let Some(mut tally) = self.pending.remove(name) else { return Ok(()) };
        let sources = std::mem::take(&mut tally.sources);
        self.queue_or_decide_announcement(name, tally.into_announcement(), &sources)
    }

    fn queue_or_decide_announcement(
        &mut self,
        name: &Arc<str>,
        mut announcement: Announcement,
        sources: &[u32],
    ) -> StepResult {
        if let Announcement::Cached(_, _, absent) = &mut announcement
            && self.joins.has_joined_members()
        {
            let children = u32::try_from(self.tree.children.len()).unwrap_or(u32::MAX);
            let silent = (0..=children).filter(|source| !sources.contains(source));
            absent.extend(silent.flat_map(|source| self.members_of_source(source)));
        }
        if self.is_coordinator() {
            return self.decide_tensor(name, announcement);
        }
        // The frame says that this member has seen the list that dropped the entry. After that the
        // parent may have forgotten the entry.
        let announcement = match announcement {
            Announcement::Cached(id, ..) if !self.cache.contains_id(id) => {
                Announcement::Explicit(announcement.into_variants(&self.tree.subtree))
            }
            announcement => announcement,
        };
        let (mut writer, subtree) = self.upward_announcement_frame();
        announcement.encode_to(name, subtree, &mut writer);
        Ok(())
    }

    /// Returns the announcement frame under construction and the members that it speaks for.
    pub(super) fn upward_announcement_frame(&mut self) -> (FrameWriter<'_>, &[u32]) {
        let mut writer = FrameWriter(&mut self.upward);
        // Later items may have seen more lists. A number that is too low only makes the parent keep
        // dropped entries longer.
        if writer.0.is_empty() {
            writer.write_varint(self.lists);
        }
        (writer, &self.tree.subtree)
    }

    /// Sends all tensors that became complete since the last poll, in one frame.
    pub(crate) fn send_complete_announcements(&mut self) -> StepResult<bool> {
        if self.upward.is_empty() {
            return Ok(false);
        }
        let frame = std::mem::take(&mut self.upward);
        self.send_frame(0, frame_kinds::TENSOR_ANNOUNCEMENT, &frame)?;
        self.upward = frame;
        self.upward.clear();
        Ok(true)
    }

    pub(super) fn on_announcement(
        &mut self,
        from: usize,
        frame: &[u8],
        now: Instant,
    ) -> Result<(), FrameFailure> {
        let child = from
            .checked_sub(self.first_child_index())
            .ok_or(MalformedFrame::Tag(frame_kinds::TENSOR_ANNOUNCEMENT))?;
        let source = u32::try_from(child + 1).map_err(|_| MalformedFrame::Overlong)?;
        let mut reader = FrameReader(frame);
        self.neighbours[from].seen = reader.read_varint()?;
        // Copied, because a join among the items reads the tree as well.
        let below = self.tree.below[child].clone();
        self.read_announced_items(source, &mut reader, &below, now)?;
        let children = &self.neighbours[self.first_child_index()..];
        // The slowest child decides: it may still announce an entry that a later list has dropped.
        let seen = children.iter().map(|child| child.seen).min().unwrap_or(u64::MAX);
        self.cache.forget_dropped_entries_until(seen);
        Ok(())
    }

    fn read_announced_items(
        &mut self,
        source: u32,
        reader: &mut FrameReader<'_>,
        below: &[u32],
        now: Instant,
    ) -> Result<(), FrameFailure> {
        while !reader.is_empty() {
            let (name, announcement) = match reader.read_byte()? {
                tag @ (0 | 3) => {
                    let id = CacheId { slot: reader.read_u32()?, version: reader.read_u32()? };
                    let absent = if tag == 3 {
                        members_below_sender(reader.read_varints()?, below)?
                    } else {
                        Vec::new()
                    };
                    let agreed =
                        self.cache.resolve_id(id).ok_or(MalformedFrame::Cache(id.slot.into()))?;
                    (Arc::clone(&agreed.name), Announcement::Cached(id, Arc::clone(agreed), absent))
                }
                2 => {
                    let member = members_below_sender(vec![reader.read_varint()?], below)?;
                    let gather = reader.read_byte()? != 0;
                    member.into_iter().for_each(|member| self.record_joined_member(member, gather));
                    continue;
                }
                4 => {
                    self.record_fully_joined_source(source)?;
                    continue;
                }
                1 => {
                    let name = Arc::from(reader.read_text()?);
                    let variants = reader.read_count()?;
                    let variants = (0..variants)
                        .map(|_| RequestVariant::decode_from(reader, below))
                        .collect::<Result<Vec<_>, _>>()?;
                    (name, Announcement::Explicit(variants))
                }
                other => return Err(MalformedFrame::Tag(other).into()),
            };
            if self.pending.get(&name).is_some_and(|tally| tally.sources.contains(&source)) {
                return Err(MalformedFrame::DuplicateAnnouncement.into());
            }
            self.record_announcement(source, &name, announcement, below, now)?;
        }
        Ok(())
    }
}

/// Converts member numbers, which must be among the members below the sender.
fn members_below_sender(numbers: Vec<u64>, below: &[u32]) -> Result<Vec<u32>, MalformedFrame> {
    let known = |number: u64| u32::try_from(number).ok().filter(|member| below.contains(member));
    numbers.into_iter().map(|number| known(number).ok_or(MalformedFrame::Member(number))).collect()
}
