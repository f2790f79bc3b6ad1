// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The connections of a link between two hosts with several interfaces. They use the pairs of
//! interfaces in turn.
//!
//! ```text
//!  own interface  0 ──── connections 0, 2, ... ──── interface 0  of the peer
//!                 1 ──── connections 1, 3, ... ──── interface 1
//! ```
//!
//! A connection comes from the own address of its pair, so the rules of the kernel for sources
//! apply to it. If no connection can be made over a pair, the pair is not tried again, and its
//! connections use the next pair. If no pair is left, they use any address at which the peer can be
//! reached.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::Result;
use crate::addresses::{AddressPair, ListenAddress, NumberedInterfaceAddress};
use crate::dial::{self, DialRequest, DialWait};
use crate::dial_failure::DialFailure;
use crate::handshake::ConnectionCarrier;
use crate::mesh_state::MeshState;
use crate::peer_state::PeerState;
use crate::secured_connection::SecuredConnection;
use crate::tcp::stripes;

/// Returns a pair for each interface that both hosts have. Returns none if each host has at most
/// one address: the kernel then chooses the route.
pub(crate) fn pair_interfaces(
    own: &[NumberedInterfaceAddress],
    theirs: &[ListenAddress],
) -> Vec<AddressPair> {
    if own.len() < 2 && theirs.len() < 2 {
        return Vec::new();
    }
    let of = |interface: &NumberedInterfaceAddress| {
        let mut found = theirs.iter().filter(|address| address.interface == interface.number);
        // A rank that named no interfaces publishes all its addresses under one number.
        let to = found.next().filter(|_| found.next().is_none())?.socket;
        let from = interface.address;
        // A socket that is bound to one family cannot connect to an address of the other.
        (from.is_ipv4() == to.is_ipv4()).then_some(AddressPair { from, to })
    };
    own.iter().filter_map(of).take(usize::from(stripes::MAX_STREAMS_PER_LINK)).collect()
}

/// Returns the number of connections of a link if `streams` were asked for: the same number for
/// each pair.
pub(crate) fn streams_per_link(streams: u16, pairs: usize) -> u16 {
    let streams = streams.clamp(1, stripes::MAX_STREAMS_PER_LINK);
    match u16::try_from(pairs).unwrap_or(u16::MAX).min(stripes::MAX_STREAMS_PER_LINK) {
        0 => streams,
        // Blocks go to the connections in turn, so a pair with fewer connections would carry fewer
        // bytes.
        pairs => streams.next_multiple_of(pairs).min(stripes::MAX_STREAMS_PER_LINK / pairs * pairs),
    }
}

/// A link to dial.
pub(crate) struct LinkRequest<'a> {
    pub(crate) to: &'a Arc<PeerState>,
    pub(crate) channel: u32,
    pub(crate) capacity: u64,
}

/// The addresses and connections that links to a peer use.
#[derive(Clone, Debug)]
pub(crate) struct PeerRoutes {
    /// All addresses of the peer, in the order in which they are tried.
    addresses: Vec<SocketAddr>,
    /// Pairs that connections use in turn.
    pairs: Vec<AddressPair>,
    /// Connections of a link.
    streams: u16,
}

impl PeerRoutes {
    pub(crate) fn new(addresses: Vec<SocketAddr>, pairs: Vec<AddressPair>, streams: u16) -> Self {
        let streams = streams_per_link(streams, pairs.len());
        Self { addresses, pairs, streams }
    }

    pub(crate) fn peer_addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Dials all connections of a link, in their order.
    pub(crate) fn dial_connections(
        &self,
        shared: &MeshState,
        call: &LinkRequest<'_>,
        wait: &mut DialWait<'_>,
    ) -> Result<Vec<SecuredConnection>> {
        let connect = |number| {
            let request = DialRequest {
                to: call.to,
                carrier: ConnectionCarrier::Tcp,
                channel: call.channel,
                stream: (number, self.streams),
                capacity: call.capacity,
            };
            self.dial_connection(shared, &request, wait)
        };
        (0..self.streams).map(connect).collect()
    }

