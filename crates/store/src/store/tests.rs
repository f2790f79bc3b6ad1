// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use super::*;

/// Checks the contract of all backends.
fn contract(store: &Store) {
    assert!(!store.exists("a/b.bin").unwrap());
    store.write("a/b.bin", Bytes::from_static(b"0123456789")).unwrap();
    store.write("c", Bytes::from_static(b"x")).unwrap();
    assert_eq!(store.read("a/b.bin").unwrap(), "0123456789");
    assert_eq!(store.size("a/b.bin").unwrap(), 10);
    assert_eq!(store.read_ranges("a/b.bin", &[1..3, 8..10]).unwrap(), ["12", "89"]);
    assert!(store.exists("a").unwrap() && store.exists("").unwrap());
    let names: Vec<String> = store.list("").unwrap().into_iter().map(|entry| entry.path).collect();
    assert_eq!(names, ["a/b.bin", "c"]);
    let below = store.open_child("a").unwrap().list("").unwrap();
    assert_eq!(below.len(), 1);
    assert_eq!((below[0].path.as_str(), below[0].bytes), ("b.bin", 10));
    assert!(below[0].modified.is_some());
    assert_eq!(store.list("nowhere").unwrap(), []);

    assert!(store.create_if_absent("once", Bytes::from_static(b"1")).unwrap());
    assert!(!store.create_if_absent("once", Bytes::from_static(b"2")).unwrap());
    assert_eq!(store.read("once").unwrap(), "1");
    store.delete("once").unwrap();

    let mut upload = store.start_upload("a/u").unwrap();
    upload.write_piece(Bytes::from(vec![7; PIECE])).unwrap();
    upload.write_piece(Bytes::from(vec![8; PIECE])).unwrap();
    assert!(!store.exists("a/u").unwrap(), "ST-1: nobody sees an upload before its end");
    assert_eq!(upload.finish().unwrap(), 2 * PIECE as u64);
    let seam = PIECE as u64 - 1..PIECE as u64 + 1;
    assert_eq!(store.read_ranges("a/u", std::slice::from_ref(&seam)).unwrap(), [&[7, 8][..]]);
    drop(store.start_upload("a/v").unwrap());
    assert!(!store.exists("a/v").unwrap());

    store.delete("c").unwrap();
    store.delete("c").unwrap();
    assert_eq!(store.delete_all("a").unwrap(), 2);
    assert!(!store.exists("a").unwrap());
    let missing = store.read("a/b.bin").unwrap_err();
    assert!(
        matches!(&missing, Error::Missing { path } if *path == store.display_path("a/b.bin")),
        "{missing}"
    );
    store.check_writable().unwrap();
    assert_eq!(store.list("").unwrap(), []);
}

const PIECE: usize = 5 << 20;

#[test]
fn a_directory_keeps_the_contract_whatever_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a b=ü%20");
    contract(&Store::open(path.to_str().unwrap()).unwrap());
}

#[test]
fn memory_keeps_the_contract() {
    contract(&Store::open("memory://contract/x").unwrap());
    contract(&Store::open("memory://contract").unwrap());
}

#[test]
fn st_2_a_path_that_cannot_be_written_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, b"x").unwrap();
    let inside = file.join("below");
    let store = Store::open(inside.to_str().unwrap()).unwrap();
    let error = store.check_writable().unwrap_err();
    assert!(error.to_string().contains(inside.to_str().unwrap()), "{error}");
    assert_eq!(error.fault(), crate::Fault::Environment);
}

#[test]
fn a_path_may_not_climb_out() {
    let store = Store::open("memory://climb/x").unwrap();
    assert!(matches!(store.read("../y"), Err(Error::Url { .. })));
    assert!(matches!(store.open_child("a//b"), Err(Error::Url { .. })));
}

#[test]
fn a_store_resolves_urls_paths_and_names() {
    let store = Store::open("/tmp/prefix").unwrap();
    assert_eq!(store.resolve_path("data").unwrap().url(), "file:///tmp/prefix/data");
    assert_eq!(store.resolve_path("/other").unwrap().url(), "file:///other");
    assert_eq!(store.resolve_path("memory://m/y").unwrap().url(), "memory://m/y");
}
