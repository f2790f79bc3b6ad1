// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Regions: memory of one process that others work in.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use farandole_shm::{Error, Region, RegionCard};

/// One test counts descriptors: others must not come and go meanwhile.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn put(region: &Region, at: usize, byte: u8) {
    assert!(at < usize::try_from(region.card().bytes).unwrap());
    // SAFETY: within the region, and tests write and read one after the other.
    unsafe { region.address().add(at).write_volatile(byte) }
}

fn get(region: &Region, at: usize) -> u8 {
    assert!(at < usize::try_from(region.card().bytes).unwrap());
    // SAFETY: as in `put`.
    unsafe { region.address().add(at).read_volatile() }
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
    let owner = Region::create(100_000).unwrap();
    put(&owner, 99_999, 7);
    let peer = Region::open(owner.card()).unwrap();
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
    let owner = Region::create(10_000).unwrap();
    let peer = Region::open(owner.card()).unwrap();
    put(&owner, 9_000, 1);
    let address = owner.address();
    owner.detach().unwrap();
    owner.detach().unwrap();
    assert_eq!((owner.address(), get(&owner, 9_000)), (address, 1));
    assert!(owner.retired() && peer.retired() && !owner.is_shareable());
    put(&peer, 9_000, 2);
    put(&owner, 5_000, 3);
    assert_eq!((get(&owner, 9_000), get(&peer, 5_000)), (1, 0));
    drop(owner);
    assert_eq!(get(&peer, 9_000), 2, "the peer may still be working there");
}

#[test]
fn a_dropped_region_is_empty_for_the_others_and_marked_as_retired() {
    let _alone = alone();
    let owner = Region::create(10_000).unwrap();
    let peer = Region::open(owner.card()).unwrap();
    put(&owner, 1, 9);
    assert!(!peer.retired());
    drop(owner);
    assert!(peer.retired());
    assert_eq!(get(&peer, 1), 0);
}

#[test]
fn shm_6_anything_else_at_that_place_is_refused() {
    let _alone = alone();
    let owner = Region::create(10_000).unwrap();
    let card = *owner.card();
    let other = RegionCard { nonce: [card.nonce[0], !card.nonce[1]], ..card };
    assert!(matches!(Region::open(&other), Err(Error::AnotherRegion { .. })));
    let larger = RegionCard { bytes: 1 << 20, ..card };
    assert!(matches!(Region::open(&larger), Err(Error::NotASegment { .. })));
    let absurd = RegionCard { bytes: u64::MAX, ..card };
    assert!(Region::open(&absurd).is_err());
    let device = File::open("/dev/zero").unwrap();
    let descriptor = u32::try_from(device.as_raw_fd()).unwrap();
    let elsewhere = RegionCard { descriptor, ..card };
    assert!(matches!(Region::open(&elsewhere), Err(Error::AnotherRegion { .. })));
    let nowhere = RegionCard { pid: 0, ..card };
    assert!(matches!(Region::open(&nowhere), Err(Error::System { call: "open", .. })));
}
