// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The messages: what holds, what does not, and which keys follow.

use super::*;
use crate::record::{RecordKind, RecordSeal};

const KEY: JobKey = JobKey([1; 32]);

fn hello(carrier: ConnectionCarrier) -> HelloMessage {
    HelloMessage {
        version: PROTOCOL_VERSION,
        carrier,
        suite: CipherSuite::fastest_local(),
        generation: Generation(3),
        channel: 7,
        from: Rank(2),
        to: Rank(1),
        size: 4,
        stream: 0,
        streams: 1,
        capacity: 65536,
        nonce: random_nonce().unwrap(),
    }
}

fn offer(key: &JobKey) -> DialerHandshake {
    DialerHandshake::new(key, &hello(ConnectionCarrier::Tcp)).unwrap()
}

/// Both ends after a handshake.
fn shaken(offer: DialerHandshake) -> (HandshakeTranscript, HandshakeTranscript) {
    let (acceptor, challenge) =
        HandshakeTranscript::answer_hello(&KEY, *offer.hello_message(), HandshakeStatus::Welcome)
            .unwrap();
    let (dialer, status) = offer.read_challenge(&challenge).unwrap();
    assert_eq!(status, HandshakeStatus::Welcome);
    assert!(acceptor.verify_proof(&dialer.dialer_proof()));
    (dialer, acceptor)
}

/// Returns whether what one end seals opens at the other.
fn opens(from: &mut RecordSeal, to: &mut RecordSeal) -> bool {
    let mut payload = *b"some bytes";
    let (header, tag) = from.seal_payload(RecordKind::Bytes, &mut payload).unwrap();
    assert_ne!(&payload, b"some bytes");
    to.open_payload(header, &mut payload, tag).is_ok() && &payload == b"some bytes"
}

#[test]
fn a_hello_survives_encoding() {
    for carrier in
        [ConnectionCarrier::Tcp, ConnectionCarrier::SharedMemory, ConnectionCarrier::Control]
    {
        let hello = hello(carrier);
        let offer = DialerHandshake::new(&KEY, &hello).unwrap();
        assert_eq!(HelloMessage::decode(offer.hello_message()), Some(hello));
        assert_eq!(read_version(offer.hello_message()), Some(PROTOCOL_VERSION));
    }
    assert_eq!(HelloMessage::decode(&[7; HELLO_BYTES]), None);
    assert_eq!(HelloMessage::decode(b"farandol"), None);
    assert_eq!((read_version(b"farandol"), read_version(&[7; OPENING_BYTES])), (None, None));
    assert_eq!(read_version(&encode_version_mismatch()), Some(PROTOCOL_VERSION));
}

#[test]
fn both_sides_prove_the_key() {
    let (dialer, acceptor) = shaken(offer(&KEY));
    assert_eq!(
        dialer.read_accepted_message(&acceptor.accepted_message(HandshakeStatus::NoSharedMemory)),
        Some(HandshakeStatus::NoSharedMemory)
    );
}

#[test]
fn both_sides_have_the_same_keys_one_each_way() {
    let (dialer, acceptor) = shaken(offer(&KEY));
    let ends = || {
        (
            dialer.derive_keys(HandshakeSide::Dialer).unwrap(),
            acceptor.derive_keys(HandshakeSide::Acceptor).unwrap(),
        )
    };
    let (mut one, mut other) = ends();
    assert!(opens(&mut one.sending, &mut other.receiving));
    assert!(opens(&mut other.sending, &mut one.receiving));
    let (mut one, mut other) = ends();
    assert!(!opens(&mut one.sending, &mut one.receiving), "a reflected record");
    assert!(!opens(&mut one.sending, &mut other.sending));
}

#[test]
fn every_handshake_has_keys_of_its_own() {
    let hello = hello(ConnectionCarrier::Tcp);
    // Even if the nonce were the same.
    let (first, _) = shaken(DialerHandshake::new(&KEY, &hello).unwrap());
    let (_, second) = shaken(DialerHandshake::new(&KEY, &hello).unwrap());
    let mut sending = first.derive_keys(HandshakeSide::Dialer).unwrap().sending;
    assert!(!opens(
        &mut sending,
        &mut second.derive_keys(HandshakeSide::Acceptor).unwrap().receiving
    ));
}

#[test]
fn keys_are_bound_to_what_was_said() {
    let secret = || {
        let (one, other) = (KeyExchangeHalf::new().unwrap(), KeyExchangeHalf::new().unwrap());
        let public = other.public;
        one.compute_shared_secret(&KEY.0, &public).unwrap()
    };
    let secret = secret();
    let keys = |side, hello: &[u8]| {
        secret.derive_keys(side, CipherSuite::ChaCha20Poly1305, hello, b"challenge").unwrap()
    };
    let mut sending = keys(HandshakeSide::Dialer, b"stream 0").sending;
    assert!(!opens(&mut sending, &mut keys(HandshakeSide::Acceptor, b"stream 1").receiving));
    let mut sending = keys(HandshakeSide::Dialer, b"stream 0").sending;
    assert!(opens(&mut sending, &mut keys(HandshakeSide::Acceptor, b"stream 0").receiving));
}

