// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A relay between two ranks, which forwards handshakes and everything else except one piece: no
//! byte is accepted that was not sent.
#![expect(clippy::unwrap_used, reason = "tests")]

#[expect(dead_code, reason = "tests of the crate use more of it")]
#[path = "../../../crates/transport/tests/integration/relay/proxy.rs"]
mod proxy;

use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use farandole_fuzz::{Random, cases};
use farandole_transport::link_contract::{DivertingRendezvous, TEST_WAIT_LIMIT, rank_zero_address};
use farandole_transport::{Error, Link, MemoryRendezvous, Mesh, MeshOptions};
use farandole_world::{HostHash, Rank};
use proxy::{Harm, Plan, Proxy, Way};

const TOTAL: usize = 40_000;

fn options(rank: u32, streams: u16) -> MeshOptions {
    MeshOptions {
        setup_timeout: TEST_WAIT_LIMIT,
        peer_timeout: Duration::from_secs(2),
        use_shared_memory: false,
        streams,
        bind: vec![IpAddr::from([127, 0, 0, 1]).into()],
        ..MeshOptions::new(Rank(rank), 2, HostHash(format!("host-{rank}")), [5; 32])
    }
}

fn harm(random: &mut Random) -> Harm {
    let bytes = 1 + random.below(500);
    match random.below(6) {
        0 => Harm::Change(1 << random.below(8)),
        1 => Harm::Drop(bytes),
        2 => Harm::Repeat(bytes),
        3 => Harm::Reorder(bytes),
        4 => Harm::Insert(random.bytes(500)),
        _ => Harm::Cut,
    }
}

fn pattern(at: usize) -> u8 {
    (at.wrapping_mul(2_654_435_761) >> 7).to_le_bytes()[0]
}

fn send(mut link: Link) {
    let limit = Instant::now() + TEST_WAIT_LIMIT;
    let mut sent = 0;
    while sent < TOTAL {
        let Ok(window) = link.sender.window() else { return };
        let bytes = window.len().min(TOTAL - sent).min(7000);
        (0..bytes).for_each(|at| window[at] = pattern(sent + at));
        if link.sender.commit(bytes).is_err() {
            return;
        }
        sent += bytes;
        assert!(Instant::now() < limit, "{sent} bytes sent");
        thread::yield_now();
    }
    while let Ok(false) = link.sender.flush() {
        assert!(Instant::now() < limit, "a flush");
        thread::yield_now();
    }
}

/// Receives bytes until the link ends, and returns their number; each must be the one that was
/// sent.
fn receive(link: &mut Link) -> (usize, Error) {
    let limit = Instant::now() + TEST_WAIT_LIMIT;
    let mut seen = 0;
    loop {
        let window = match link.receiver.window() {
            Ok(window) => window,
            Err(error) => return (seen, error),
        };
        let bytes = window.len();
        assert!(seen + bytes <= TOTAL, "more than was sent");
        assert!(
            window.iter().enumerate().all(|(at, byte)| *byte == pattern(seen + at)),
            "a forged byte"
        );
        seen += bytes;
        if let Err(error) = link.receiver.release(bytes) {
            return (seen, error);
        }
        assert!(Instant::now() < limit, "{seen} bytes accepted, and neither more nor an error");
        thread::yield_now();
    }
}

#[test]
fn no_action_of_a_relay_makes_a_rank_accept_its_bytes() {
    cases(|random| {
        let streams = if random.below(3) == 0 { 2 } else { 1 };
        let way = if random.below(2) == 0 { Way::ToAcceptor } else { Way::ToDialer };
        // That of heartbeats, too, which may end before the harm is done.
        let connection = random.below(1 + usize::from(streams));
        let offset = random.below(if connection == 0 { 240 } else { TOTAL / 2 });
        let plan = Plan { connection, way, offset, harm: harm(random) };
        let rendezvous = MemoryRendezvous::default();
        let target = rendezvous.clone();
        let proxy = Proxy::start(move || rank_zero_address(&target, 0), Some(plan));
        let diverted = DivertingRendezvous { rendezvous: rendezvous.clone(), to: proxy.address };
        let (zero, one) = thread::scope(|scope| {
            let zero = scope.spawn(|| Mesh::join(options(0, streams), &rendezvous).unwrap());
            let one = Mesh::join(options(1, streams), &diverted).unwrap();
            (zero.join().unwrap(), one)
        });
        let (zeros, ones) = thread::scope(|scope| {
            let zeros = scope
                .spawn(|| zero.open_links(1, &[Rank(1)], 1 << 16).map(|mut links| links.remove(0)));
            let ones = one.open_links(1, &[Rank(0)], 1 << 16).map(|mut links| links.remove(0));
            (zeros.join().unwrap(), ones)
        });
        let (zeros, ones) = match (zeros, ones) {
            (Ok(zeros), Ok(ones)) => (zeros, ones),
            // The harm to its heartbeats came first.
            (Err(error), _) | (_, Err(error)) => {
                assert!(connection == 0 && matches!(error, Error::PeerLost { .. }), "{error}");
                return;
            }
        };
        let (from, mut to) = if way == Way::ToAcceptor { (ones, zeros) } else { (zeros, ones) };
        let (seen, error) = thread::scope(|scope| {
            scope.spawn(|| send(from));
            receive(&mut to)
        });
        assert!(matches!(error, Error::PeerLost { .. }), "{error}");
        assert!(seen == TOTAL || proxy.done(), "{seen} bytes: {error}");
    });
}
