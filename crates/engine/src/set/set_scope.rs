// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The constant facts of a process set on one rank: its members, this rank's place in the control
//! tree, and the state that all sets of an engine share.

use std::sync::Arc;

use farandole_negotiation::{ControlTree, FrameReader, MalformedFrame};
use farandole_world::{ProcessSetId, Rank, World};

use crate::devices::EngineDevices;
use crate::timeline::OperationTracer;
use crate::{EngineObserver, EngineSettings};

/// The state that all sets of an engine share.
#[derive(Clone)]
pub(crate) struct ProcessSetContext {
    pub(crate) world: Arc<World>,
    pub(crate) settings: Arc<EngineSettings>,
    pub(crate) devices: Arc<EngineDevices>,
    pub(crate) observer: Arc<dyn EngineObserver>,
    pub(crate) tracer: Arc<OperationTracer>,
}

/// A process set as one of its members sees it.
pub(crate) struct SetScope {
    pub(super) id: ProcessSetId,
    pub(super) members: Vec<Rank>,
    pub(super) tree: ControlTree,
    pub(super) context: ProcessSetContext,
}

impl SetScope {
    pub(super) fn is_coordinator(&self) -> bool {
        self.tree.parent.is_none()
    }

    /// Returns the member number of this rank, as an index.
    pub(super) fn own_index(&self) -> usize {
        self.tree.me as usize
    }

    pub(super) fn host_name(&self, rank: Rank) -> String {
        let seat = self.context.world.seats.get(rank.index());
        seat.map_or_else(String::new, |seat| seat.host.0.clone())
    }

    /// Returns the members that a source of tallies stands for: 0 is this member, `n + 1` its `n`th
    /// child.
    pub(super) fn members_of_source(&self, source: u32) -> &[u32] {
        match (source as usize).checked_sub(1) {
            None => std::slice::from_ref(&self.tree.me),
            Some(child) => &self.tree.below[child],
        }
    }

    /// Returns the number of sources of tallies.
    pub(super) fn source_count(&self) -> usize {
        self.tree.children.len() + 1
    }

    /// Returns the members that these sources stand for.
    pub(super) fn members_of_sources(&self, sources: &[u32]) -> impl Iterator<Item = u32> {
        sources.iter().flat_map(move |source| self.members_of_source(*source)).copied()
    }

    /// Returns the ranks that are not among these members.
    pub(super) fn missing_ranks(&self, submitters: &[u32]) -> Vec<Rank> {
        (0u32..)
            .zip(&self.members)
            .filter(|(member, _)| !submitters.contains(member))
            .map(|(_, rank)| *rank)
            .collect()
    }

    pub(super) fn read_members(
        &self,
        reader: &mut FrameReader<'_>,
    ) -> Result<Vec<u32>, MalformedFrame> {
        let size = self.members.len() as u64;
        let member = |number: u64| {
            u32::try_from(number)
                .ok()
                .filter(|_| number < size)
                .ok_or(MalformedFrame::Member(number))
        };
        reader.read_varints()?.into_iter().map(member).collect()
    }
}
