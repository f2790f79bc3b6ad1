// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Regions: memory of one process that others work in.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use farandole_shm::{Error, RegionHandle, SharedRegion};

/// One test counts descriptors: others must not come and go meanwhile.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn put(region: &SharedRegion, at: usize, byte: u8) {
    assert!(at < usize::try_from(region.region_handle().bytes).unwrap());
    // SAFETY: within the region, and tests write and read one after the other.
    unsafe { region.data_address().add(at).write_volatile(byte) }
}

fn get(region: &SharedRegion, at: usize) -> u8 {
    assert!(at < usize::try_from(region.region_handle().bytes).unwrap());
    // SAFETY: as in `put`.
    unsafe { region.data_address().add(at).read_volatile() }
}

/// Descriptors of this process that lead to regions.
fn descriptors() -> usize {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let target =
        |entry: std::io::Result<std::fs::DirEntry>| std::fs::read_link(entry.unwrap().path());
    entries
        .filter_map(|entry| target(entry).ok())
        .filter(|to| to.to_string_lossy().contains("farandole-region"))
        .count()
}

#[test]
fn a_process_with_the_card_maps_the_same_memory_and_keeps_no_descriptor() {
    let _alone = alone();
    let before = descriptors();
    let owner = SharedRegion::create(100_000).unwrap();
    put(&owner, 99_999, 7);
    let peer = SharedRegion::open_peer_region(owner.region_handle()).unwrap();
    assert_eq!(get(&peer, 99_999), 7);
    put(&peer, 0, 8);
    assert_eq!(get(&owner, 0), 8);
    assert!(owner.is_shareable() && !peer.is_shareable());
    assert_eq!(descriptors(), before + 1);
    drop((owner, peer));
    assert_eq!(descriptors(), before);
}

#[test]
fn shm_6_detached_memory_keeps_its_place_and_bytes_and_is_not_shared() {
    let _alone = alone();
    let owner = SharedRegion::create(10_000).unwrap();
    let peer = SharedRegion::open_peer_region(owner.region_handle()).unwrap();
    put(&owner, 9_000, 1);
    let address = owner.data_address();
    owner.detach_from_peers().unwrap();
    owner.detach_from_peers().unwrap();
    assert_eq!((owner.data_address(), get(&owner, 9_000)), (address, 1));
    assert!(owner.is_retired() && peer.is_retired() && !owner.is_shareable());
    put(&peer, 9_000, 2);
    put(&owner, 5_000, 3);
    assert_eq!((get(&owner, 9_000), get(&peer, 5_000)), (1, 0));
    drop(owner);
    assert_eq!(get(&peer, 9_000), 2, "the peer may still be working there");
}

#[test]
fn a_dropped_region_is_empty_for_the_others_and_marked_as_retired() {
    let _alone = alone();
    let owner = SharedRegion::create(10_000).unwrap();
    let peer = SharedRegion::open_peer_region(owner.region_handle()).unwrap();
    put(&owner, 1, 9);
    assert!(!peer.is_retired());
    drop(owner);
    assert!(peer.is_retired());
    assert_eq!(get(&peer, 1), 0);
}

#[test]
fn shm_6_anything_else_at_that_place_is_refused() {
    let _alone = alone();
    let owner = SharedRegion::create(10_000).unwrap();
    let card = *owner.region_handle();
    let other = RegionHandle { nonce: [card.nonce[0], !card.nonce[1]], ..card };
    assert!(matches!(SharedRegion::open_peer_region(&other), Err(Error::AnotherRegion { .. })));
    let larger = RegionHandle { bytes: 1 << 20, ..card };
    assert!(matches!(SharedRegion::open_peer_region(&larger), Err(Error::NotASegment { .. })));
    let absurd = RegionHandle { bytes: u64::MAX, ..card };
    assert!(SharedRegion::open_peer_region(&absurd).is_err());
    let device = File::open("/dev/zero").unwrap();
    let descriptor = u32::try_from(device.as_raw_fd()).unwrap();
    let elsewhere = RegionHandle { descriptor, ..card };
    assert!(matches!(SharedRegion::open_peer_region(&elsewhere), Err(Error::AnotherRegion { .. })));
    let nowhere = RegionHandle { pid: 0, ..card };
    assert!(matches!(
        SharedRegion::open_peer_region(&nowhere),
        Err(Error::System { call: "open", .. })
    ));
}
