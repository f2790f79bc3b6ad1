// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A relay forwards handshakes and then changes, drops, repeats, reorders, cuts off, inserts or
//! exchanges bytes: no byte is accepted that was not sent, and the error names the link. What he
//! hears says nothing.
#![expect(clippy::unwrap_used, reason = "tests")]

mod proxy;

use std::io::{Read, Write};
use std::net::{IpAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use farandole_transport::link_contract::{
    DivertingRendezvous, TEST_WAIT_LIMIT, open_link_pair, rank_zero_address,
};
use farandole_transport::{Error, Link, MemoryRendezvous, Mesh, MeshOptions, into_frame_halves};
use farandole_world::{HostHash, Rank};
use proxy::{HANDSHAKE, Harm, Plan, Proxy, Way};
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};

const KEY: [u8; 32] = [7; 32];
/// Bytes sent each way.
const TOTAL: usize = 600_000;
const RING: usize = 1 << 20;

fn options(rank: u32, streams: u16) -> MeshOptions {
    MeshOptions {
        setup_timeout: TEST_WAIT_LIMIT,
        use_shared_memory: false,
        streams,
        // Nothing is to be lost by time here.
        peer_timeout: TEST_WAIT_LIMIT,
        bind: vec![IpAddr::from([127, 0, 0, 1]).into()],
        ..MeshOptions::new(Rank(rank), 2, HostHash(format!("host-{rank}")), KEY)
    }
}

/// Two ranks with a relay between them.
struct Pair {
    meshes: Vec<Mesh>,
    proxy: Proxy,
}

impl Pair {
    fn new(streams: u16, plan: Option<Plan>) -> Self {
        Self::with(|rank| options(rank, streams), plan)
    }

    fn with(options: impl Fn(u32) -> MeshOptions + Sync, plan: Option<Plan>) -> Self {
        let rendezvous = MemoryRendezvous::default();
        let target = rendezvous.clone();
        let proxy = Proxy::start(move || rank_zero_address(&target, 0), plan);
        let diverted = DivertingRendezvous { rendezvous: rendezvous.clone(), to: proxy.address };
        let meshes = thread::scope(|scope| {
            let zero = scope.spawn(|| Mesh::join(options(0), &rendezvous).unwrap());
            let one = Mesh::join(options(1), &diverted).unwrap();
            vec![zero.join().unwrap(), one]
        });
        Self { meshes, proxy }
    }

    fn open(&self, channel: u32) -> (Link, Link) {
        open_link_pair(&self.meshes, channel, RING)
    }
}

fn pattern(at: usize) -> u8 {
    (at.wrapping_mul(31) >> 3).to_le_bytes()[0]
}

/// Sends all of the pattern and closes the link in order, or gives up where the other end is lost.
fn send(link: Link) {
    let Link { mut sender, receiver, .. } = link;
    let limit = Instant::now() + TEST_WAIT_LIMIT;
    let mut sent = 0;
    while sent < TOTAL {
        let Ok(window) = sender.window() else { return };
        let bytes = window.len().min(TOTAL - sent).min(100_000);
        (0..bytes).for_each(|at| window[at] = pattern(sent + at));
        if sender.commit(bytes).is_err() {
            return;
        }
        sent += bytes;
        assert!(Instant::now() < limit, "{sent} bytes sent");
    }
    while let Ok(false) = sender.flush() {
        assert!(Instant::now() < limit, "a flush");
        thread::yield_now();
    }
    drop((sender, receiver));
}

/// Reads to the error; how much was accepted, every byte of which is the one that was sent.
fn receive(link: &mut Link, told: &str) -> (usize, Error) {
    let limit = Instant::now() + TEST_WAIT_LIMIT;
    let mut seen = 0;
    loop {
        let window = match link.receiver.window() {
            Ok(window) => window,
            Err(error) => return (seen, error),
        };
        assert!(seen + window.len() <= TOTAL, "more than was sent");
        assert!(
            window.iter().enumerate().all(|(at, byte)| *byte == pattern(seen + at)),
            "a forged byte"
        );
        let bytes = window.len();
        seen += bytes;
        let released = link.receiver.release(bytes).and_then(|()| link.receiver.check_not_ended(0));
        if let (Err(error), Ok([])) = (released, link.receiver.window()) {
            return (seen, error);
        }
        assert!(
            Instant::now() < limit,
            "{told}: {seen} bytes accepted, and neither more nor an error"
        );
        thread::yield_now();
    }
}

/// Returns whether an error is the expected one for a link with this harm.
fn names_the_link(error: &Error, rank: u32, harm: &Harm) -> bool {
    let Error::PeerLost { rank: lost, reason, .. } = error else { return false };
    let meddled = reason.contains("on connection ")
        && reason.contains(" of channel 1 with 127.0.0.1:")
        && reason.contains("is not what its sender sealed");
    let cut = ["without a closing message", "its connection broke", "reset by peer"];
    let may_end = matches!(harm, Harm::Drop(_) | Harm::Cut | Harm::Exchange(_));
    *lost == Rank(rank) && (meddled || may_end && cut.iter().any(|what| reason.contains(what)))
}

