// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Segments, bells and their hand-over, through the public door.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use farandole_shm::{
    Error, ForkGuard, ProcessDoorbell, RingSegment, create_private_ring, descriptor_passing,
};

#[test]
fn a_segment_arrives_over_a_socket_and_is_the_same_memory() {
    let (here, there) = UnixStream::pair().unwrap();
    let segment = RingSegment::create(2, 5000).unwrap();
    assert_eq!(segment.capacity(), 8192);
    descriptor_passing::send_with_descriptors(&here, b"segment", &[segment.as_fd()]).unwrap();
    let mut text = [0; 16];
    let (bytes, mut descriptors) =
        descriptor_passing::receive_with_descriptors(&there, &mut text).unwrap();
    assert_eq!((&text[..bytes], descriptors.len()), (&b"segment"[..], 1));
    let adopted = RingSegment::from_descriptor(descriptors.remove(0), 2, 5000).unwrap();
    let mut producer = segment.take_producer(0).unwrap();
    let mut consumer = adopted.take_consumer(0).unwrap();
    producer.window().unwrap()[..3].copy_from_slice(b"abc");
    producer.commit(3).unwrap();
    assert_eq!(consumer.window().unwrap(), b"abc");
}

#[test]
fn shm_1_what_can_be_shrunk_or_has_another_size_is_refused() {
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert!(matches!(
        RingSegment::from_descriptor(file.into(), 1, 4096),
        Err(Error::NotASegment { .. })
    ));
    let other = RingSegment::create(1, 4096).unwrap().as_fd().try_clone_to_owned().unwrap();
    assert!(matches!(
        RingSegment::from_descriptor(other, 2, 4096),
        Err(Error::NotASegment { expected: 16384, actual: 8192 })
    ));
}

#[test]
fn a_stream_through_a_small_ring_keeps_its_order() {
    const TOTAL: usize = 3_000_001;
    let (mut producer, mut consumer) = create_private_ring(4096).unwrap();
    let writer = thread::spawn(move || {
        let mut sent = 0;
        while sent < TOTAL {
            let window = producer.window().unwrap();
            let bytes = window.len().min(TOTAL - sent).min(1 + sent % 1500);
            for (at, byte) in window[..bytes].iter_mut().enumerate() {
                *byte = ((sent + at) % 251).to_le_bytes()[0];
            }
            producer.commit(bytes).unwrap();
            sent += bytes;
            if bytes == 0 {
                thread::yield_now();
            }
        }
    });
    let mut seen = 0;
    while seen < TOTAL {
        let window = consumer.window().unwrap();
        assert!(
            window.iter().enumerate().all(|(at, byte)| usize::from(*byte) == (seen + at) % 251)
        );
        let bytes = window.len();
        seen += bytes;
        consumer.release(bytes).unwrap();
        if bytes == 0 {
            thread::yield_now();
        }
    }
    writer.join().unwrap();
}

#[test]
fn a_bell_is_rung_once_and_only_when_its_owner_sleeps() {
    let bell = ProcessDoorbell::create().unwrap();
    let [memory, event] = bell.shared_descriptors().map(|fd| fd.try_clone_to_owned().unwrap());
    let theirs = ProcessDoorbell::from_descriptors(memory, event).unwrap();
    theirs.ring_if_parked().unwrap();
    assert!(!bell.clear_rings(), "nobody asked");
    bell.mark_parked();
    theirs.ring_if_parked().unwrap();
    theirs.ring_if_parked().unwrap();
    assert!(bell.clear_rings());
    assert!(!bell.clear_rings());
    assert!(!bell.is_parked(), "whoever rings resets the flag");
    bell.increment_heartbeat();
    assert_eq!(theirs.heartbeat_count(), 1);
    bell.mark_closed();
    assert!(theirs.is_closed());
}

#[test]
fn a_guard_holds_in_its_own_process() {
    assert!(ForkGuard::new().is_original_process());
}

#[test]
fn shm_5_a_forked_child_cannot_use_a_ring_of_its_parent() {
    const FORKED: i32 = 200;
    let guard = ForkGuard::new();
    let (mut producer, mut consumer) = create_private_ring(4096).unwrap();
    producer.window().unwrap();
    let mut command = Command::new("/proc/self/exe");
    let probe = move || {
        let refused = !guard.is_original_process()
            && producer.window().err() == Some(Error::Forked)
            && producer.commit(1) == Err(Error::Forked);
        producer.close();
        Err(std::io::Error::from_raw_os_error(if refused { FORKED } else { 0 }))
    };
    // SAFETY: the closure runs in the forked child before exec; it reads atomics and allocates
    // nothing.
    unsafe { command.pre_exec(probe) };
    assert_eq!(command.spawn().unwrap_err().raw_os_error(), Some(FORKED));
    assert!(!consumer.is_producer_closed(), "the child changed the parent's ring");
    assert!(consumer.window().unwrap().is_empty());
    assert!(guard.is_original_process());
}

/// Waits without sleeping, so that two threads meet within nanoseconds; gives way when the other is
/// not running.
fn meet(at: &AtomicU64, round: u64) {
    let mut spins = 0_u32;
    while at.load(Ordering::Acquire) < round {
        spins += 1;
        if spins.is_multiple_of(1 << 12) {
            thread::yield_now();
        }
        std::hint::spin_loop();
    }
}

/// A few cycles each: the race to be provoked is as short.
fn dawdle(steps: u64) {
    (0..steps).for_each(|step| {
        std::hint::black_box(step);
    });
}

#[test]
fn shm_4_a_commit_is_seen_by_the_poll_after_parking_or_rings_the_bell() {
    let bell = ProcessDoorbell::create().unwrap();
    let (mut producer, mut consumer) = create_private_ring(4096).unwrap();
    let (go, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let end = Instant::now() + Duration::from_secs(1);
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1.. {
                producer.window().unwrap();
                meet(&go, round);
                if go.load(Ordering::Acquire) == u64::MAX {
                    return;
                }
                dawdle(round % 211);
                producer.commit(1).unwrap();
                bell.ring_if_parked().unwrap();
                done.store(round, Ordering::Release);
            }
        });
        for round in 1.. {
            if Instant::now() > end {
                break;
            }
            go.store(round, Ordering::Release);
            dawdle(round % 499);
            bell.mark_parked();
            let seen = consumer.used_bytes().unwrap() > 0;
            meet(&done, round);
            assert!(bell.clear_rings() || seen, "neither seen nor rung in round {round}");
            bell.clear_parked();
            consumer.window().unwrap();
            consumer.release(1).unwrap();
        }
        go.store(u64::MAX, Ordering::Release);
    });
}
