// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Frames: what was sent arrives, and garbage ends in an error or in waiting, with little memory.

use farandole_fuzz::cases;
use farandole_transport::{Error, LinkFrame, into_frame_halves, loopback};
use farandole_world::Rank;

#[test]
fn frames_of_any_size_cross_rings_of_any_size() {
    cases(|random| {
        let (a, b) = loopback::link_pair(Rank(0), Rank(1), 1 + random.below(20_000)).unwrap();
        let (mut sender, mut receiver) = (into_frame_halves(a).0, into_frame_halves(b).1);
        let sent: Vec<LinkFrame> = (0..random.below(20))
            .map(|_| LinkFrame { kind: random.byte(), payload: random.bytes(30_000) })
            .collect();
        for frame in &sent {
            sender.queue_frame(frame.kind, &frame.payload).unwrap();
        }
        let mut seen = Vec::new();
        while seen.len() < sent.len() {
            sender.flush().unwrap();
            seen.extend(receiver.try_receive_frame().unwrap());
        }
        assert_eq!(seen, sent);
    });
}

#[test]
fn garbage_is_an_error_or_waits_for_more() {
    cases(|random| {
        let (mut a, b) = loopback::link_pair(Rank(0), Rank(1), 4096).unwrap();
        let mut receiver = into_frame_halves(b).1;
        for _ in 0..random.below(30) {
            let bytes = random.bytes(64);
            let window = a.sender.window().unwrap();
            let fits = bytes.len().min(window.len());
            window[..fits].copy_from_slice(&bytes[..fits]);
            a.sender.commit(fits).unwrap();
            match receiver.try_receive_frame() {
                Ok(Some(frame)) => assert!(frame.payload.len() <= 4096),
                Ok(None) => {}
                Err(Error::Frame { rank, .. }) => {
                    assert_eq!(rank, Rank(0));
                    return;
                }
                Err(other) => unreachable!("{other}"),
            }
        }
    });
}
