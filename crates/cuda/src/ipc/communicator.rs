// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A communicator over windows that never blocks and has a deadline for every wait.
//!
//! ```text
//!   Making --own window--> Offering --all are open--> Ready --deadline, a member that ended, abandon--> Over
//!      |                      |
//!      +-- somebody refuses --+--> Refused: it carries nothing, for any member
//! ```

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_collectives::{
    Communicator, DataType, Error as CollectiveError, Event, Operation, ReduceOp, Result, Room,
    Segment, Token,
};

use super::mailbox::{Mailbox, Outcome, Phase};
use super::pieces::{Span, pieces};
use super::site::{How, SLOTS, Site};
use crate::ending::{drain, wait_for};

/// An operation that was not started, and what it comes after.
type Queued = (Token, Operation, Vec<Arc<dyn Event>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Making,
    Offering,
    /// As offering, and this member has opened all windows.
    Opened,
    Ready,
    Refused,
    Over,
}

/// The operation in progress.
struct Current {
    token: Token,
    how: How,
    segments: Vec<Segment>,
    pieces: Vec<Vec<Span>>,
    /// Number of its first piece.
    first: u64,
}

impl Current {
    fn end(&self) -> u64 {
        self.first + self.pieces.len() as u64
    }

    fn piece(&self, number: u64) -> &[Span] {
        let index = usize::try_from(number - self.first).unwrap_or(usize::MAX);
        self.pieces.get(index).map_or(&[], Vec::as_slice)
    }
}

/// Collectives among processes that share a device.
pub(crate) struct IpcCommunicator<S: Site> {
    site: S,
    mailbox: Mailbox,
    state: State,
    /// Since when it is formed or something is waited for.
    since: Instant,
    /// The longest that may take.
    patience: Duration,
    waiting: VecDeque<Queued>,
    current: Option<Current>,
    /// Pieces that were ever told to go into the window, and to be reduced from all windows.
    filled: u64,
    reduced: u64,
    /// Events of the last of those.
    fills: VecDeque<Arc<dyn Event>>,
    takes: VecDeque<Arc<dyn Event>>,
    /// Operations whose work is on the stream.
    running: VecDeque<(Token, Arc<dyn Event>, Vec<Segment>)>,
    /// Put on the stream, and not told yet.
    launched: Vec<(Token, Arc<dyn Event>)>,
    /// The reason why nothing is carried, until it is reported.
    remark: Option<String>,
    failure: Option<CollectiveError>,
    /// Others may have opened this member's window.
    offered: bool,
    /// Whether the work on the stream is done.
    quiet: bool,
}

/// Returns the reduction of an operation, if a kernel does it; the same on all members.
fn how(operation: &Operation) -> Option<How> {
    let Operation::Allreduce { dtype, op, prescale, postscale, .. } = *operation else {
        return None;
    };
    // Nothing goes from host to host here.
    let op = op.exact();
    let scaled = prescale != 1.0 || postscale != 1.0;
    let truths = dtype == DataType::Bool && (op == ReduceOp::Average || scaled);
    let complex = matches!(dtype, DataType::C64 | DataType::C128);
    let done = op != ReduceOp::Adasum && !truths && !complex;
    done.then_some(How { dtype, op, prescale, postscale })
}

impl<S: Site> IpcCommunicator<S> {
    /// Begins to form a communicator of the mailbox's members, of which every one does so with its
    /// own site. `patience` is how long forming it, and each step of an operation, may take.
    pub(crate) fn form(site: S, mailbox: Mailbox, patience: Duration) -> Self {
        Self {
            site,
            mailbox,
            state: State::Making,
            since: Instant::now(),
            patience,
            waiting: VecDeque::new(),
            current: None,
            filled: 0,
            reduced: 0,
            fills: VecDeque::new(),
            takes: VecDeque::new(),
            running: VecDeque::new(),
            launched: Vec::new(),
            remark: None,
            failure: None,
            offered: false,
            quiet: true,
        }
    }

