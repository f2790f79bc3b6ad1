// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A world of threads.

use std::time::{Duration, Instant};

use farandole_collectives::{Communicator, HostCommunicator, Operation, Result, Token};
use farandole_transport::{Error, Link, loopback};
use farandole_world::Rank;

use crate::cut_after;

/// How long anything may take that should take milliseconds.
const DEADLINE: Duration = Duration::from_secs(30);

/// Builds worlds of threads over loopback links.
#[derive(Clone, Copy, Debug)]
pub struct Harness {
    size: usize,
    ring: usize,
    cut: Option<Cut>,
}

/// The link from one rank to another stops after some bytes.
#[derive(Clone, Copy, Debug)]
struct Cut {
    from: usize,
    to: usize,
    bytes: usize,
}

impl Harness {
    /// A world of `size` ranks with rings of 1 MiB.
    pub fn new(size: usize) -> Self {
        Self { size, ring: 1 << 20, cut: None }
    }

    /// Rings of at least this many bytes.
    #[must_use]
    pub fn ring(self, bytes: usize) -> Self {
        Self { ring: bytes, ..self }
    }

    /// The link from one rank to another breaks after some bytes.
    #[must_use]
    pub fn cut(self, from: usize, to: usize, bytes: usize) -> Self {
        Self { cut: Some(Cut { from, to, bytes }), ..self }
    }

    /// Runs `body` on every rank, each in a thread of its own; returns what they return, in rank order.
    ///
    /// # Panics
    /// When links cannot be made, and when a rank panics: its links close, so that the others end too.
    #[expect(clippy::expect_used, reason = "a test without its world has failed")]
    pub fn run<T: Send>(&self, body: impl Fn(Rank, HostCommunicator) -> T + Sync) -> Vec<T> {
        let mut links = loopback::mesh(self.size, self.ring).expect("loopback links");
        if let Some(Cut { from, to, bytes }) = self.cut {
            let to = Rank(u32::try_from(to).unwrap_or(u32::MAX));
            links[from] = std::mem::take(&mut links[from])
                .into_iter()
                .map(|link| if link.peer == to { cut_after(link, bytes) } else { link })
                .collect();
        }
        over(links, body)
    }
}

/// Runs `body` on every rank over links that exist already: element `r` holds rank `r`'s.
#[expect(clippy::expect_used, reason = "a test without its world has failed")]
fn over<T: Send>(links: Vec<Vec<Link>>, body: impl Fn(Rank, HostCommunicator) -> T + Sync) -> Vec<T> {
    let body = &body;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0_u32..)
            .zip(links)
            .map(|(rank, links)| {
                scope.spawn(move || {
                    let communicator = HostCommunicator::new(Rank(rank), links).expect("a communicator");
                    body(Rank(rank), communicator)
                })
            })
            .collect();
        let joined: Vec<_> = threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        let whole: std::result::Result<Vec<T>, _> = joined.into_iter().collect();
        whole.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Runs `body` on every rank of a world of `size`.
///
/// # Panics
/// As [`Harness::run`].
pub fn run_world<T: Send>(size: usize, body: impl Fn(Rank, HostCommunicator) -> T + Sync) -> Vec<T> {
    Harness::new(size).run(body)
}

/// Submits one operation and drives it to its end.
///
/// # Errors
/// The communicator's, and `Timeout` after half a minute.
pub fn complete(communicator: &mut dyn Communicator, operation: Operation) -> Result<()> {
    complete_all(communicator, vec![operation])
}

/// Submits operations and drives them to their end, which they must reach in this order.
///
/// # Errors
/// The communicator's, and `Timeout` after half a minute.
///
/// # Panics
/// When tokens come back in another order.
pub fn complete_all(communicator: &mut dyn Communicator, operations: Vec<Operation>) -> Result<()> {
    let start = Instant::now();
    let tokens: Vec<Token> = (1..).take(operations.len()).map(Token).collect();
    for (token, operation) in tokens.iter().zip(operations) {
        communicator.submit(*token, operation)?;
    }
    let mut completed = Vec::new();
    while communicator.pending() > 0 {
        if !communicator.progress(&mut completed)? {
            std::thread::yield_now();
        }
        let elapsed = start.elapsed();
        if elapsed > DEADLINE {
            let what = format!("{} operations of member {}", communicator.pending(), communicator.member());
            return Err(Error::Timeout { what, elapsed }.into());
        }
    }
    assert_eq!(completed, tokens, "operations complete in the order of their submission");
    Ok(())
}
