// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The connections of a link between two hosts that have several interfaces: they take turns with
//! the pairs of addresses.
//!
//! ```text
//!  own interface  0 ──── connections 0, 2, ... ──── interface 0  of the peer
//!                 1 ──── connections 1, 3, ... ──── interface 1
//! ```
//!
//! A connection comes from the own address of its pair, so the rules of the kernel for sources
//! apply to it. A pair over which no connection comes about is not tried again; its connections use
//! the next pair. If there is none, they go wherever the peer can be reached.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::Result;
use crate::addresses::{Address, Interface};
use crate::dial::{self, Failure, Request, Wait};
use crate::handshake::Carrier;
use crate::peer::Peer;
use crate::shared::{Secured, Shared};
use crate::tcp::stripes;

/// Addresses of one interface of each host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) from: IpAddr,
    pub(crate) to: SocketAddr,
}

/// Returns a pair for each interface that both hosts have. None if one address is all that either
/// has named: the kernel then chooses the way.
pub(crate) fn pairs(own: &[Interface], theirs: &[Address]) -> Vec<Pair> {
    if own.len() < 2 && theirs.len() < 2 {
        return Vec::new();
    }
    let of = |interface: &Interface| {
        let mut found = theirs.iter().filter(|address| address.interface == interface.number);
        // A rank that has named none publishes all its addresses under one number.
        let to = found.next().filter(|_| found.next().is_none())?.socket;
        let from = interface.address;
        (from.is_ipv4() == to.is_ipv4()).then_some(Pair { from, to })
    };
    own.iter().filter_map(of).take(usize::from(stripes::MOST)).collect()
}

/// Returns the number of connections of a link if `streams` were asked for: as many for each pair.
pub(crate) fn rounded(streams: u16, pairs: usize) -> u16 {
    let streams = streams.clamp(1, stripes::MOST);
    match u16::try_from(pairs).unwrap_or(u16::MAX).min(stripes::MOST) {
        0 => streams,
        pairs => streams.next_multiple_of(pairs).min(stripes::MOST / pairs * pairs),
    }
}

/// A link to dial.
pub(crate) struct Call<'a> {
    pub(crate) to: &'a Arc<Peer>,
    pub(crate) channel: u32,
    pub(crate) capacity: u64,
}

/// The way of links to a peer.
#[derive(Clone, Debug)]
pub(crate) struct Way {
    /// All addresses of the peer, in the order in which they are tried.
    addresses: Vec<SocketAddr>,
    /// Pairs that connections take turns with.
    pairs: Vec<Pair>,
    /// Connections of a link.
    streams: u16,
}

impl Way {
    pub(crate) fn new(addresses: Vec<SocketAddr>, pairs: Vec<Pair>, streams: u16) -> Self {
        let streams = rounded(streams, pairs.len());
        Self { addresses, pairs, streams }
    }

    pub(crate) fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Dials all connections of a link, in their order.
    pub(crate) fn connect(
        &self,
        shared: &Shared,
        call: &Call<'_>,
        wait: &mut Wait<'_>,
    ) -> Result<Vec<Secured>> {
        let connect = |number| {
            let request = Request {
                to: call.to,
                carrier: Carrier::Tcp,
                channel: call.channel,
                stream: (number, self.streams),
                capacity: call.capacity,
            };
            self.connect_one(shared, &request, wait)
        };
        (0..self.streams).map(connect).collect()
    }

    fn connect_one(
        &self,
        shared: &Shared,
        request: &Request<'_>,
        wait: &mut Wait<'_>,
    ) -> Result<Secured> {
        let first = usize::from(request.stream.0) % self.pairs.len().max(1);
        let (later, sooner) = self.pairs.split_at(first.min(self.pairs.len()));
        for pair in sooner.iter().chain(later) {
            if request.to.dead.lock().contains(pair) {
                continue;
            }
            match dial::over(shared, request, *pair, wait)? {
                Ok(secured) => {
                    *request.to.reached.lock() = Some(pair.to);
                    return Ok(secured);
                }
                // No connection came about.
                Err(failure @ (Failure::Refused(_) | Failure::Unanswered(_))) => {
                    bury(shared, request.to, *pair, &failure);
                }
                // The peer was reached: another pair leads to the same process.
                Err(_) => break,
            }
        }
        dial::any(shared, request, &self.addresses, wait)
    }
}

/// A pair is not tried again. A warning says so, once for each own address: the cause is often at
/// this end, and then all peers are concerned.
fn bury(shared: &Shared, peer: &Peer, pair: Pair, failure: &Failure) {
    peer.dead.lock().push(pair);
    let (rank, host) = (peer.rank, peer.host.get().map_or("", String::as_str));
    let Pair { from, to } = pair;
    let (address, reason) = (format!("{to}: "), failure.to_string());
    let reason = reason.strip_prefix(&address).unwrap_or(&reason);
    if shared.detours.lock().insert(from) {
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

    fn interface(number: u16, address: &str) -> Interface {
        Interface { number, address: address.parse().unwrap() }
    }

    fn address(interface: u16, socket: &str) -> Address {
        Address { socket: socket.parse().unwrap(), interface }
    }

    #[test]
    fn interfaces_that_both_hosts_have_make_pairs_in_their_order() {
        let own = [interface(0, "10.0.0.1"), interface(1, "10.1.0.1"), interface(3, "10.3.0.1")];
        let theirs = [address(1, "10.1.0.2:7"), address(2, "10.2.0.2:7"), address(3, "10.3.0.2:8")];
        let pair =
            |from: &str, to: &str| Pair { from: from.parse().unwrap(), to: to.parse().unwrap() };
        let both = [pair("10.1.0.1", "10.1.0.2:7"), pair("10.3.0.1", "10.3.0.2:8")];
        assert_eq!(pairs(&own, &theirs), both);
        assert_eq!(pairs(&own[1..2], &theirs), both[..1], "it has one of several");
        assert_eq!(pairs(&own, &theirs[..1]), both[..1], "the peer has one of several");
        assert_eq!(pairs(&own, &[address(1, "[fd00::2]:7")]), [], "another family");
    }

    #[test]
    fn hosts_that_name_no_interfaces_have_no_pairs() {
        let named = [interface(0, "10.0.0.1")];
        let all = [address(0, "10.0.0.2:7"), address(0, "10.1.0.2:7")];
        assert_eq!(pairs(&[], &all), []);
        assert_eq!(pairs(&named, &all[..1]), [], "one each");
        assert_eq!(pairs(&named, &all), [], "the peer has named none");
    }

    #[test]
    fn each_pair_has_as_many_connections_as_the_others() {
        assert_eq!([1, 4, 0, 99].map(|streams| rounded(streams, 0)), [1, 4, 1, 16]);
        assert_eq!([1, 2, 3, 16].map(|streams| rounded(streams, 2)), [2, 2, 4, 16]);
        assert_eq!([1, 4, 16].map(|streams| rounded(streams, 3)), [3, 6, 15]);
        assert_eq!((rounded(1, 16), rounded(1, 40)), (16, 16));
    }
}
