// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Lookup of the user behind a loopback connection, in the kernel's table of connections. The
//! loopback is open to all users of a host, but a listener that leads to another host is for one
//! user.

use std::net::{Ipv4Addr, SocketAddr};

/// The kernel's table of the IPv4 connections of this network namespace.
const PROC_NET_TCP_PATH: &str = "/proc/net/tcp";

/// Returns whether the user of this process opened the connection from `caller` to `listener`, a
/// listener of this process. If the kernel shows no table, every caller is accepted: ranks prove to
/// each other in any case that they have the job's key.
pub(super) fn is_own_user_connection(listener: SocketAddr, caller: SocketAddr) -> bool {
    std::fs::read_to_string(PROC_NET_TCP_PATH)
        .map_or(true, |table| is_own_user_in_table(&table, listener, caller))
}

fn is_own_user_in_table(table: &str, listener: SocketAddr, caller: SocketAddr) -> bool {
    let owner = socket_user(table, listener, SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)));
    // The listener's own line gives this user in the form of the table, also in a user namespace.
    owner.is_some() && owner == socket_user(table, caller, listener)
}

/// Returns the user of the socket with these two ends; `None` if its process has closed it. The
/// kernel shows such a socket without an inode and as a socket of root, whatever its user was.
fn socket_user(table: &str, own: SocketAddr, other: SocketAddr) -> Option<&str> {
    let (own, other) = (format_proc_address(own)?, format_proc_address(other)?);
    table.lines().find_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let found = fields.next()? == own && fields.next()? == other;
        // State, queues, timer and retransmissions lie between; a timeout lies before the inode.
        let user = found.then(|| fields.nth(4)).flatten()?;
        (fields.nth(1)? != "0").then_some(user)
    })
}

/// Formats an address like the kernel: the IP address as a hexadecimal number in this machine's
/// byte order, then the port.
fn format_proc_address(address: SocketAddr) -> Option<String> {
    // The listeners of a relay are on 127.0.0.1.
    let SocketAddr::V4(address) = address else { return None };
    Some(format!("{:08X}:{:04X}", u32::from_ne_bytes(address.ip().octets()), address.port()))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn connections_of_this_user_are_distinguished_from_those_of_others() {
        let row = |own: SocketAddr, other: SocketAddr, state: &str, user: u32, inode: u32| {
            let (own, other) =
                (format_proc_address(own).unwrap(), format_proc_address(other).unwrap());
            format!(
                "   0: {own} {other} {state} 00000000:00000000 00:00000000 00000000  {user}        \
                 0 {inode} 1 0\n"
            )
        };
        let [listener, caller, stranger, closed] =
            [9000, 9001, 9002, 9004].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let nobody = SocketAddr::from(([0, 0, 0, 0], 0));
        let table = [
            "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
                .to_owned(),
            row(listener, nobody, "0A", 1000, 6),
            // The table also has our own ends of the connections.
            row(listener, caller, "01", 1000, 7),
            row(listener, stranger, "01", 1000, 8),
            row(caller, listener, "01", 1000, 9),
            row(stranger, listener, "01", 1001, 10),
            // The process has closed this socket, so its user is unknown.
            row(closed, listener, "05", 1000, 0),
        ]
        .concat();
        assert!(is_own_user_in_table(&table, listener, caller));
        assert!(!is_own_user_in_table(&table, listener, stranger));
        assert!(!is_own_user_in_table(&table, listener, closed));
        assert!(
            !is_own_user_in_table(&table, listener, SocketAddr::from(([127, 0, 0, 1], 9003))),
            "it is gone again"
        );
        assert!(!is_own_user_in_table("", listener, caller));
    }

    #[test]
    fn the_kernels_table_knows_a_connection_of_this_process() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let listener = socket.local_addr().unwrap();
        let _caller = TcpStream::connect(listener).unwrap();
        assert!(is_own_user_connection(listener, socket.accept().unwrap().1));
        assert!(!is_own_user_connection(listener, SocketAddr::from(([127, 0, 0, 1], 1))));
    }
}
