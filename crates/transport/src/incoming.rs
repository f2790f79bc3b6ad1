// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The acceptor's side of one handshake, as a machine that never waits.

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use farandole_shm::{Bell, Error as ShmError, Segment, handover};
use farandole_world::Rank;
use rustix::io::Errno;

use crate::handshake::exchange::Side;
use crate::handshake::{
    self, CONTROL, Carrier, HELLO, Hello, OPENING, PROOF, Status, Transcript, VERSION,
};
use crate::peer::Peer;
use crate::shared::{Arrival, Secured, Shared};
use crate::tcp::stripes;
use crate::watch::Watch;

/// A connection whose handshake is not finished.
pub(crate) struct Incoming {
    socket: OwnedFd,
    /// Address of the peer; `None` over the Unix socket.
    source: Option<IpAddr>,
    pub(crate) deadline: Instant,
    buffer: [u8; HELLO],
    filled: usize,
    stage: Stage,
}

enum Stage {
    Hello,
    Proof { hello: Hello, transcript: Box<Transcript>, descriptors: Vec<OwnedFd> },
}

/// The progress of an arrival.
pub(crate) enum Progress {
    /// More has to arrive.
    Waiting(Box<Incoming>),
    /// Turned away.
    Refused,
    /// A link, already among the arrivals.
    Linked,
    /// A peer to watch.
    Watched(Watch),
}

/// A peer's end of a link, the bell if it is new, and the pidfd.
struct Adopted {
    arrival: Arrival,
    bell: Option<Arc<Bell>>,
    pidfd: Option<OwnedFd>,
}

impl AsFd for Incoming {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Incoming {
    /// The socket must not block.
    pub(crate) fn new(socket: OwnedFd, source: Option<IpAddr>, deadline: Instant) -> Self {
        Self { socket, source, deadline, buffer: [0; HELLO], filled: 0, stage: Stage::Hello }
    }

    /// Returns whether it has shown that it may be a rank: what it said first bears the key's code.
    pub(crate) fn vouched(&self) -> bool {
        matches!(self.stage, Stage::Proof { .. })
    }

    pub(crate) fn source(&self) -> Option<IpAddr> {
        self.source
    }

    /// Returns whether the peer speaks another protocol. Nothing more is awaited then, and a peer
    /// of another version gets an answer: its messages may have other sizes.
    fn is_foreign(&self) -> bool {
        let Some(opening) = self.buffer[..self.filled].get(..OPENING) else { return false };
        match handshake::version(opening) {
            Some(VERSION) => false,
            Some(_) => {
                // It is turned away in any case.
                let _ = handover::send(&self.socket, &handshake::other_version(), &[]);
                true
            }
            None => true,
        }
    }

