// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One link at a time: the member with the higher rank dials, the other one accepts.

use super::*;

impl Mesh {
    pub(super) fn accept_link(
        &self,
        peer: &Arc<PeerState>,
        channel: u32,
        capacity: usize,
        wait: &mut DialWait<'_>,
    ) -> Result<Link> {
        let (theirs, arrival) = self.await_dialed_connection((channel, 0), peer, wait)?;
        let capacity = RingSegment::round_capacity(capacity);
        // Both ends must agree on the size of the ring, or a sender would wait for space that never
        // comes.
        if theirs != capacity as u64 {
            return Err(capacity_mismatch_error(peer.rank, channel, theirs, capacity));
        }
        match arrival {
            ArrivedConnection::SharedMemory { sender, receiver, bell } => Ok(Link {
                peer: peer.rank,
                kind: LinkKind::SharedMemory,
                capacity,
                sender: Box::new(RingSender::new(
                    sender,
                    Arc::clone(peer),
                    Some(Arc::clone(&bell)),
                )),
                receiver: Box::new(RingReceiver::new(receiver, Arc::clone(peer), Some(bell))),
            }),
            ArrivedConnection::Tcp { secured, streams } => {
                let mut connections = vec![secured];
                for stream in 1..streams {
                    match self.await_dialed_connection((channel, stream), peer, wait)? {
                        (_, ArrivedConnection::Tcp { secured, .. }) => connections.push(secured),
                        (_, ArrivedConnection::SharedMemory { .. }) => {
                            return Err(peer.loss_error_or("it mixed two kinds of links"));
                        }
                    }
                }
                self.open_tcp_link(peer, channel, connections, capacity)
            }
        }
    }

    /// Waits for the peer to dial. The peer may not be watched yet, so a long wait probes whether
    /// it still listens.
    pub(super) fn await_dialed_connection(
        &self,
        place: (u32, u16),
        peer: &Arc<PeerState>,
        wait: &mut DialWait<'_>,
    ) -> Result<(u64, ArrivedConnection)> {
        let started = Instant::now();
        let deadline = wait.deadline;
        let mut last_progress = started;
        loop {
            let pause = deadline.min(Instant::now() + PROBE_INTERVAL);
            let waited = match self.shared.arrivals.await_arrived_connection(place, peer, pause) {
                Err(Error::Timeout { what, .. }) => what,
                other => return other,
            };
            if pause == deadline {
                return Err(Error::Timeout { what: waited, elapsed: started.elapsed() });
            }
            wait.check_give_up()?;
            match self.probe_peer_listener(peer, deadline)? {
                Some(true) => last_progress = Instant::now(),
                Some(false) => {
                    return Err(peer.loss_error_or("it no longer listens at any of its addresses"));
                }
                None if last_progress.elapsed() > self.shared.peer_timeout => {
                    return Err(peer.loss_error_or("nothing answers at any of its addresses"));
                }
                None => {}
            }
        }
    }

    pub(super) fn probe_peer_listener(
        &self,
        peer: &PeerState,
        deadline: Instant,
    ) -> Result<Option<bool>> {
        let Some(their_addresses) = self.peer_addresses.get(peer.rank.index()) else {
            return Ok(None);
        };
        let same_host = their_addresses.host.machine_name() == self.options.host.machine_name();
        let local = (same_host && !their_addresses.unix_socket_name.is_empty())
            .then_some(their_addresses.unix_socket_name.as_str());
        dial::probe_listener(
            local,
            &addresses::order_for_dialing(&their_addresses.addresses, same_host),
            deadline.min(Instant::now() + PROBE_INTERVAL),
        )
    }

    pub(super) fn dial_link(
        &self,
        peer: &Arc<PeerState>,
        channel: u32,
        capacity: usize,
        wait: &mut DialWait<'_>,
    ) -> Result<Link> {
        let capacity = RingSegment::round_capacity(capacity);
        let their_addresses = self
            .peer_addresses
            .get(peer.rank.index())
            .ok_or_else(|| peer.loss_error_or("it never joined"))?;
        let same_host = their_addresses.host.machine_name() == self.options.host.machine_name();
        if let Some(error) = peer.loss_error() {
            return Err(error);
        }
        if same_host
            && !their_addresses.unix_socket_name.is_empty()
            && let Some(link) = self.dial_shared_memory_link(
                peer,
                &their_addresses.unix_socket_name,
                channel,
                capacity,
                wait,
            )?
        {
            return Ok(link);
        }
        let way = self.peer_routes(peer.rank);
        // Heartbeats come first: a peer that stops while the links open is then noticed.
        self.dial_heartbeat_channel(peer, way.peer_addresses(), wait)?;
        let call = LinkRequest { to: peer, channel, capacity: capacity as u64 };
        let connections = way.dial_connections(&self.shared, &call, wait)?;
        self.open_tcp_link(peer, channel, connections, capacity)
    }

    /// Dials the heartbeat connection to a peer, if one is needed and does not exist yet.
    pub(super) fn dial_heartbeat_channel(
        &self,
        peer: &Arc<PeerState>,
        addresses: &[SocketAddr],
        wait: &mut DialWait<'_>,
    ) -> Result<()> {
        // Two channels to a peer may be opened at the same time, but they need only one heartbeat
        // connection.
        let _one_at_a_time = peer.handover.lock();
        if !self.heartbeat_peers.contains(&peer.rank)
            || self.heartbeat_channels.lock().contains(&peer.rank)
        {
            return Ok(());
        }
        let carrier = ConnectionCarrier::Control;
        let request = DialRequest {
            to: peer,
            carrier,
            channel: CONTROL_CHANNEL,
            stream: (0, 1),
            capacity: 0,
        };
        let secured = dial::dial_any_address(&self.shared, &request, addresses, wait)?;
        // The handshake needs a blocking socket, and the service thread must never wait for one
        // peer.
        rustix::io::ioctl_fionbio(&secured.socket, true)
            .map_err(Error::failed_call_mapper("ioctl"))?;
        self.shared.inbox.queue_peer_watch(PeerWatch::watch_remote(Arc::clone(peer), secured));
        // Recorded only after success, so a later link tries again after a failed dial.
        self.heartbeat_channels.lock().insert(peer.rank);
        Ok(())
    }

