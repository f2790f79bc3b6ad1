// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The negotiation of a set: announcements become response lists. It reads frames and writes
//! frames, and neither sends nor executes anything.
//!
//! Announcements go upward: a node announces a tensor when its whole subtree has announced it. If
//! all members agree, they are merged into one item. The coordinator checks tensors that all ranks
//! have announced, and decides the content of the next list.
//!
//! Frame: number of lists seen, then items until the end. `0 slot version` is a cached request. `3
//! slot version absent` is a cached request without the members below that have joined. `1 name
//! count variant...` is a full request (see [`RequestVariant`]). `2 member gather` is a member that
//! joins. `4` means that all members below have joined and announce nothing more.

use std::sync::Arc;
use std::time::Instant;

use farandole_negotiation::{
    Announcement, AnnouncementTally, CacheId, CachedResponse, CollectiveCall, FastHashMap,
    FrameReader, FrameWriter, MalformedFrame, MemorySite, ReadyTensor, RequestSignature,
    RequestVariant, ResponseCache, ResponseList, TensorRefusal, decode_list_updating_cache,
    encode_list_updating_cache, resolve_variants,
};

use super::control_links::{FrameFailure, frame_kinds};
use super::coordinator_decisions::SetCoordinator;
use super::join::{JOIN_TENSOR_NAME, JoinState};
use super::local_requests::LocalRequests;
use super::operation_trace::trace_arrival;
use super::set_scope::SetScope;
use super::stall_cases::StallCases;
use crate::StopCause;
use crate::error::StepResult;

pub(super) struct Negotiation {
    cache: ResponseCache,
    /// Tensors that a part of the subtree has announced.
    pub(super) pending: FastHashMap<Arc<str>, AnnouncementTally>,
    pub(super) joins: JoinState,
    coordinator: SetCoordinator,
    pub(super) stalls: StallCases,
    /// The announcement to the parent, under construction.
    pub(super) upward_frame: Vec<u8>,
    /// Number of lists applied.
    pub(super) lists: u64,
    /// For each child: number of lists that it had seen at its last announcement.
    lists_seen_by_children: Vec<u64>,
    /// Number of requests of this rank that were announced by cache number.
    pub(super) cache_hits: u64,
}

impl Negotiation {
    pub(super) fn new(scope: &SetScope) -> Self {
        Self {
            cache: ResponseCache::new(scope.context.settings.cache_capacity),
            pending: FastHashMap::default(),
            joins: JoinState::default(),
            coordinator: SetCoordinator::new(scope),
            stalls: StallCases::default(),
            upward_frame: Vec::new(),
            lists: 0,
            lists_seen_by_children: vec![0; scope.tree.children.len()],
            cache_hits: 0,
        }
    }

    /// Returns the announcement of this member's request, whose row counts are `rows`.
    pub(super) fn own_announcement(
        &mut self,
        scope: &SetScope,
        name: &Arc<str>,
        signature: RequestSignature,
        rows: &[u64],
    ) -> Announcement {
        let me = scope.tree.me;
        if let Some((id, agreed)) = self.cache.find_by_name(name)
            && agreed.signature.covers_request(&signature)
            && agreed.request_row_counts(me) == rows
        {
            self.cache_hits += 1;
            return Announcement::Cached(id, Arc::clone(agreed), Vec::new());
        }
        let has_rows = signature.call.row_counts_per_member() > 0;
        let rows = if has_rows { rows.to_vec() } else { Vec::new() };
        Announcement::Explicit(vec![RequestVariant { signature, members: vec![me], rows }])
    }

