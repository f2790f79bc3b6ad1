// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The acceptor's side of one handshake, as a state machine that never waits.

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use farandole_shm::{Error as ShmError, ProcessDoorbell, RingSegment, descriptor_passing};
use farandole_world::Rank;
use rustix::io::Errno;

use crate::connection_arrivals::ArrivedConnection;
use crate::handshake::key_exchange::HandshakeSide;
use crate::handshake::{
    self, CONTROL_CHANNEL, ConnectionCarrier, HELLO_BYTES, HandshakeStatus, HandshakeTranscript,
    HelloMessage, OPENING_BYTES, PROOF_BYTES, PROTOCOL_VERSION,
};
use crate::mesh_state::MeshState;
use crate::peer_state::PeerState;
use crate::peer_watch::PeerWatch;
use crate::secured_connection::SecuredConnection;
use crate::tcp::stripes;

/// A connection whose handshake is not finished.
pub(crate) struct AcceptorHandshake {
    socket: OwnedFd,
    /// Address of the peer; `None` over the Unix socket.
    source: Option<IpAddr>,
    pub(crate) deadline: Instant,
    buffer: [u8; HELLO_BYTES],
    filled: usize,
    stage: AcceptorStage,
}

enum AcceptorStage {
    Hello,
    Proof { hello: HelloMessage, transcript: Box<HandshakeTranscript>, descriptors: Vec<OwnedFd> },
}

/// Progress of an incoming handshake.
pub(crate) enum AcceptorProgress {
    /// More bytes must arrive.
    Waiting(Box<AcceptorHandshake>),
    /// The connection was refused.
    Refused,
    /// The connection belongs to a link and was added to the arrivals.
    Linked,
    /// The connection gives a peer to watch.
    Watched(PeerWatch),
}

/// A mapped segment of a peer: its end of the link, its doorbell if that is new, and its pidfd.
struct AdoptedSegment {
    arrival: ArrivedConnection,
    bell: Option<Arc<ProcessDoorbell>>,
    pidfd: Option<OwnedFd>,
}

impl AsFd for AcceptorHandshake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AcceptorHandshake {
    /// Creates a handshake; the socket must be non-blocking.
    pub(crate) fn new(socket: OwnedFd, source: Option<IpAddr>, deadline: Instant) -> Self {
        Self {
            socket,
            source,
            deadline,
            buffer: [0; HELLO_BYTES],
            filled: 0,
            stage: AcceptorStage::Hello,
        }
    }

    /// Returns whether the peer may be a rank: its hello has a valid code of the job's key.
    pub(crate) fn has_verified_hello(&self) -> bool {
        matches!(self.stage, AcceptorStage::Proof { .. })
    }

    pub(crate) fn source_address(&self) -> Option<IpAddr> {
        self.source
    }

    /// Returns whether the peer uses another protocol. The caller then refuses it without waiting
    /// for more bytes, because messages of another version may have other sizes. A peer of another
    /// version gets an answer first.
    fn speaks_other_protocol(&self) -> bool {
        let Some(opening) = self.buffer[..self.filled].get(..OPENING_BYTES) else { return false };
        match handshake::read_version(opening) {
            Some(PROTOCOL_VERSION) => false,
            Some(_) => {
                // A failure does not matter: the connection is refused in any case.
                let _ = descriptor_passing::send_with_descriptors(
                    &self.socket,
                    &handshake::encode_version_mismatch(),
                    &[],
                );
                true
            }
            None => true,
        }
    }

