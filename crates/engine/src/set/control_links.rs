// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The control links of a set: one to each neighbour in the control tree. The frames of the
//! negotiation, of departures and of stall reports go over them.

use farandole_negotiation::{ControlTree, FastHashMap, MalformedFrame};
use farandole_transport::{FrameReceiver, FrameSender, Link, LinkKind, into_frame_halves};
use farandole_world::Rank;

use super::set_scope::SetScope;
use crate::error::StepResult;
use crate::{Error, Result, StopCause};

/// Kinds of control frames.
pub(super) mod frame_kinds {
    /// Upward: tensors that a whole subtree has announced.
    pub(crate) const TENSOR_ANNOUNCEMENT: u8 = 1;
    /// Downward: the operations to execute next.
    pub(crate) const RESPONSE_LIST: u8 = 2;
    /// To all: a rank departs in order.
    pub(crate) const RANK_DEPARTURE: u8 = 3;
    /// To all: a rank failed.
    pub(crate) const RANK_ABORT: u8 = 4;
    /// Upward: the ranks that have submitted a tensor that has waited too long.
    pub(crate) const STALL_SUBMITTERS: u8 = 5;
    /// Downward: the combined submitters of such a tensor.
    pub(crate) const STALL_STATUS: u8 = 6;
    /// Upward: no member of the subtree executes an operation of a departed rank any more.
    pub(crate) const SUBTREE_DONE: u8 = 7;
    /// Downward: no member of the set executes such an operation, so links may close.
    pub(crate) const LINKS_CLEAR: u8 = 8;
    /// Downward: asks missing members for their stacks and waits.
    pub(crate) const STALL_QUERY: u8 = 9;
    /// Upward: the answer of one member.
    pub(crate) const STALL_ANSWER: u8 = 10;
    /// To all: ranks put a tensor into different groups, so the engine must stop.
    pub(crate) const GROUP_DISAGREEMENT: u8 = 11;
}

/// The reason why a frame could not be handled.
pub(super) enum FrameFailure {
    Cause(StopCause),
    Malformed(MalformedFrame),
}

impl From<StopCause> for FrameFailure {
    fn from(cause: StopCause) -> Self {
        Self::Cause(cause)
    }
}

impl From<MalformedFrame> for FrameFailure {
    fn from(malformed: MalformedFrame) -> Self {
        Self::Malformed(malformed)
    }
}

/// The control link to a neighbour in the tree.
struct TreeNeighbour {
    sender: FrameSender,
    receiver: FrameReceiver,
    kind: LinkKind,
    /// Whether the link is closed in both directions.
    closed: bool,
}

pub(super) struct ControlLinks {
    /// The parent first, if there is one; then the children in the tree's order.
    neighbours: Vec<TreeNeighbour>,
    /// Index of the first child among the neighbours.
    first_child: usize,
    pub(super) frames_sent: u64,
    pub(super) frames_received: u64,
}

impl ControlLinks {
    /// Takes the link to each neighbour.
    ///
    /// # Errors
    /// `Start` if a link is missing.
    pub(super) fn new(links: Vec<Link>, scope: &SetScope) -> Result<Self> {
        let mut links: FastHashMap<u64, _> =
            links.into_iter().map(|link| (u64::from(link.peer.0), link)).collect();
        let ControlTree { parent, children, .. } = &scope.tree;
        let connect = |member: &u32| {
            let peer = scope.members[*member as usize];
            let link = links.remove(&peer.0.into()).ok_or_else(|| Error::Start {
                reason: format!("process set {} has no control link to rank {peer}", scope.id),
            })?;
            let kind = link.kind;
            let (sender, receiver) = into_frame_halves(link);
            Ok(TreeNeighbour { sender, receiver, kind, closed: false })
        };
        Ok(Self {
            neighbours: parent.iter().chain(children).map(connect).collect::<Result<_>>()?,
            first_child: usize::from(parent.is_some()),
            frames_sent: 0,
            frames_received: 0,
        })
    }

    /// Returns the number of neighbours, which are numbered from 0.
    pub(super) fn count(&self) -> usize {
        self.neighbours.len()
    }