    pub(super) fn open_tcp_link(
        &self,
        peer: &Arc<PeerState>,
        channel: u32,
        connections: Vec<SecuredConnection>,
        capacity: usize,
    ) -> Result<Link> {
        let congestion = &self.options.congestion;
        let (link, below) = tcp::link_over_connections(
            connections,
            Arc::clone(peer),
            &self.shared,
            channel,
            capacity,
            congestion,
        )?;
        // A weak reference: the service thread must not keep a dropped link and its sockets open.
        self.shared.inbox.queue_monitored_link(Arc::downgrade(&below) as _);
        Ok(link)
    }

    /// Opens a link over shared memory. Returns `None` if that is impossible; the caller then uses
    /// TCP. After the peer may have accepted its end, TCP is no longer allowed, because the two
    /// ranks would hold different links.
    pub(super) fn dial_shared_memory_link(
        &self,
        peer: &Arc<PeerState>,
        name: &str,
        channel: u32,
        capacity: usize,
        wait: &mut DialWait<'_>,
    ) -> Result<Option<Link>> {
        if !self.options.use_shared_memory {
            return Ok(None);
        }
        let fall_back = |reason: String| {
            self.fallbacks.lock().push((peer.rank, reason));
            Ok(None)
        };
        // The kernel allocates the pages at their first use. Without a budget, memory that is too
        // small would end the process in the middle of a step.
        let lease = match self.budget.reserve_bytes(capacity as u64) {
            Ok(lease) => Arc::new(lease),
            Err(reason) => return fall_back(reason),
        };
        // Handshakes with a peer run one after the other: both ends use the socket of the first one
        // to detect the death of the peer.
        let _one_at_a_time = peer.handover.lock();
        let mut silence = DialSilence::default();
        loop {
            wait.check_give_up()?;
            let began = Instant::now();
            match self.exchange_segment(
                peer,
                name,
                channel,
                capacity,
                &lease,
                wait.attempt_deadline(&self.shared),
            ) {
                Ok(link) => return Ok(Some(link)),
                // A peer with another key is an error, not a reason to use TCP.
                Err(DialFailure::Unauthenticated(reason)) => {
                    return Err(Error::Handshake { reason });
                }
                Err(DialFailure::LocalError(error)) => return Err(error),
                Err(DialFailure::Broken(reason)) => {
                    return Err(peer.loss_error_or(&format!(
                        "the handover of shared memory broke off: {reason}"
                    )));
                }
                Err(DialFailure::Silent(_)) if Instant::now() < wait.deadline => {
                    silence.record_attempt(began);
                    if silence.exceeds_timeout(self.shared.peer_timeout) {
                        return Err(
                            peer.loss_error_or("it accepts connections but does not answer")
                        );
                    }
                }
                Err(failure) => return fall_back(failure.to_string()),
            }
        }
    }

    pub(super) fn exchange_segment(
        &self,
        peer: &Arc<PeerState>,
        name: &str,
        channel: u32,
        capacity: usize,
        lease: &Arc<RingByteReservation>,
        deadline: Instant,
    ) -> std::result::Result<Link, DialFailure> {
        let failed = |error: farandole_shm::Error| DialFailure::Unanswered(error.to_string());
        let segment = RingSegment::create(2, capacity).map_err(failed)?;
        let (sender, receiver) =
            (segment.take_producer(0).map_err(failed)?, segment.take_consumer(1).map_err(failed)?);
        let request = DialRequest {
            to: peer,
            carrier: ConnectionCarrier::SharedMemory,
            channel,
            stream: (0, 1),
            capacity: capacity as u64,
        };
        let mut own = vec![segment.as_fd()];
        own.extend(self.shared.parker.own_doorbell().shared_descriptors());
        own.extend(self.shared.pidfd.as_ref().map(AsFd::as_fd));
        let socket = dial::connect_unix_socket(name, deadline)?;
        let (socket, _, theirs) =
            dial::perform_handshake(&self.shared, &request, socket, &own, deadline)?;
        let mut theirs = theirs.into_iter();
        let (Some(memory), Some(event)) = (theirs.next(), theirs.next()) else {
            return Err(DialFailure::Broken("no bell was handed over".to_owned()));
        };
        let (bell, first) = peer
            .adopt_doorbell(memory, event)
            .map_err(|error| DialFailure::LocalError(peer.convert_shm_error(error)))?;
        let end = self.shared.process_end_descriptor(theirs.next(), socket, first);
        if first {
            self.shared.inbox.queue_peer_watch(PeerWatch::watch_local(
                Arc::clone(peer),
                Arc::clone(&bell),
                end,
            ));
        }
        let sender = RingSender::new(sender, Arc::clone(peer), Some(Arc::clone(&bell)));
        let receiver = RingReceiver::new(receiver, Arc::clone(peer), Some(bell));
        Ok(Link {
            peer: peer.rank,
            kind: LinkKind::SharedMemory,
            capacity,
            sender: Box::new(sender.with_reservation(lease)),
            receiver: Box::new(receiver.with_reservation(lease)),
        })
    }
}
