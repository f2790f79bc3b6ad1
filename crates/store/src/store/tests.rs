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

    store.copy("a/b.bin", "a/copy").unwrap();
    assert_eq!(store.read("a/copy").unwrap(), "0123456789");
    assert!(matches!(store.copy("nowhere", "a/x").unwrap_err(), Error::Missing { .. }));
    store.delete("a/copy").unwrap();

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

/// A recursive operation on a directory.
type TreeOperation = (&'static str, fn(&Store));

/// Every recursive operation, on a store with a directory `d`.
const TREE_OPERATIONS: [TreeOperation; 5] = [
    ("list", |store| drop(store.list("d"))),
    ("list with links", |store| drop(store.list_with_links("d").unwrap())),
    ("delete all", |store| assert!(store.delete_all("d").unwrap() > 0)),
    ("delete all of a child", |store| {
        assert!(store.open_child("d").unwrap().delete_all("").unwrap() > 0);
    }),
    ("clear", |store| {
        let child = store.open_child("d").unwrap();
        let now = SystemTime::now();
        let lease = crate::acquire_lease(&child, now, None, None).unwrap().unwrap();
        assert!(crate::delete_content_and_lease(&child, &lease).unwrap() > 0);
    }),
];

/// A link that is placed below a store's directory and leads to another one.
type PlacedLink = (&'static str, fn(&std::path::Path, &std::path::Path));

#[test]
fn st_7_no_recursive_operation_leaves_its_directory_through_a_link() {
    use std::os::unix::fs::symlink;
    let links: [PlacedLink; 4] = [
        ("a link to a directory", |base, other| symlink(other, base.join("d/link")).unwrap()),
        ("a deep link", |base, other| {
            std::fs::create_dir_all(base.join("d/x/y")).unwrap();
            symlink(other, base.join("d/x/y/link")).unwrap();
        }),
        ("a link to a file", |base, other| {
            symlink(other.join("theirs"), base.join("d/link")).unwrap();
        }),
        ("a link to the directory above", |base, _| symlink(base, base.join("d/up")).unwrap()),
    ];
    for (operation, operate) in TREE_OPERATIONS {
        for (kind, place_link) in links {
            for base_is_link in [false, true] {
                let places = tempfile::tempdir().unwrap();
                let (base, other) = (places.path().join("store"), places.path().join("other"));
                std::fs::create_dir_all(base.join("d")).unwrap();
                std::fs::create_dir_all(&other).unwrap();
                std::fs::write(other.join("theirs"), b"x").unwrap();
                std::fs::write(base.join("d/ours"), b"x").unwrap();
                std::fs::write(base.join("beside"), b"x").unwrap();
                place_link(&base, &other);
                let mut path = base.clone();
                if base_is_link {
                    path = places.path().join("linked");
                    symlink(&base, &path).unwrap();
                }
                let store = Store::open(path.to_str().unwrap()).unwrap();
                operate(&store);
                let case = format!("{operation}, {kind}, base is a link: {base_is_link}");
                assert!(other.join("theirs").exists() && base.join("beside").exists(), "{case}");
                let deletes = !operation.starts_with("list");
                assert_eq!(base.join("d/ours").exists(), !deletes, "{case}");
                let (files, _) = store.list_with_links("").unwrap();
                assert!(!files.iter().any(|file| file.path.ends_with("theirs")), "{case}");
            }
        }
    }
}

#[test]
fn a_listing_names_a_link_to_a_directory_instead_of_omitting_its_files() {
    let places = tempfile::tempdir().unwrap();
    let inside = places.path().join("store/x=1");
    std::fs::create_dir_all(places.path().join("store")).unwrap();
    std::fs::create_dir_all(places.path().join("other")).unwrap();
    std::os::unix::fs::symlink(places.path().join("other"), &inside).unwrap();
    let store = Store::open(places.path().join("store").to_str().unwrap()).unwrap();
    let error = store.list("").unwrap_err().to_string();
    assert!(error.contains(inside.to_str().unwrap()), "{error}");
}

#[test]
fn a_child_that_is_a_link_is_deleted_as_a_link() {
    let places = tempfile::tempdir().unwrap();
    let other = places.path().join("other");
    std::fs::create_dir_all(&other).unwrap();
    std::fs::write(other.join("theirs"), b"x").unwrap();
    let link = places.path().join("link");
    std::os::unix::fs::symlink(&other, &link).unwrap();
    let store = Store::open(link.to_str().unwrap()).unwrap();
    assert_eq!(store.read("theirs").unwrap(), "x", "a base may be a link");
    assert_eq!(store.delete_all("").unwrap(), 0);
    assert!(other.join("theirs").exists() && !link.exists());
}

#[test]
fn a_prepared_directory_that_is_a_link_is_foreign_and_is_not_cleared() {
    let places = tempfile::tempdir().unwrap();
    let (base, other) = (places.path().join("store"), places.path().join("other"));
    std::fs::create_dir_all(&base).unwrap();
    std::fs::create_dir_all(&other).unwrap();
    let theirs = Store::open(other.to_str().unwrap()).unwrap();
    let manifest = br#"{"fingerprint": "data x", "files": [{"path": "part.parquet"}]}"#;
    for (file, text) in [("_manifest.json", &manifest[..]), ("part.parquet", b"1"), ("x/y", b"2")] {
        theirs.write(file, Bytes::copy_from_slice(text)).unwrap();
    }
    theirs.delete_all("x").unwrap();
    std::os::unix::fs::symlink(&other, base.join("linked")).unwrap();
    let store = Store::open(base.to_str().unwrap()).unwrap();
    let missing = store.open_child("missing").unwrap();
    for url in [base.join("linked"), base.join("linked/")] {
        let linked = Store::open(url.to_str().unwrap()).unwrap();
        for (train, val) in [(&linked, &missing), (&missing, &linked)] {
            let found = crate::find_foreign_file(train, val).unwrap();
            assert_eq!(found, Some(linked.display_path("")), "{url:?}");
        }
        let lease = crate::acquire_lease(&linked, SystemTime::now(), None, None).unwrap().unwrap();
        let before = theirs.list("").unwrap();
        let error = crate::delete_content_and_lease(&linked, &lease).unwrap_err();
        assert!(format!("{:?}", error_messages(&error)).contains("symbolic link"), "{error}");
        assert_eq!(theirs.list("").unwrap(), before);
        theirs.delete(&lease).unwrap();
    }
}

#[test]
fn a_directory_that_is_exchanged_for_a_link_during_its_deletion_is_not_left() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let places = tempfile::tempdir().unwrap();
    let (base, other) = (places.path().join("d"), places.path().join("other"));
    std::fs::create_dir_all(&other).unwrap();
    let names: Vec<String> = (0..40).map(|number| format!("{number}.parquet")).collect();
    for name in &names {
        std::fs::write(other.join(name), b"theirs").unwrap();
    }
    let (inner, link) = (base.join("x=1"), places.path().join("link"));
    for _ in 0..30 {
        std::os::unix::fs::symlink(&other, &link).unwrap();
        let store = Store::open(base.to_str().unwrap()).unwrap();
        for name in &names {
            store.write(&format!("x=1/{name}"), Bytes::from_static(b"ours")).unwrap();
        }
        let lease = crate::acquire_lease(&store, SystemTime::now(), None, None).unwrap().unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let (at, flags) = (rustix::fs::CWD, rustix::fs::RenameFlags::EXCHANGE);
                    // It fails after one of them was deleted.
                    rustix::fs::renameat_with(at, &inner, at, &link, flags).unwrap_or_default();
                }
            });
            // The directory that changes meanwhile may be an error.
            drop(crate::delete_content_and_lease(&store, &lease));
            is_over.store(true, Ordering::Relaxed);
        });
        assert_eq!(std::fs::read_dir(&other).unwrap().count(), names.len(), "files outside went");
        for path in [&base, &link] {
            local_tree::remove_tree(path).unwrap();
        }
    }
}

