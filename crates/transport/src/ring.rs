// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Link halves over rings that both ends map: shared memory, and loopback within a process.

use std::sync::Arc;

use farandole_shm::{Bell, Consumer, Producer};

use crate::budget::Lease;
use crate::peer::Peer;
use crate::{LinkReceiver, LinkSender, Result};

/// Message of a link whose peer dropped its half.
const CLOSED: &str = "it closed the link";

pub(crate) struct RingSender {
    producer: Producer,
    peer: Arc<Peer>,
    /// The peer's; `None` if the peer has no sleeper.
    bell: Option<Arc<Bell>>,
    _lease: Option<Arc<Lease>>,
}

impl RingSender {
    pub(crate) fn new(producer: Producer, peer: Arc<Peer>, bell: Option<Arc<Bell>>) -> Self {
        Self { producer, peer, bell, _lease: None }
    }

    /// The memory counts as taken until both halves are dropped.
    pub(crate) fn leased(mut self, lease: &Arc<Lease>) -> Self {
        self._lease = Some(Arc::clone(lease));
        self
    }

    fn alive(&self) -> Result<()> {
        if let Some(error) = self.peer.lost() {
            return Err(error);
        }
        if self.producer.closed() { Err(self.peer.gone(CLOSED)) } else { Ok(()) }
    }
}

impl LinkSender for RingSender {
    fn window(&mut self) -> Result<&mut [u8]> {
        self.alive()?;
        let peer = &self.peer;
        self.producer.window().map_err(|error| peer.fault(error))
    }

    fn commit(&mut self, bytes: usize) -> Result<()> {
        self.producer.commit(bytes).map_err(|error| self.peer.fault(error))?;
        ring(self.bell.as_deref(), &self.peer)
    }

    /// Nothing is ever left here, so there is nothing to fail.
    fn flush(&mut self) -> Result<bool> {
        Ok(true)
    }
}

impl Drop for RingSender {
    fn drop(&mut self) {
        self.producer.close();
        // A bell that cannot be rung has no one to hear it.
        drop(ring(self.bell.as_deref(), &self.peer));
    }
}

pub(crate) struct RingReceiver {
    consumer: Consumer,
    peer: Arc<Peer>,
    bell: Option<Arc<Bell>>,
    _lease: Option<Arc<Lease>>,
}

impl RingReceiver {
    pub(crate) fn new(consumer: Consumer, peer: Arc<Peer>, bell: Option<Arc<Bell>>) -> Self {
        Self { consumer, peer, bell, _lease: None }
    }

    /// As the sender's.
    pub(crate) fn leased(mut self, lease: &Arc<Lease>) -> Self {
        self._lease = Some(Arc::clone(lease));
        self
    }

    fn used(&self) -> Result<usize> {
        self.consumer.used().map_err(|error| self.peer.fault(error))
    }
}

impl LinkReceiver for RingReceiver {
    fn window(&mut self) -> Result<&[u8]> {
        if self.used()? == 0 {
            self.awaits()?;
        }
        let peer = &self.peer;
        self.consumer.window().map_err(|error| peer.fault(error))
    }

    fn awaits(&mut self) -> Result<()> {
        let seen = self.used()?;
        let end =
            self.peer.lost().or_else(|| self.consumer.closed().then(|| self.peer.gone(CLOSED)));
        // What was committed before the end may have become visible only now.
        match end {
            Some(error) if self.used()? == seen => Err(error),
            _ => Ok(()),
        }
    }

    fn release(&mut self, bytes: usize) -> Result<()> {
        if self.consumer.release(bytes).map_err(|error| self.peer.fault(error))? {
            ring(self.bell.as_deref(), &self.peer)?;
        }
        Ok(())
    }
}

impl Drop for RingReceiver {
    fn drop(&mut self) {
        self.consumer.close();
        // As for the sender.
        drop(ring(self.bell.as_deref(), &self.peer));
    }
}

fn ring(bell: Option<&Bell>, peer: &Peer) -> Result<()> {
    bell.map_or(Ok(()), Bell::ring_if_parked).map_err(|error| peer.fault(error))
}
