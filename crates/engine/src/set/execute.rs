// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Batches on their way through communicators: that of hosts, or one among the members' devices.
//! Batches start strictly in list order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use farandole_collectives::{Communicator, Error as CollectiveError, Event, Token};
use farandole_world::Rank;

use super::batch::{Batch, PIECE, Route, State};
use super::deal::{DEAL, Dealing};
use super::reach::{MEETING, Reach};
use super::trace::Span;
use super::{Entry, Finished, ProcessSet, Shared, Step};
use crate::Cause;
use crate::cache::Agreed;
use crate::timeline::{MEMCPY_IN_HOST_BUFFER, MEMCPY_OUT_HOST_BUFFER, WAIT_FOR_DATA};

/// Pieces that are copied in ahead of their turn.
const AHEAD: usize = 2;
/// Pieces of device memory in staging memory at a time.
const PIECES: usize = 8;

/// The batches of a set.
pub(super) struct Execution {
    communicator: Option<Box<dyn Communicator>>,
    reach: Reach,
    /// Numbers of rows that are in progress; later batches wait for them.
    dealing: Option<Dealing>,
    batches: VecDeque<Batch>,
    /// Batches at the front that a communicator has, or had.
    started: usize,
    /// Token of the first batch.
    first: u64,
    tokens: Vec<Token>,
    launched: Vec<(Token, Arc<dyn Event>)>,
    /// A communicator failed, or is not used any more.
    pub(super) broken: bool,
}

impl Execution {
    pub(super) fn new(communicator: Box<dyn Communicator>) -> Self {
        Self {
            communicator: Some(communicator),
            reach: Reach::Unasked,
            dealing: None,
            batches: VecDeque::new(),
            started: 0,
            first: 0,
            tokens: Vec::new(),
            launched: Vec::new(),
            broken: false,
        }
    }

    /// Returns whether nothing is left of what ranks asked for.
    pub(super) fn is_idle(&self) -> bool {
        self.batches.is_empty()
    }

    /// Returns whether a device has work in progress whose result a caller may have already.
    pub(super) fn is_watched(&self) -> bool {
        !self.broken && self.reach.is_watched()
    }

    /// Returns whether this rank or a peer waits for the device, whose end wakes no thread.
    pub(super) fn waits_for_device(&self) -> bool {
        !self.broken
            && (self.reach.is_forming()
                || self.reach.is_awaited()
                || self.batches.iter().any(Batch::waits_for_device))
    }

    /// Lists of which something is left.
    pub(super) fn lists(&self) -> u64 {
        match (self.batches.front(), self.batches.back()) {
            (Some(front), Some(back)) => back.list - front.list + 1,
            _ => 0,
        }
    }

    /// The oldest list of which something is left.
    pub(super) fn oldest_list(&self) -> Option<u64> {
        self.batches.front().map(|batch| batch.list)
    }

    pub(super) fn push(
        &mut self,
        list: u64,
        entries: Vec<(Entry, Arc<Agreed>)>,
        span: Option<Span>,
    ) {
        self.batches.push_back(Batch::new(list, entries, span));
    }

    /// Requests of which something is left.
    pub(super) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.batches.iter().flat_map(Batch::entries)
    }

    /// The request that has waited longest.
    pub(super) fn oldest(&self) -> Option<&Entry> {
        self.entries().min_by_key(|entry| entry.since)
    }

    /// Closes the communicators' links.
    pub(super) fn end(&mut self) {
        self.communicator = None;
        self.reach = Reach::Not;
    }

    /// Fails the batches. The communicators give them up, so their buffers are not touched any
    /// more.
    pub(super) fn fail(&mut self, cause: &Arc<Cause>, finished: &mut Vec<Finished>) {
        self.reach.abandon(cause.is_orderly(), self.broken);
        self.broken = true;
        self.started = 0;
        if let Some(communicator) = &mut self.communicator {
            communicator.abandon();
        }
        self.dealing = None;
        for batch in self.batches.drain(..) {
            batch.fail(cause, finished);
        }
    }
}

