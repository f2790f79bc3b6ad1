// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The messages with which two ranks prove to each other that they hold the job's key. No I/O here.
//!
//! ```text
//! dialer   -> hello      magic, version, carrier, generation, channel, ranks, size, stream, streams, capacity, nonce
//! acceptor -> challenge  magic, version, status, nonce, HMAC(key, "acceptor" | hello | challenge)
//! dialer   -> proof      HMAC(key, "dialer" | hello | challenge)            (+ descriptors)
//! acceptor -> accepted   status, HMAC(key, "accepted" | status | hello | challenge)   (+ descriptors)
//! ```
//!
//! Every message has a fixed size; numbers are little endian. Both nonces enter every code, so nothing can be
//! replayed, and the role does, so nothing can be reflected.

use std::fmt;

use farandole_world::{Generation, Rank};
use hmac::{Hmac, Mac};
use rand::TryRngCore;
use rand::rngs::OsRng;
use sha2::Sha256;

use crate::{Error, Result};

pub(crate) const VERSION: u16 = 2;
/// The channel of heartbeats; not for users.
pub(crate) const CONTROL: u32 = u32::MAX;

const MAGIC: [u8; 8] = *b"farandol";
const CODE: usize = 32;
pub(crate) const HELLO: usize = 80;
const CHALLENGE_HEAD: usize = 44;
pub(crate) const CHALLENGE: usize = CHALLENGE_HEAD + CODE;
pub(crate) const PROOF: usize = CODE;
pub(crate) const ACCEPTED: usize = 2 + CODE;

/// The job's key. Its bytes appear in no message and no log.
#[derive(Clone)]
pub(crate) struct Key(pub(crate) [u8; 32]);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// What a connection is going to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carrier {
    Tcp,
    SharedMemory,
    Control,
}

/// What an acceptor answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Welcome,
    Version,
    Generation,
    World,
    NoSharedMemory,
}

impl Status {
    const ALL: [Self; 5] =
        [Self::Welcome, Self::Version, Self::Generation, Self::World, Self::NoSharedMemory];

    fn code(self) -> [u8; 2] {
        let at = Self::ALL.iter().position(|one| *one == self).unwrap_or(0);
        u16::try_from(at).unwrap_or(u16::MAX).to_le_bytes()
    }

    fn from_code(code: [u8; 2]) -> Option<Self> {
        Self::ALL.get(usize::from(u16::from_le_bytes(code))).copied()
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Welcome => "welcome",
            Self::Version => "it speaks another version of the protocol",
            Self::Generation => "it belongs to another generation of the job",
            Self::World => "it has another rank or another world size",
            Self::NoSharedMemory => "it cannot map the segment",
        })
    }
}

/// The first message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) version: u16,
    pub(crate) carrier: Carrier,
    pub(crate) generation: Generation,
    pub(crate) channel: u32,
    pub(crate) from: Rank,
    pub(crate) to: Rank,
    pub(crate) size: u32,
    /// Number of this connection among those of its link.
    pub(crate) stream: u16,
    /// Connections of the link.
    pub(crate) streams: u16,
    pub(crate) capacity: u64,
    pub(crate) nonce: [u8; 32],
}

pub(crate) fn nonce() -> Result<[u8; 32]> {
    let mut nonce = [0; 32];
    OsRng.try_fill_bytes(&mut nonce).map_err(Error::of("getrandom"))?;
    Ok(nonce)
}