    /// Reads the available bytes, and answers complete messages.
    pub(crate) fn advance_handshake(mut self, shared: &MeshState) -> AcceptorProgress {
        loop {
            // Bytes of the next message stay in the socket: descriptors come with them, and they
            // must be read after the stage has changed.
            let wanted =
                if matches!(self.stage, AcceptorStage::Hello) { HELLO_BYTES } else { PROOF_BYTES };
            match descriptor_passing::receive_with_descriptors(
                &self.socket,
                &mut self.buffer[self.filled..wanted],
            ) {
                Ok((0, _)) => return AcceptorProgress::Refused,
                Ok((received, arrived)) => {
                    self.filled += received;
                    // Descriptors of a peer that has not proved the key are closed here.
                    if let AcceptorStage::Proof { descriptors, .. } = &mut self.stage {
                        descriptors.extend(arrived);
                        // Limits the descriptors: a proof that arrives byte by byte could bring new
                        // ones with each byte.
                        descriptors.truncate(descriptor_passing::MAX_DESCRIPTORS_PER_MESSAGE);
                    }
                }
                Err(ShmError::System { source: Errno::AGAIN, .. }) => {
                    return AcceptorProgress::Waiting(Box::new(self));
                }
                Err(ShmError::System { source: Errno::INTR, .. }) => continue,
                Err(_) => return AcceptorProgress::Refused,
            }
            if matches!(self.stage, AcceptorStage::Hello) && self.speaks_other_protocol() {
                return AcceptorProgress::Refused;
            }
            if self.filled < wanted {
                continue;
            }
            self.filled = 0;
            self.stage = match self.stage {
                AcceptorStage::Hello => {
                    match send_challenge(&self.socket, self.buffer, self.source.is_none(), shared) {
                        Some(stage) => stage,
                        None => return AcceptorProgress::Refused,
                    }
                }
                AcceptorStage::Proof { hello, transcript, descriptors } => {
                    if !transcript.verify_proof(&self.buffer[..PROOF_BYTES]) {
                        return AcceptorProgress::Refused;
                    }
                    return finish_handshake(self.socket, &hello, &transcript, descriptors, shared);
                }
            };
        }
    }
}

/// Answers a hello; returns `None` if the connection is refused.
fn send_challenge(
    socket: &OwnedFd,
    bytes: [u8; HELLO_BYTES],
    local: bool,
    shared: &MeshState,
) -> Option<AcceptorStage> {
    let hello = HelloMessage::decode(&bytes)?;
    // A stranger gets an answer, too: a rank that has the key of another job then sees the reason,
    // and not a closed connection. The answer costs one HMAC and no key exchange.
    let known = HandshakeTranscript::verify_hello(&shared.key, &bytes);
    let status = if known { judge_hello(&hello, local, shared) } else { HandshakeStatus::WrongKey };
    let (transcript, answer) =
        HandshakeTranscript::answer_hello(&shared.key, bytes, status).ok()?;
    descriptor_passing::send_with_descriptors(socket, &answer, &[]).ok()?;
    let stage =
        AcceptorStage::Proof { hello, transcript: Box::new(transcript), descriptors: Vec::new() };
    // A refused peer has its answer; keeping the connection would occupy a slot.
    (status == HandshakeStatus::Welcome).then_some(stage)
}

fn judge_hello(hello: &HelloMessage, local: bool, shared: &MeshState) -> HandshakeStatus {
    let fitting = match hello.carrier {
        // Descriptors pass only over the Unix socket, and heartbeats have their own channel, so a
        // hello that mixes these is no hello of this version.
        ConnectionCarrier::SharedMemory => local && hello.channel != CONTROL_CHANNEL,
        ConnectionCarrier::Tcp => !local && hello.channel != CONTROL_CHANNEL,
        ConnectionCarrier::Control => !local && hello.channel == CONTROL_CHANNEL,
    };
    let connections =
        if hello.carrier == ConnectionCarrier::Tcp { stripes::MAX_STREAMS_PER_LINK } else { 1 };
    if hello.version != PROTOCOL_VERSION
        || !fitting
        // The number comes from the peer: without a limit it could reserve arrivals for 65,535
        // connections.
        || hello.streams > connections
        || hello.stream >= hello.streams
    {
        HandshakeStatus::OtherVersion
    } else if hello.generation != shared.generation {
        HandshakeStatus::OtherGeneration
    } else if hello.to != shared.rank
        || hello.size != shared.size
        || hello.from >= Rank(shared.size)
    {
        HandshakeStatus::OtherWorld
    } else if hello.from <= hello.to {
        // The higher rank dials.
        HandshakeStatus::OtherWorld
    } else if hello.carrier == ConnectionCarrier::SharedMemory && !shared.use_shared_memory {
        HandshakeStatus::NoSharedMemory
    } else {
        HandshakeStatus::Welcome
    }
}

