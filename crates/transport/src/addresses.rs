// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The addresses of this host, in the order in which a peer tries them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::AsFd;

use farandole_config::PortRange;
use rustix::net::getpeername;

use crate::{Error, Result};

/// An address of this host to listen on, and the number of its interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumberedInterfaceAddress {
    /// Number of the interface among the named ones, from 0. Interfaces of two hosts with the same
    /// number reach each other.
    pub number: u16,
    /// The address to listen on.
    pub address: IpAddr,
}

impl From<IpAddr> for NumberedInterfaceAddress {
    fn from(address: IpAddr) -> Self {
        Self { number: 0, address }
    }
}

/// An address at which a rank listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ListenAddress {
    pub(crate) socket: SocketAddr,
    /// Number of its interface among the named ones; 0 if at most one was named.
    pub(crate) interface: u16,
}

impl From<SocketAddr> for ListenAddress {
    fn from(socket: SocketAddr) -> Self {
        Self { socket, interface: 0 }
    }
}

/// An address of this host and an address of the peer, on interfaces that reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddressPair {
    pub(crate) from: IpAddr,
    pub(crate) to: SocketAddr,
}

/// Length of the queue of connections to accept; the system may limit it further.
const LISTEN_BACKLOG: i32 = 4096;

/// Returns the addresses of this host: first the address of the default route, last the loopback.
/// Link-local addresses are omitted, because they are usable only with an interface.
pub(crate) fn local_addresses() -> Vec<IpAddr> {
    let mut found: Vec<IpAddr> = default_route_address().into_iter().collect();
    let table = |path| std::fs::read_to_string(path).unwrap_or_default();
    found.extend(parse_fib_trie(&table("/proc/net/fib_trie")).into_iter().map(IpAddr::V4));
    found.extend(parse_if_inet6(&table("/proc/net/if_inet6")).into_iter().map(IpAddr::V6));
    found.push(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let mut own: Vec<IpAddr> = Vec::new();
    for address in found {
        if !own.contains(&address) {
            own.push(address);
        }
    }
    // The sort is stable, so the address of the default route stays first.
    own.sort_by_key(IpAddr::is_loopback);
    own
}

/// Returns the source address of packets on the default route. No packet is sent.
fn default_route_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    // 192.0.2.0/24 is reserved for documentation, so no host has a route of its network, and the
    // kernel answers with the default route. Connecting a UDP socket only looks up the route.
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|address| !address.is_unspecified())
}

/// Parses the kernel's routing table, which has local addresses on the line before `/32 host
/// LOCAL`.
fn parse_fib_trie(table: &str) -> Vec<Ipv4Addr> {
    let mut found = Vec::new();
    let mut last = None;
    for line in table.lines().map(str::trim) {
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse::<Ipv4Addr>().ok();
        } else if line == "/32 host LOCAL"
            && let Some(address) = last.take()
            && !address.is_link_local()
        {
            found.push(address);
        }
    }
    found
}

/// Parses lines of the form `<32 hex digits> <interface> <prefix> <scope> <flags> <name>`; scope 20
/// is link-local.
fn parse_if_inet6(table: &str) -> Vec<Ipv6Addr> {
    table
        .lines()
        .filter_map(|line| {
            let mut fields = line.split_whitespace();
            let address = u128::from_str_radix(fields.next()?, 16).ok()?;
            (fields.nth(2)? != "20").then(|| Ipv6Addr::from(address))
        })
        .collect()
}

/// Listens on each address of `bind`, or on all addresses if `bind` is empty, at the first free
/// port of the range.
pub(crate) fn listen_on_interfaces(
    bind: &[NumberedInterfaceAddress],
    ports: PortRange,
) -> Result<(Vec<TcpListener>, Vec<ListenAddress>)> {
    if bind.is_empty() {
        return listen_anywhere(ports);
    }
    let (mut listeners, mut own) = (Vec::new(), Vec::new());
    for NumberedInterfaceAddress { number: interface, address } in bind {
        let (listener, socket) = listen_on_first_free(&[*address], ports)?;
        listeners.push(listener);
        own.push(ListenAddress { socket, interface: *interface });
    }
    Ok((listeners, own))
}

fn listen_anywhere(ports: PortRange) -> Result<(Vec<TcpListener>, Vec<ListenAddress>)> {
    let anywhere = [IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)];
    // If an IPv6 socket does not accept IPv4 connections as well, IPv4 reaches more hosts.
    let apart = std::fs::read_to_string("/proc/sys/net/ipv6/bindv6only")
        .is_ok_and(|text| text.trim() == "1");
    let (listener, socket) = listen_on_first_free(&anywhere[usize::from(apart)..], ports)?;
    let own = local_addresses().into_iter().filter(|address| socket.is_ipv6() || address.is_ipv4());
    let own = own.map(|address| SocketAddr::new(address, socket.port()).into()).collect();
    Ok((vec![listener], own))
}

