// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Link halves over rings that both ends map: shared memory, and loopback within a process.

use std::sync::Arc;

use farandole_shm::{ProcessDoorbell, RingConsumer, RingProducer};

use crate::link_traffic::count_sent_bytes;
use crate::peer_state::PeerState;
use crate::ring_byte_budget::RingByteReservation;
use crate::{LinkKind, LinkReceiver, LinkSender, Result};

/// Reason of the loss when the peer dropped its half of the link.
const LINK_CLOSED_REASON: &str = "it closed the link";

pub(crate) struct RingSender {
    producer: RingProducer,
    peer: Arc<PeerState>,
    /// Doorbell of the peer; `None` if no thread of the peer sleeps.
    bell: Option<Arc<ProcessDoorbell>>,
    _reservation: Option<Arc<RingByteReservation>>,
}

impl RingSender {
    pub(crate) fn new(
        producer: RingProducer,
        peer: Arc<PeerState>,
        bell: Option<Arc<ProcessDoorbell>>,
    ) -> Self {
        Self { producer, peer, bell, _reservation: None }
    }

    /// Keeps the reservation of the memory until both halves are dropped.
    pub(crate) fn with_reservation(mut self, lease: &Arc<RingByteReservation>) -> Self {
        self._reservation = Some(Arc::clone(lease));
        self
    }

    fn check_peer_alive(&self) -> Result<()> {
        if let Some(error) = self.peer.loss_error() {
            return Err(error);
        }
        if self.producer.is_consumer_closed() {
            Err(self.peer.loss_error_or(LINK_CLOSED_REASON))
        } else {
            Ok(())
        }
    }
}

impl LinkSender for RingSender {
    fn window(&mut self) -> Result<&mut [u8]> {
        self.check_peer_alive()?;
        let peer = &self.peer;
        self.producer.window().map_err(|error| peer.convert_shm_error(error))
    }

    fn commit(&mut self, bytes: usize) -> Result<()> {
        self.producer.commit(bytes).map_err(|error| self.peer.convert_shm_error(error))?;
        count_sent_bytes(LinkKind::SharedMemory, bytes);
        ring_peer_doorbell(self.bell.as_deref(), &self.peer)
    }

    /// Returns true: committed bytes are already in shared memory.
    fn flush(&mut self) -> Result<bool> {
        Ok(true)
    }
}

impl Drop for RingSender {
    fn drop(&mut self) {
        // The mark comes first: a peer that wakes by the ring must find it.
        self.producer.close();
        // If the doorbell cannot be rung, no peer waits for it.
        drop(ring_peer_doorbell(self.bell.as_deref(), &self.peer));
    }
}

pub(crate) struct RingReceiver {
    consumer: RingConsumer,
    peer: Arc<PeerState>,
    bell: Option<Arc<ProcessDoorbell>>,
    _reservation: Option<Arc<RingByteReservation>>,
}

impl RingReceiver {
    pub(crate) fn new(
        consumer: RingConsumer,
        peer: Arc<PeerState>,
        bell: Option<Arc<ProcessDoorbell>>,
    ) -> Self {
        Self { consumer, peer, bell, _reservation: None }
    }

    /// Keeps the reservation of the memory, like [`RingSender::with_reservation`].
    pub(crate) fn with_reservation(mut self, lease: &Arc<RingByteReservation>) -> Self {
        self._reservation = Some(Arc::clone(lease));
        self
    }

    fn used_bytes(&self) -> Result<usize> {
        self.consumer.used_bytes().map_err(|error| self.peer.convert_shm_error(error))
    }
}

impl LinkReceiver for RingReceiver {
    fn window(&mut self) -> Result<&[u8]> {
        if self.used_bytes()? == 0 {
            self.check_not_ended(0)?;
        }
        let peer = &self.peer;
        self.consumer.window().map_err(|error| peer.convert_shm_error(error))
    }

    fn check_not_ended(&mut self, seen_bytes: usize) -> Result<()> {
        let end = self.peer.loss_error().or_else(|| {
            self.consumer.is_producer_closed().then(|| self.peer.loss_error_or(LINK_CLOSED_REASON))
        });
        // The peer may have committed bytes and closed the link since the caller's window.
        match end {
            Some(error) if self.used_bytes()? <= seen_bytes => Err(error),
            _ => Ok(()),
        }
    }

    fn release(&mut self, bytes: usize) -> Result<()> {
        // The producer asks for this signal when the ring is full. A ring of the doorbell for each
        // release would cost a system call.
        if self.consumer.release(bytes).map_err(|error| self.peer.convert_shm_error(error))? {
            ring_peer_doorbell(self.bell.as_deref(), &self.peer)?;
        }
        Ok(())
    }
}

impl Drop for RingReceiver {
    fn drop(&mut self) {
        self.consumer.close();
        // A failure does not matter, as for the sender.
        drop(ring_peer_doorbell(self.bell.as_deref(), &self.peer));
    }
}

fn ring_peer_doorbell(bell: Option<&ProcessDoorbell>, peer: &PeerState) -> Result<()> {
    bell.map_or(Ok(()), ProcessDoorbell::ring_if_parked)
        .map_err(|error| peer.convert_shm_error(error))
}

#[cfg(test)]
mod tests {
    use farandole_world::Rank;

    use crate::loopback::link_pair;

    /// Enough for the sender to commit and close between two loads of the receiver many times.
    const ROUNDS: usize = 20_000;

    #[test]
    fn a_byte_that_arrives_with_the_close_is_read_before_the_error() {
        for round in 0..ROUNDS {
            let (mut a, mut b) = link_pair(Rank(0), Rank(1), 4096).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    a.sender.window().unwrap()[0] = 7;
                    a.sender.commit(1).unwrap();
                });
                while b.receiver.window().unwrap_or_else(|end| panic!("{round}: {end}")).is_empty()
                {
                }
            });
        }
    }
}
