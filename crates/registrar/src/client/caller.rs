// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The user behind a loopback connection, from the kernel's table of connections: the loopback is
//! open to all users of a host, and a door that leads to another host is for one of them.

use std::net::{Ipv4Addr, SocketAddr};

/// Connections over IPv4 of this network namespace.
const TABLE: &str = "/proc/net/tcp";

/// Returns whether a connection to `door`, which this process listens on, was made by the user of
/// this process. If the kernel shows no table, no caller is refused: ranks prove the job's key to
/// each other in any case.
pub(super) fn is_own(door: SocketAddr, caller: SocketAddr) -> bool {
    std::fs::read_to_string(TABLE).map_or(true, |table| is_own_in(&table, door, caller))
}

fn is_own_in(table: &str, door: SocketAddr, caller: SocketAddr) -> bool {
    let owner = user(table, door, SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)));
    owner.is_some() && owner == user(table, caller, door)
}

/// Returns the user of the socket with these two ends. A socket that its process has closed has no
/// inode, and the kernel shows it as one of root, whoever its user was.
fn user(table: &str, own: SocketAddr, other: SocketAddr) -> Option<&str> {
    let (own, other) = (hex(own)?, hex(other)?);
    table.lines().find_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let found = fields.next()? == own && fields.next()? == other;
        // State, queues, timer and retransmissions lie between; a timeout lies before the inode.
        let user = found.then(|| fields.nth(4)).flatten()?;
        (fields.nth(1)? != "0").then_some(user)
    })
}

/// As the kernel writes it: the address as a number of this machine, the port as digits.
fn hex(address: SocketAddr) -> Option<String> {
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
            let (own, other) = (hex(own).unwrap(), hex(other).unwrap());
            format!(
                "   0: {own} {other} {state} 00000000:00000000 00:00000000 00000000  {user}        \
                 0 {inode} 1 0\n"
            )
        };
        let [door, caller, stranger, closed] =
            [9000, 9001, 9002, 9004].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let nobody = SocketAddr::from(([0, 0, 0, 0], 0));
        let table = [
            "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
                .to_owned(),
            row(door, nobody, "0A", 1000, 6),
            // Our own ends are there as well.
            row(door, caller, "01", 1000, 7),
            row(door, stranger, "01", 1000, 8),
            row(caller, door, "01", 1000, 9),
            row(stranger, door, "01", 1001, 10),
            // Its process has closed it, so that nobody can say whose it was.
            row(closed, door, "05", 1000, 0),
        ]
        .concat();
        assert!(is_own_in(&table, door, caller));
        assert!(!is_own_in(&table, door, stranger));
        assert!(!is_own_in(&table, door, closed));
        assert!(
            !is_own_in(&table, door, SocketAddr::from(([127, 0, 0, 1], 9003))),
            "it is gone again"
        );
        assert!(!is_own_in("", door, caller));
    }

    #[test]
    fn the_kernels_table_knows_a_connection_of_this_process() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let door = listener.local_addr().unwrap();
        let _caller = TcpStream::connect(door).unwrap();
        assert!(is_own(door, listener.accept().unwrap().1));
        assert!(!is_own(door, SocketAddr::from(([127, 0, 0, 1], 1))));
    }
}
