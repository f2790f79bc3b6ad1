// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The addresses of this host, in the order in which a peer tries them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::AsFd;

use farandole_config::PortRange;
use rustix::net::getpeername;

use crate::{Error, Result};

/// An address of this host to listen on, and the interface that it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Number among the interfaces that were named, from 0. Interfaces of two hosts with the same
    /// number reach each other.
    pub number: u16,
    /// The address.
    pub address: IpAddr,
}

impl From<IpAddr> for Interface {
    fn from(address: IpAddr) -> Self {
        Self { number: 0, address }
    }
}

/// An address at which a rank listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) socket: SocketAddr,
    /// Number of its interface among those that were named; 0 if none or one was.
    pub(crate) interface: u16,
}

impl From<SocketAddr> for Address {
    fn from(socket: SocketAddr) -> Self {
        Self { socket, interface: 0 }
    }
}

/// Connections that wait to be accepted, as far as the system lets them.
const QUEUE: i32 = 4096;

/// Addresses of this host: the one that faces the default route first, loopback last. Link-local
/// ones are left out, because they mean nothing without an interface.
pub(crate) fn own() -> Vec<IpAddr> {
    let mut found: Vec<IpAddr> = primary().into_iter().collect();
    let table = |path| std::fs::read_to_string(path).unwrap_or_default();
    found.extend(ipv4(&table("/proc/net/fib_trie")).into_iter().map(IpAddr::V4));
    found.extend(ipv6(&table("/proc/net/if_inet6")).into_iter().map(IpAddr::V6));
    found.push(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let mut own: Vec<IpAddr> = Vec::new();
    for address in found {
        if !own.contains(&address) {
            own.push(address);
        }
    }
    own.sort_by_key(IpAddr::is_loopback);
    own
}

/// The address packets to the world would leave from; no packet is sent.
fn primary() -> Option<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|address| !address.is_unspecified())
}

/// The kernel's routing table names local addresses on the line before `/32 host LOCAL`.
fn ipv4(table: &str) -> Vec<Ipv4Addr> {
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

/// `<32 hex digits> <interface> <prefix> <scope> <flags> <name>`, scope 20 being link-local.
fn ipv6(table: &str) -> Vec<Ipv6Addr> {
    table
        .lines()
        .filter_map(|line| {
            let mut fields = line.split_whitespace();
            let address = u128::from_str_radix(fields.next()?, 16).ok()?;
            (fields.nth(2)? != "20").then(|| Ipv6Addr::from(address))
        })
        .collect()
}

/// Listens on each address of `bind`, or on everything if there is none, at the first free port of
/// the range.
pub(crate) fn listen(
    bind: &[Interface],
    ports: PortRange,
) -> Result<(Vec<TcpListener>, Vec<Address>)> {
    if bind.is_empty() {
        return listen_anywhere(ports);
    }
    let (mut listeners, mut own) = (Vec::new(), Vec::new());
    for Interface { number: interface, address } in bind {
        let (listener, socket) = listen_on(&[*address], ports)?;
        listeners.push(listener);
        own.push(Address { socket, interface: *interface });
    }
    Ok((listeners, own))
}

fn listen_anywhere(ports: PortRange) -> Result<(Vec<TcpListener>, Vec<Address>)> {
    let anywhere = [IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)];
    // Where an IPv6 socket does not serve IPv4 as well, IPv4 reaches more hosts.
    let apart = std::fs::read_to_string("/proc/sys/net/ipv6/bindv6only")
        .is_ok_and(|text| text.trim() == "1");
    let (listener, socket) = listen_on(&anywhere[usize::from(apart)..], ports)?;
    let own = own().into_iter().filter(|address| socket.is_ipv6() || address.is_ipv4());
    let own = own.map(|address| SocketAddr::new(address, socket.port()).into()).collect();
    Ok((vec![listener], own))
}

