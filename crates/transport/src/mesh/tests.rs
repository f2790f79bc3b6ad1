// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Handovers of shared memory that break off: the dialer against a peer that holds the key and
//! misbehaves.

use std::net::SocketAddr;
use std::os::unix::net::UnixStream;

use farandole_shm::descriptor_passing;

use super::*;
use crate::handshake::key_exchange::{ConnectionKeys, HandshakeSide};
use crate::handshake::{
    DialerHandshake, HELLO_BYTES, HandshakeStatus, HandshakeTranscript, HelloMessage, PROOF_BYTES,
    PROTOCOL_VERSION,
};
use crate::heartbeat_channel::{ControlMessage, HeartbeatChannel, ReceiveOutcome};
use crate::link_contract::{join_meshes, open_link_pair};
use crate::record::CipherSuite;
use crate::{MemoryRendezvous, RendezvousParticipant, into_frame_halves};

const KEY: [u8; 32] = [7; 32];
const PATIENCE: Duration = Duration::from_secs(20);

fn options() -> MeshOptions {
    let mut options = MeshOptions::new(Rank(1), 2, HostHash("here".to_owned()), KEY);
    options.setup_timeout = PATIENCE;
    options.peer_timeout = Duration::from_secs(1);
    options
}

/// Rank 1 opens a link to a rank 0 that listens under a Unix name only and treats its one caller
/// with `serve`.
fn open_to(serve: impl FnOnce(UnixStream) + Send) -> (Mesh, Error) {
    let (listener, local) = bind_unix_listener();
    let listener = listener.unwrap();
    let rendezvous = MemoryRendezvous::default();
    let host = HostHash("here".to_owned());
    let addresses = PeerAddresses {
        host,
        pid: 1,
        relay_world: 0,
        unix_socket_name: local,
        addresses: Vec::new(),
    };
    rendezvous.publish_value("mesh/0/0", &addresses.encode());
    let mesh = Mesh::join(options(), &rendezvous).unwrap();
    let error = thread::scope(|scope| {
        scope.spawn(move || serve(listener.accept().unwrap().0));
        mesh.open_links(1, &[Rank(0)], 4096).unwrap_err()
    });
    (mesh, error)
}

/// The messages of an acceptor up to the dialer's proof, which it takes.
fn up_to_the_proof(socket: &UnixStream) -> HandshakeTranscript {
    let mut hello = [0; HELLO_BYTES];
    assert_eq!(
        descriptor_passing::receive_with_descriptors(socket, &mut hello).unwrap().0,
        HELLO_BYTES
    );
    let (transcript, challenge) =
        HandshakeTranscript::answer_hello(&JobKey(KEY), hello, HandshakeStatus::Welcome).unwrap();
    descriptor_passing::send_with_descriptors(socket, &challenge, &[]).unwrap();
    let mut proof = [0; PROOF_BYTES];
    assert_eq!(
        descriptor_passing::receive_with_descriptors(socket, &mut proof).unwrap().0,
        PROOF_BYTES
    );
    assert!(transcript.verify_proof(&proof));
    transcript
}

#[test]
fn a_peer_that_took_its_end_and_gave_none_is_an_error_and_not_a_matter_for_tcp() {
    let (mesh, error) = open_to(|socket| {
        let accepted = up_to_the_proof(&socket).accepted_message(HandshakeStatus::Welcome);
        descriptor_passing::send_with_descriptors(&socket, &accepted, &[]).unwrap();
    });
    assert!(matches!(&error, Error::PeerLost { rank: Rank(0), .. }), "{error}");
    assert!(error.to_string().contains("no bell was handed over"), "{error}");
    assert_eq!(mesh.tcp_fallbacks(), []);
}

#[test]
fn a_peer_that_falls_silent_with_our_segment_is_an_error_and_not_a_matter_for_tcp() {
    let (mesh, error) = open_to(|socket| {
        up_to_the_proof(&socket);
        // Until the dialer hangs up.
        assert_eq!(descriptor_passing::receive_with_descriptors(&socket, &mut [0]).unwrap().0, 0);
    });
    assert!(matches!(&error, Error::PeerLost { rank: Rank(0), .. }), "{error}");
    assert!(error.to_string().contains("broke off"), "{error}");
    assert_eq!(mesh.tcp_fallbacks(), []);
}