impl ProcessSet {
    pub(super) fn execute(&mut self, now: Instant, finished: &mut Vec<Finished>) -> Step<bool> {
        if self.execution.broken
            || (self.execution.batches.is_empty() && !self.execution.is_watched())
        {
            return Ok(false);
        }
        let mut moved = self.execution.start(&self.options, &self.members, finished)?;
        match self.execution.progress(&self.options, &self.members, finished) {
            Ok(progressed) => moved |= progressed,
            // Other ranks may soon say which rank is to blame.
            Err(
                cause @ (Cause::Transport(_)
                | Cause::Collective(
                    CollectiveError::Transport(_) | CollectiveError::Lost { .. },
                )),
            ) => {
                self.execution.broken = true;
                self.suspect.get_or_insert((now, cause));
            }
            Err(cause) => return Err(cause),
        }
        self.execution.forget();
        Ok(moved)
    }
}

impl Execution {
    /// This member among so many.
    fn place(&self) -> (usize, usize) {
        self.communicator.as_ref().map_or((0, 1), |all| (all.member(), all.size()))
    }

    /// Hands batches to the communicators, in order, as far as their inputs are there.
    fn start(
        &mut self,
        shared: &Shared,
        members: &[Rank],
        finished: &mut Vec<Finished>,
    ) -> Step<bool> {
        let before = self.started;
        while self.started < self.batches.len() {
            if !self.knows_rows()? {
                break;
            }
            let started = match self.route(shared, members)? {
                Route::Open => false,
                Route::Host => self.start_on_hosts(shared, members, finished)?,
                Route::Device => self.start_on_devices(members)?,
            };
            if !started {
                break;
            }
            self.started += 1;
        }
        Ok(self.started > before)
    }

    /// Returns whether the rows of the next batch are known. If not, members begin to tell each
    /// other.
    fn knows_rows(&mut self) -> Step<bool> {
        if self.dealing.is_some() {
            return Ok(false);
        }
        let undealt = self.batches.get(self.started).and_then(Batch::undealt);
        let (Some((agreed, sends)), Some(communicator)) = (undealt, &mut self.communicator) else {
            return Ok(true);
        };
        self.dealing =
            Some(Dealing::begin(Arc::clone(agreed), sends.to_vec(), &mut **communicator)?);
        Ok(false)
    }

    /// Chooses the route of the next batch, the same on every member. It stays open until the
    /// choice is known.
    fn route(&mut self, shared: &Shared, members: &[Rank]) -> Step<Route> {
        let place = self.place();
        let Some(batch) = self.batches.get(self.started) else { return Ok(Route::Open) };
        if batch.route != Route::Open || self.communicator.is_none() {
            return Ok(batch.route);
        }
        let mut route = Route::Host;
        if batch.is_for_devices() {
            match &mut self.reach {
                Reach::Left(_) | Reach::Not => {}
                Reach::Asking(_) | Reach::Naming(_) => return Ok(Route::Open),
                Reach::Among(communicator) if communicator.is_forming() => return Ok(Route::Open),
                Reach::Among(communicator) => {
                    if communicator.carries(&batch.outline(members)) {
                        route = Route::Device;
                    }
                }
                Reach::Unasked => {
                    let meeting = self.reach.ask(shared, place.1);
                    if let Some(communicator) = &mut self.communicator {
                        communicator.submit(MEETING, meeting)?;
                    }
                    return Ok(Route::Open);
                }
            }
        }
        if route == Route::Host && batch.is_staged() {
            self.cut();
        }
        if let Some(batch) = self.batches.get_mut(self.started) {
            batch.route = route;
        }
        Ok(route)
    }

    /// Puts the pieces of the next batch in its place.
    fn cut(&mut self) {
        let mut later = self.batches.split_off(self.started);
        if let Some(batch) = later.pop_front() {
            for mut piece in batch.cut(PIECE) {
                piece.route = Route::Host;
                self.batches.push_back(piece);
            }
        }
        self.batches.append(&mut later);
    }