    pub(super) fn peer_rank(&self, index: usize) -> Rank {
        self.neighbours[index].receiver.peer_rank()
    }

    /// Returns the position of a neighbour among the children; `None` for the parent.
    pub(super) fn child_position(&self, index: usize) -> Option<usize> {
        index.checked_sub(self.first_child)
    }

    /// Returns the kind of the link towards a child, or towards the parent.
    pub(super) fn kind_towards(&self, child: Option<usize>) -> Option<LinkKind> {
        let index = child.map_or(0, |child| child + self.first_child);
        self.neighbours.get(index).map(|neighbour| neighbour.kind)
    }

    /// Receives the next frame of a neighbour and returns its kind.
    ///
    /// # Errors
    /// The link is lost, and closed from now on.
    pub(super) fn receive_frame(
        &mut self,
        index: usize,
        frame: &mut Vec<u8>,
    ) -> StepResult<Option<u8>> {
        let neighbour = &mut self.neighbours[index];
        if neighbour.closed {
            return Ok(None);
        }
        let received = neighbour.receiver.try_receive_frame_into(frame);
        match received {
            Ok(kind) => self.frames_received += u64::from(kind.is_some()),
            Err(_) => neighbour.closed = true,
        }
        Ok(received?)
    }

    pub(super) fn send_to_parent(&mut self, kind: u8, frame: &[u8]) -> StepResult {
        self.send_frame(0, kind, frame)
    }

    pub(super) fn send_to_children(&mut self, kind: u8, frame: &[u8]) -> StepResult {
        (self.first_child..self.neighbours.len())
            .try_for_each(|child| self.send_frame(child, kind, frame))
    }

    pub(super) fn send_to_all_except(
        &mut self,
        except: Option<usize>,
        kind: u8,
        frame: &[u8],
    ) -> StepResult {
        (0..self.neighbours.len())
            .filter(|index| Some(*index) != except)
            .try_for_each(|index| self.send_frame(index, kind, frame))
    }

    pub(super) fn send_frame(&mut self, to: usize, kind: u8, frame: &[u8]) -> StepResult {
        let neighbour = &mut self.neighbours[to];
        if neighbour.closed {
            return Ok(());
        }
        self.frames_sent += 1;
        match neighbour.sender.queue_frame(kind, frame) {
            Ok(()) => Ok(()),
            Err(error @ farandole_transport::Error::Frame { .. }) => Err(error.into()),
            // The peer is gone: the next receive shows whether it departed in order.
            Err(_) => Ok(()),
        }
    }

    /// Sends the last frame of this rank to all neighbours, also to lost neighbours: if a
    /// connection is silent, its other end may not know of the failure yet.
    pub(super) fn send_final_frame(&mut self, kind: u8, frame: &[u8]) {
        for neighbour in &mut self.neighbours {
            neighbour.sender.send_final_frame(kind, frame);
        }
    }

    /// Sends queued bytes, as many as the links take. Returns the first loss of a link.
    pub(super) fn flush_frames(&mut self) -> StepResult {
        let mut result = Ok(());
        for neighbour in &mut self.neighbours {
            if neighbour.has_queued_bytes()
                && let Err(error) = neighbour.sender.flush()
                && result.is_ok()
            {
                result = Err(error.into());
            }
        }
        result
    }

    /// Sends queued bytes, and returns whether all links have sent theirs.
    pub(super) fn drain_queues(&mut self) -> bool {
        // A peer that is lost receives nothing any more, so there is nothing to wait for.
        self.neighbours
            .iter_mut()
            .all(|neighbour| neighbour.closed || neighbour.sender.flush().unwrap_or(true))
    }

    pub(super) fn has_queued_bytes(&self) -> bool {
        self.neighbours.iter().any(TreeNeighbour::has_queued_bytes)
    }

    pub(super) fn has_closed_link(&self) -> bool {
        self.neighbours.iter().any(|neighbour| neighbour.closed)
    }
}

impl TreeNeighbour {
    fn has_queued_bytes(&self) -> bool {
        !self.closed && self.sender.queued_bytes() > 0
    }
}