fn harm(random: &mut StdRng, streams: u16) -> Harm {
    let bytes = random.random_range(1..5000);
    match random.random_range(0..if streams > 1 { 7 } else { 6 }) {
        0 => Harm::Change(1 << random.random_range(0..8)),
        1 => Harm::Drop(bytes),
        2 => Harm::Repeat(bytes),
        3 => Harm::Reorder(bytes),
        4 => {
            let mut strange = vec![0; bytes];
            random.fill_bytes(&mut strange);
            Harm::Insert(strange)
        }
        5 => Harm::Cut,
        _ => Harm::Exchange(2),
    }
}

#[test]
fn without_harm_everything_arrives_through_the_relay() {
    for streams in [1, 3] {
        let pair = Pair::new(streams, None);
        let (mut zero, one) = pair.open(1);
        let sending = thread::spawn(move || send(one));
        let (seen, error) = receive(&mut zero, "no harm");
        sending.join().unwrap();
        assert_eq!(seen, TOTAL);
        assert!(error.to_string().ends_with("it closed the connection"), "{error}");
        pair.meshes.iter().for_each(|mesh| mesh.check_peers().unwrap());
    }
}

/// Any harm, anywhere in a link, either way, on links of one and of several connections.
#[test]
fn tr_7_no_byte_is_accepted_that_was_not_sent_and_the_error_names_the_link() {
    for seed in 0..80 {
        let mut random = StdRng::seed_from_u64(seed);
        let streams = if seed % 3 == 0 { 2 } else { 1 };
        let way = if random.random() { Way::ToAcceptor } else { Way::ToDialer };
        // Where records begin and end as often as anywhere in them.
        let offset = match random.random_range(0..4) {
            0 => random.random_range(0..40),
            1 => 100_000 + random.random_range(0..64),
            _ => random.random_range(0..200_000),
        };
        let harm = harm(&mut random, streams);
        let told = format!("seed {seed}: {} at {offset}, {way:?}, {streams} streams", name(&harm));
        let plan = Plan { connection: 1, way, offset, harm: harm.clone() };
        let pair = Pair::new(streams, Some(plan));
        let (zero, one) = pair.open(1);
        let (from, mut to, sender) = match way {
            Way::ToAcceptor => (one, zero, 1),
            Way::ToDialer => (zero, one, 0),
        };
        let sending = thread::spawn(move || send(from));
        let (seen, error) = receive(&mut to, &told);
        sending.join().unwrap();
        assert!(pair.proxy.done(), "{told}: no harm was done");
        assert!(seen < TOTAL, "{told}: all was accepted");
        assert!(names_the_link(&error, sender, &harm), "{told}: {error}");
    }
}

fn name(harm: &Harm) -> &'static str {
    match harm {
        Harm::Change(_) => "change",
        Harm::Drop(_) => "drop",
        Harm::Repeat(_) => "repeat",
        Harm::Reorder(_) => "reorder",
        Harm::Insert(_) => "insert",
        Harm::Cut => "cut",
        Harm::Exchange(_) => "exchange",
    }
}

/// A cut that falls between two records looks like an end, and is none.
#[test]
fn a_link_that_is_cut_off_between_two_records_did_not_end_in_order() {
    // One message: header, payload and tag; then nothing of the last word.
    let record = 16 + 1000 + 16;
    let plan = Plan { connection: 1, way: Way::ToAcceptor, offset: record, harm: Harm::Cut };
    let pair = Pair::new(1, Some(plan));
    let (mut zero, mut one) = pair.open(1);
    one.sender.window().unwrap()[..1000].fill(pattern(0));
    one.sender.commit(1000).unwrap();
    drop(one);
    pair.proxy.await_harm();
    let limit = Instant::now() + TEST_WAIT_LIMIT;
    let error = loop {
        match zero.receiver.check_not_ended(1000) {
            Ok(()) => {
                assert!(zero.receiver.window().unwrap().len() <= 1000 && Instant::now() < limit)
            }
            Err(error) => break error,
        }
    };
    assert_eq!(zero.receiver.window().unwrap().len(), 1000);
    assert!(error.to_string().contains("without a closing message"), "{error}");
}