    /// Records the announcement of one source. When all sources have announced the tensor, it goes
    /// up, or is decided if this is the coordinator.
    ///
    /// # Errors
    /// As [`Self::decide_tensor`].
    pub(super) fn record_announcement(
        &mut self,
        scope: &SetScope,
        source: u32,
        name: &Arc<str>,
        announcement: Announcement,
        since: Instant,
    ) -> StepResult {
        let members = scope.members_of_source(source);
        if scope.context.tracer.is_enabled() {
            let is_pending = self.pending.contains_key(name);
            trace_arrival(scope, name, &announcement, members, is_pending);
        }
        // A leaf needs no tally: its own announcement is the one of its subtree.
        if scope.tree.children.is_empty() {
            return self.queue_or_decide_announcement(scope, name, announcement, &[source]);
        }
        let tally =
            self.pending.entry(Arc::clone(name)).or_insert_with(|| AnnouncementTally::new(since));
        tally.add_announcement(source, announcement, members, |source| {
            scope.members_of_source(source).to_vec()
        });
        if self.joins.completes_tally(tally, scope.source_count()) {
            return self.complete_pending_tensor(scope, name);
        }
        Ok(())
    }

    /// Completes a tensor after all ranks that will submit it have submitted it.
    fn complete_pending_tensor(&mut self, scope: &SetScope, name: &Arc<str>) -> StepResult {
        let Some(mut tally) = self.pending.remove(name) else { return Ok(()) };
        let sources = std::mem::take(&mut tally.sources);
        self.queue_or_decide_announcement(scope, name, tally.into_announcement(), &sources)
    }

    fn queue_or_decide_announcement(
        &mut self,
        scope: &SetScope,
        name: &Arc<str>,
        mut announcement: Announcement,
        sources: &[u32],
    ) -> StepResult {
        if let Announcement::Cached(_, _, absent) = &mut announcement
            && self.joins.has_joined_members()
        {
            let silent = (0u32..).take(scope.source_count());
            let silent = silent.filter(|source| !sources.contains(source));
            absent.extend(silent.flat_map(|source| scope.members_of_source(source)));
        }
        if scope.is_coordinator() {
            return self.decide_tensor(scope, name, announcement);
        }
        // The frame says that this member has seen the list that dropped the entry. After that the
        // parent may have forgotten the entry.
        let announcement = match announcement {
            Announcement::Cached(id, ..) if !self.cache.contains_id(id) => {
                Announcement::Explicit(announcement.into_variants(&scope.tree.subtree))
            }
            announcement => announcement,
        };
        announcement.encode_to(name, &scope.tree.subtree, &mut self.upward_writer());
        Ok(())
    }