#[test]
fn a_peer_that_cannot_map_the_segment_is_dialled_over_tcp_and_the_reason_is_kept() {
    let (mesh, error) = open_to(|socket| {
        let accepted = up_to_the_proof(&socket).accepted_message(HandshakeStatus::NoSharedMemory);
        descriptor_passing::send_with_descriptors(&socket, &accepted, &[]).unwrap();
    });
    // It offers no address, so TCP fails next.
    assert!(matches!(&error, Error::Unreachable { rank: Rank(0), .. }), "{error}");
    let reason = "rank 0 turned us away: it cannot map the segment".to_owned();
    assert_eq!(mesh.tcp_fallbacks(), [(Rank(0), reason)]);
}

#[test]
fn a_peer_that_is_lost_on_one_connection_hears_last_words_on_another() {
    let meshes = join_meshes(2, |options| options.use_shared_memory = false);
    let (here, there) = open_link_pair(&meshes, 1, 4096);
    let (mut sender, _) = into_frame_halves(here);
    let (_, mut receiver) = into_frame_halves(there);
    sender.queue_frame(1, b"before").unwrap();
    let peer = meshes[0].find_peer(Rank(1)).unwrap();
    meshes[0].shared.record_loss(
        peer,
        "nothing that was sent to it was confirmed".to_owned(),
        false,
    );
    assert!(matches!(sender.queue_frame(2, b"unsaid"), Err(Error::PeerLost { .. })));
    sender.send_final_frame(3, b"why");
    let limit = Instant::now() + PATIENCE;
    let mut hear = || loop {
        if let Some(frame) = receiver.try_receive_frame().unwrap() {
            return (frame.kind, frame.payload);
        }
        assert!(Instant::now() < limit);
        thread::yield_now();
    };
    assert_eq!(hear(), (1, b"before".to_vec()));
    assert_eq!(hear(), (3, b"why".to_vec()));
}

/// Adds an address without an answer to the addresses of rank 0.
struct Misled(MemoryRendezvous, SocketAddr);