    /// Reads what is there and answers.
    pub(crate) fn advance(mut self, shared: &Shared) -> Progress {
        loop {
            let wanted = if matches!(self.stage, Stage::Hello) { HELLO } else { PROOF };
            match handover::receive(&self.socket, &mut self.buffer[self.filled..wanted]) {
                Ok((0, _)) => return Progress::Refused,
                Ok((received, arrived)) => {
                    self.filled += received;
                    // Descriptors of an unproven peer are closed here.
                    if let Stage::Proof { descriptors, .. } = &mut self.stage {
                        descriptors.extend(arrived);
                        // A proof that comes byte by byte must not bring more of them each time.
                        descriptors.truncate(handover::MOST);
                    }
                }
                Err(ShmError::System { source: Errno::AGAIN, .. }) => {
                    return Progress::Waiting(Box::new(self));
                }
                Err(ShmError::System { source: Errno::INTR, .. }) => continue,
                Err(_) => return Progress::Refused,
            }
            if matches!(self.stage, Stage::Hello) && self.is_foreign() {
                return Progress::Refused;
            }
            if self.filled < wanted {
                continue;
            }
            self.filled = 0;
            self.stage = match self.stage {
                Stage::Hello => {
                    match challenge(&self.socket, self.buffer, self.source.is_none(), shared) {
                        Some(stage) => stage,
                        None => return Progress::Refused,
                    }
                }
                Stage::Proof { hello, transcript, descriptors } => {
                    if !transcript.proved(&self.buffer[..PROOF]) {
                        return Progress::Refused;
                    }
                    return finish(self.socket, &hello, &transcript, descriptors, shared);
                }
            };
        }
    }
}

/// Answers a hello; `None` turns the connection away.
fn challenge(socket: &OwnedFd, bytes: [u8; HELLO], local: bool, shared: &Shared) -> Option<Stage> {
    let hello = Hello::decode(&bytes)?;
    let known = Transcript::knows(&shared.key, &bytes);
    let status = if known { judge(&hello, local, shared) } else { Status::Stranger };
    let (transcript, answer) = Transcript::answer(&shared.key, bytes, status).ok()?;
    handover::send(socket, &answer, &[]).ok()?;
    let stage = Stage::Proof { hello, transcript: Box::new(transcript), descriptors: Vec::new() };
    (status == Status::Welcome).then_some(stage)
}

fn judge(hello: &Hello, local: bool, shared: &Shared) -> Status {
    let fitting = match hello.carrier {
        Carrier::SharedMemory => local && hello.channel != CONTROL,
        Carrier::Tcp => !local && hello.channel != CONTROL,
        Carrier::Control => !local && hello.channel == CONTROL,
    };
    let connections = if hello.carrier == Carrier::Tcp { stripes::MOST } else { 1 };
    if hello.version != VERSION
        || !fitting
        || hello.streams > connections
        || hello.stream >= hello.streams
    {
        Status::Version
    } else if hello.generation != shared.generation {
        Status::Generation
    } else if hello.to != shared.rank
        || hello.size != shared.size
        || hello.from >= Rank(shared.size)
    {
        Status::World
    } else if hello.from <= hello.to {
        // The higher rank dials.
        Status::World
    } else if hello.carrier == Carrier::SharedMemory && !shared.use_shared_memory {
        Status::NoSharedMemory
    } else {
        Status::Welcome
    }
}

/// The dialer holds the key: takes its end, and gives ours.
fn finish(
    socket: OwnedFd,
    hello: &Hello,
    transcript: &Transcript,
    descriptors: Vec<OwnedFd>,
    shared: &Shared,
) -> Progress {
    let Some(peer) = shared.peers.get(hello.from.index()) else { return Progress::Refused };
    let place = (hello.channel, hello.from, hello.stream);
    if hello.carrier == Carrier::SharedMemory {
        let Some(Adopted { arrival, bell, pidfd }) = adopt(hello, peer, descriptors) else {
            // The dialer takes another way.
            let _ = handover::send(&socket, &transcript.accept(Status::NoSharedMemory), &[]);
            return Progress::Linked;
        };
        let own: Vec<_> = (shared.parker.bell().descriptors().into_iter())
            .chain(shared.pidfd.as_ref().map(AsFd::as_fd))
            .collect();
        if handover::send(&socket, &transcript.accept(Status::Welcome), &own).is_ok() {
            shared.arrive(place, hello.capacity, arrival);
        }
        let end = shared.end_of(pidfd, socket, bell.is_some());
        // The bell is adopted once for all links, so its watch stays even if this link came to
        // nothing.
        return bell.map_or(Progress::Linked, |bell| {
            Progress::Watched(Watch::local(Arc::clone(peer), bell, end))
        });
    }
    let Some(keys) = transcript.keys(Side::Acceptor).map(Box::new) else {
        return Progress::Refused;
    };
    if handover::send(&socket, &transcript.accept(Status::Welcome), &[]).is_err() {
        return Progress::Refused;
    }
    if hello.carrier == Carrier::Control {
        return Progress::Watched(Watch::remote(Arc::clone(peer), Secured { socket, keys }));
    }
    let secured = Secured { socket, keys };
    shared.arrive(place, hello.capacity, Arrival::Tcp { secured, streams: hello.streams });
    Progress::Linked
}

/// Maps what the dialer handed over; `None` when it cannot be used.
fn adopt(hello: &Hello, peer: &Peer, descriptors: Vec<OwnedFd>) -> Option<Adopted> {
    let mut descriptors = descriptors.into_iter();
    let (segment, memory, event) = (descriptors.next()?, descriptors.next()?, descriptors.next()?);
    let segment = Segment::adopt(segment, 2, usize::try_from(hello.capacity).ok()?).ok()?;
    let (sender, receiver) = (segment.producer(1).ok()?, segment.consumer(0).ok()?);
    let (bell, first) = peer.adopt(memory, event).ok()?;
    let new = first.then(|| Arc::clone(&bell));
    Some(Adopted {
        arrival: Arrival::Shared { sender, receiver, bell },
        bell: new,
        pidfd: descriptors.next(),
    })
}
