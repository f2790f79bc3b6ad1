// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A relay between rank 1, which dials, and rank 0: it forwards handshakes, and then does harm.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};

use farandole_transport::link_contract::TEST_WAIT_LIMIT;

/// Bytes of a handshake, from the dialer and from the acceptor.
pub(crate) const HANDSHAKE: [usize; 2] = [144 + 32, 110 + 34];

/// The direction of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    ToAcceptor,
    ToDialer,
}

/// A change to the bytes of one connection, in one direction, from an offset behind the handshake
/// on.
#[derive(Clone, Debug)]
pub(crate) enum Harm {
    Change(u8),
    Drop(usize),
    Repeat(usize),
    /// Two neighbouring parts of this length change places.
    Reorder(usize),
    Insert(Vec<u8>),
    /// The connection ends, both ways.
    Cut,
    /// The bytes of one connection from there on come out of another one, and the other way round.
    Exchange(usize),
}

/// The place of the harm.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// In the order in which they are made: the first is that of heartbeats.
    pub(crate) connection: usize,
    pub(crate) way: Way,
    pub(crate) offset: usize,
    pub(crate) harm: Harm,
}

#[derive(Default)]
struct State {
    /// The far ends, by connection and way.
    outs: Vec<[TcpStream; 2]>,
    /// All that was forwarded, by connection and way.
    heard: Vec<[Vec<u8>; 2]>,
    /// Harm was done.
    done: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    stop: AtomicBool,
}

/// Dropping it ends all connections.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Forwards to `target`.
    pub(crate) fn start(
        target: impl FnOnce() -> SocketAddr + Send + 'static,
        plan: Option<Plan>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared::default());
        let below = Arc::clone(&shared);
        let accepting = thread::spawn(move || {
            let target = target();
            let mut pumps = Vec::new();
            for near in listener.incoming() {
                if below.stop.load(Ordering::Acquire) {
                    break;
                }
                let (near, far) = (near.unwrap(), TcpStream::connect(target).unwrap());
                near.set_nodelay(true).unwrap();
                far.set_nodelay(true).unwrap();
                let mut state = below.state.lock().unwrap();
                let number = state.outs.len();
                state.outs.push([far.try_clone().unwrap(), near.try_clone().unwrap()]);
                state.heard.push([Vec::new(), Vec::new()]);
                drop(state);
                below.changed.notify_all();
                for (from, way) in [(near, Way::ToAcceptor), (far, Way::ToDialer)] {
                    let (shared, plan) = (Arc::clone(&below), plan.clone());
                    pumps.push(thread::spawn(move || {
                        pump(&shared, from, number, way, plan.as_ref())
                    }));
                }
            }
            pumps.into_iter().for_each(|pump| pump.join().unwrap());
        });
        Self { address, shared, accepting: Some(accepting) }
    }

    /// Returns the bytes that were forwarded on a connection.
    pub(crate) fn heard(&self, connection: usize, way: Way) -> Vec<u8> {
        self.shared.state.lock().unwrap().heard[connection][way as usize].clone()
    }

    /// Returns whether harm was done.
    pub(crate) fn done(&self) -> bool {
        self.shared.state.lock().unwrap().done
    }

    /// Waits until harm was done.
    pub(crate) fn await_harm(&self) {
        let state = self.shared.state.lock().unwrap();
        let (_state, late) = self
            .shared
            .changed
            .wait_timeout_while(state, TEST_WAIT_LIMIT, |state| !state.done)
            .unwrap();
        assert!(!late.timed_out(), "no harm was done");
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        for end in self.shared.state.lock().unwrap().outs.iter().flatten() {
            drop(end.shutdown(Shutdown::Both));
        }
        drop(TcpStream::connect(self.address));
        if let Some(accepting) = self.accepting.take() {
            accepting.join().unwrap();
        }
    }
}

fn pump(shared: &Shared, mut from: TcpStream, number: usize, way: Way, plan: Option<&Plan>) {
    let mut plan = plan.filter(|plan| plan.connection == number && plan.way == way).cloned();
    let own = shared.state.lock().unwrap().outs[number][way as usize].try_clone().unwrap();
    let mut out = own.try_clone().unwrap();
    let mut buffer = vec![0; 64 << 10];
    // What has come and was not forwarded: harm may need more of it.
    let mut held = Vec::new();
    let mut gone = 0;
    loop {
        let received = from.read(&mut buffer).unwrap_or(0);
        held.extend_from_slice(&buffer[..received]);
        let at = plan.as_ref().map(|plan| HANDSHAKE[way as usize] + plan.offset - gone);
        if let (Some(Plan { harm, .. }), Some(at)) = (plan.clone(), at)
            && at + needs(&harm) <= held.len()
        {
            plan = None;
            // Before anybody can feel it.
            shared.state.lock().unwrap().done = true;
            shared.changed.notify_all();
            if let Harm::Exchange(other) = harm {
                drop(out.write_all(&held.drain(..at).collect::<Vec<_>>()));
                out = meet(shared, number, other, way);
            } else {
                inflict(&harm, &mut held, at);
            }
            if matches!(harm, Harm::Cut) {
                drop(out.write_all(&held));
                drop((out.shutdown(Shutdown::Both), from.shutdown(Shutdown::Both)));
            }
        }
        // What lies before the harm continues; what is needed for it stays, unless nothing follows.
        let goes = match &plan {
            Some(_) if received > 0 => at.unwrap_or(0).min(held.len()),
            _ => held.len(),
        };
        let part: Vec<u8> = held.drain(..goes).collect();
        gone += part.len();
        shared.state.lock().unwrap().heard[number][way as usize].extend_from_slice(&part);
        if out.write_all(&part).is_err() || received == 0 {
            // Both, where they differ: an exchange takes the rest of the connection's own way, and
            // its end would never come.
            drop((out.shutdown(Shutdown::Write), own.shutdown(Shutdown::Write)));
            return;
        }
    }
}

/// Bytes that harm is done to, from its offset on.
fn needs(harm: &Harm) -> usize {
    match harm {
        Harm::Change(_) => 1,
        Harm::Drop(bytes) | Harm::Repeat(bytes) => *bytes,
        Harm::Reorder(bytes) => 2 * bytes,
        Harm::Insert(_) | Harm::Cut | Harm::Exchange(_) => 0,
    }
}

fn inflict(harm: &Harm, held: &mut Vec<u8>, at: usize) {
    match harm {
        Harm::Change(bits) => held[at] ^= bits,
        Harm::Drop(bytes) => drop(held.drain(at..at + bytes)),
        Harm::Repeat(bytes) => {
            let again = held[at..at + bytes].to_vec();
            held.splice(at..at, again).for_each(drop);
        }
        Harm::Reorder(bytes) => held[at..at + 2 * bytes].rotate_left(*bytes),
        Harm::Insert(strange) => held.splice(at..at, strange.iter().copied()).for_each(drop),
        Harm::Cut => held.truncate(at),
        Harm::Exchange(_) => {}
    }
}

/// The far end of another connection, once it is there. The other's own bytes continue: they are
/// harmed, too.
fn meet(shared: &Shared, number: usize, other: usize, way: Way) -> TcpStream {
    assert_ne!(number, other);
    let state = shared.state.lock().unwrap();
    let missing = |state: &mut State| state.outs.len() <= other;
    let (state, late) = shared.changed.wait_timeout_while(state, TEST_WAIT_LIMIT, missing).unwrap();
    assert!(!late.timed_out(), "no connection {other}");
    state.outs[other][way as usize].try_clone().unwrap()
}
