// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The addresses of a rank, as published at the rendezvous.

use farandole_world::HostHash;

use crate::addresses::ListenAddress;
use crate::handshake::PROTOCOL_VERSION;

/// Largest number of addresses of a rank. A node of a cluster may have one for each of its
/// services; its own come first.
const MAX_ADDRESSES_PER_PEER: usize = 256;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerAddresses {
    pub(crate) host: HostHash,
    pub(crate) pid: u32,
    /// World number of the relay, see [`LinkRelay::relay_world`](crate::LinkRelay::relay_world); 0
    /// without a relay.
    pub(crate) relay_world: u64,
    /// Name of the Unix socket in the abstract namespace; empty without shared memory.
    pub(crate) unix_socket_name: String,
    pub(crate) addresses: Vec<ListenAddress>,
}

impl PeerAddresses {
    /// Encodes the addresses as text, one fact per line.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut text = format!(
            "farandole {PROTOCOL_VERSION}\nhost {}\npid {}\nlocal {}\n",
            self.host, self.pid, self.unix_socket_name
        );
        if self.relay_world > 0 {
            // The name of this field is part of the format, so it keeps its old word.
            text.push_str(&format!("door {}\n", self.relay_world));
        }
        for address in self.addresses.iter().take(MAX_ADDRESSES_PER_PEER) {
            let interface = match address.interface {
                0 => String::new(),
                number => format!(" {number}"),
            };
            text.push_str(&format!("address {}{interface}\n", address.socket));
        }
        text.into_bytes()
    }

    /// Decodes the text of `encode`; the error says which part is invalid.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
        let mut lines = text.lines();
        if lines.next() != Some(&format!("farandole {PROTOCOL_VERSION}")) {
            return Err(format!("not addresses of protocol version {PROTOCOL_VERSION}"));
        }
        let mut peer = Self {
            host: HostHash(String::new()),
            pid: 0,
            relay_world: 0,
            unix_socket_name: String::new(),
            addresses: Vec::new(),
        };
        for line in lines {
            let (name, value) =
                line.split_once(' ').ok_or_else(|| format!("not a field: {line}"))?;
            match name {
                "host" => peer.host = HostHash(value.to_owned()),
                "pid" => {
                    peer.pid = value.parse().map_err(|_| format!("not a process id: {value}"))?
                }
                "door" => {
                    peer.relay_world =
                        value.parse().map_err(|_| format!("not a relay world: {value}"))?
                }
                "local" => value.clone_into(&mut peer.unix_socket_name),
                // The text comes from another process and must not grow this list without a limit.
                "address" if peer.addresses.len() < MAX_ADDRESSES_PER_PEER => {
                    let (socket, interface) = value.split_once(' ').unwrap_or((value, "0"));
                    let address = socket.parse().ok().zip(interface.parse().ok());
                    let (socket, interface) =
                        address.ok_or_else(|| format!("not an address: {value}"))?;
                    peer.addresses.push(ListenAddress { socket, interface });
                }
                _ => return Err(format!("an unknown field, or too many addresses: {name}")),
            }
        }
        Ok(peer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_survives_encoding() {
        let peer = PeerAddresses {
            host: HostHash("box-0123".to_owned()),
            pid: 7,
            relay_world: 9,
            unix_socket_name: String::new(),
            addresses: vec![
                ListenAddress { socket: "10.0.0.1:80".parse().unwrap(), interface: 0 },
                ListenAddress { socket: "[fe::1]:81".parse().unwrap(), interface: 1 },
            ],
        };
        let text = String::from_utf8(peer.encode()).unwrap();
        assert!(text.ends_with("address 10.0.0.1:80\naddress [fe::1]:81 1\n"), "{text}");
        assert_eq!(PeerAddresses::decode(&peer.encode()), Ok(peer));
    }

    #[test]
    fn garbage_is_refused_with_its_reason() {
        assert!(PeerAddresses::decode(&[0xff, 0xfe]).is_err());
        assert_eq!(
            PeerAddresses::decode(
                format!("farandole {PROTOCOL_VERSION}\naddress nowhere\n").as_bytes()
            ),
            Err("not an address: nowhere".to_owned())
        );
        assert_eq!(
            PeerAddresses::decode(
                format!("farandole {PROTOCOL_VERSION}\naddress 10.0.0.1:80 eth0\n").as_bytes()
            ),
            Err("not an address: 10.0.0.1:80 eth0".to_owned())
        );
        assert!(PeerAddresses::decode(b"farandole 99\n").unwrap_err().contains("version"));
    }
}
