// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Records on a socket, in parts of any size, into rings of any room: exactly the sent bytes are
//! placed.

use std::io::Write;
use std::os::unix::net::UnixStream;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::record::CipherSuite;

fn seal() -> RecordSeal {
    RecordSeal::new(CipherSuite::ChaCha20Poly1305, &[3; 32]).unwrap()
}

/// Payloads as they go over a connection, with the last word.
fn wire(payloads: &[Vec<u8>]) -> Vec<u8> {
    let mut seal = seal();
    let mut wire = Vec::new();
    for (kind, payload) in
        payloads.iter().map(|one| (RecordKind::Bytes, &one[..])).chain([(RecordKind::End, &[][..])])
    {
        let mut payload = payload.to_vec();
        let (header, tag) = seal.seal_payload(kind, &mut payload).unwrap();
        wire.extend([&header.0[..], &payload, &tag].concat());
    }
    wire
}

/// Hands over `wire` in parts and reads it with `room` at a time in the ring; what was placed, and
/// how it ended.
fn read(wire: &[u8], parts: &[usize], room: usize) -> (Vec<u8>, ReceiveStep) {
    let (here, mut there) = UnixStream::pair().unwrap();
    let socket = OwnedFd::from(here);
    let (mut receiving, mut placed) = (RecordReceiver::new(seal()), Vec::new());
    let mut parts = parts.iter().cycle();
    let mut rest = wire;
    // The space behind what was placed keeps what lies in it, as a ring's does.
    let mut space = vec![0; room];
    let mut filled = 0;
    loop {
        let (part, behind) = rest.split_at(rest.len().min(*parts.next().unwrap()));
        there.write_all(part).unwrap();
        rest = behind;
        if rest.is_empty() {
            there.shutdown(std::net::Shutdown::Write).unwrap();
        }
        receiving.begin_poll();
        let mut seen = false;
        loop {
            match receiving.receive_record_step(&socket, &mut space[filled..], usize::MAX, seen) {
                ReceiveStep::Placed(bytes) => {
                    placed.extend_from_slice(&space[filled..filled + bytes]);
                    filled += bytes;
                    seen = true;
                }
                ReceiveStep::Again => {}
                ReceiveStep::Drained => break,
                // The reader releases everything, and the ring begins again unless a part of a
                // record lies in it.
                ReceiveStep::Full => {
                    assert!(!receiving.has_partial_in_ring());
                    filled = 0;
                }
                end => return (placed, end),
            }
        }
    }
}

fn payloads() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let small = vec(any::<u8>(), 1..300);
    let large = (1_usize..40_000, any::<u8>()).prop_map(|(bytes, byte)| vec![byte; bytes]);
    vec(prop_oneof![3 => small, 1 => large], 0..12)
}

fn parts() -> impl Strategy<Value = Vec<usize>> {
    vec(prop_oneof![1_usize..40, 1_usize..20_000], 1..8)
}

proptest! {
    #[test]
    fn sent_bytes_are_placed_for_all_sizes_of_parts_and_room(
        payloads in payloads(),
        parts in parts(),
        room in 1_usize..60_000,
    ) {
        let (placed, end) = read(&wire(&payloads), &parts, room);
        prop_assert!(placed == payloads.concat());
        prop_assert_eq!(end, ReceiveStep::Ended(CONNECTION_CLOSED_REASON.to_owned()));
    }

    #[test]
    fn of_a_changed_stream_only_the_bytes_before_the_change_are_placed(
        payloads in payloads(),
        parts in parts(),
        room in 1_usize..60_000,
        at in any::<prop::sample::Index>(),
        strange in vec(any::<u8>(), 0..50),
        taken in 0_usize..50,
    ) {
        let whole = wire(&payloads);
        let at = at.index(whole.len());
        let mut meddled = whole.clone();
        meddled.splice(at..whole.len().min(at + taken), strange);
        prop_assume!(meddled != whole);
        let same = whole.iter().zip(&meddled).take_while(|(one, other)| one == other).count();
        let (placed, end) = read(&meddled, &parts, room);
        let sent = payloads.concat();
        prop_assert!(sent.starts_with(&placed));
        prop_assert!(placed.len() <= same);
        // What was put in behind the last word is not read.
        let behind = same == whole.len();
        let expected = match end {
            ReceiveStep::Tampered(_) => !behind,
            ReceiveStep::Ended(reason) => reason == if behind { CONNECTION_CLOSED_REASON } else { CONNECTION_CUT_REASON },
            _ => false,
        };
        prop_assert!(expected);
    }

    /// A peer without the key cannot make it take memory or place anything.
    #[test]
    fn garbage_places_nothing(garbage in vec(any::<u8>(), 0..2000), parts in parts()) {
        let (placed, end) = read(&garbage, &parts, 4096);
        prop_assert!(placed.is_empty());
        prop_assert!(matches!(end, ReceiveStep::Tampered(_) | ReceiveStep::Ended(_)));
    }
}