impl Rendezvous for Misled {
    fn exchange_addresses(
        &self,
        point: RendezvousParticipant,
        addresses: &[u8],
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>> {
        let mut all_addresses = self.0.exchange_addresses(point, addresses, deadline)?;
        let mut first = PeerAddresses::decode(&all_addresses[0]).unwrap();
        first.addresses.insert(0, self.1.into());
        all_addresses[0] = first.encode();
        Ok(all_addresses)
    }
}

#[test]
fn a_dead_first_address_costs_a_moment_once_and_not_seconds_for_every_connection() {
    let (dead, rendezvous) = (crate::happy_eyeballs::tests::dead(), MemoryRendezvous::default());
    let of = |rank| {
        let mut options = MeshOptions::new(Rank(rank), 2, HostHash("here".to_owned()), KEY);
        options.use_shared_memory = false;
        options.bind = vec![IpAddr::V4(Ipv4Addr::LOCALHOST).into()];
        options.streams = 4;
        options
    };
    let times: Vec<Duration> = thread::scope(|scope| {
        let (rendezvous, channels) = (&rendezvous, 1..=3);
        let near = channels.clone();
        let far = scope.spawn(move || {
            let mesh = Mesh::join(of(0), rendezvous).unwrap();
            let links: Vec<_> = channels
                .map(|channel| mesh.open_links(channel, &[Rank(1)], 4096).unwrap())
                .collect();
            (mesh, links)
        });
        let mesh = Mesh::join(of(1), &Misled(rendezvous.clone(), dead.address)).unwrap();
        let open = |channel| {
            let began = Instant::now();
            drop(mesh.open_links(channel, &[Rank(0)], 4096).unwrap());
            began.elapsed()
        };
        let times = near.map(open).collect();
        drop(far.join().unwrap());
        times
    });
    assert!(times[0] >= Duration::from_millis(200), "the dead address was not tried: {times:?}");
    assert!(times[0] < Duration::from_millis(1500), "{times:?}");
    assert!(times[1..].iter().all(|time| *time < Duration::from_millis(200)), "{times:?}");
}

#[test]
fn links_are_dialled_16_at_a_time_and_no_more_when_nobody_wants_them() {
    const OTHERS: u32 = 20;
    let (dead, rendezvous) = (crate::happy_eyeballs::tests::dead(), MemoryRendezvous::default());
    for rank in 0..OTHERS {
        let host = HostHash("here".to_owned());
        let addresses = vec![dead.address.into()];
        let addresses = PeerAddresses {
            host,
            pid: 1,
            relay_world: 0,
            unix_socket_name: String::new(),
            addresses,
        };
        rendezvous.publish_value(&format!("mesh/0/{rank}"), &addresses.encode());
    }
    let mesh =
        Mesh::join(MeshOptions { rank: Rank(OTHERS), size: OTHERS + 1, ..options() }, &rendezvous)
            .unwrap();
    let (peers, deadline) = ((0..OTHERS).map(Rank).collect::<Vec<_>>(), Instant::now() + PATIENCE);
    let mut links = mesh.open_links_on_demand(1, &peers, 4096, deadline, &mut || false).unwrap();
    assert_eq!(mesh.dial_queue.thread_count(), 0, "nobody has asked");
    for link in &mut links {
        link.sender.request_open();
        link.sender.request_open();
    }
    assert_eq!(mesh.dial_queue.thread_count(), 16);
    drop(links);
    // Sooner than a dial takes that nobody answers.
    while mesh.dial_queue.thread_count() > 0 {
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
}

/// The keys of both ends of a connection of heartbeats.
fn both_keys() -> (ConnectionKeys, ConnectionKeys) {
    let hello = HelloMessage {
        version: PROTOCOL_VERSION,
        carrier: ConnectionCarrier::Control,
        suite: CipherSuite::fastest_local(),
        generation: Generation(0),
        channel: CONTROL_CHANNEL,
        from: Rank(1),
        to: Rank(0),
        size: 2,
        stream: 0,
        streams: 1,
        capacity: 0,
        nonce: random_nonce().unwrap(),
    };
    let offer = DialerHandshake::new(&JobKey(KEY), &hello).unwrap();
    let (acceptor, challenge) = HandshakeTranscript::answer_hello(
        &JobKey(KEY),
        *offer.hello_message(),
        HandshakeStatus::Welcome,
    )
    .unwrap();
    let (dialer, _) = offer.read_challenge(&challenge).unwrap();
    (
        dialer.derive_keys(HandshakeSide::Dialer).unwrap(),
        acceptor.derive_keys(HandshakeSide::Acceptor).unwrap(),
    )
}

/// The shared state of rank 0 in a world, and its service before it runs.
fn service(size: u32) -> (Arc<MeshState>, MeshService) {
    let shared = MeshState::new(MeshParameters {
        rank: Rank(0),
        size,
        generation: Generation(0),
        key: JobKey(KEY),
        use_shared_memory: false,
        use_pidfd: false,
        peer_timeout: PATIENCE,
    });
    let shared = Arc::new(shared.unwrap());
    let (tcp, _) = addresses::listen_on_interfaces(&[], options().ports).unwrap();
    let service = MeshService::new(Arc::clone(&shared), MeshListeners { tcp, unix: None }).unwrap();
    (shared, service)
}

/// The other end of a connection of heartbeats with a rank that is watched from now on.
fn watched(shared: &MeshState, rank: usize) -> HeartbeatChannel {
    let (there, here) = UnixStream::pair().unwrap();
    let (dialer, acceptor) = both_keys();
    let secured = SecuredConnection { socket: here.into(), keys: Box::new(acceptor) };
    shared
        .inbox
        .queue_peer_watch(PeerWatch::watch_remote(Arc::clone(&shared.peers[rank]), secured));
    HeartbeatChannel::new(SecuredConnection { socket: there.into(), keys: Box::new(dialer) })
}

#[test]
fn a_peer_that_was_just_dialled_hears_a_goodbye() {
    let (shared, service) = service(2);
    let mut beats = watched(&shared, 1);
    shared.inbox.request_stop();
    service.run();
    drop(shared);
    assert_eq!(
        (beats.receive_message(), beats.receive_message()),
        (ReceiveOutcome::Message(ControlMessage::Goodbye), ReceiveOutcome::End)
    );
}

/// The next word that is no beat.
fn next(beats: &mut HeartbeatChannel) -> ReceiveOutcome {
    let limit = Instant::now() + PATIENCE;
    loop {
        match beats.receive_message() {
            ReceiveOutcome::Nothing | ReceiveOutcome::Message(ControlMessage::Heartbeat) => {
                assert!(Instant::now() < limit)
            }
            other => return other,
        }
        thread::yield_now();
    }
}

fn lost(rank: u32, reason: &str) -> ControlMessage {
    ControlMessage::RankLost { rank: Rank(rank), reason: reason.to_owned() }
}

#[test]
fn tr_4_a_loss_is_reported_once_to_every_peer_and_to_later_ones() {
    let (shared, service) = service(6);
    let (mut one, mut two) = (watched(&shared, 1), watched(&shared, 2));
    let service = thread::spawn(move || service.run());
    one.queue_message(lost(5, "it was killed"));
    assert_eq!(next(&mut two), ReceiveOutcome::Message(lost(5, "it was killed")));
    assert_eq!(shared.lost_ranks(), [Rank(5)]);
    assert_eq!(shared.first_loss().unwrap().to_string().matches("rank 5").count(), 1);
    // What is known, what no rank is, and the next that is news.
    two.queue_message(lost(5, "the same"));
    two.queue_message(lost(6, "no such rank"));
    two.queue_message(lost(4, "it stopped"));
    assert_eq!(next(&mut two), ReceiveOutcome::Message(lost(4, "it stopped")));
    let mut three = watched(&shared, 3);
    assert_eq!(next(&mut three), ReceiveOutcome::Message(lost(4, "it stopped")));
    assert_eq!(next(&mut three), ReceiveOutcome::Message(lost(5, "it was killed")));
    // Rank 1 ends without a goodbye.
    drop(one);
    let ReceiveOutcome::Message(ControlMessage::RankLost { rank: Rank(1), reason }) =
        next(&mut three)
    else {
        panic!("no loss of 1")
    };
    assert!(reason.contains("its connection "), "{reason}");
    assert_eq!(shared.lost_ranks(), [1, 4, 5].map(Rank));
    shared.inbox.request_stop();
    service.join().unwrap();
    assert_eq!(
        (next(&mut three), next(&mut three)),
        (ReceiveOutcome::Message(ControlMessage::Goodbye), ReceiveOutcome::End)
    );
}

/// Only the way between two others may be broken, and then this rank can still speak with both.
#[test]
fn a_watcher_of_a_rank_believes_no_other_rank_and_passes_the_news_on() {
    let (shared, service) = service(4);
    let (mut one, mut two) = (watched(&shared, 1), watched(&shared, 2));
    let service = thread::spawn(move || service.run());
    one.queue_message(lost(2, "it does not answer me"));
    one.queue_message(lost(0, "nor does this one"));
    assert_eq!(next(&mut two), ReceiveOutcome::Message(lost(2, "it does not answer me")));
    assert_eq!(next(&mut two), ReceiveOutcome::Message(lost(0, "nor does this one")));
    assert_eq!(shared.lost_ranks(), []);
    drop(two);
    assert_eq!(next(&mut one), ReceiveOutcome::Message(lost(2, "it does not answer me")));
    let limit = Instant::now() + PATIENCE;
    while shared.lost_ranks() != [Rank(2)] {
        assert!(Instant::now() < limit);
        thread::yield_now();
    }
    shared.inbox.request_stop();
    service.join().unwrap();
}

#[test]
fn ranks_of_nine_hosts_exchange_heartbeats_with_six_others_each() {
    for (hosts, each) in [(9, 6), (5, 4)] {
        let meshes = join_meshes(hosts, |options| {
            options.host = HostHash(format!("host-{}", options.rank));
        });
        let everybody: &[Rank] = &(0..hosts).map(Rank).collect::<Vec<_>>();
        let links: Vec<_> = thread::scope(|scope| {
            let open =
                |mesh| scope.spawn(move || Mesh::open_links(mesh, 1, everybody, 4096).unwrap());
            let opening: Vec<_> = meshes.iter().map(open).collect();
            opening.into_iter().map(|links| links.join().unwrap()).collect()
        });
        assert!(links.iter().all(|links| links.len() + 1 == everybody.len()));
        let dialled: usize = meshes.iter().map(|mesh| mesh.heartbeat_channels.lock().len()).sum();
        assert_eq!(2 * dialled, each * everybody.len(), "each connection has two ends");
        // Those that hear of a loss from others need a part of the time.
        let (timeout, silence) =
            (meshes[0].shared.peer_timeout, meshes[0].shared.max_peer_silence());
        assert_eq!(
            silence,
            if hosts == 5 { timeout } else { timeout - crate::loss_report_allowance(timeout) }
        );
    }
}

#[test]
fn ranks_that_dial_at_the_same_time_dial_different_ranks() {
    let all: Vec<Rank> = (0..64).map(Rank).collect();
    for step in 0..63 {
        let dialled =
            all.iter().filter_map(|own| dial_order(*own, &all).get(step).map(|(_, rank)| *rank));
        let mut dialled: Vec<Rank> = dialled.collect();
        assert_eq!(dialled.len(), 63 - step);
        dialled.sort_unstable();
        dialled.dedup();
        assert_eq!(dialled.len(), 63 - step, "step {step}");
    }
    assert_eq!(
        super::dial_order(Rank(5), &[Rank(9), Rank(3), Rank(5), Rank(4)]),
        [(3, Rank(4)), (1, Rank(3))]
    );
}