    /// Ends everything and remembers why.
    fn fail(&mut self, reason: &str) -> CollectiveError {
        self.end();
        let reason = format!("device {}: {reason}", self.site.ordinal());
        self.failure.get_or_insert(CollectiveError::Lost { reason }).clone()
    }

    /// Afterwards nothing here touches a buffer or another's window.
    fn end(&mut self) {
        if self.state == State::Over {
            return;
        }
        self.state = State::Over;
        self.quiet = self.filled == 0 || self.quieten();
        if self.quiet {
            self.site.close();
            self.mailbox.close();
        }
        self.mailbox.end();
        self.waiting.clear();
        self.current = None;
        self.fills.clear();
        self.takes.clear();
        self.running.clear();
        self.launched.clear();
    }

    /// Waits for the work of the stream. This waits for no peer, only for work of the framework.
    /// False when it took too long.
    fn quieten(&self) -> bool {
        let Ok(last) = self.site.mark() else { return false };
        wait_for(|| last.is_ready().unwrap_or(true))
    }

    fn over(&self) -> CollectiveError {
        let ended = || CollectiveError::Lost { reason: "the communicator was given up".to_owned() };
        self.failure.clone().unwrap_or_else(ended)
    }

    /// Takes the next step to a communicator, if there is one to take.
    fn form_on(&mut self) -> Result<bool> {
        if matches!(self.state, State::Ready | State::Refused) {
            return Ok(false);
        }
        match (self.state, self.mailbox.outcome()) {
            (State::Ready | State::Refused, _) => return Ok(false),
            (State::Over, _) => return Err(self.over()),
            (_, Outcome::Refused(member)) => {
                let reason = self.mailbox.reason(member);
                self.refuse(member, &reason);
            }
            (_, Outcome::Ended(member)) => {
                return Err(self.fail(&format!("member {member} has ended")));
            }
            (State::Making, _) => match self.site.offer() {
                None => return self.check("forming it").map(|()| false),
                Some(Ok(offer)) => {
                    self.mailbox.offer(&offer);
                    self.offered = true;
                    self.state = State::Offering;
                }
                Some(Err(reason)) => {
                    self.mailbox.refuse(&reason);
                    self.refuse(self.mailbox.member(), &reason);
                }
            },
            (State::Offering, Outcome::AllOffered) => self.open(),
            (State::Opened, Outcome::Formed) => self.state = State::Ready,
            (State::Offering | State::Opened, _) => {
                return self.check("forming it").map(|()| false);
            }
        }
        self.since = Instant::now();
        Ok(true)
    }

    fn open(&mut self) {
        let offers: Vec<_> =
            (0..self.mailbox.size()).map(|member| self.mailbox.offered(member)).collect();
        match self.site.open(&offers, self.mailbox.member()) {
            Ok(()) => {
                self.mailbox.opened();
                self.state = State::Opened;
            }
            Err(reason) => {
                self.mailbox.refuse(&reason);
                self.refuse(self.mailbox.member(), &reason);
            }
        }
    }

    fn refuse(&mut self, member: usize, reason: &str) {
        self.state = State::Refused;
        self.site.close();
        self.mailbox.close();
        self.remark = Some(format!("member {member} cannot use CUDA IPC: {reason}"));
    }

    /// Fails when something takes too long, or will never come.
    fn check(&mut self, what: &str) -> Result<()> {
        if let Some(member) =
            self.lacking().filter(|member| self.mailbox.phase(*member) == Phase::Ended)
        {
            return Err(self.fail(&format!("member {member} has ended")));
        }
        if self.since.elapsed() > self.patience {
            let whom = self.lacking().map(|member| format!(", which waits for member {member}"));
            let whom = whom.unwrap_or_default();
            return Err(self.fail(&format!("{what} took longer than {:?}{whom}", self.patience)));
        }
        Ok(())
    }

