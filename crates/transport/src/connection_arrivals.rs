// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Connections of links that peers have dialled, until the links take them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use farandole_shm::{ProcessDoorbell, RingConsumer, RingProducer};
use farandole_world::Rank;
use parking_lot::{Condvar, Mutex};

use crate::peer_state::PeerState;
use crate::secured_connection::SecuredConnection;
use crate::{Error, Result};

/// A connection of a link that an authenticated peer has dialled.
#[derive(Debug)]
pub(crate) enum ArrivedConnection {
    SharedMemory { sender: RingProducer, receiver: RingConsumer, bell: Arc<ProcessDoorbell> },
    Tcp { secured: SecuredConnection, streams: u16 },
}

/// Key of an arrival: channel, peer, number of the connection.
pub(crate) type ArrivalKey = (u32, Rank, u16);

/// The arrived connections.
#[derive(Default)]
pub(crate) struct ConnectionArrivals {
    /// Arrived connections, with the capacity of their rings. Lock order: no other lock is taken
    /// while this is held.
    waiting: Mutex<HashMap<ArrivalKey, (u64, ArrivedConnection)>>,
    arrived: Condvar,
}

impl ConnectionArrivals {
    /// Adds a connection, and returns an earlier one with the same key, which its dialer has given
    /// up.
    pub(crate) fn add_connection(
        &self,
        place: ArrivalKey,
        capacity: u64,
        arrival: ArrivedConnection,
    ) -> Option<(u64, ArrivedConnection)> {
        let replaced = self.waiting.lock().insert(place, (capacity, arrival));
        self.arrived.notify_all();
        replaced
    }

    /// Takes the connections of a link that `peer` has dialled over TCP, with the capacity of its
    /// rings. Returns `None` until all connections have arrived.
    pub(crate) fn take_connections(
        &self,
        channel: u32,
        peer: &PeerState,
    ) -> Option<(u64, Vec<SecuredConnection>)> {
        let place = |stream| (channel, peer.rank, stream);
        let mut arrivals = self.waiting.lock();
        let (capacity, ArrivedConnection::Tcp { streams, .. }) = arrivals.get(&place(0))? else {
            return None;
        };
        let (capacity, streams) = (*capacity, *streams);
        // Nothing is removed before all connections are here: a caller that polls must find them
        // next time.
        if !(1..streams).all(|stream| arrivals.contains_key(&place(stream))) {
            return None;
        }
        let connection = |stream| match arrivals.remove(&place(stream)) {
            Some((_, ArrivedConnection::Tcp { secured, .. })) => Some(secured),
            _ => None,
        };
        Some((capacity, (0..streams).filter_map(connection).collect()))
    }

    /// Waits for a connection that `peer` dials.
    pub(crate) fn await_arrived_connection(
        &self,
        (channel, stream): (u32, u16),
        peer: &PeerState,
        deadline: Instant,
    ) -> Result<(u64, ArrivedConnection)> {
        let started = Instant::now();
        let mut arrivals = self.waiting.lock();
        loop {
            if let Some(arrival) = arrivals.remove(&(channel, peer.rank, stream)) {
                return Ok(arrival);
            }
            // Arrivals come first: a peer that connected and then left in order has sent data on
            // this link.
            if let Some(error) = peer.loss_error() {
                return Err(error);
            }
            if self.arrived.wait_until(&mut arrivals, deadline).timed_out() {
                let host = peer.host.get().map_or("", String::as_str);
                let what = format!("rank {} on {host} to open channel {channel}", peer.rank);
                return Err(Error::Timeout { what, elapsed: started.elapsed() });
            }
        }
    }

    /// Lets all waiting threads check whether their peers were lost.
    pub(crate) fn wake_waiting_threads(&self) {
        // A thread that has just checked is in its wait once the lock is free.
        drop(self.waiting.lock());
        self.arrived.notify_all();
    }
}
