// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Records: whatever happens to them on the way, none opens that was not sealed next.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// The suites that this processor supports.
fn suites() -> impl Iterator<Item = CipherSuite> {
    CipherSuite::ALL_SUITES.into_iter().filter(|suite| *suite <= CipherSuite::fastest_local())
}

fn suite() -> impl Strategy<Value = CipherSuite> {
    proptest::sample::select(suites().collect::<Vec<_>>())
}

fn seal(suite: CipherSuite, key: u8) -> RecordSeal {
    RecordSeal::new(suite, &vec![key; suite.key_len()]).unwrap()
}

fn header(length: usize, kind: u8) -> RecordHeader {
    let mut bytes = [0; RECORD_HEADER_BYTES];
    bytes[..4].copy_from_slice(&u32::try_from(length).unwrap().to_le_bytes());
    bytes[4] = kind;
    RecordHeader(bytes)
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Record {
    header: RecordHeader,
    payload: Vec<u8>,
    tag: [u8; RECORD_TAG_BYTES],
}

fn sealed(seal: &mut RecordSeal, kind: RecordKind, payload: &[u8]) -> Record {
    let mut payload = payload.to_vec();
    let (header, tag) = seal.seal_payload(kind, &mut payload).unwrap();
    Record { header, payload, tag }
}

fn opened(seal: &mut RecordSeal, record: &Record) -> Result<Vec<u8>, TamperedRecord> {
    let mut payload = record.payload.clone();
    seal.open_payload(record.header, &mut payload, record.tag).map(|()| payload)
}

#[test]
fn headers_that_no_sender_writes_promise_nothing() {
    let header = |length: usize, kind: u8| header(length, kind).announced_kind_and_length();
    assert_eq!(header(MAX_RECORD_PAYLOAD, 1), Some((RecordKind::Bytes, MAX_RECORD_PAYLOAD)));
    assert_eq!(
        [header(0, 2), header(CONTROL_PAYLOAD_BYTES, 3)],
        [Some((RecordKind::End, 0)), Some((RecordKind::Control, CONTROL_PAYLOAD_BYTES))]
    );
    let never = [
        (0, 1),
        (MAX_RECORD_PAYLOAD + 1, 1),
        ((1 << 24) - 1, 1),
        (1, 2),
        (0, 3),
        (1, 3),
        (CONTROL_PAYLOAD_BYTES + 1, 3),
        (5, 0),
        (5, 4),
        (5, 255),
    ];
    assert!(never.into_iter().all(|(length, kind)| header(length, kind).is_none()));
    let mut more = super::RecordHeader::new(RecordKind::Bytes, 5).unwrap();
    more.0[9] = 1;
    assert_eq!(more.announced_kind_and_length(), None);
    let mut long = vec![0; MAX_RECORD_PAYLOAD + 1];
    assert!(
        seal(CipherSuite::fastest_local(), 1).seal_payload(RecordKind::Bytes, &mut long).is_none()
    );
    assert!(long.iter().all(|byte| *byte == 0), "it was left alone");
}

#[test]
fn a_record_of_another_key_or_another_place_does_not_open() {
    for suite in suites() {
        let mut sender = seal(suite, 1);
        let records: Vec<_> =
            (0..3).map(|_| sealed(&mut sender, RecordKind::Bytes, b"the same each time")).collect();
        assert_ne!(records[0].payload, records[1].payload);
        assert!(opened(&mut seal(suite, 2), &records[0]).is_err(), "another key");
        assert_eq!(
            opened(&mut seal(suite, 1), &records[1]).unwrap_err().record,
            0,
            "one was left out"
        );
        let mut receiver = seal(suite, 1);
        opened(&mut receiver, &records[0]).unwrap();
        let error = opened(&mut receiver, &records[0]).unwrap_err();
        assert_eq!(error, receiver.tampered_record_error(), "repeated");
        assert!(error.to_string().contains("record 1 "), "{error}");
    }
}

#[derive(Clone, Debug)]
enum Harm {
    Flip { record: usize, at: usize, bits: u8 },
    Cut { record: usize, bytes: usize },
    Repeat { record: usize },
    Drop { record: usize },
    Swap { one: usize, other: usize },
    Insert { record: usize, kind: u8, payload: Vec<u8>, tag: [u8; RECORD_TAG_BYTES] },
}

fn harm() -> impl Strategy<Value = Harm> {
    prop_oneof![
        (any::<usize>(), any::<usize>(), 1_u8..).prop_map(|(record, at, bits)| Harm::Flip {
            record,
            at,
            bits
        }),
        (any::<usize>(), 1_usize..40).prop_map(|(record, bytes)| Harm::Cut { record, bytes }),
        any::<usize>().prop_map(|record| Harm::Repeat { record }),
        any::<usize>().prop_map(|record| Harm::Drop { record }),
        (any::<usize>(), any::<usize>()).prop_map(|(one, other)| Harm::Swap { one, other }),
        (any::<usize>(), 1_u8..4, vec(any::<u8>(), 0..40), any::<[u8; RECORD_TAG_BYTES]>())
            .prop_map(|(record, kind, payload, tag)| Harm::Insert { record, kind, payload, tag }),
    ]
}

fn apply(harm: &Harm, records: &mut Vec<Record>) {
    let place = |at: usize| at % records.len();
    match harm {
        Harm::Flip { record, at, bits } => {
            let record = place(*record);
            let record = &mut records[record];
            let at = at % (RECORD_HEADER_BYTES + record.payload.len() + RECORD_TAG_BYTES);
            let byte = if at < RECORD_HEADER_BYTES {
                &mut record.header.0[at]
            } else if at < RECORD_HEADER_BYTES + RECORD_TAG_BYTES {
                &mut record.tag[at - RECORD_HEADER_BYTES]
            } else {
                &mut record.payload[at - RECORD_HEADER_BYTES - RECORD_TAG_BYTES]
            };
            *byte ^= bits;
        }
        Harm::Cut { record, bytes } => {
            let record = place(*record);
            let payload = &mut records[record].payload;
            payload.truncate(payload.len().saturating_sub(*bytes));
            let length = u32::try_from(payload.len()).unwrap().to_le_bytes();
            records[record].header.0[..4].copy_from_slice(&length);
        }
        Harm::Repeat { record } => {
            let record = place(*record);
            records.insert(record, records[record].clone());
        }
        Harm::Drop { record } => {
            let record = place(*record);
            records.remove(record);
        }
        Harm::Swap { one, other } => {
            let (one, other) = (place(*one), place(*other));
            records.swap(one, other);
        }
        Harm::Insert { record, kind, payload, tag } => {
            let record = place(*record);
            let header = header(payload.len(), *kind);
            records.insert(record, Record { header, payload: payload.clone(), tag: *tag });
        }
    }
}

proptest! {
    #[test]
    fn sealed_records_open_in_their_order(suite in suite(), payloads in vec(vec(any::<u8>(), 1..300), 1..12)) {
        let (mut sender, mut receiver) = (seal(suite, 5), seal(suite, 5));
        for payload in payloads {
            let record = sealed(&mut sender, RecordKind::Bytes, &payload);
            prop_assert_eq!(record.header.announced_kind_and_length(), Some((RecordKind::Bytes, payload.len())));
            prop_assert_eq!(opened(&mut receiver, &record), Ok(payload));
        }
        prop_assert!(opened(&mut receiver, &sealed(&mut sender, RecordKind::End, &[])).is_ok());
    }

    /// Up to the first harm everything opens, and nothing does that is not as it was sealed.
    #[test]
    fn no_record_opens_that_was_not_sealed_next(
        suite in suite(),
        payloads in vec(vec(any::<u8>(), 1..100), 1..8),
        harm in harm(),
    ) {
        let (mut sender, mut receiver) = (seal(suite, 5), seal(suite, 5));
        let original: Vec<_> =
            payloads.iter().map(|payload| sealed(&mut sender, RecordKind::Bytes, payload)).collect();
        let mut records = original.clone();
        apply(&harm, &mut records);
        let same = original.iter().zip(&records).take_while(|(one, other)| one == other).count();
        for (at, record) in records.iter().enumerate() {
            let outcome = opened(&mut receiver, record);
            if at < same {
                prop_assert_eq!(outcome.as_ref(), Ok(&payloads[at]));
            } else {
                prop_assert_eq!(outcome, Err(TamperedRecord { record: same as u64 }));
                break;
            }
        }
    }
}