impl Hello {
    pub(crate) fn encode(&self) -> [u8; HELLO] {
        let carrier = match self.carrier {
            Carrier::Tcp => 1,
            Carrier::SharedMemory => 2,
            Carrier::Control => 3,
        };
        let mut bytes = [0; HELLO];
        let parts: [&[u8]; 11] = [
            &MAGIC,
            &self.version.to_le_bytes(),
            &[carrier, 0],
            &self.generation.0.to_le_bytes(),
            &self.channel.to_le_bytes(),
            &self.from.0.to_le_bytes(),
            &self.to.0.to_le_bytes(),
            &self.size.to_le_bytes(),
            &self.stream.to_le_bytes(),
            &self.streams.to_le_bytes(),
            &self.capacity.to_le_bytes(),
        ];
        let mut at = 0;
        for part in parts.into_iter().chain([&self.nonce[..]]) {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        bytes
    }

    /// `None` for anything that is no hello.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        if reader.take::<8>()? != MAGIC {
            return None;
        }
        let version = u16::from_le_bytes(reader.take()?);
        let [carrier, _] = reader.take()?;
        let carrier = match carrier {
            1 => Carrier::Tcp,
            2 => Carrier::SharedMemory,
            3 => Carrier::Control,
            _ => return None,
        };
        Some(Self {
            version,
            carrier,
            generation: Generation(u64::from_le_bytes(reader.take()?)),
            channel: u32::from_le_bytes(reader.take()?),
            from: Rank(u32::from_le_bytes(reader.take()?)),
            to: Rank(u32::from_le_bytes(reader.take()?)),
            size: u32::from_le_bytes(reader.take()?),
            stream: u16::from_le_bytes(reader.take()?),
            streams: u16::from_le_bytes(reader.take()?),
            capacity: u64::from_le_bytes(reader.take()?),
            nonce: reader.take()?,
        })
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }
}

/// What both sides have said so far, and the codes over it.
#[derive(Clone, Debug)]
pub(crate) struct Transcript {
    key: Key,
    hello: [u8; HELLO],
    challenge: [u8; CHALLENGE_HEAD],
}