    /// Returns the member that the operation in progress waits for.
    fn lacking(&self) -> Option<usize> {
        let current = self.current.as_ref()?;
        let mut others = (0..self.mailbox.size()).filter(|member| *member != self.mailbox.member());
        others.find(|member| {
            let unread = self.filled < current.end() && !self.has_taken(*member);
            unread || (self.reduced < self.filled && self.mailbox.filled(*member) <= self.reduced)
        })
    }

    /// Returns whether a member has read the slot of the next piece.
    fn has_taken(&self, member: usize) -> bool {
        self.mailbox.taken(member).saturating_add(SLOTS) > self.filled
    }

    /// Publishes the progress to the others.
    ///
    /// Asks for the last events of the stream first. The device works on meanwhile: in the order of
    /// the stream, an operation could be found complete after its pieces were found incomplete.
    /// They would never be published, because nothing asks once all operations are complete.
    fn look(&mut self, completed: &mut Vec<Token>) -> Result<bool> {
        let over = ready(self.running.iter().map(|(_, event, _)| event));
        let (takes, fills) = (first_ready(&self.takes), first_ready(&self.fills));
        let (fills, takes, over) = over
            .and_then(|over| Ok((fills?, takes?, over)))
            .map_err(|error| self.fail(&error.to_string()))?;
        drop(self.fills.drain(..fills));
        drop(self.takes.drain(..takes));
        completed.extend(self.running.drain(..over).map(|(token, ..)| token));
        if fills > 0 {
            self.mailbox.fill(self.filled - self.fills.len() as u64);
        }
        if takes > 0 {
            self.mailbox.take(self.reduced - self.takes.len() as u64);
        }
        Ok(fills + takes + over > 0)
    }

    /// Puts all possible work on the stream.
    fn start(&mut self) -> Result<bool> {
        let mut moved = false;
        while self.begin()? {
            moved = true;
        }
        let Some(current) = self.current.take() else { return Ok(moved) };
        let advanced = self.advance(&current);
        moved |= advanced.map_err(|error| self.fail(&error.to_string()))?;
        if self.reduced < current.end() {
            self.current = Some(current);
            return Ok(moved);
        }
        let last = self.takes.back().map(Arc::clone);
        self.launch(current.token, last, current.segments)?;
        Ok(true)
    }

    /// Takes up the next operation, if none is in progress; true when it was nothing, and another
    /// may follow.
    fn begin(&mut self) -> Result<bool> {
        if self.current.is_some() {
            return Ok(false);
        }
        let Some((token, operation, events)) = self.waiting.pop_front() else { return Ok(false) };
        let (Some(how), Operation::Allreduce { segments, .. }) = (how(&operation), operation)
        else {
            return Ok(false);
        };
        self.site.hold(&events).map_err(|error| self.fail(&error.to_string()))?;
        let lengths: Vec<usize> = segments.iter().map(|segment| segment.input.len()).collect();
        let pieces = pieces(&lengths, self.site.room_of_a_piece());
        if pieces.is_empty() {
            self.launch(token, None, segments)?;
            return Ok(true);
        }
        self.current = Some(Current { token, how, segments, pieces, first: self.filled });
        Ok(false)
    }

    /// Moves the operation in progress. Pieces of the next one wait until all of this is on the
    /// stream: they may come after work of the framework that waits for it.
    fn advance(&mut self, current: &Current) -> Result<bool> {
        let mut moved = false;
        let members = self.mailbox.size();
        while self.filled < current.end() && (0..members).all(|member| self.has_taken(member)) {
            let piece = current.piece(self.filled);
            self.site.fill(self.filled % SLOTS, piece, &current.segments, current.how.dtype)?;
            self.fills.push_back(self.site.mark()?);
            self.filled += 1;
            moved = true;
        }
        // The own part is there in the order of the stream.
        let there = |this: &Self, member| {
            member == this.mailbox.member() || this.mailbox.filled(member) > this.reduced
        };
        while self.reduced < self.filled && (0..members).all(|member| there(self, member)) {
            let piece = current.piece(self.reduced);
            self.site.reduce(self.reduced % SLOTS, piece, &current.segments, current.how)?;
            self.takes.push_back(self.site.mark()?);
            self.reduced += 1;
            moved = true;
        }
        Ok(moved)
    }