/// Listens on the first of these addresses and ports that is free; returns the listener and its
/// address.
fn listen_on_first_free(hosts: &[IpAddr], ports: PortRange) -> Result<(TcpListener, SocketAddr)> {
    let mut last = "no port tried".to_owned();
    for port in ports.first..=ports.last {
        for host in hosts {
            match TcpListener::bind((*host, port)) {
                Ok(listener) => {
                    // All ranks of a large job connect at once, and a rank that finds the queue
                    // full retries only after a second.
                    rustix::net::listen(&listener, LISTEN_BACKLOG)
                        .map_err(Error::failed_call_mapper("listen"))?;
                    let socket =
                        listener.local_addr().map_err(Error::failed_call_mapper("getsockname"))?;
                    return Ok((listener, socket));
                }
                // A port that another process uses is not an error: ranks of one host share the
                // range of ports.
                Err(error) => last = format!("{host}: {error}"),
            }
        }
    }
    Err(Error::System {
        what: "bind",
        reason: format!("no free port in {}-{}: {last}", ports.first, ports.last),
    })
}

/// Returns the address of the peer, for messages.
pub(crate) fn describe_peer_address(socket: impl AsFd) -> String {
    let address =
        getpeername(socket).ok().flatten().and_then(|address| SocketAddr::try_from(address).ok());
    address.map_or("an unknown address".to_owned(), |address| address.to_string())
}

/// Returns the addresses of a peer in the order in which they are tried. On the same host, loopback
/// comes first. Otherwise loopback is used only if there is no other address, because two
/// containers of one machine may share it.
pub(crate) fn order_for_dialing(addresses: &[ListenAddress], same_host: bool) -> Vec<SocketAddr> {
    let sockets = addresses.iter().map(|address| address.socket);
    let (near, far): (Vec<_>, Vec<_>) = sockets.partition(|address| address.ip().is_loopback());
    if same_host {
        near.into_iter().chain(far).collect()
    } else if far.is_empty() {
        near
    } else {
        far
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_addresses_are_read_from_the_kernels_tables() {
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 10.1.2.3\n        /32 host LOCAL\n     \
                    |-- 10.1.2.255\n        /32 link BROADCAST\n     |-- 169.254.0.1\n        /32 \
                    host LOCAL\n";
        assert_eq!(parse_fib_trie(trie), [Ipv4Addr::new(10, 1, 2, 3)]);
        let inet6 = "fd000000000000000000000000000001 02 40 00 80 \
                     eth0\nfe800000000000000000000000000001 02 40 20 80 eth0\n";
        assert_eq!(parse_if_inet6(inet6), ["fd00::1".parse::<Ipv6Addr>().unwrap()]);
    }

    #[test]
    fn this_host_has_loopback_and_has_it_last() {
        let own = local_addresses();
        assert!(own.contains(&IpAddr::V4(Ipv4Addr::LOCALHOST)));
        let first = own.iter().position(IpAddr::is_loopback).unwrap();
        assert!(own[first..].iter().all(IpAddr::is_loopback));
    }

    #[test]
    fn a_busy_port_range_is_named_in_the_error() {
        let bind = [IpAddr::V4(Ipv4Addr::LOCALHOST).into()];
        let (listeners, _) = listen_on_interfaces(&bind, PortRange { first: 0, last: 0 }).unwrap();
        let port = listeners[0].local_addr().unwrap().port();
        let error = listen_on_interfaces(&bind, PortRange { first: port, last: port })
            .unwrap_err()
            .to_string();
        assert!(error.contains(&format!("no free port in {port}-{port}: 127.0.0.1: ")), "{error}");
    }

    #[test]
    fn each_interface_that_is_named_is_listened_on_and_no_other() {
        let interface =
            |number, last| NumberedInterfaceAddress { number, address: [127, 0, 0, last].into() };
        let bind = [interface(0, 2), interface(2, 3)];
        let (listeners, own) =
            listen_on_interfaces(&bind, PortRange { first: 0, last: 0 }).unwrap();
        let found: Vec<SocketAddr> =
            listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
        assert_eq!(own.iter().map(|address| address.socket).collect::<Vec<_>>(), found);
        let found = own.iter().map(|address| (address.interface, address.socket.ip()));
        assert_eq!(
            found.collect::<Vec<_>>(),
            bind.map(|interface| (interface.number, interface.address))
        );
        let absent = NumberedInterfaceAddress { number: 1, address: [192, 0, 2, 1].into() };
        let error =
            listen_on_interfaces(&[bind[0], absent], PortRange { first: 0, last: 0 }).unwrap_err();
        assert!(error.to_string().contains("192.0.2.1"), "{error}");
    }

    #[test]
    fn loopback_is_tried_on_the_same_host_or_for_want_of_others() {
        let sockets = ["10.0.0.1:5", "127.0.0.1:5"].map(|text| text.parse().unwrap());
        let addresses = sockets.map(ListenAddress::from);
        assert_eq!(order_for_dialing(&addresses, true)[0], sockets[1]);
        assert_eq!(order_for_dialing(&addresses, false), sockets[..1]);
        assert_eq!(order_for_dialing(&addresses[1..], false), sockets[1..]);
    }
}
