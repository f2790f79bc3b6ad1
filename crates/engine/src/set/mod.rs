// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One process set: negotiation, queue, cache and communicator, driven by polling. Knows no
//! threads, locks or clocks.

mod announce;
mod batch;
mod deal;
mod decide;
mod execute;
mod inquiry;
mod join;
mod leave;
mod list;
mod reach;
#[cfg(any(test, feature = "_test-harness"))]
pub(crate) mod simulation;
mod trace;
mod watch;

#[cfg(test)]
mod tests;

pub(crate) use decide::{lists_at_a_time, operations};
pub(crate) use execute::share_of;

use std::sync::Arc;
use std::time::Instant;

use farandole_collectives::{Buffer, Event};
use farandole_transport::{FrameReceiver, FrameSender, LinkKind, frames};
use farandole_world::{ProcessSetId, Rank, World};

use crate::cache::Cache;
use crate::devices::Devices;
use crate::hash::Map;
use crate::signature::{Call, Signature};
use crate::tally::Tally;
use crate::timeline::Tracer;
use crate::tree::Tree;
use crate::tune::Tuner;
use crate::wire::{Malformed, Reader};
use crate::{Cause, Completion, Error, Handle, Observer, Result, SetOptions, Settings, Statistics};

pub(crate) use inquiry::answer_questions;

/// Kinds of control frames.
mod kind {
    /// Upward: tensors a whole subtree has announced.
    pub(super) const ANNOUNCE: u8 = 1;
    /// Downward: what to execute next.
    pub(super) const LIST: u8 = 2;
    /// To all: a rank leaves in good order.
    pub(super) const DEPARTURE: u8 = 3;
    /// To all: a rank failed.
    pub(super) const ABORT: u8 = 4;
    /// Upward: the ranks that have submitted a tensor that waits too long.
    pub(super) const CAME: u8 = 5;
    /// Downward: the same, put together.
    pub(super) const STALLED: u8 = 6;
    /// Upward: the subtree executes nothing that a departed rank took part in.
    pub(super) const DONE: u8 = 7;
    /// Downward: none of them does.
    pub(super) const CLEAR: u8 = 8;
    /// Downward: members that are waited for shall say what they do.
    pub(super) const QUERY: u8 = 9;
    /// Upward: what one of them says.
    pub(super) const ANSWER: u8 = 10;
    /// To all: ranks submitted what cannot continue.
    pub(super) const DISAGREEMENT: u8 = 11;
}

/// A request of this rank, from its submission to its batch.
pub(crate) struct Entry {
    pub(crate) handle: Handle,
    pub(crate) name: Arc<str>,
    pub(crate) operation: &'static str,
    /// The matter of a meeting, if its kind does not state it: the full text of a change of process
    /// sets.
    pub(crate) matter: Option<Box<str>>,
    pub(crate) group: u64,
    /// Row counts that this member brings: of its input, or of each block of it.
    pub(crate) rows: Vec<u64>,
    pub(crate) input: Buffer,
    pub(crate) output: Option<Buffer>,
    pub(crate) ready: Option<Arc<dyn Event>>,
    pub(crate) since: Instant,
    /// Ranks the coordinator misses, once it said so.
    pub(crate) missing: Option<Vec<Rank>>,
}

impl Entry {
    fn what(&self) -> String {
        what(self.operation, self.matter.as_deref(), &self.name)
    }

    fn is_meeting(&self) -> bool {
        MEETINGS.contains(&self.operation)
    }

    fn failed(&self, cause: &Arc<Cause>) -> Error {
        Error::Failed {
            operation: self.operation,
            tensor: Arc::clone(&self.name),
            cause: Arc::clone(cause),
        }
    }
}

/// Names of the operations that move no data: their submitters wait for them.
const MEETINGS: [&str; 3] = ["barrier", "process set change", "join"];

/// `allreduce of gradient.3`, `an addition of process set [0, 1]`: as reports name an operation.
pub(crate) fn what(operation: &str, matter: Option<&str>, name: &str) -> String {
    match matter {
        Some(matter) => matter.to_owned(),
        None if operation == "join" => "join".to_owned(),
        None => format!("{operation} of {name}"),
    }
}

/// The end of a request.
pub(crate) struct Finished {
    pub(crate) handle: Handle,
    pub(crate) name: Arc<str>,
    pub(crate) result: Result<Completion>,
}

fn tuner(settings: &Settings) -> Option<Tuner> {
    let tune = settings.tune.clone()?;
    Some(Tuner::new(tune, settings.fusion_threshold, settings.cache_capacity > 0))
}

/// The control link to a neighbour in the tree.
struct Neighbour {
    sender: FrameSender,
    receiver: FrameReceiver,
    kind: LinkKind,
    /// Nothing more comes from it, nor does it listen.
    closed: bool,
    /// Child: lists it had seen when it last announced something.
    seen: u64,
}

