// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links that are opened at their first use, in the strictest way: they open only when both ends
//! have asked, and to use one that was not asked for is a failure.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use farandole_transport::{Link, LinkReceiver, LinkSender, Result};
use farandole_world::Rank;

/// Whether the lower and the higher rank have asked for their link.
type Asked = [AtomicBool; 2];

/// The links of all ranks that were asked for.
#[derive(Clone, Debug, Default)]
pub struct Register(HashMap<(Rank, Rank), Arc<Asked>>);

impl Register {
    /// The link of `own` as one that is opened at its first use.
    pub fn on_demand(&mut self, own: Rank, link: Link) -> Link {
        let Link { peer, kind, capacity, sender, receiver } = link;
        let asked = Arc::clone(self.0.entry((own.min(peer), own.max(peer))).or_default());
        let gate = Gate { asked, side: usize::from(own > peer), ends: [own, peer] };
        let sender = Box::new(Sender { inner: sender, gate: gate.clone() });
        Link {
            peer,
            kind,
            capacity,
            sender,
            receiver: Box::new(Receiver { inner: receiver, gate }),
        }
    }

    /// The peers that a rank has asked for, ascending.
    pub fn asked(&self, own: Rank) -> Vec<Rank> {
        let asked = |((low, high), asked): (&(Rank, Rank), &Arc<Asked>)| {
            let (side, peer) = if *low == own { (0, *high) } else { (1, *low) };
            let is_own = *low == own || *high == own;
            (is_own && asked[side].load(Ordering::Acquire)).then_some(peer)
        };
        let mut peers: Vec<Rank> = self.0.iter().filter_map(asked).collect();
        peers.sort_unstable();
        peers
    }
}

#[derive(Clone, Debug)]
struct Gate {
    asked: Arc<Asked>,
    side: usize,
    ends: [Rank; 2],
}

impl Gate {
    fn is_open(&self) -> bool {
        let [own, peer] = self.ends;
        assert!(
            self.asked[self.side].load(Ordering::Acquire),
            "rank {own} did not ask for rank {peer}"
        );
        self.asked[1 - self.side].load(Ordering::Acquire)
    }
}

struct Sender {
    inner: Box<dyn LinkSender>,
    gate: Gate,
}

impl LinkSender for Sender {
    fn window(&mut self) -> Result<&mut [u8]> {
        if self.gate.is_open() { self.inner.window() } else { Ok(&mut []) }
    }

    fn commit(&mut self, bytes: usize) -> Result<()> {
        self.inner.commit(bytes)
    }

    fn flush(&mut self) -> Result<bool> {
        self.inner.flush()
    }

    fn is_on_demand(&self) -> bool {
        true
    }

    fn request_open(&mut self) {
        self.gate.asked[self.gate.side].store(true, Ordering::Release);
    }
}

struct Receiver {
    inner: Box<dyn LinkReceiver>,
    gate: Gate,
}

impl LinkReceiver for Receiver {
    fn window(&mut self) -> Result<&[u8]> {
        if self.gate.is_open() { self.inner.window() } else { Ok(&[]) }
    }

    fn check_not_ended(&mut self, seen_bytes: usize) -> Result<()> {
        self.inner.check_not_ended(seen_bytes)
    }

    fn release(&mut self, bytes: usize) -> Result<()> {
        self.inner.release(bytes)
    }
}