/// Listens on one of these addresses, and returns it with the port.
fn listen_on(hosts: &[IpAddr], ports: PortRange) -> Result<(TcpListener, SocketAddr)> {
    let mut last = "no port tried".to_owned();
    for port in ports.first..=ports.last {
        for host in hosts {
            match TcpListener::bind((*host, port)) {
                Ok(listener) => {
                    // All ranks of a large job connect at once: a rank that finds the queue full
                    // tries again only after a second.
                    rustix::net::listen(&listener, QUEUE).map_err(Error::of("listen"))?;
                    let socket = listener.local_addr().map_err(Error::of("getsockname"))?;
                    return Ok((listener, socket));
                }
                Err(error) => last = format!("{host}: {error}"),
            }
        }
    }
    Err(Error::System {
        what: "bind",
        reason: format!("no free port in {}-{}: {last}", ports.first, ports.last),
    })
}

/// Returns the peer's address, for messages.
pub(crate) fn of_peer(socket: impl AsFd) -> String {
    let address =
        getpeername(socket).ok().flatten().and_then(|address| SocketAddr::try_from(address).ok());
    address.map_or("an unknown address".to_owned(), |address| address.to_string())
}

/// The order in which a peer's addresses are tried: loopback first on the same host; elsewhere only
/// if there is no other address, because two containers of one machine may have it in common.
pub(crate) fn ordered(addresses: &[Address], same_host: bool) -> Vec<SocketAddr> {
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
        assert_eq!(ipv4(trie), [Ipv4Addr::new(10, 1, 2, 3)]);
        let inet6 = "fd000000000000000000000000000001 02 40 00 80 \
                     eth0\nfe800000000000000000000000000001 02 40 20 80 eth0\n";
        assert_eq!(ipv6(inet6), ["fd00::1".parse::<Ipv6Addr>().unwrap()]);
    }

    #[test]
    fn this_host_has_loopback_and_has_it_last() {
        let own = own();
        assert!(own.contains(&IpAddr::V4(Ipv4Addr::LOCALHOST)));
        let first = own.iter().position(IpAddr::is_loopback).unwrap();
        assert!(own[first..].iter().all(IpAddr::is_loopback));
    }

    #[test]
    fn a_busy_port_range_is_named_in_the_error() {
        let bind = [IpAddr::V4(Ipv4Addr::LOCALHOST).into()];
        let (listeners, _) = listen(&bind, PortRange { first: 0, last: 0 }).unwrap();
        let port = listeners[0].local_addr().unwrap().port();
        let error = listen(&bind, PortRange { first: port, last: port }).unwrap_err().to_string();
        assert!(error.contains(&format!("no free port in {port}-{port}: 127.0.0.1: ")), "{error}");
    }

    #[test]
    fn each_interface_that_is_named_is_listened_on_and_no_other() {
        let interface = |number, last| Interface { number, address: [127, 0, 0, last].into() };
        let bind = [interface(0, 2), interface(2, 3)];
        let (listeners, own) = listen(&bind, PortRange { first: 0, last: 0 }).unwrap();
        let found: Vec<SocketAddr> =
            listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
        assert_eq!(own.iter().map(|address| address.socket).collect::<Vec<_>>(), found);
        let found = own.iter().map(|address| (address.interface, address.socket.ip()));
        assert_eq!(
            found.collect::<Vec<_>>(),
            bind.map(|interface| (interface.number, interface.address))
        );
        let absent = Interface { number: 1, address: [192, 0, 2, 1].into() };
        let error = listen(&[bind[0], absent], PortRange { first: 0, last: 0 }).unwrap_err();
        assert!(error.to_string().contains("192.0.2.1"), "{error}");
    }

    #[test]
    fn loopback_is_tried_on_the_same_host_or_for_want_of_others() {
        let sockets = ["10.0.0.1:5", "127.0.0.1:5"].map(|text| text.parse().unwrap());
        let addresses = sockets.map(Address::from);
        assert_eq!(ordered(&addresses, true)[0], sockets[1]);
        assert_eq!(ordered(&addresses, false), sockets[..1]);
        assert_eq!(ordered(&addresses[1..], false), sockets[1..]);
    }
}