#[test]
fn ranks_take_the_fastest_cipher_that_both_have() {
    use CipherSuite::{Aegis128X2, Aes128Gcm, ChaCha20Poly1305};
    assert_eq!(Aegis128X2.fastest_common(Aegis128X2), Aegis128X2);
    assert_eq!(
        (Aegis128X2.fastest_common(Aes128Gcm), Aes128Gcm.fastest_common(Aegis128X2)),
        (Aes128Gcm, Aes128Gcm)
    );
    for one in CipherSuite::ALL_SUITES {
        assert_eq!(
            (one.fastest_common(ChaCha20Poly1305), ChaCha20Poly1305.fastest_common(one)),
            (ChaCha20Poly1305, ChaCha20Poly1305)
        );
        assert_eq!(CipherSuite::from_code(one.to_code()), Some(one));
    }
    for suite in
        CipherSuite::ALL_SUITES.into_iter().filter(|suite| *suite <= CipherSuite::fastest_local())
    {
        let slower = HelloMessage { suite, ..hello(ConnectionCarrier::Control) };
        let (dialer, acceptor) = shaken(DialerHandshake::new(&KEY, &slower).unwrap());
        assert_eq!(acceptor.challenge[OPENING_BYTES], suite.to_code());
        let mut receiving = acceptor.derive_keys(HandshakeSide::Acceptor).unwrap().receiving;
        assert!(opens(
            &mut dialer.derive_keys(HandshakeSide::Dialer).unwrap().sending,
            &mut receiving
        ));
    }
}

#[test]
fn a_segment_of_shared_memory_has_no_keys() {
    let (dialer, acceptor) =
        shaken(DialerHandshake::new(&KEY, &hello(ConnectionCarrier::SharedMemory)).unwrap());
    assert!(
        dialer.derive_keys(HandshakeSide::Dialer).is_none()
            && acceptor.derive_keys(HandshakeSide::Acceptor).is_none()
    );
}

/// A key of small order would make the secret public.
#[test]
fn a_public_key_that_gives_nothing_away_is_no_key() {
    for public in [[0; PUBLIC_KEY_BYTES], std::array::from_fn(|at| u8::from(at == 0))] {
        assert!(KeyExchangeHalf::new().unwrap().compute_shared_secret(&KEY.0, &public).is_none());
    }
}

#[test]
fn another_key_is_noticed_by_both_sides() {
    let offer = offer(&KEY);
    let hello = *offer.hello_message();
    let other = JobKey([2; 32]);
    assert!(
        HandshakeTranscript::verify_hello(&KEY, &hello)
            && !HandshakeTranscript::verify_hello(&other, &hello)
    );
    let (acceptor, challenge) =
        HandshakeTranscript::answer_hello(&other, hello, HandshakeStatus::Welcome).unwrap();
    assert!(offer.read_challenge(&challenge).is_err());
    let (own, _) =
        HandshakeTranscript::answer_hello(&KEY, hello, HandshakeStatus::Welcome).unwrap();
    assert!(!acceptor.verify_proof(&own.dialer_proof()));
}

#[test]
fn every_byte_of_a_hello_is_under_its_code() {
    let hello = *offer(&KEY).hello_message();
    for at in 0..HELLO_BYTES {
        let mut changed = hello;
        changed[at] ^= 0x10;
        assert!(!HandshakeTranscript::verify_hello(&KEY, &changed), "byte {at}");
    }
}

#[test]
fn a_public_key_cannot_be_changed_on_the_way() {
    let (ours, theirs) = (offer(&KEY), offer(&KEY));
    // A man in the middle inserts another key, and cannot make the code.
    let mut hello = *ours.hello_message();
    hello[HELLO_PUBLIC_KEY_OFFSET..HELLO_HEAD_BYTES]
        .copy_from_slice(&theirs.hello_message()[HELLO_PUBLIC_KEY_OFFSET..HELLO_HEAD_BYTES]);
    assert!(!HandshakeTranscript::verify_hello(&KEY, &hello));
    let (_, mut challenge) =
        HandshakeTranscript::answer_hello(&KEY, *ours.hello_message(), HandshakeStatus::Welcome)
            .unwrap();
    challenge[CHALLENGE_PUBLIC_KEY_OFFSET] ^= 1;
    assert!(ours.read_challenge(&challenge).is_err());
}

#[test]
fn a_proof_holds_for_one_exchange_only() {
    let offer = offer(&KEY);
    let hello = *offer.hello_message();
    let (_, first) =
        HandshakeTranscript::answer_hello(&KEY, hello, HandshakeStatus::Welcome).unwrap();
    let (dialer, _) = offer.read_challenge(&first).unwrap();
    let (second, _) =
        HandshakeTranscript::answer_hello(&KEY, hello, HandshakeStatus::Welcome).unwrap();
    assert!(!second.verify_proof(&dialer.dialer_proof()), "a replayed proof");
    assert!(!second.verify_proof(&second.compute_mac(b"acceptor", &[])), "a reflected code");
}

#[test]
fn a_status_cannot_be_changed_on_the_way() {
    let offer = offer(&KEY);
    let (acceptor, mut challenge) =
        HandshakeTranscript::answer_hello(&KEY, *offer.hello_message(), HandshakeStatus::Welcome)
            .unwrap();
    let mut accepted = acceptor.accepted_message(HandshakeStatus::NoSharedMemory);
    accepted[0] = 0;
    assert_eq!(acceptor.read_accepted_message(&accepted), None);
    challenge[10] = 1;
    assert!(offer.read_challenge(&challenge).is_err());
}
