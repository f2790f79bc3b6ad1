// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The contract of every kind of link: run by the tests of each.
//!
//! A factory makes a fresh pair of connected links whose rings hold at least the given capacity.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test harness")]

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use farandole_world::{HostHash, Rank};

use crate::{
    Error, Link, LinkReceiver, LinkSender, MemoryRendezvous, Mesh, MeshOptions, Place, Rendezvous,
    Result, frames,
};

/// Returns whether records of this process go in clear, for measurements of what sealing costs;
/// both ends are in this process.
pub fn send_in_clear(clear: bool) {
    crate::record::IN_CLEAR.store(clear, std::sync::atomic::Ordering::Relaxed);
}

/// Makes a pair of links of a capacity.
pub type Factory<'a> = &'a mut dyn FnMut(usize) -> (Link, Link);

/// The longest any wait of the suite lasts.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Returns options of a rank on the one host of a test.
pub fn options(rank: u32, size: u32) -> MeshOptions {
    let host = HostHash("here".to_owned());
    MeshOptions { patience: PATIENCE, ..MeshOptions::new(Rank(rank), size, host, [7; 32]) }
}

/// Joins a mesh of `size` ranks, all in this process on one host, after `adjust` changed their
/// options.
pub fn meshes(size: u32, adjust: impl Fn(&mut MeshOptions)) -> Vec<Mesh> {
    let meeting = MemoryRendezvous::default();
    thread::scope(|scope| {
        let joining: Vec<_> = (0..size)
            .map(|rank| {
                let mut options = options(rank, size);
                adjust(&mut options);
                let meeting = meeting.clone();
                scope.spawn(move || Mesh::join(options, &meeting).unwrap())
            })
            .collect();
        joining.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Opens a channel between the first two of some meshes.
pub fn open_pair(meshes: &[Mesh], channel: u32, capacity: usize) -> (Link, Link) {
    thread::scope(|scope| {
        let other =
            scope.spawn(|| meshes[1].open(channel, &[Rank(0)], capacity).unwrap().remove(0));
        let link = meshes[0].open(channel, &[Rank(1)], capacity).unwrap().remove(0);
        (link, other.join().unwrap())
    })
}

/// A meeting point at which the card of rank 0 has another address.
#[derive(Clone)]
pub struct Diverted {
    /// The meeting point of the ranks.
    pub meeting: MemoryRendezvous,
    /// The only address of rank 0.
    pub to: SocketAddr,
}

impl Rendezvous for Diverted {
    fn meet(&self, place: Place, card: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        let mut cards = self.meeting.meet(place, card, deadline)?;
        let first = String::from_utf8(cards[0].clone()).unwrap();
        let facts = first.lines().filter(|line| !line.starts_with("address "));
        let mut diverted: String = facts.flat_map(|line| [line, "\n"]).collect();
        diverted.push_str(&format!("address {}\n", self.to));
        cards[0] = diverted.into_bytes();
        Ok(cards)
    }
}

/// Returns rank 0's address in a generation, as a stranger on the host would find it.
pub fn address(meeting: &MemoryRendezvous, generation: u32) -> SocketAddr {
    let name = format!("mesh/{generation}/0");
    let card = meeting.get(&name, Instant::now() + PATIENCE).unwrap();
    let card = String::from_utf8(card).unwrap();
    let line = card.lines().find_map(|line| line.strip_prefix("address 127.0.0.1")).unwrap();
    format!("127.0.0.1{line}").parse().unwrap()
}

/// The whole suite.
pub fn all(factory: Factory<'_>) {
    bytes_arrive_in_order(factory(4096));
    windows_are_contiguous_at_every_offset(factory(4096));
    a_sender_is_held_back_by_a_reader_that_is_slow(factory(4096));
    what_was_sent_before_a_close_is_read_before_its_error(factory(4096));
    a_sender_learns_that_there_is_no_reader_any_more(factory(4096));
    large_frames_cross_a_small_ring(factory(4096));
    both_directions_flow_at_the_same_time(factory(65536));
    more_than_a_window_is_refused(factory(4096));
}

fn pattern(at: usize) -> u8 {
    (at % 251).to_le_bytes()[0]
}

struct Limit(Instant);

impl Limit {
    fn new() -> Self {
        // Where other processes are busy each turn costs the time slices of all of them.
        Self(Instant::now() + 3 * PATIENCE)
    }

    fn pause(&self, what: &str) {
        assert!(Instant::now() < self.0, "waited too long for {what}");
        thread::yield_now();
    }
}

/// Sends `total` bytes of the pattern in parts of varying, odd sizes.
fn send(sender: &mut dyn LinkSender, total: usize) {
    let limit = Limit::new();
    let mut sent = 0;
    while sent < total {
        let window = sender.window().unwrap();
        let bytes = window.len().min(total - sent).min(1 + sent % 1493);
        for (at, byte) in window[..bytes].iter_mut().enumerate() {
            *byte = pattern(sent + at);
        }
        sender.commit(bytes).unwrap();
        sent += bytes;
        if bytes == 0 {
            limit.pause("space");
        }
    }
    while !sender.flush().unwrap() {
        limit.pause("a flush");
    }
}

fn receive(receiver: &mut dyn LinkReceiver, total: usize) {
    let limit = Limit::new();
    let mut seen = 0;
    while seen < total {
        let window = receiver.window().unwrap();
        let bytes = window.len().min(1 + seen % 1777).min(total - seen);
        assert!(
            window[..bytes].iter().enumerate().all(|(at, byte)| *byte == pattern(seen + at)),
            "at {seen}"
        );
        receiver.release(bytes).unwrap();
        seen += bytes;
        if bytes == 0 {
            limit.pause("bytes");
        }
    }
    assert_eq!(seen, total);
}

/// `TR-1`: order, odd sizes, from another thread.
pub fn bytes_arrive_in_order((mut a, mut b): (Link, Link)) {
    let total = 1_000_003;
    let sending = thread::spawn(move || {
        send(&mut *a.sender, total);
        a
    });
    receive(&mut *b.receiver, total);
    drop(sending.join().unwrap());
}

/// A message as large as the ring is seen whole, wherever it starts.
pub fn windows_are_contiguous_at_every_offset((mut a, mut b): (Link, Link)) {
    let capacity = a.capacity;
    assert_eq!(capacity, b.capacity);
    for offset in 0..capacity {
        let limit = Limit::new();
        for bytes in [capacity, 1] {
            loop {
                let window = a.sender.window().unwrap();
                if window.len() >= bytes {
                    for (at, byte) in window[..bytes].iter_mut().enumerate() {
                        *byte = pattern(at + offset);
                    }
                    break;
                }
                limit.pause("an empty ring");
            }
            a.sender.commit(bytes).unwrap();
            loop {
                a.sender.flush().unwrap();
                let window = b.receiver.window().unwrap();
                if window.len() == bytes {
                    assert!(
                        window.iter().enumerate().all(|(at, byte)| *byte == pattern(at + offset))
                    );
                    break;
                }
                limit.pause("a whole message");
            }
            b.receiver.release(bytes).unwrap();
        }
    }
}

/// Bytes are bounded while there is no reader, and flow again when there is one.
pub fn a_sender_is_held_back_by_a_reader_that_is_slow((mut a, mut b): (Link, Link)) {
    let limit = Limit::new();
    let mut sent = 0;
    let mut idle = 0;
    while idle < 100 {
        let window = a.sender.window().unwrap();
        let bytes = window.len();
        for (at, byte) in window.iter_mut().enumerate() {
            *byte = pattern(sent + at);
        }
        a.sender.commit(bytes).unwrap();
        sent += bytes;
        assert!(sent < 1 << 28, "nothing holds the sender back");
        if bytes == 0 {
            // A socket may take some more after a moment.
            idle += 1;
            limit.pause("back-pressure");
        } else {
            idle = 0;
        }
    }
    assert!(sent >= a.capacity);
    let reading = thread::spawn(move || {
        receive(&mut *b.receiver, sent);
        b
    });
    while !a.sender.flush().unwrap() {
        limit.pause("a flush");
    }
    let b = reading.join().unwrap();
    assert_eq!(a.sender.window().unwrap().len(), a.capacity);
    drop(b);
}

/// `TR-5`: no byte is lost by an orderly close, and the error names the peer.
pub fn what_was_sent_before_a_close_is_read_before_its_error((mut a, mut b): (Link, Link)) {
    send(&mut *a.sender, 1000);
    let rank = b.peer;
    drop(a);
    receive(&mut *b.receiver, 999);
    let limit = Limit::new();
    // A reader that needs two bytes learns that there is only one, and may read it.
    while b.receiver.awaits().is_ok() {
        assert_eq!(b.receiver.window().unwrap().len(), 1);
        limit.pause("the end");
    }
    assert_eq!(b.receiver.window().unwrap(), [pattern(999)]);
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
        limit.pause("the end");
    }
}

/// A close reaches a sender too.
pub fn a_sender_learns_that_there_is_no_reader_any_more((mut a, b): (Link, Link)) {
    drop(b);
    let limit = Limit::new();
    loop {
        let outcome = a.sender.window().map(|window| window.len().min(1));
        match outcome.and_then(|bytes| a.sender.commit(bytes)) {
            Ok(()) => limit.pause("an error"),
            Err(error) => {
                assert!(matches!(error, Error::PeerLost { .. }), "{error}");
                return;
            }
        }
    }
}

/// Frames of many times the capacity, from another thread.
pub fn large_frames_cross_a_small_ring((a, b): (Link, Link)) {
    let (mut sender, _unused) = frames(a);
    let (_other, mut receiver) = frames(b);
    let large: Vec<u8> = (0..3_000_001).map(pattern).collect();
    let expected = large.clone();
    let sending = thread::spawn(move || {
        let limit = Limit::new();
        sender.queue(1, &large).unwrap();
        sender.queue(2, b"small").unwrap();
        while !sender.flush().unwrap() {
            limit.pause("a flush");
        }
        (sender, _unused)
    });
    let limit = Limit::new();
    let mut next = || {
        loop {
            if let Some(frame) = receiver.try_receive().unwrap() {
                return frame;
            }
            limit.pause("a frame");
        }
    };
    let frame = next();
    assert!(frame.kind == 1 && frame.payload == expected);
    assert_eq!(next().payload, b"small");
    drop(sending.join().unwrap());
}

/// Four threads, one for each half.
pub fn both_directions_flow_at_the_same_time((a, b): (Link, Link)) {
    let total = 2_000_003;
    thread::scope(|scope| {
        for (mut sender, mut receiver) in [(a.sender, b.receiver), (b.sender, a.receiver)] {
            let sending = scope.spawn(move || {
                send(&mut *sender, total);
                sender
            });
            scope.spawn(move || {
                receive(&mut *receiver, total);
                drop(sending.join().unwrap());
            });
        }
    });
}

/// Neither commit nor release passes the window.
pub fn more_than_a_window_is_refused((mut a, mut b): (Link, Link)) {
    let window = a.sender.window().unwrap().len();
    assert!(a.sender.commit(window + 1).is_err());
    b.receiver.window().unwrap();
    assert!(b.receiver.release(1).is_err());
}