#[test]
fn a_pipe_in_the_place_of_a_file_blocks_nobody() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path().to_str().unwrap()).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, directory.path().join("f"), 0o644.into()).unwrap();
    type Request = fn(&Store) -> Result<()>;
    let asked: [(&str, Request); 6] = [
        ("read", |store| store.read("f").map(drop)),
        ("size", |store| store.size("f").map(drop)),
        ("stat", |store| store.stat("f").map(drop)),
        ("copy", |store| store.copy("f", "g").map(drop)),
        ("ranges", |store| store.read_ranges("f", std::slice::from_ref(&(0..1))).map(drop)),
        ("open", |store| store.open_file("f").map(drop)),
    ];
    for (name, ask) in asked {
        let error = ask(&store).unwrap_err();
        assert!(!matches!(error, Error::Missing { .. }), "{name}: {error}");
        let text = format!("{:?}", error_messages(&error));
        assert!(text.contains("pipe"), "{name}: {text}");
    }
    assert_eq!(store.list("").unwrap(), []);
}

/// The messages of an error and of its sources.
fn error_messages(error: &dyn std::error::Error) -> Vec<String> {
    std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string).collect()
}

#[test]
fn directories_nested_beyond_all_use_are_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path().to_str().unwrap()).unwrap();
    let mut deep = directory.path().to_path_buf();
    (0..120).for_each(|_| deep.push("d"));
    std::fs::create_dir_all(&deep).unwrap();
    let error = store.list("").unwrap_err();
    assert!(format!("{:?}", error_messages(&error)).contains("nested more than"), "{error}");
}

#[test]
fn st_8_a_file_system_that_cannot_be_asked_is_an_error_and_not_absence() {
    let places = tempfile::tempdir().unwrap();
    std::fs::write(places.path().join("file"), b"x").unwrap();
    let store = Store::open(places.path().to_str().unwrap()).unwrap();
    // The name of a loop of links: the system answers ELOOP, also to the superuser.
    std::os::unix::fs::symlink("loop", places.path().join("loop")).unwrap();
    let long = "x".repeat(300);
    for name in ["loop/x", "loop", long.as_str()] {
        assert!(store.exists(name).is_err(), "exists {name}");
        assert!(store.stat(name).is_err(), "stat {name}");
        let read = store.read(name).unwrap_err();
        assert!(!matches!(read, Error::Missing { .. }), "read {name}: {read}");
        let listed = store.list(&format!("{name}/y"));
        assert!(listed.is_err(), "list {name}: {listed:?}");
    }
    for name in ["nowhere", "nowhere/x", "file/x"] {
        assert!(!store.exists(name).unwrap(), "{name}");
        assert!(matches!(store.read(name).unwrap_err(), Error::Missing { .. }), "{name}");
        assert_eq!(store.list(name).unwrap(), [], "{name}");
        store.delete(name).unwrap();
        assert_eq!(store.delete_all(name).unwrap(), 0, "{name}");
    }
}