/// Everything of one process set on one rank.
pub(crate) struct ProcessSet {
    /// Names it inside the engine.
    pub(crate) key: usize,
    pub(crate) members: Vec<Rank>,
    options: Shared,
    tree: Tree,
    /// The parent first, when there is one; then the children in the tree's order.
    neighbours: Vec<Neighbour>,
    cache: Cache,
    /// Announced, not yet in a list.
    local: Map<Arc<str>, Entry>,
    /// Announced by a part of the subtree.
    pending: Map<Arc<str>, Tally>,
    /// The announcement under construction.
    upward: Vec<u8>,
    /// Lists applied.
    lists: u64,
    coordinator: decide::Coordinator,
    execution: execute::Execution,
    watch: watch::Watch,
    inquiries: inquiry::Inquiries,
    /// At the coordinator of the global set, while autotune is on.
    tuner: Option<Tuner>,
    joins: join::Joins,
    leaving: Option<leave::Leaving>,
    /// Until when it lives on after it was removed.
    retired: Option<Instant>,
    /// A lost peer that may yet turn out to have left in order.
    suspect: Option<(Instant, Cause)>,
    scratch: Vec<u8>,
    pub(crate) statistics: Statistics,
}

/// The state that all sets of an engine share.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) world: Arc<World>,
    pub(crate) settings: Arc<Settings>,
    pub(crate) devices: Arc<Devices>,
    pub(crate) observer: Arc<dyn Observer>,
    pub(crate) tracer: Arc<Tracer>,
}

impl Shared {
    fn host(&self, rank: Rank) -> String {
        self.world.seats.get(rank.index()).map_or_else(String::new, |seat| seat.host.0.clone())
    }
}

impl ProcessSet {
    pub(crate) fn new(key: usize, options: SetOptions, shared: Shared) -> Result<Self> {
        let refuse = |reason: String| Error::Start { reason };
        let SetOptions { id, members, control, communicator } = options;
        let me = shared.world.rank;
        if !members.is_sorted_by(|low, high| low < high) {
            return Err(refuse(format!(
                "members of process set {id} are not ascending: {members:?}"
            )));
        }
        let tree = Tree::new(&shared.world, &members, me)
            .ok_or_else(|| refuse(format!("rank {me} is not in process set {id}")))?;
        if communicator.size() != members.len() || communicator.member() != tree.me as usize {
            let (size, member) = (communicator.size(), communicator.member());
            return Err(refuse(format!(
                "process set {id} has another communicator: member {member} of {size}"
            )));
        }
        let mut links: Map<u64, _> = control
            .into_iter()
            .map(|link| (u64::from(link.peer.0), (link.kind, frames(link))))
            .collect();
        let mut neighbours = Vec::new();
        for member in tree.parent.iter().chain(&tree.children) {
            let peer = members[*member as usize];
            let (kind, (sender, receiver)) = links.remove(&peer.0.into()).ok_or_else(|| {
                refuse(format!("process set {id} has no control link to rank {peer}"))
            })?;
            neighbours.push(Neighbour { sender, receiver, kind, closed: false, seen: 0 });
        }
        Ok(Self {
            watch: watch::Watch::new(id, &shared.settings),
            inquiries: inquiry::Inquiries::default(),
            tuner: tuner(&shared.settings)
                .filter(|_| id == ProcessSetId::GLOBAL && tree.parent.is_none()),
            joins: join::Joins::default(),
            coordinator: decide::Coordinator::default(),
            execution: execute::Execution::new(communicator),
            cache: Cache::new(shared.settings.cache_capacity),
            key,
            members,
            options: shared,
            tree,
            neighbours,
            local: Map::default(),
            pending: Map::default(),
            upward: Vec::new(),
            lists: 0,
            leaving: None,
            retired: None,
            suspect: None,
            scratch: Vec::new(),
            statistics: Statistics::default(),
        })
    }

    /// Takes a request and announces it; the frame leaves with the next poll.
    pub(crate) fn enqueue(
        &mut self,
        entry: Entry,
        signature: Signature,
        finished: &mut Vec<Finished>,
    ) -> Step {
        if let Some(leaving) = &self.leaving {
            let result = Err(entry.failed(&leaving.cause));
            finished.push(Finished { handle: entry.handle, name: entry.name, result });
            return Ok(());
        }
        if let Call::Join { gather } = signature.call {
            return self.join(entry, gather);
        }
        let (name, since) = (Arc::clone(&entry.name), entry.since);
        let wish = self.wish_of(&entry, signature);
        self.local.insert(Arc::clone(&name), entry);
        let me = [self.tree.me];
        self.announced(0, &name, wish, &me, since)
    }

    /// Moves everything that can move; true when anything did.
    ///
    /// # Errors
    /// Why the engine must stop.
    pub(crate) fn poll(&mut self, now: Instant, finished: &mut Vec<Finished>) -> Step<bool> {
        let mut moved = self.receive(now, finished)?;
        // A second round executes what the first one decided.
        for _ in 0..2 {
            moved |= self.emit(finished)?;
            moved |= self.send_announcement()?;
            let ran = self.execute(now, finished)?;
            moved |= ran;
            if !ran || self.coordinator.is_empty() {
                break;
            }
        }
        for neighbour in &mut self.neighbours {
            if neighbour.sender.queued() > 0 && !neighbour.closed {
                neighbour.flush(&mut self.suspect, now);
            }
        }
        self.settle(now, finished)?;
        Ok(moved)
    }