/// Heartbeats: forged ones could hide a death or feign a farewell.
#[test]
fn tr_7_a_changed_heartbeat_loses_the_peer_and_both_ranks_name_the_link() {
    let beat = 16 + 128 + 16;
    let harms = [
        Harm::Change(1),
        Harm::Repeat(beat),
        Harm::Drop(beat),
        Harm::Reorder(beat),
        Harm::Insert(vec![0; beat]),
        Harm::Insert(vec![1]),
    ];
    for (number, harm) in harms.into_iter().enumerate() {
        let way = if number % 2 == 0 { Way::ToAcceptor } else { Way::ToDialer };
        let told = name(&harm);
        // Some heartbeats pass first, so that the links are open when the harm is noticed, also on
        // a busy machine.
        let plan = Plan { connection: 0, way, offset: 5 * beat, harm };
        let quick =
            |rank| MeshOptions { peer_timeout: Duration::from_millis(400), ..options(rank, 1) };
        let pair = Pair::with(quick, Some(plan));
        let _links = pair.open(1);
        let (hearer, sayer) = if way == Way::ToAcceptor { (0, 1) } else { (1, 0) };
        let reason = |rank: usize| {
            let limit = Instant::now() + TEST_WAIT_LIMIT;
            loop {
                if let Err(error) = pair.meshes[rank].check_peers() {
                    break error.to_string();
                }
                assert!(Instant::now() < limit, "{told}: rank {rank} noticed nothing");
                thread::sleep(Duration::from_millis(5));
            }
        };
        let (noticed, heard) = (reason(hearer), reason(sayer));
        assert!(
            noticed.contains(&format!("lost rank {sayer} on host-{sayer}")),
            "{told}: {noticed}"
        );
        assert!(heard.contains(&format!("lost rank {hearer} on host-{hearer}")), "{told}: {heard}");
        assert!(heard.contains("it counts this rank as lost: "), "{told}: {heard}");
        for reason in [noticed, heard] {
            assert!(
                reason.contains("on its connection of heartbeats with 127.0.0.1:"),
                "{told}: {reason}"
            );
            assert!(reason.contains("is not what its sender sealed"), "{told}: {reason}");
        }
    }
}

#[test]
fn data_on_the_network_reveals_nothing() {
    let secret = b"gradients, pickles and the names of tensors: nobody's business";
    let pair = Pair::new(1, None);
    let (zero, one) = pair.open(1);
    let ((_, mut heard), (mut sender, _)) = (into_frame_halves(zero), into_frame_halves(one));
    let payload = secret.repeat(5000);
    sender.queue_frame(1, &payload).unwrap();
    let limit = Instant::now() + TEST_WAIT_LIMIT;
    let frame = loop {
        sender.flush().unwrap();
        if let Some(frame) = heard.try_receive_frame().unwrap() {
            break frame;
        }
        assert!(Instant::now() < limit);
    };
    assert_eq!(frame.payload, payload);
    let captured = pair.proxy.heard(1, Way::ToAcceptor);
    assert!(captured.len() > payload.len());
    for part in secret.chunks_exact(8) {
        assert!(captured.windows(part.len()).all(|window| window != part), "{part:?} in clear");
    }
    // Nor does it look the same twice.
    let sealed = &captured[HANDSHAKE[0]..];
    let repeated =
        sealed.windows(secret.len()).filter(|window| *window == &sealed[100..100 + secret.len()]);
    assert_eq!(repeated.count(), 1);
}

/// A whole recorded session, word for word, at the same rank of a job with the same key.
#[test]
fn a_recorded_handshake_is_useless_later() {
    let pair = Pair::new(1, None);
    let (mut zero, one) = pair.open(1);
    let sending = thread::spawn(move || send(one));
    assert_eq!(receive(&mut zero, "no harm").0, TOTAL);
    sending.join().unwrap();
    let recorded: Vec<_> =
        [0, 1].map(|connection| pair.proxy.heard(connection, Way::ToAcceptor)).into();
    drop((zero, pair));
    let rendezvous = MemoryRendezvous::default();
    let (target, addresses) = (rendezvous.clone(), rendezvous.clone());
    let joining = thread::spawn(move || Mesh::join(options(0, 1), &target).unwrap());
    let there = rank_zero_address(&addresses, 0);
    let other = Mesh::join(options(1, 1), &rendezvous).unwrap();
    let mesh = joining.join().unwrap();
    for words in &recorded {
        let before = mesh.refused_connection_count();
        let mut stream = TcpStream::connect(there).unwrap();
        stream.set_read_timeout(Some(TEST_WAIT_LIMIT)).unwrap();
        // The mesh may close the connection in the middle.
        drop(stream.write_all(words));
        let mut heard = Vec::new();
        drop(stream.read_to_end(&mut heard));
        assert!(heard.len() <= HANDSHAKE[1] - 34, "it was accepted");
        let limit = Instant::now() + TEST_WAIT_LIMIT;
        while mesh.refused_connection_count() == before {
            assert!(Instant::now() < limit, "it was not turned away");
            thread::yield_now();
        }
    }
    let impatient = Instant::now() + Duration::from_millis(300);
    let error = mesh.open_links_until(1, &[Rank(1)], RING, impatient, &mut || false).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "a recorded session became a link: {error}");
    drop(other);
}