    fn dial_connection(
        &self,
        shared: &MeshState,
        request: &DialRequest<'_>,
        wait: &mut DialWait<'_>,
    ) -> Result<SecuredConnection> {
        let first = usize::from(request.stream.0) % self.pairs.len().max(1);
        let (later, sooner) = self.pairs.split_at(first.min(self.pairs.len()));
        for pair in sooner.iter().chain(later) {
            if request.to.failed_pairs.lock().contains(pair) {
                continue;
            }
            match dial::dial_address_pair(shared, request, *pair, wait)? {
                Ok(secured) => {
                    *request.to.last_address.lock() = Some(pair.to);
                    return Ok(secured);
                }
                // No connection could be made over this pair.
                Err(failure @ (DialFailure::Refused(_) | DialFailure::Unanswered(_))) => {
                    mark_pair_failed(shared, request.to, *pair, &failure);
                }
                // The peer was reached, and another pair leads to the same process.
                Err(_) => break,
            }
        }
        dial::dial_any_address(shared, request, &self.addresses, wait)
    }
}

/// Excludes a pair from further attempts. Logs one warning for each address of this host, because
/// the cause is often at this end and then affects all peers.
fn mark_pair_failed(
    shared: &MeshState,
    peer: &PeerState,
    pair: AddressPair,
    failure: &DialFailure,
) {
    peer.failed_pairs.lock().push(pair);
    let (rank, host) = (peer.rank, peer.host.get().map_or("", String::as_str));
    let AddressPair { from, to } = pair;
    let (address, reason) = (format!("{to}: "), failure.to_string());
    let reason = reason.strip_prefix(&address).unwrap_or(&reason);
    if shared.warned_addresses.lock().insert(from) {
        tracing::warn!(
            "links to rank {rank} on {host} do not use the interface with {from}, because no \
             connection to {to} came about: {reason}. They use the other interfaces"
        );
    } else {
        tracing::debug!("no connection from {from} to {to} of rank {rank} on {host}: {reason}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(number: u16, address: &str) -> NumberedInterfaceAddress {
        NumberedInterfaceAddress { number, address: address.parse().unwrap() }
    }

    fn address(interface: u16, socket: &str) -> ListenAddress {
        ListenAddress { socket: socket.parse().unwrap(), interface }
    }

    #[test]
    fn interfaces_that_both_hosts_have_make_pairs_in_their_order() {
        let own = [interface(0, "10.0.0.1"), interface(1, "10.1.0.1"), interface(3, "10.3.0.1")];
        let theirs = [address(1, "10.1.0.2:7"), address(2, "10.2.0.2:7"), address(3, "10.3.0.2:8")];
        let pair = |from: &str, to: &str| AddressPair {
            from: from.parse().unwrap(),
            to: to.parse().unwrap(),
        };
        let both = [pair("10.1.0.1", "10.1.0.2:7"), pair("10.3.0.1", "10.3.0.2:8")];
        assert_eq!(pair_interfaces(&own, &theirs), both);
        assert_eq!(pair_interfaces(&own[1..2], &theirs), both[..1], "it has one of several");
        assert_eq!(pair_interfaces(&own, &theirs[..1]), both[..1], "the peer has one of several");
        assert_eq!(pair_interfaces(&own, &[address(1, "[fd00::2]:7")]), [], "another family");
    }

    #[test]
    fn hosts_that_name_no_interfaces_have_no_pairs() {
        let named = [interface(0, "10.0.0.1")];
        let all = [address(0, "10.0.0.2:7"), address(0, "10.1.0.2:7")];
        assert_eq!(pair_interfaces(&[], &all), []);
        assert_eq!(pair_interfaces(&named, &all[..1]), [], "one each");
        assert_eq!(pair_interfaces(&named, &all), [], "the peer has named none");
    }

    #[test]
    fn each_pair_has_as_many_connections_as_the_others() {
        assert_eq!([1, 4, 0, 99].map(|streams| streams_per_link(streams, 0)), [1, 4, 1, 16]);
        assert_eq!([1, 2, 3, 16].map(|streams| streams_per_link(streams, 2)), [2, 2, 4, 16]);
        assert_eq!([1, 4, 16].map(|streams| streams_per_link(streams, 3)), [3, 6, 15]);
        assert_eq!((streams_per_link(1, 16), streams_per_link(1, 40)), (16, 16));
    }
}