    /// Returns whether something is in progress that a poll could move.
    pub(crate) fn is_busy(&self) -> bool {
        !self.local.is_empty()
            || self.joins.own().is_some()
            || !self.execution.is_idle()
            || self.execution.is_watched()
            || self.suspect.is_some()
            || self.is_unsettled()
            || self
                .neighbours
                .iter()
                .any(|neighbour| !neighbour.closed && neighbour.sender.queued() > 0)
    }

    /// Returns whether a device is waited for: its end wakes no thread.
    pub(crate) fn waits_for_device(&self) -> bool {
        self.execution.waits_for_device()
    }

    fn receive(&mut self, now: Instant, finished: &mut Vec<Finished>) -> Step<bool> {
        let mut frame = std::mem::take(&mut self.scratch);
        let mut moved = false;
        for index in 0..self.neighbours.len() {
            while let Some(kind) =
                self.neighbours[index].receive(&mut frame, &mut self.suspect, now)
            {
                moved = true;
                self.statistics.frames_received += 1;
                let read = self.dispatch(index, kind, &frame, now, finished);
                let rank = self.neighbours[index].receiver.peer();
                read.map_err(|stop| match stop {
                    Stop::Cause(cause) => cause,
                    Stop::Malformed(malformed) => {
                        Cause::Protocol { rank, reason: malformed.to_string() }
                    }
                })?;
            }
        }
        self.scratch = frame;
        Ok(moved)
    }

    fn dispatch(
        &mut self,
        from: usize,
        kind: u8,
        frame: &[u8],
        now: Instant,
        finished: &mut Vec<Finished>,
    ) -> Result<(), Stop> {
        match kind {
            kind::ANNOUNCE => self.on_announcement(from, frame, now),
            kind::LIST => self.on_list(frame, finished),
            kind::DEPARTURE => self.on_departure(from, frame, finished),
            kind::ABORT => self.on_abort(frame),
            kind::DISAGREEMENT => {
                Err(Cause::Disagreement { text: Reader(frame).text()?.to_owned() }.into())
            }
            kind::CAME => self.on_came(frame, now),
            kind::STALLED => self.on_stalled(frame),
            kind::QUERY => self.on_query(frame, now),
            kind::ANSWER => self.on_answer(frame),
            kind::DONE => {
                self.on_done();
                Ok(())
            }
            kind::CLEAR => Ok(self.on_clear()?),
            other => Err(Malformed::Tag(other).into()),
        }
    }

    fn is_coordinator(&self) -> bool {
        self.tree.parent.is_none()
    }

    /// Index of the first child among the neighbours.
    fn first_child(&self) -> usize {
        usize::from(self.tree.parent.is_some())
    }

    fn send(&mut self, to: usize, kind: u8, frame: &[u8]) -> Step {
        let neighbour = &mut self.neighbours[to];
        if neighbour.closed {
            return Ok(());
        }
        self.statistics.frames_sent += 1;
        match neighbour.sender.queue(kind, frame) {
            Ok(()) => Ok(()),
            Err(error @ farandole_transport::Error::Frame { .. }) => Err(error.into()),
            // The peer is gone: reading from it tells whether it left in order.
            Err(_) => Ok(()),
        }
    }

    fn send_down(&mut self, kind: u8, frame: &[u8]) -> Step {
        (self.first_child()..self.neighbours.len())
            .try_for_each(|child| self.send(child, kind, frame))
    }
}

impl Neighbour {
    /// The kind of the next frame. A lost link is closed and its peer becomes a suspect.
    fn receive(
        &mut self,
        frame: &mut Vec<u8>,
        suspect: &mut Option<(Instant, Cause)>,
        now: Instant,
    ) -> Option<u8> {
        if self.closed {
            return None;
        }
        self.receiver.try_receive_into(frame).unwrap_or_else(|error| {
            self.closed = true;
            suspect.get_or_insert((now, error.into()));
            None
        })
    }

    fn flush(&mut self, suspect: &mut Option<(Instant, Cause)>, now: Instant) {
        if let Err(error) = self.sender.flush() {
            suspect.get_or_insert((now, error.into()));
        }
    }
}

/// A step of a set: an error stops the engine.
pub(crate) type Step<T = ()> = Result<T, Cause>;

/// The reason why a frame could not be dealt with.
enum Stop {
    Cause(Cause),
    Malformed(Malformed),
}

impl From<Cause> for Stop {
    fn from(cause: Cause) -> Self {
        Self::Cause(cause)
    }
}

impl From<Malformed> for Stop {
    fn from(malformed: Malformed) -> Self {
        Self::Malformed(malformed)
    }
}
