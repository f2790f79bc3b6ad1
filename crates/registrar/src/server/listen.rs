// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Listening addresses of the registrar, and addresses that it offers to callers.

use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::time::{Duration, Instant};

use farandole_config::PortRange;

use crate::error::{Error, Result};
use crate::local_host_facts;

/// Time between two attempts to listen.
const LISTEN_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Like [`listen_on_port_range`], but retries until `timeout` has passed: a connection of another
/// process may hold a port for a moment.
pub(super) fn listen_with_retries(
    host: Option<&str>,
    bound: Option<IpAddr>,
    ports: PortRange,
    timeout: Duration,
) -> Result<(TcpListener, u16, Vec<String>)> {
    let started = Instant::now();
    loop {
        match listen_on_port_range(host, bound, ports) {
            Err(Error::Listen { .. }) if started.elapsed() < timeout => {
                std::thread::sleep(LISTEN_RETRY_INTERVAL)
            }
            done => return done,
        }
    }
}

/// Listens on the first free port of the range. If `host` is no address of this machine (a service
/// name, an address behind NAT), the ticket offers `host`, and the registrar listens on every
/// address.
fn listen_on_port_range(
    host: Option<&str>,
    bound: Option<IpAddr>,
    ports: PortRange,
) -> Result<(TcpListener, u16, Vec<String>)> {
    let bound = bound.map(|address| address.to_string());
    // One socket for both families; a host without IPv6 refuses the first address.
    let any: &[&str] = if is_dual_stack() { &["::", "0.0.0.0"] } else { &["0.0.0.0"] };
    let binds: Vec<String> = if let Some(bound) = &bound {
        vec![bound.clone()]
    } else {
        let own = host.map(|host| host.trim_matches(['[', ']']).to_owned());
        own.into_iter().chain(any.iter().map(|&address| address.to_owned())).collect()
    };
    let host = host.or(bound.as_deref());
    let mut last = "no port in the range".to_owned();
    for bind in &binds {
        // All ports of one address come before the next address, so a busy port does not widen the
        // address.
        for port in ports.first..=ports.last {
            let found = match (bind.as_str(), port).to_socket_addrs() {
                Ok(addresses) => addresses.collect::<Vec<SocketAddr>>(),
                Err(error) => {
                    last = format!("{bind}: {error}");
                    break;
                }
            };
            match TcpListener::bind(&found[..])
                .and_then(|listener| Ok((listener.local_addr()?.port(), listener)))
            {
                Ok((port, listener)) => return Ok((listener, port, offered_addresses(host, port))),
                Err(error) => last = format!("{bind} port {port}: {error}"),
            }
        }
    }
    Err(Error::Listen {
        host: host.unwrap_or("all addresses").to_owned(),
        first: ports.first,
        last: ports.last,
        reason: last,
    })
}

fn offered_addresses(host: Option<&str>, port: u16) -> Vec<String> {
    if let Some(host) = host {
        let bare = host.trim_matches(['[', ']']);
        return vec![if bare.contains(':') {
            format!("[{bare}]:{port}")
        } else {
            format!("{bare}:{port}")
        }];
    }
    let reachable = |address: &IpAddr| address.is_ipv4() || is_dual_stack();
    local_host_facts::local_addresses()
        .into_iter()
        .filter(reachable)
        .map(|address| SocketAddr::new(address, port).to_string())
        .collect()
}

/// Returns whether an IPv6 socket also serves IPv4.
fn is_dual_stack() -> bool {
    std::fs::read_to_string("/proc/sys/net/ipv6/bindv6only").is_ok_and(|text| text.trim() == "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_taken_for_a_moment_is_waited_for() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let listen = |timeout| {
            let ports = PortRange { first: port, last: port };
            listen_with_retries(None, Some("127.0.0.1".parse().unwrap()), ports, timeout)
        };
        assert!(matches!(listen(2 * LISTEN_RETRY_INTERVAL), Err(Error::Listen { .. })));
        let holder = std::thread::spawn(move || {
            std::thread::sleep(3 * LISTEN_RETRY_INTERVAL);
            drop(taken);
        });
        let (_listener, found, _) = listen(Duration::from_secs(30)).unwrap();
        assert_eq!(found, port);
        holder.join().unwrap();
    }
}