    /// Returns the writer of the announcement frame under construction.
    fn upward_writer(&mut self) -> FrameWriter<'_> {
        let mut writer = FrameWriter(&mut self.upward_frame);
        // Later items may have seen more lists. A number that is too low only makes the parent keep
        // dropped entries longer.
        if writer.0.is_empty() {
            writer.write_varint(self.lists);
        }
        writer
    }

    /// Reads the announcement of a child; `None` is the parent, which must not announce.
    pub(super) fn receive_announcement(
        &mut self,
        scope: &SetScope,
        child: Option<usize>,
        frame: &[u8],
        now: Instant,
    ) -> Result<(), FrameFailure> {
        let child = child.ok_or(MalformedFrame::Tag(frame_kinds::TENSOR_ANNOUNCEMENT))?;
        let source = u32::try_from(child + 1).map_err(|_| MalformedFrame::Overlong)?;
        let mut reader = FrameReader(frame);
        self.lists_seen_by_children[child] = reader.read_varint()?;
        while !reader.is_empty() {
            self.read_announced_item(scope, source, &mut reader, now)?;
        }
        // The slowest child decides: it may still announce an entry that a later list has dropped.
        let seen = self.lists_seen_by_children.iter().min().copied().unwrap_or(u64::MAX);
        self.cache.forget_dropped_entries_until(seen);
        Ok(())
    }

    fn read_announced_item(
        &mut self,
        scope: &SetScope,
        source: u32,
        reader: &mut FrameReader<'_>,
        now: Instant,
    ) -> Result<(), FrameFailure> {
        let below = scope.members_of_source(source);
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
                let members = members_below_sender(vec![reader.read_varint()?], below)?;
                let gather = reader.read_byte()? != 0;
                for member in members {
                    self.record_joined_member(scope, member, gather);
                }
                return Ok(());
            }
            4 => return Ok(self.record_fully_joined_source(scope, source)?),
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
        Ok(self.record_announcement(scope, source, &name, announcement, now)?)
    }

    /// Announces the join of this member.
    pub(super) fn announce_own_join(&mut self, scope: &SetScope, gather: bool) -> StepResult {
        self.record_joined_member(scope, scope.tree.me, gather);
        self.record_fully_joined_source(scope, 0)
    }

    fn record_joined_member(&mut self, scope: &SetScope, member: u32, gather: bool) {
        self.joins.record_member(member, gather);
        if !scope.is_coordinator() {
            let mut writer = self.upward_writer();
            writer.write_byte(2);
            writer.write_varint(member.into());
            writer.write_byte(gather.into());
        }
    }

    /// Records that all members of a source have joined and that all their announcements have
    /// arrived.
    fn record_fully_joined_source(&mut self, scope: &SetScope, source: u32) -> StepResult {
        self.joins.record_finished_source(source);
        let sources = scope.source_count();
        let complete =
            self.pending.iter().filter(|(_, tally)| self.joins.completes_tally(tally, sources));
        let complete: Vec<Arc<str>> = complete.map(|(name, _)| Arc::clone(name)).collect();
        complete.iter().try_for_each(|name| self.complete_pending_tensor(scope, name))?;
        if !self.joins.has_finished_all(sources) {
            return Ok(());
        }
        if !scope.is_coordinator() {
            // Written after the announcements of the members below.
            self.upward_writer().write_byte(4);
        } else if let Some(last) = self.joins.joined_members().last() {
            // The order of arrival at the coordinator decides, so that all ranks report the same
            // rank.
            self.coordinator.push_all_joined_decision(last);
        }
        Ok(())
    }

    /// Decides a tensor that all ranks have submitted: checks that their requests agree.
    ///
    /// # Errors
    /// `Disagreement` if ranks put the tensor into different groups. The engine must stop: the
    /// other members of these groups may never become complete, so a wait for them has no limit.
    fn decide_tensor(
        &mut self,
        scope: &SetScope,
        name: &Arc<str>,
        announcement: Announcement,
    ) -> StepResult {
        self.stalls.forget_tensor(name);
        let variants = match announcement {
            Announcement::Cached(id, agreed, absent) if absent.is_empty() => {
                let known = self.cache.contains_id(id).then_some(id);
                self.coordinator.accept_tensor(ReadyTensor { agreed, known });
                return Ok(());
            }
            Announcement::Cached(id, agreed, absent) => {
                self.accept_without_absent_members(scope, agreed, Some(id), &absent);
                return Ok(());
            }
            Announcement::Explicit(variants) => variants,
        };
        let absent: Vec<u32> = if self.joins.has_joined_members() {
            let has_submitted =
                |member: &u32| variants.iter().any(|variant| variant.members.contains(member));
            (0u32..).take(scope.members.len()).filter(|member| !has_submitted(member)).collect()
        } else {
            Vec::new()
        };
        let group = variants.first().map_or(0, |variant| variant.signature.group);
        let divided = variants.iter().any(|variant| variant.signature.group != group);
        match resolve_variants(name, variants, &scope.members) {
            Ok(agreed) if absent.is_empty() => {
                self.coordinator
                    .accept_tensor(ReadyTensor { agreed: Arc::new(agreed), known: None });
            }
            Ok(agreed) => {
                self.accept_without_absent_members(scope, Arc::new(agreed), None, &absent);
            }
            Err(text) if divided => return Err(StopCause::Disagreement { text }),
            Err(text) => self.refuse_tensor(name, group, text),
        }
        Ok(())
    }

    /// Accepts a tensor that all members except joined ones agree on, or refuses it if the
    /// operation cannot run without them.
    fn accept_without_absent_members(
        &mut self,
        scope: &SetScope,
        agreed: Arc<CachedResponse>,
        known: Option<CacheId>,
        absent: &[u32],
    ) {
        if let Err(conflict) =
            self.joins.check_runs_without_absent(&agreed.signature.call, absent, &scope.members)
        {
            let operation = agreed.signature.call.operation_name();
            let text = format!(
                "{operation} of {} is not possible while ranks have joined: {conflict}",
                agreed.name
            );
            return self.refuse_tensor(&agreed.name, agreed.signature.group, text);
        }
        // A joined rank substitutes host memory.
        let known = known.filter(|id| {
            self.cache.contains_id(*id) && agreed.signature.site != MemorySite::Device
        });
        let agreed = match agreed.signature.site {
            MemorySite::Device => Arc::new(CachedResponse::new(
                Arc::clone(&agreed.name),
                RequestSignature { site: MemorySite::Mixed, ..agreed.signature.clone() },
                agreed.rows.clone(),
            )),
            _ => agreed,
        };
        if agreed.signature.call != CollectiveCall::Allgather
            || absent.iter().all(|member| agreed.member_row_counts(*member) == [0])
        {
            return self.coordinator.accept_tensor(ReadyTensor { agreed, known });
        }
        // The cached response has rows of members that now contribute none.
        let mut rows = agreed.rows.clone();
        for member in absent {
            if let Some(rows) = rows.get_mut(*member as usize) {
                *rows = 0;
            }
        }
        let agreed = CachedResponse::new(Arc::clone(&agreed.name), agreed.signature.clone(), rows);
        self.coordinator.accept_tensor(ReadyTensor { agreed: Arc::new(agreed), known: None });
    }

    fn refuse_tensor(&mut self, name: &Arc<str>, group: u64, text: String) {
        self.drop_refused_group(group);
        self.coordinator.refuse_tensor(TensorRefusal { name: Arc::clone(name), group, text });
    }

    /// Drops the tallies of a refused group. All ranks put the same tensors into the group and
    /// announced them together.
    pub(super) fn drop_refused_group(&mut self, group: u64) {
        if group == 0 {
            return;
        }
        for (name, _) in self.pending.extract_if(|_, tally| tally.is_in_group(group)) {
            self.stalls.forget_tensor(&name);
        }
    }

    /// Returns whether the coordinator has tensors for a next list.
    pub(super) fn has_decisions(&self) -> bool {
        self.coordinator.has_decisions()
    }

    /// Fuses the tensors that are ready into the next list, and writes the list into `frame`.
    pub(super) fn plan_next_list(
        &mut self,
        scope: &SetScope,
        requests: &LocalRequests,
        frame: &mut Vec<u8>,
    ) -> ResponseList {
        let priority_of = |name: &str| requests.priority_of(name);
        let plan = self.coordinator.plan_next_list(&scope.context.settings, priority_of);
        encode_list_updating_cache(self.lists + 1, plan, &mut self.cache, frame)
    }

    /// Reads the next list from the coordinator.
    pub(super) fn receive_list(&mut self, frame: &[u8]) -> Result<ResponseList, MalformedFrame> {
        let list = decode_list_updating_cache(frame, &mut self.cache)?;
        match list.number {
            number if number == self.lists + 1 => Ok(list),
            number => Err(MalformedFrame::ListOutOfOrder(number)),
        }
    }

    /// Counts a list that is applied next.
    pub(super) fn begin_list(&mut self, scope: &SetScope, number: u64) {
        self.lists = number;
        self.stalls.forget_tensor(JOIN_TENSOR_NAME);
        // No member below can announce an entry that this list has dropped.
        if scope.tree.children.is_empty() {
            self.cache.forget_dropped_entries_until(number);
        }
    }

    /// Forgets what members have announced and the coordinator has decided, because the set ends.
    pub(super) fn end_negotiation(&mut self) {
        self.coordinator.clear();
        self.pending.clear();
        self.joins = JoinState::default();
    }
}

/// Converts member numbers, which must be among the members below the sender.
fn members_below_sender(numbers: Vec<u64>, below: &[u32]) -> Result<Vec<u32>, MalformedFrame> {
    let known = |number: u64| u32::try_from(number).ok().filter(|member| below.contains(member));
    numbers.into_iter().map(|number| known(number).ok_or(MalformedFrame::Member(number))).collect()
}
