// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The contract of every kind of link. The tests of each kind run it.
//!
//! A factory creates a new pair of connected links whose rings have at least the given capacity.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test harness")]

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use farandole_world::{HostHash, Rank};

use crate::{
    Error, Link, LinkReceiver, LinkSender, MemoryRendezvous, Mesh, MeshOptions, Rendezvous,
    RendezvousParticipant, Result, into_frame_halves,
};

/// Function that creates a pair of connected links with a given capacity.
pub type LinkPairFactory<'a> = &'a mut dyn FnMut(usize) -> (Link, Link);

/// Longest wait of any test of the suite.
pub const TEST_WAIT_LIMIT: Duration = Duration::from_secs(20);

/// Returns the options of a rank; all ranks of a test are on one host.
pub fn test_mesh_options(rank: u32, size: u32) -> MeshOptions {
    let host = HostHash("here".to_owned());
    MeshOptions {
        setup_timeout: TEST_WAIT_LIMIT,
        ..MeshOptions::new(Rank(rank), size, host, [7; 32])
    }
}

/// Joins a mesh of `size` ranks in this process, on one host. `adjust` may change the options of
/// each rank first.
pub fn join_meshes(size: u32, adjust: impl Fn(&mut MeshOptions)) -> Vec<Mesh> {
    let rendezvous = MemoryRendezvous::default();
    thread::scope(|scope| {
        let joining: Vec<_> = (0..size)
            .map(|rank| {
                let mut options = test_mesh_options(rank, size);
                adjust(&mut options);
                let rendezvous = rendezvous.clone();
                scope.spawn(move || Mesh::join(options, &rendezvous).unwrap())
            })
            .collect();
        joining.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Opens a channel between the first two meshes.
pub fn open_link_pair(meshes: &[Mesh], channel: u32, capacity: usize) -> (Link, Link) {
    thread::scope(|scope| {
        let other =
            scope.spawn(|| meshes[1].open_links(channel, &[Rank(0)], capacity).unwrap().remove(0));
        let link = meshes[0].open_links(channel, &[Rank(1)], capacity).unwrap().remove(0);
        (link, other.join().unwrap())
    })
}

/// A rendezvous that replaces the addresses of rank 0.
#[derive(Clone)]
pub struct DivertingRendezvous {
    /// The rendezvous that the ranks use.
    pub rendezvous: MemoryRendezvous,
    /// The only address of rank 0.
    pub to: SocketAddr,
}

impl Rendezvous for DivertingRendezvous {
    fn exchange_addresses(
        &self,
        point: RendezvousParticipant,
        addresses: &[u8],
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>> {
        let mut all_addresses = self.rendezvous.exchange_addresses(point, addresses, deadline)?;
        let first = String::from_utf8(all_addresses[0].clone()).unwrap();
        let facts = first.lines().filter(|line| !line.starts_with("address "));
        let mut diverted: String = facts.flat_map(|line| [line, "\n"]).collect();
        diverted.push_str(&format!("address {}\n", self.to));
        all_addresses[0] = diverted.into_bytes();
        Ok(all_addresses)
    }
}

/// Returns the address of rank 0 in a generation, as an attacker on the same host could find it.
pub fn rank_zero_address(rendezvous: &MemoryRendezvous, generation: u32) -> SocketAddr {
    let name = format!("mesh/{generation}/0");
    let addresses = rendezvous.await_value(&name, Instant::now() + TEST_WAIT_LIMIT).unwrap();
    let addresses = String::from_utf8(addresses).unwrap();
    let line = addresses.lines().find_map(|line| line.strip_prefix("address 127.0.0.1")).unwrap();
    format!("127.0.0.1{line}").parse().unwrap()
}

/// Runs all tests of the suite.
pub fn run_link_contract(factory: LinkPairFactory<'_>) {
    bytes_arrive_in_order(factory(4096));
    windows_are_contiguous_at_every_offset(factory(4096));
    a_sender_is_held_back_by_a_reader_that_is_slow(factory(4096));
    what_was_sent_before_a_close_is_read_before_its_error(factory(4096));
    a_sender_learns_that_there_is_no_reader_any_more(factory(4096));
    large_frames_cross_a_small_ring(factory(4096));
    both_directions_flow_at_the_same_time(factory(65536));
    more_than_a_window_is_refused(factory(4096));
}

fn pattern_byte(at: usize) -> u8 {
    (at % 251).to_le_bytes()[0]
}

struct WaitLimit(Instant);

impl WaitLimit {
    fn new() -> Self {
        // On a busy machine, each yield may cost a time slice of every other process.
        Self(Instant::now() + 3 * TEST_WAIT_LIMIT)
    }

    fn yield_or_panic(&self, what: &str) {
        assert!(Instant::now() < self.0, "waited too long for {what}");
        thread::yield_now();
    }
}

/// Sends `total` bytes of the pattern in parts of varying, odd sizes.
fn send_pattern(sender: &mut dyn LinkSender, total: usize) {
    let limit = WaitLimit::new();
    let mut sent = 0;
    while sent < total {
        let window = sender.window().unwrap();
        let bytes = window.len().min(total - sent).min(1 + sent % 1493);
        for (at, byte) in window[..bytes].iter_mut().enumerate() {
            *byte = pattern_byte(sent + at);
        }
        sender.commit(bytes).unwrap();
        sent += bytes;
        if bytes == 0 {
            limit.yield_or_panic("space");
        }
    }
    while !sender.flush().unwrap() {
        limit.yield_or_panic("a flush");
    }
}

fn receive_pattern(receiver: &mut dyn LinkReceiver, total: usize) {
    let limit = WaitLimit::new();
    let mut seen = 0;
    while seen < total {
        let window = receiver.window().unwrap();
        let bytes = window.len().min(1 + seen % 1777).min(total - seen);
        assert!(
            window[..bytes].iter().enumerate().all(|(at, byte)| *byte == pattern_byte(seen + at)),
            "at {seen}"
        );
        receiver.release(bytes).unwrap();
        seen += bytes;
        if bytes == 0 {
            limit.yield_or_panic("bytes");
        }
    }
    assert_eq!(seen, total);
}

/// Checks `TR-1`: bytes arrive in order, with odd sizes, from another thread.
pub fn bytes_arrive_in_order((mut a, mut b): (Link, Link)) {
    let total = 1_000_003;
    let sending = thread::spawn(move || {
        send_pattern(&mut *a.sender, total);
        a
    });
    receive_pattern(&mut *b.receiver, total);
    drop(sending.join().unwrap());
}

/// Checks that a message as large as the ring is contiguous at every start offset.
pub fn windows_are_contiguous_at_every_offset((mut a, mut b): (Link, Link)) {
    let capacity = a.capacity;
    assert_eq!(capacity, b.capacity);
    for offset in 0..capacity {
        let limit = WaitLimit::new();
        for bytes in [capacity, 1] {
            loop {
                let window = a.sender.window().unwrap();
                if window.len() >= bytes {
                    for (at, byte) in window[..bytes].iter_mut().enumerate() {
                        *byte = pattern_byte(at + offset);
                    }
                    break;
                }
                limit.yield_or_panic("an empty ring");
            }
            a.sender.commit(bytes).unwrap();
            loop {
                a.sender.flush().unwrap();
                let window = b.receiver.window().unwrap();
                if window.len() == bytes {
                    assert!(
                        window
                            .iter()
                            .enumerate()
                            .all(|(at, byte)| *byte == pattern_byte(at + offset))
                    );
                    break;
                }
                limit.yield_or_panic("a whole message");
            }
            b.receiver.release(bytes).unwrap();
        }
    }
}

/// Checks that unread bytes are bounded while nothing reads, and that bytes flow again afterwards.
pub fn a_sender_is_held_back_by_a_reader_that_is_slow((mut a, mut b): (Link, Link)) {
    let limit = WaitLimit::new();
    let mut sent = 0;
    let mut idle = 0;
    while idle < 100 {
        let window = a.sender.window().unwrap();
        let bytes = window.len();
        for (at, byte) in window.iter_mut().enumerate() {
            *byte = pattern_byte(sent + at);
        }
        a.sender.commit(bytes).unwrap();
        sent += bytes;
        assert!(sent < 1 << 28, "nothing holds the sender back");
        if bytes == 0 {
            // A socket may accept more bytes after a moment.
            idle += 1;
            limit.yield_or_panic("back-pressure");
        } else {
            idle = 0;
        }
    }
    assert!(sent >= a.capacity);
    let reading = thread::spawn(move || {
        receive_pattern(&mut *b.receiver, sent);
        b
    });
    while !a.sender.flush().unwrap() {
        limit.yield_or_panic("a flush");
    }
    let b = reading.join().unwrap();
    assert_eq!(a.sender.window().unwrap().len(), a.capacity);
    drop(b);
}

/// Checks `TR-5`: an orderly close loses no byte, and the error names the peer.
pub fn what_was_sent_before_a_close_is_read_before_its_error((mut a, mut b): (Link, Link)) {
    send_pattern(&mut *a.sender, 1000);
    let rank = b.peer;
    drop(a);
    receive_pattern(&mut *b.receiver, 999);
    let limit = WaitLimit::new();
    // A reader that needs two bytes gets an error because only one is left, and may still read that
    // one.
    while b.receiver.check_not_ended(1).is_ok() {
        assert_eq!(b.receiver.window().unwrap().len(), 1);
        limit.yield_or_panic("the end");
    }
    // A reader whose window was empty before the byte and the end arrived: the byte may follow.
    b.receiver.check_not_ended(0).unwrap();
    assert_eq!(b.receiver.window().unwrap(), [pattern_byte(999)]);
    b.receiver.release(1).unwrap();
    loop {
        match b.receiver.window() {
            Ok(window) => assert!(window.is_empty()),
            Err(Error::PeerLost { rank: lost, reason, .. }) => {
                assert_eq!(lost, rank);
                assert!(!reason.is_empty());
                return;
            }
            Err(other) => panic!("{other}"),
        }
        limit.yield_or_panic("the end");
    }
}

/// Checks that the sender gets an error after the peer closed the link.
pub fn a_sender_learns_that_there_is_no_reader_any_more((mut a, b): (Link, Link)) {
    drop(b);
    let limit = WaitLimit::new();
    loop {
        let outcome = a.sender.window().map(|window| window.len().min(1));
        match outcome.and_then(|bytes| a.sender.commit(bytes)) {
            Ok(()) => limit.yield_or_panic("an error"),
            Err(error) => {
                assert!(matches!(error, Error::PeerLost { .. }), "{error}");
                return;
            }
        }
    }
}

/// Checks frames of many times the capacity, sent from another thread.
pub fn large_frames_cross_a_small_ring((a, b): (Link, Link)) {
    let (mut sender, _unused) = into_frame_halves(a);
    let (_other, mut receiver) = into_frame_halves(b);
    let large: Vec<u8> = (0..3_000_001).map(pattern_byte).collect();
    let expected = large.clone();
    let sending = thread::spawn(move || {
        let limit = WaitLimit::new();
        sender.queue_frame(1, &large).unwrap();
        sender.queue_frame(2, b"small").unwrap();
        while !sender.flush().unwrap() {
            limit.yield_or_panic("a flush");
        }
        (sender, _unused)
    });
    let limit = WaitLimit::new();
    let mut next = || {
        loop {
            if let Some(frame) = receiver.try_receive_frame().unwrap() {
                return frame;
            }
            limit.yield_or_panic("a frame");
        }
    };
    let frame = next();
    assert!(frame.kind == 1 && frame.payload == expected);
    assert_eq!(next().payload, b"small");
    drop(sending.join().unwrap());
}

/// Checks both directions at once, with one thread for each half.
pub fn both_directions_flow_at_the_same_time((a, b): (Link, Link)) {
    let total = 2_000_003;
    thread::scope(|scope| {
        for (mut sender, mut receiver) in [(a.sender, b.receiver), (b.sender, a.receiver)] {
            let sending = scope.spawn(move || {
                send_pattern(&mut *sender, total);
                sender
            });
            scope.spawn(move || {
                receive_pattern(&mut *receiver, total);
                drop(sending.join().unwrap());
            });
        }
    });
}

/// Checks that neither `commit` nor `release` accepts more bytes than the window has.
pub fn more_than_a_window_is_refused((mut a, mut b): (Link, Link)) {
    let window = a.sender.window().unwrap().len();
    assert!(a.sender.commit(window + 1).is_err());
    b.receiver.window().unwrap();
    assert!(b.receiver.release(1).is_err());
}