impl Transcript {
    /// Acceptor: answers a hello; the second part goes to the dialer.
    pub(crate) fn answer(key: &Key, hello: [u8; HELLO], status: Status) -> Result<(Self, [u8; CHALLENGE])> {
        let mut bytes = [0; CHALLENGE];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10..12].copy_from_slice(&status.code());
        bytes[12..CHALLENGE_HEAD].copy_from_slice(&nonce()?);
        let mut challenge = [0; CHALLENGE_HEAD];
        challenge.copy_from_slice(&bytes[..CHALLENGE_HEAD]);
        let transcript = Self { key: key.clone(), hello, challenge };
        bytes[CHALLENGE_HEAD..].copy_from_slice(&transcript.code(b"acceptor", &[]));
        Ok((transcript, bytes))
    }

    /// Dialer: reads the challenge. The error says why this is no acceptor of this job.
    pub(crate) fn read(
        key: &Key,
        hello: [u8; HELLO],
        bytes: &[u8; CHALLENGE],
    ) -> std::result::Result<(Self, Status), &'static str> {
        let (head, code) = bytes.split_at(CHALLENGE_HEAD);
        let challenge: [u8; CHALLENGE_HEAD] = head.try_into().map_err(|_| "a challenge of another size")?;
        if challenge[..8] != MAGIC {
            return Err("what listens there speaks another protocol");
        }
        let transcript = Self { key: key.clone(), hello, challenge };
        if !transcript.holds(b"acceptor", &[], code) {
            return Err("what listens there does not hold the key of this job");
        }
        let status = Status::from_code([challenge[10], challenge[11]]).ok_or("an unknown status")?;
        Ok((transcript, status))
    }

    /// Dialer: its proof.
    pub(crate) fn proof(&self) -> [u8; PROOF] {
        self.code(b"dialer", &[])
    }

    /// Acceptor: whether the proof holds.
    pub(crate) fn proved(&self, proof: &[u8]) -> bool {
        self.holds(b"dialer", &[], proof)
    }

    /// Acceptor: the last message.
    pub(crate) fn accept(&self, status: Status) -> [u8; ACCEPTED] {
        let mut bytes = [0; ACCEPTED];
        bytes[..2].copy_from_slice(&status.code());
        bytes[2..].copy_from_slice(&self.code(b"accepted", &status.code()));
        bytes
    }

    /// Dialer: reads the last message; `None` when its code does not hold.
    pub(crate) fn accepted(&self, bytes: &[u8; ACCEPTED]) -> Option<Status> {
        let [a, b, ..] = *bytes;
        if self.holds(b"accepted", &[a, b], &bytes[2..]) { Status::from_code([a, b]) } else { None }
    }

    fn mac(&self, role: &[u8], extra: &[u8]) -> Option<Hmac<Sha256>> {
        // A key of any length is taken, so there is always a code.
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.key.0).ok()?;
        for part in [role, &[0], extra, &self.hello, &self.challenge] {
            mac.update(part);
        }
        Some(mac)
    }

    fn code(&self, role: &[u8], extra: &[u8]) -> [u8; CODE] {
        self.mac(role, extra).map_or([0; CODE], |mac| mac.finalize().into_bytes().into())
    }

    /// Compares in constant time.
    fn holds(&self, role: &[u8], extra: &[u8], code: &[u8]) -> bool {
        self.mac(role, extra).is_some_and(|mac| mac.verify_slice(code).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello {
            version: VERSION,
            carrier: Carrier::SharedMemory,
            generation: Generation(3),
            channel: 7,
            from: Rank(2),
            to: Rank(1),
            size: 4,
            stream: 0,
            streams: 1,
            capacity: 65536,
            nonce: nonce().unwrap(),
        }
    }

    #[test]
    fn a_hello_survives_encoding() {
        let hello = hello();
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        assert_eq!(Hello::decode(&[7; HELLO]), None);
        assert_eq!(Hello::decode(b"farandol"), None);
    }

    #[test]
    fn both_sides_prove_the_key() {
        let key = Key([1; 32]);
        let hello = hello().encode();
        let (acceptor, challenge) = Transcript::answer(&key, hello, Status::Welcome).unwrap();
        let (dialer, status) = Transcript::read(&key, hello, &challenge).unwrap();
        assert_eq!(status, Status::Welcome);
        assert!(acceptor.proved(&dialer.proof()));
        assert_eq!(dialer.accepted(&acceptor.accept(Status::NoSharedMemory)), Some(Status::NoSharedMemory));
    }

    #[test]
    fn another_key_is_noticed_by_both_sides() {
        let hello = hello().encode();
        let (acceptor, challenge) = Transcript::answer(&Key([1; 32]), hello, Status::Welcome).unwrap();
        assert!(Transcript::read(&Key([2; 32]), hello, &challenge).is_err());
        let (other, _) = Transcript::answer(&Key([2; 32]), hello, Status::Welcome).unwrap();
        assert!(!acceptor.proved(&other.proof()));
    }

    #[test]
    fn a_proof_holds_for_one_exchange_only() {
        let key = Key([1; 32]);
        let hello = hello().encode();
        let (_, first) = Transcript::answer(&key, hello, Status::Welcome).unwrap();
        let (dialer, _) = Transcript::read(&key, hello, &first).unwrap();
        let (second, _) = Transcript::answer(&key, hello, Status::Welcome).unwrap();
        assert!(!second.proved(&dialer.proof()), "a replayed proof");
        assert!(!second.proved(&second.code(b"acceptor", &[])), "a reflected code");
    }

    #[test]
    fn a_status_cannot_be_changed_on_the_way() {
        let key = Key([1; 32]);
        let hello = hello().encode();
        let (acceptor, mut challenge) = Transcript::answer(&key, hello, Status::Welcome).unwrap();
        let mut accepted = acceptor.accept(Status::NoSharedMemory);
        accepted[0] = 0;
        assert_eq!(acceptor.accepted(&accepted), None);
        challenge[10] = 1;
        assert!(Transcript::read(&key, hello, &challenge).is_err());
    }
}
