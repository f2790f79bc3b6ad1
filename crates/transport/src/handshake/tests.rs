// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The messages: what holds, what does not, and which keys follow.

use super::*;
use crate::record::{Kind, Seal};

const KEY: Key = Key([1; 32]);

fn hello(carrier: Carrier) -> Hello {
    Hello {
        version: VERSION,
        carrier,
        suite: Suite::own(),
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

fn offer(key: &Key) -> Offer {
    Offer::new(key, &hello(Carrier::Tcp)).unwrap()
}

/// Both ends after a handshake.
fn shaken(offer: Offer) -> (Transcript, Transcript) {
    let (acceptor, challenge) = Transcript::answer(&KEY, *offer.hello(), Status::Welcome).unwrap();
    let (dialer, status) = offer.read(&challenge).unwrap();
    assert_eq!(status, Status::Welcome);
    assert!(acceptor.proved(&dialer.proof()));
    (dialer, acceptor)
}

/// Returns whether what one end seals opens at the other.
fn opens(from: &mut Seal, to: &mut Seal) -> bool {
    let mut payload = *b"some bytes";
    let (header, tag) = from.seal(Kind::Bytes, &mut payload).unwrap();
    assert_ne!(&payload, b"some bytes");
    to.open(header, &mut payload, tag).is_ok() && &payload == b"some bytes"
}

#[test]
fn a_hello_survives_encoding() {
    for carrier in [Carrier::Tcp, Carrier::SharedMemory, Carrier::Control] {
        let hello = hello(carrier);
        let offer = Offer::new(&KEY, &hello).unwrap();
        assert_eq!(Hello::decode(offer.hello()), Some(hello));
        assert_eq!(version(offer.hello()), Some(VERSION));
    }
    assert_eq!(Hello::decode(&[7; HELLO]), None);
    assert_eq!(Hello::decode(b"farandol"), None);
    assert_eq!((version(b"farandol"), version(&[7; OPENING])), (None, None));
    assert_eq!(version(&other_version()), Some(VERSION));
}

#[test]
fn both_sides_prove_the_key() {
    let (dialer, acceptor) = shaken(offer(&KEY));
    assert_eq!(
        dialer.accepted(&acceptor.accept(Status::NoSharedMemory)),
        Some(Status::NoSharedMemory)
    );
}

#[test]
fn both_sides_have_the_same_keys_one_each_way() {
    let (dialer, acceptor) = shaken(offer(&KEY));
    let ends = || (dialer.keys(Side::Dialer).unwrap(), acceptor.keys(Side::Acceptor).unwrap());
    let (mut one, mut other) = ends();
    assert!(opens(&mut one.sending, &mut other.receiving));
    assert!(opens(&mut other.sending, &mut one.receiving));
    let (mut one, mut other) = ends();
    assert!(!opens(&mut one.sending, &mut one.receiving), "a reflected record");
    assert!(!opens(&mut one.sending, &mut other.sending));
}

#[test]
fn every_handshake_has_keys_of_its_own() {
    let hello = hello(Carrier::Tcp);
    // Even if the nonce were the same.
    let (first, _) = shaken(Offer::new(&KEY, &hello).unwrap());
    let (_, second) = shaken(Offer::new(&KEY, &hello).unwrap());
    let mut sending = first.keys(Side::Dialer).unwrap().sending;
    assert!(!opens(&mut sending, &mut second.keys(Side::Acceptor).unwrap().receiving));
}

#[test]
fn keys_are_bound_to_what_was_said() {
    let secret = || {
        let (one, other) = (Half::new().unwrap(), Half::new().unwrap());
        let public = other.public;
        one.meet(&KEY.0, &public).unwrap()
    };
    let secret = secret();
    let keys = |side, hello: &[u8]| {
        secret.keys(side, Suite::ChaCha20Poly1305, hello, b"challenge").unwrap()
    };
    let mut sending = keys(Side::Dialer, b"stream 0").sending;
    assert!(!opens(&mut sending, &mut keys(Side::Acceptor, b"stream 1").receiving));
    let mut sending = keys(Side::Dialer, b"stream 0").sending;
    assert!(opens(&mut sending, &mut keys(Side::Acceptor, b"stream 0").receiving));
}

#[test]
fn ranks_take_the_fastest_cipher_that_both_have() {
    use Suite::{Aegis128X2, Aes128Gcm, ChaCha20Poly1305};
    assert_eq!(Aegis128X2.of_both(Aegis128X2), Aegis128X2);
    assert_eq!(
        (Aegis128X2.of_both(Aes128Gcm), Aes128Gcm.of_both(Aegis128X2)),
        (Aes128Gcm, Aes128Gcm)
    );
    for one in Suite::ALL {
        assert_eq!(
            (one.of_both(ChaCha20Poly1305), ChaCha20Poly1305.of_both(one)),
            (ChaCha20Poly1305, ChaCha20Poly1305)
        );
        assert_eq!(Suite::from_code(one.code()), Some(one));
    }
    for suite in Suite::ALL.into_iter().filter(|suite| *suite <= Suite::own()) {
        let slower = Hello { suite, ..hello(Carrier::Control) };
        let (dialer, acceptor) = shaken(Offer::new(&KEY, &slower).unwrap());
        assert_eq!(acceptor.challenge[OPENING], suite.code());
        let mut receiving = acceptor.keys(Side::Acceptor).unwrap().receiving;
        assert!(opens(&mut dialer.keys(Side::Dialer).unwrap().sending, &mut receiving));
    }
}

#[test]
fn a_segment_of_shared_memory_has_no_keys() {
    let (dialer, acceptor) = shaken(Offer::new(&KEY, &hello(Carrier::SharedMemory)).unwrap());
    assert!(dialer.keys(Side::Dialer).is_none() && acceptor.keys(Side::Acceptor).is_none());
}

/// A key of small order would make the secret public.
#[test]
fn a_public_key_that_gives_nothing_away_is_no_key() {
    for public in [[0; PUBLIC], std::array::from_fn(|at| u8::from(at == 0))] {
        assert!(Half::new().unwrap().meet(&KEY.0, &public).is_none());
    }
}

#[test]
fn another_key_is_noticed_by_both_sides() {
    let offer = offer(&KEY);
    let hello = *offer.hello();
    let other = Key([2; 32]);
    assert!(Transcript::knows(&KEY, &hello) && !Transcript::knows(&other, &hello));
    let (acceptor, challenge) = Transcript::answer(&other, hello, Status::Welcome).unwrap();
    assert!(offer.read(&challenge).is_err());
    let (own, _) = Transcript::answer(&KEY, hello, Status::Welcome).unwrap();
    assert!(!acceptor.proved(&own.proof()));
}

#[test]
fn every_byte_of_a_hello_is_under_its_code() {
    let hello = *offer(&KEY).hello();
    for at in 0..HELLO {
        let mut changed = hello;
        changed[at] ^= 0x10;
        assert!(!Transcript::knows(&KEY, &changed), "byte {at}");
    }
}

#[test]
fn a_public_key_cannot_be_changed_on_the_way() {
    let (ours, theirs) = (offer(&KEY), offer(&KEY));
    // A man in the middle inserts another key, and cannot make the code.
    let mut hello = *ours.hello();
    hello[HELLO_PUBLIC..HELLO_HEAD].copy_from_slice(&theirs.hello()[HELLO_PUBLIC..HELLO_HEAD]);
    assert!(!Transcript::knows(&KEY, &hello));
    let (_, mut challenge) = Transcript::answer(&KEY, *ours.hello(), Status::Welcome).unwrap();
    challenge[CHALLENGE_PUBLIC] ^= 1;
    assert!(ours.read(&challenge).is_err());
}

#[test]
fn a_proof_holds_for_one_exchange_only() {
    let offer = offer(&KEY);
    let hello = *offer.hello();
    let (_, first) = Transcript::answer(&KEY, hello, Status::Welcome).unwrap();
    let (dialer, _) = offer.read(&first).unwrap();
    let (second, _) = Transcript::answer(&KEY, hello, Status::Welcome).unwrap();
    assert!(!second.proved(&dialer.proof()), "a replayed proof");
    assert!(!second.proved(&second.code(b"acceptor", &[])), "a reflected code");
}

#[test]
fn a_status_cannot_be_changed_on_the_way() {
    let offer = offer(&KEY);
    let (acceptor, mut challenge) =
        Transcript::answer(&KEY, *offer.hello(), Status::Welcome).unwrap();
    let mut accepted = acceptor.accept(Status::NoSharedMemory);
    accepted[0] = 0;
    assert_eq!(acceptor.accepted(&accepted), None);
    challenge[10] = 1;
    assert!(offer.read(&challenge).is_err());
}