    /// All work of an operation is on the stream, and done at this event or, without one, at once.
    fn launch(
        &mut self,
        token: Token,
        last: Option<Arc<dyn Event>>,
        segments: Vec<Segment>,
    ) -> Result<()> {
        let last = last
            .map_or_else(|| self.site.mark(), Ok)
            .map_err(|error| self.fail(&error.to_string()))?;
        self.launched.push((token, Arc::clone(&last)));
        self.running.push_back((token, last, segments));
        Ok(())
    }
}

/// Returns the number of leading events that are ready.
fn ready<'a>(events: impl Iterator<Item = &'a Arc<dyn Event>>) -> Result<usize> {
    let mut count = 0;
    for event in events {
        if !event.is_ready()? {
            break;
        }
        count += 1;
    }
    Ok(count)
}

fn first_ready(events: &VecDeque<Arc<dyn Event>>) -> Result<usize> {
    ready(events.iter())
}

impl<S: Site> Communicator for IpcCommunicator<S> {
    fn size(&self) -> usize {
        self.mailbox.size()
    }

    fn member(&self) -> usize {
        self.mailbox.member()
    }

    fn submit(&mut self, token: Token, operation: Operation) -> Result<()> {
        self.submit_after(token, operation, Vec::new())
    }

    fn submit_after(
        &mut self,
        token: Token,
        operation: Operation,
        events: Vec<Arc<dyn Event>>,
    ) -> Result<()> {
        if self.state == State::Over {
            return Err(self.over());
        }
        if !self.carries(&operation) {
            let reason = "CUDA IPC does not do this operation, or nothing at all".to_owned();
            return Err(CollectiveError::Shape { reason });
        }
        if self.pending() == 0 {
            self.since = Instant::now();
        }
        self.waiting.push_back((token, operation, events));
        Ok(())
    }

    fn is_forming(&self) -> bool {
        matches!(self.state, State::Making | State::Offering | State::Opened)
    }

    fn carries(&self, operation: &Operation) -> bool {
        self.state == State::Ready && how(operation).is_some()
    }

    fn remark(&mut self) -> Option<String> {
        self.remark.take()
    }

    fn room(&mut self, bytes: usize) -> Result<Arc<dyn Room>> {
        match self.state {
            State::Over => Err(self.over()),
            _ => self.site.room(bytes),
        }
    }

    fn launched(&mut self, launched: &mut Vec<(Token, Arc<dyn Event>)>) {
        launched.append(&mut self.launched);
    }

    fn is_awaited(&self) -> bool {
        !(self.fills.is_empty() && self.takes.is_empty())
    }

    fn drain(&mut self, limit: Duration) {
        drain(self, limit);
    }

    fn progress(&mut self, completed: &mut Vec<Token>) -> Result<bool> {
        let mut moved = self.form_on()?;
        if self.state != State::Ready {
            return Ok(moved);
        }
        moved |= self.look(completed)?;
        moved |= self.start()?;
        if moved {
            self.since = Instant::now();
        } else if self.pending() > 0 {
            self.check("an operation")?;
        }
        Ok(moved)
    }

    fn abandon(&mut self) {
        if self.state != State::Over {
            self.fail("the operation was given up");
        }
    }

    fn pending(&self) -> usize {
        let under_way =
            self.waiting.len() + usize::from(self.current.is_some()) + self.running.len();
        under_way + usize::from(self.is_forming())
    }
}

impl<S: Site> Drop for IpcCommunicator<S> {
    fn drop(&mut self) {
        let orderly = self.failure.is_none() && self.pending() == 0;
        self.end();
        // Others may still read this window; in good order they end at the same time. After a
        // failure no member is waited for: its operations complete with the error first. Memory
        // that a member may still read is kept, because a kernel may be using it.
        let alone = || self.mailbox.is_alone();
        let unread = !self.offered || alone() || (orderly && wait_for(alone));
        if !(self.quiet && unread) {
            self.site.leave();
        }
    }
}