/// Finishes the handshake after the dialer has proved the key: adopts its end and sends ours.
fn finish_handshake(
    socket: OwnedFd,
    hello: &HelloMessage,
    transcript: &HandshakeTranscript,
    descriptors: Vec<OwnedFd>,
    shared: &MeshState,
) -> AcceptorProgress {
    let Some(peer) = shared.peers.get(hello.from.index()) else { return AcceptorProgress::Refused };
    let place = (hello.channel, hello.from, hello.stream);
    if hello.carrier == ConnectionCarrier::SharedMemory {
        let Some(AdoptedSegment { arrival, bell, pidfd }) = adopt_segment(hello, peer, descriptors)
        else {
            // The dialer falls back to TCP.
            let _ = descriptor_passing::send_with_descriptors(
                &socket,
                &transcript.accepted_message(HandshakeStatus::NoSharedMemory),
                &[],
            );
            return AcceptorProgress::Linked;
        };
        let own: Vec<_> = (shared.parker.own_doorbell().shared_descriptors().into_iter())
            .chain(shared.pidfd.as_ref().map(AsFd::as_fd))
            .collect();
        if descriptor_passing::send_with_descriptors(
            &socket,
            &transcript.accepted_message(HandshakeStatus::Welcome),
            &own,
        )
        .is_ok()
        {
            shared.add_arrival(place, hello.capacity, arrival);
        }
        let end = shared.process_end_descriptor(pidfd, socket, bell.is_some());
        // The doorbell is adopted once for all links, so its watch stays even if this link failed.
        return bell.map_or(AcceptorProgress::Linked, |bell| {
            AcceptorProgress::Watched(PeerWatch::watch_local(Arc::clone(peer), bell, end))
        });
    }
    // `None` for a public key of small order. Nothing is sent in clear in that case.
    let Some(keys) = transcript.derive_keys(HandshakeSide::Acceptor).map(Box::new) else {
        return AcceptorProgress::Refused;
    };
    if descriptor_passing::send_with_descriptors(
        &socket,
        &transcript.accepted_message(HandshakeStatus::Welcome),
        &[],
    )
    .is_err()
    {
        return AcceptorProgress::Refused;
    }
    if hello.carrier == ConnectionCarrier::Control {
        return AcceptorProgress::Watched(PeerWatch::watch_remote(
            Arc::clone(peer),
            SecuredConnection { socket, keys },
        ));
    }
    let secured = SecuredConnection { socket, keys };
    shared.add_arrival(
        place,
        hello.capacity,
        ArrivedConnection::Tcp { secured, streams: hello.streams },
    );
    AcceptorProgress::Linked
}

/// Maps the segment and the doorbell of the dialer; returns `None` if they cannot be used.
fn adopt_segment(
    hello: &HelloMessage,
    peer: &PeerState,
    descriptors: Vec<OwnedFd>,
) -> Option<AdoptedSegment> {
    let mut descriptors = descriptors.into_iter();
    let (segment, memory, event) = (descriptors.next()?, descriptors.next()?, descriptors.next()?);
    // The descriptor comes from another process: this call checks the size and the seals of the
    // segment, because a segment that shrinks would end this process by SIGBUS.
    let segment =
        RingSegment::from_descriptor(segment, 2, usize::try_from(hello.capacity).ok()?).ok()?;
    let (sender, receiver) = (segment.take_producer(1).ok()?, segment.take_consumer(0).ok()?);
    let (bell, first) = peer.adopt_doorbell(memory, event).ok()?;
    let new = first.then(|| Arc::clone(&bell));
    Some(AdoptedSegment {
        arrival: ArrivedConnection::SharedMemory { sender, receiver, bell },
        bell: new,
        pidfd: descriptors.next(),
    })
}
