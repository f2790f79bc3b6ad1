// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The card of a rank at the meeting point: the addresses where it can be reached.

use farandole_world::HostHash;

use crate::addresses::Address;
use crate::handshake::VERSION;

/// Addresses that a card may have: a node of a cluster may have one for each of its services, and
/// the first are its own.
const MOST: usize = 256;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Card {
    pub(crate) host: HostHash,
    pub(crate) pid: u32,
    /// Its gateway's; 0 without one.
    pub(crate) door: u64,
    /// Name of its socket in the abstract namespace; empty without shared memory.
    pub(crate) local: String,
    pub(crate) addresses: Vec<Address>,
}

impl Card {
    /// One fact a line.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut text = format!(
            "farandole {VERSION}\nhost {}\npid {}\nlocal {}\n",
            self.host, self.pid, self.local
        );
        if self.door > 0 {
            text.push_str(&format!("door {}\n", self.door));
        }
        for address in self.addresses.iter().take(MOST) {
            let interface = match address.interface {
                0 => String::new(),
                number => format!(" {number}"),
            };
            text.push_str(&format!("address {}{interface}\n", address.socket));
        }
        text.into_bytes()
    }

    /// The error says what is wrong with the card.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
        let mut lines = text.lines();
        if lines.next() != Some(&format!("farandole {VERSION}")) {
            return Err(format!("not a card of protocol version {VERSION}"));
        }
        let mut card = Self {
            host: HostHash(String::new()),
            pid: 0,
            door: 0,
            local: String::new(),
            addresses: Vec::new(),
        };
        for line in lines {
            let (name, value) =
                line.split_once(' ').ok_or_else(|| format!("not a fact: {line}"))?;
            match name {
                "host" => card.host = HostHash(value.to_owned()),
                "pid" => {
                    card.pid = value.parse().map_err(|_| format!("not a process id: {value}"))?
                }
                "door" => card.door = value.parse().map_err(|_| format!("not a door: {value}"))?,
                "local" => value.clone_into(&mut card.local),
                "address" if card.addresses.len() < MOST => {
                    let (socket, interface) = value.split_once(' ').unwrap_or((value, "0"));
                    let address = socket.parse().ok().zip(interface.parse().ok());
                    let (socket, interface) =
                        address.ok_or_else(|| format!("not an address: {value}"))?;
                    card.addresses.push(Address { socket, interface });
                }
                _ => return Err(format!("an unknown fact, or too many: {name}")),
            }
        }
        Ok(card)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_survives_encoding() {
        let card = Card {
            host: HostHash("box-0123".to_owned()),
            pid: 7,
            door: 9,
            local: String::new(),
            addresses: vec![
                Address { socket: "10.0.0.1:80".parse().unwrap(), interface: 0 },
                Address { socket: "[fe::1]:81".parse().unwrap(), interface: 1 },
            ],
        };
        let text = String::from_utf8(card.encode()).unwrap();
        assert!(text.ends_with("address 10.0.0.1:80\naddress [fe::1]:81 1\n"), "{text}");
        assert_eq!(Card::decode(&card.encode()), Ok(card));
    }

    #[test]
    fn garbage_is_refused_with_its_reason() {
        assert!(Card::decode(&[0xff, 0xfe]).is_err());
        assert_eq!(
            Card::decode(format!("farandole {VERSION}\naddress nowhere\n").as_bytes()),
            Err("not an address: nowhere".to_owned())
        );
        assert_eq!(
            Card::decode(format!("farandole {VERSION}\naddress 10.0.0.1:80 eth0\n").as_bytes()),
            Err("not an address: 10.0.0.1:80 eth0".to_owned())
        );
        assert!(Card::decode(b"farandole 99\n").unwrap_err().contains("version"));
    }
}