    fn start_on_hosts(
        &mut self,
        shared: &Shared,
        members: &[Rank],
        finished: &mut Vec<Finished>,
    ) -> Step<bool> {
        let place = self.place();
        let held = self.batches.iter().filter(|batch| batch.holds_memory()).count();
        let Some(batch) = self.batches.get_mut(self.started) else { return Ok(false) };
        // Pieces before this one give theirs back without it.
        if batch.follows && held >= PIECES && !batch.holds_memory() {
            return Ok(false);
        }
        let loaded = batch.load(shared, place)?;
        if !loaded {
            batch.enter(if batch.is_copying() { MEMCPY_IN_HOST_BUFFER } else { WAIT_FOR_DATA });
        }
        let room = PIECES.saturating_sub(held + 1).min(AHEAD);
        for next in self.batches.iter_mut().skip(self.started + 1).take(room) {
            if !next.follows {
                break;
            }
            next.load(shared, place)?;
        }
        let (Some(batch), Some(communicator)) =
            (self.batches.get_mut(self.started), &mut self.communicator)
        else {
            return Ok(false);
        };
        if !loaded {
            return Ok(false);
        }
        let token = Token(self.first + self.started as u64);
        match communicator.submit(token, batch.operation(members)) {
            Ok(()) => batch.run(),
            Err(cause @ CollectiveError::Unsupported { .. }) => {
                batch.refuse(&Arc::new(cause), finished)
            }
            Err(error) => return Err(error.into()),
        }
        Ok(true)
    }

    fn start_on_devices(&mut self, members: &[Rank]) -> Step<bool> {
        let (me, _) = self.place();
        let token = Token(self.first + self.started as u64);
        let (Some(batch), Some(communicator)) =
            (self.batches.get_mut(self.started), self.reach.communicator())
        else {
            return Ok(false);
        };
        let (operation, events) = batch.launch(members, me, &mut **communicator)?;
        communicator.submit_after(token, operation, events)?;
        batch.run();
        Ok(true)
    }

    /// Moves what communicators have, and completes what they are done with.
    fn progress(
        &mut self,
        shared: &Shared,
        members: &[Rank],
        finished: &mut Vec<Finished>,
    ) -> Step<bool> {
        let (me, _) = self.place();
        let mut moved = false;
        if let Some(communicator) = self.communicator.as_mut().filter(|all| all.pending() > 0) {
            moved |= communicator.progress(&mut self.tokens)?;
        }
        let mut tokens = std::mem::take(&mut self.tokens);
        for token in tokens.drain(..) {
            if token == MEETING {
                let next = self.reach.met(shared, members, me)?;
                if let (Some(meeting), Some(communicator)) = (next, &mut self.communicator) {
                    communicator.submit(MEETING, meeting)?;
                }
                moved = true;
            } else if token == DEAL {
                if let Some(dealing) = self.dealing.take() {
                    dealing.end();
                }
                moved = true;
            } else if let Some(batch) = self.batch(token) {
                if batch.is_staged() {
                    batch.enter(MEMCPY_OUT_HOST_BUFFER);
                }
                let reached = batch.store(shared)?;
                batch.complete(reached.as_ref(), finished);
            }
        }
        self.tokens = tokens;
        let Some(communicator) = self.reach.communicator().filter(|all| all.pending() > 0) else {
            return Ok(moved);
        };
        let mut over = Vec::new();
        moved |= communicator.progress(&mut over)?;
        if let Some(remark) = communicator.remark().filter(|_| me == 0) {
            shared.observer.note(&remark);
        }
        let mut launched = std::mem::take(&mut self.launched);
        communicator.launched(&mut launched);
        for (token, event) in launched.drain(..) {
            if let Some(batch) = self.batch(token) {
                batch.complete(Some(&event), finished);
            }
        }
        self.launched = launched;
        // What was launched and completed at once, or by a communicator that launches nothing.
        for token in over {
            if let Some(batch) = self.batch(token) {
                batch.complete(None, finished);
            }
        }
        Ok(moved)
    }

    /// The batch of a token, if it is not over.
    fn batch(&mut self, token: Token) -> Option<&mut Batch> {
        let index = usize::try_from(token.0.checked_sub(self.first)?).ok()?;
        self.batches.get_mut(index).filter(|batch| batch.state == State::Running)
    }

    /// Drops what is over.
    fn forget(&mut self) {
        while self.batches.front().is_some_and(|batch| batch.state == State::Done) {
            self.batches.pop_front();
            self.started -= 1;
            self.first += 1;
        }
    }
}

/// Rows dealt out evenly, what is left over to the first.
pub(crate) fn share_of(rows: u64, member: usize, members: usize) -> u64 {
    let (member, members) = (member as u64, members.max(1) as u64);
    rows / members + u64::from(member < rows % members)
}
