// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links that break.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use farandole_transport::{Error, Link, LinkReceiver, LinkSender, Result};
use farandole_world::Rank;

/// A link that carries `bytes` bytes towards its peer and is then lost in both directions, to both
/// ends.
pub fn cut_after(link: Link, bytes: usize) -> Link {
    let Link { peer, kind, capacity, sender, receiver } = link;
    let cut = Arc::new(AtomicBool::new(false));
    Link {
        peer,
        kind,
        capacity,
        sender: Box::new(CutSender {
            inner: Some(sender),
            peer,
            left: bytes,
            cut: Arc::clone(&cut),
        }),
        receiver: Box::new(CutReceiver { inner: Some(receiver), peer, cut }),
    }
}

struct CutSender {
    inner: Option<Box<dyn LinkSender>>,
    peer: Rank,
    left: usize,
    cut: Arc<AtomicBool>,
}

struct CutReceiver {
    inner: Option<Box<dyn LinkReceiver>>,
    peer: Rank,
    cut: Arc<AtomicBool>,
}

fn lost(rank: Rank) -> Error {
    Error::PeerLost { rank, host: "testkit".to_owned(), reason: "the link was cut".to_owned() }
}

impl CutSender {
    fn inner(&mut self) -> Result<&mut Box<dyn LinkSender>> {
        self.inner.as_mut().ok_or_else(|| lost(self.peer))
    }
}

impl LinkSender for CutSender {
    fn window(&mut self) -> Result<&mut [u8]> {
        self.inner()?.window()
    }

    fn commit(&mut self, bytes: usize) -> Result<()> {
        let sent = bytes.min(self.left);
        self.inner()?.commit(sent)?;
        self.left -= sent;
        if self.left == 0 {
            // Dropping the halves closes them for the peer too.
            self.inner = None;
            self.cut.store(true, Ordering::Release);
            return Err(lost(self.peer));
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<bool> {
        self.inner()?.flush()
    }

    fn is_on_demand(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| inner.is_on_demand())
    }

    fn request_open(&mut self) {
        if let Some(inner) = &mut self.inner {
            inner.request_open();
        }
    }
}

impl CutReceiver {
    fn inner(&mut self) -> Result<&mut Box<dyn LinkReceiver>> {
        if self.cut.load(Ordering::Acquire) {
            self.inner = None;
        }
        self.inner.as_mut().ok_or_else(|| lost(self.peer))
    }
}

impl LinkReceiver for CutReceiver {
    fn window(&mut self) -> Result<&[u8]> {
        self.inner()?.window()
    }

    fn check_not_ended(&mut self, seen_bytes: usize) -> Result<()> {
        self.inner()?.check_not_ended(seen_bytes)
    }

    fn release(&mut self, bytes: usize) -> Result<()> {
        self.inner()?.release(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farandole_transport::loopback;

    #[test]
    fn both_ends_of_a_cut_link_see_the_loss_after_what_was_carried() {
        let (a, mut b) = loopback::link_pair(Rank(0), Rank(1), 4096).unwrap();
        let mut a = cut_after(a, 10);
        assert!(a.sender.window().unwrap().len() > 10);
        a.sender.commit(4).unwrap();
        assert!(matches!(a.sender.commit(64), Err(Error::PeerLost { rank: Rank(1), .. })));
        assert!(a.receiver.window().is_err());
        assert_eq!(b.receiver.window().unwrap().len(), 10);
        b.receiver.release(10).unwrap();
        assert!(matches!(b.receiver.window(), Err(Error::PeerLost { rank: Rank(0), .. })));
    }
}
