// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links that count.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use farandole_transport::{Link, LinkSender, Result};

/// The link, which adds the bytes that are sent over it to `sent`.
pub fn counted(link: Link, sent: &Arc<AtomicUsize>) -> Link {
    let Link { peer, kind, capacity, sender, receiver } = link;
    let sender = Box::new(Counter { inner: sender, sent: Arc::clone(sent) });
    Link { peer, kind, capacity, sender, receiver }
}

struct Counter {
    inner: Box<dyn LinkSender>,
    sent: Arc<AtomicUsize>,
}

impl LinkSender for Counter {
    fn window(&mut self) -> Result<&mut [u8]> {
        self.inner.window()
    }

    fn commit(&mut self, bytes: usize) -> Result<()> {
        self.inner.commit(bytes)?;
        self.sent.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn flush(&mut self) -> Result<bool> {
        self.inner.flush()
    }

    fn is_on_demand(&self) -> bool {
        self.inner.is_on_demand()
    }

    fn request_open(&mut self) {
        self.inner.request_open();
    }
}
