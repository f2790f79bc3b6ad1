// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use super::*;

fn store(name: &str) -> Store {
    Store::open(&format!("memory://lease-{name}/d")).unwrap()
}

fn left(store: &Store, name: &str, holder: &MarkHolder) {
    store.write(name, serde_json::to_vec(holder).unwrap().into()).unwrap();
}

/// Makes a file look as if it was written earlier.
fn age_file(path: &std::path::Path, age: Duration) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - age).unwrap();
}

fn unseen_holder(now: SystemTime, lasts: Duration) -> MarkHolder {
    MarkHolder { boot: Some("another".to_owned()), ..MarkHolder::of_this_process(now, Some(lasts)) }
}

#[test]
fn clocks_that_differ_neither_take_a_living_lease_nor_keep_a_dead_one() {
    let lasts = Duration::from_secs(180);
    for (case, age, is_living) in [("renewed", 20, true), ("expired", 200, false)] {
        let age = Duration::from_secs(age);
        // Of both clocks, the holder's and ours, each may be ahead.
        for holder_ahead in [0, 240, 86_000] {
            for ours_ahead in [0_i64, 240, 86_000, -240, -86_000] {
                let directory = tempfile::tempdir().unwrap();
                let store = Store::open(directory.path().to_str().unwrap()).unwrap();
                let real = SystemTime::now();
                let written = real - age + Duration::from_secs(holder_ahead);
                left(&store, "_lease-5.json", &unseen_holder(written, lasts));
                age_file(&directory.path().join("_lease-5.json"), age);
                let skew = Duration::from_secs(ours_ahead.unsigned_abs());
                let now = if ours_ahead < 0 { real - skew } else { real + skew };
                let acquired = acquire_lease(&store, now, Some(lasts), None).unwrap();
                let case = format!("{case} {holder_ahead} {ours_ahead}");
                assert_eq!(acquired.is_none(), is_living, "{case}");
                assert_eq!(store.exists("_lease-5.json").unwrap(), is_living, "{case}");
                let files = store.list("").unwrap();
                assert_eq!(files.len(), 1, "{case}, one lease and nothing else: {files:?}");
            }
        }
    }
}

#[test]
fn a_reader_whose_clock_is_ahead_respects_a_writer() {
    let (store, real) = (store("ahead"), SystemTime::now());
    left(&store, "_lease-5.json", &unseen_holder(real, Duration::from_secs(180)));
    assert_eq!(mark_in_use(&store, real + Duration::from_secs(3600), None).unwrap(), None);
    let names: Vec<String> =
        store.list_directory("").unwrap().into_iter().map(|item| item.name).collect();
    assert_eq!(names, ["_lease-5.json"]);
}

#[test]
fn a_creation_that_is_refused_because_its_first_attempt_succeeded_counts() {
    let (store, now) = (store("lost"), SystemTime::now());
    let holder = encode_mark_holder(now, None, None).unwrap();
    // The answer of this attempt was lost, and the service refuses the second one.
    assert!(store.create_if_absent("_lease-9.json", holder.clone()).unwrap());
    create_mark(&store, "_lease-9.json", holder).unwrap();
    assert!(win_or_withdraw_lease(&store, "_lease-9.json", now, None, &[]).unwrap());
}

#[test]
fn a_mark_that_is_deleted_during_its_renewal_stays_deleted() {
    let directory = tempfile::tempdir().unwrap();
    for store in [store("raced"), Store::open(directory.path().to_str().unwrap()).unwrap()] {
        let now = SystemTime::now();
        let lease = acquire_lease(&store, now, None, None).unwrap().unwrap();
        // Another process deletes the mark between the read and the write.
        let delete = |text: &[u8]| -> Result<Option<Bytes>> {
            store.delete(&lease)?;
            Ok(Some(Bytes::copy_from_slice(text)))
        };
        let replaced = store.replace_existing(&lease, delete).unwrap();
        assert_eq!(replaced, FileReplacement::Refused);
        assert!(!store.exists(&lease).unwrap());
        assert!(!renew_mark(&store, &lease, now).unwrap());
    }
}

#[test]
fn a_process_that_proc_hides_is_not_absent() {
    assert_eq!(observe_process(u32::MAX), ObservedProcess::Absent);
    assert_eq!(observe_process(0), ObservedProcess::Absent);
    let mut child = std::process::Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    assert_eq!(observe_process(child.id()), ObservedProcess::Absent);
    assert!(matches!(observe_process(std::process::id()), ObservedProcess::StartedAt(_)));
    assert_eq!(parse_process_stat("1 (a) b) Z 1"), Some(ObservedProcess::Absent));
}

#[test]
fn one_takes_and_many_share_but_never_both() {
    let (store, now) = (store("both"), SystemTime::now());
    assert!(is_free(&store, now).unwrap());
    let lease = acquire_lease(&store, now, None, None).unwrap().unwrap();
    assert_eq!(acquire_lease(&store, now, None, None).unwrap(), None);
    assert_eq!(mark_in_use(&store, now, None).unwrap(), None);
    let first = downgrade_lease(&store, &lease, now).unwrap();
    let second = mark_in_use(&store, now, None).unwrap().unwrap();
    assert_ne!(first, second);
    assert_eq!(acquire_lease(&store, now, None, None).unwrap(), None);
    assert!(!is_free(&store, now).unwrap());
    store.delete(&first).unwrap();
    assert_eq!(acquire_lease(&store, now, None, None).unwrap(), None);
    store.delete(&second).unwrap();
    assert!(acquire_lease(&store, now, None, None).unwrap().is_some());
}

#[test]
fn a_cleared_directory_keeps_what_another_process_has_there() {
    let directory = tempfile::tempdir().unwrap();
    let base = directory.path().join("d");
    let (store, now) = (Store::open(base.to_str().unwrap()).unwrap(), SystemTime::now());
    for file in ["part.parquet", MANIFEST_FILE, "x=1/part.parquet"] {
        store.write(file, Bytes::from_static(b"1")).unwrap();
    }
    let lease = acquire_lease(&store, now, None, None).unwrap().unwrap();
    let reader = write_use_mark(&store, now, None).unwrap();
    assert_eq!(delete_content_and_lease(&store, &lease).unwrap(), 2, "the manifest is not counted");
    let left: Vec<String> =
        store.list_directory("").unwrap().into_iter().map(|item| item.name).collect();
    assert_eq!(left, [reader.as_str()]);
    store.delete(&reader).unwrap();
    let lease = acquire_lease(&store, now, None, None).unwrap().unwrap();
    assert_eq!(delete_content_and_lease(&store, &lease).unwrap(), 0);
    assert!(!base.exists());
}

#[test]
fn whoever_lost_its_lease_neither_shares_nor_deletes_the_directory() {
    let directory = tempfile::tempdir().unwrap();
    let local = Store::open(directory.path().to_str().unwrap()).unwrap();
    for store in [store("lost-lease"), local] {
        let now = SystemTime::now();
        let lost = acquire_lease(&store, now, None, None).unwrap().unwrap();
        // As its next owner does when the lease has expired.
        store.delete(&lost).unwrap();
        let other = acquire_lease(&store, now, None, None).unwrap().unwrap();
        for file in ["part.parquet", MANIFEST_FILE, PREPARATION_FILE] {
            store.write(file, Bytes::from_static(b"theirs")).unwrap();
        }
        let before = store.list("").unwrap();
        for refused in [
            downgrade_lease(&store, &lost, now).map(drop),
            delete_content_and_lease(&store, &lost).map(drop),
        ] {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(&store.display_path("")), "the directory is named: {error}");
        }
        assert_eq!(store.list("").unwrap(), before);
        assert_eq!(store.read(PREPARATION_FILE).unwrap(), "theirs");
        downgrade_lease(&store, &other, now).unwrap();
    }
}

#[test]
fn of_many_at_once_one_takes() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path().to_str().unwrap()).unwrap();
    let now = SystemTime::now();
    let dead = MarkHolder { pid: u32::MAX, ..MarkHolder::of_this_process(now, None) };
    for _ in 0..200 {
        left(&store, "_lease-7.json", &dead);
        let taken: Vec<String> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| acquire_lease(&store, now, None, None).unwrap()))
                .collect();
            threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(taken.len(), 1, "{taken:?}");
        store.delete_all("").unwrap();
    }
}

#[test]
fn the_dead_do_not_count_and_the_unseen_do_for_a_week() {
    let (store, now) = (store("dead"), SystemTime::now());
    let me = MarkHolder::of_this_process(now, None);
    left(
        &store,
        "_lease-3.json",
        &MarkHolder { pid: u32::MAX, ..MarkHolder::of_this_process(now, None) },
    );
    left(
        &store,
        "_use-x.json",
        &MarkHolder {
            started: me.started.map(|ticks| ticks + 1),
            ..MarkHolder::of_this_process(now, None)
        },
    );
    assert!(is_free(&store, now).unwrap());
    let lease = acquire_lease(&store, now, None, None).unwrap().unwrap();
    let names: Vec<String> =
        store.list_directory("").unwrap().into_iter().map(|item| item.name).collect();
    assert_eq!(names, [lease.as_str()], "what the dead left goes");
    store.delete(&lease).unwrap();

    for unseen in [
        MarkHolder {
            host: "elsewhere".to_owned(),
            boot: None,
            ..MarkHolder::of_this_process(now, None)
        },
        // A host with the same name; no process here has that number.
        MarkHolder {
            boot: Some("another".to_owned()),
            pid: u32::MAX,
            ..MarkHolder::of_this_process(now, None)
        },
        MarkHolder {
            namespace: Some("pid:[1]".to_owned()),
            pid: u32::MAX,
            ..MarkHolder::of_this_process(now, None)
        },
    ] {
        left(&store, "_use-y.json", &unseen);
        assert_eq!(acquire_lease(&store, now, None, None).unwrap(), None);
        assert!(is_free(&store, now + UNSEEN_HOLDER_LIFETIME + EMPTY_MARK_LIFETIME).unwrap());
    }
}

#[test]
fn a_process_that_cannot_be_observed_is_not_dead() {
    let now = SystemTime::now();
    let pid = 4_000_000;
    let dead = MarkHolder { pid, ..MarkHolder::of_this_process(now, None) };
    assert!(!dead.is_mark_valid(unix_seconds(now), unix_seconds(now)), "it is on this host");
    let none = || MarkHolder { pid, ..MarkHolder::of_this_process(now, None) };
    for (case, holder) in [
        ("an unknown boot id", MarkHolder { boot: None, ..none() }),
        ("an unknown namespace", MarkHolder { namespace: None, ..none() }),
        ("a clone of the machine", MarkHolder { host: "clone".to_owned(), ..none() }),
        ("another host of the same name", MarkHolder { boot: Some("b".to_owned()), ..none() }),
    ] {
        assert!(holder.is_mark_valid(unix_seconds(now), unix_seconds(now)), "{case}");
        let later = unix_seconds(now) + UNSEEN_HOLDER_LIFETIME.as_secs_f64() + 1.0;
        assert!(!holder.is_mark_valid(unix_seconds(now), later), "{case}");
    }
}

#[test]
fn an_empty_lease_is_completed_when_there_is_room() {
    let (store, now) = (store("empty"), SystemTime::now());
    let name = acquire_lease_with_content(&store, now, Bytes::new(), None).unwrap().unwrap();
    store.write(MANIFEST_FILE, Bytes::from_static(b"{}")).unwrap();
    store.write("part", Bytes::from_static(b"1")).unwrap();
    make_room_and_complete_lease(&store, &name).unwrap();
    let holder: MarkHolder = serde_json::from_slice(&store.read(&name).unwrap()).unwrap();
    assert!(holder.is_this_process() && store.exists("part").unwrap());
    assert!(!store.exists(MANIFEST_FILE).unwrap(), "no reader finds one without its files");
}

#[test]
fn a_mark_that_says_nothing_counts_while_it_may_be_written() {
    let (store, now) = (store("half"), SystemTime::now());
    store.write("_lease-1.json", Bytes::new()).unwrap();
    assert_eq!(acquire_lease(&store, now, None, None).unwrap(), None);
    let directory = tempfile::tempdir().unwrap();
    let local = Store::open(directory.path().to_str().unwrap()).unwrap();
    local.write("_lease-1.json", Bytes::new()).unwrap();
    age_file(&directory.path().join("_lease-1.json"), EMPTY_MARK_LIFETIME * 2);
    assert!(acquire_lease(&local, now, None, None).unwrap().is_some());
}

#[test]
fn a_renewal_extends_a_lease_and_recreates_no_deleted_one() {
    let (store, now) = (store("renewed"), SystemTime::now());
    let lasts = Duration::from_secs(600);
    let lease = acquire_lease(&store, now, Some(lasts), None).unwrap().unwrap();
    let later = now + UNSEEN_HOLDER_LIFETIME;
    assert!(renew_mark(&store, &lease, later).unwrap());
    let held: MarkHolder = serde_json::from_slice(&store.read(&lease).unwrap()).unwrap();
    // Numbers in JSON may be off in the last bit.
    assert!((held.time - unix_seconds(later)).abs() < 1e-3, "{held:?}");
    assert_eq!(held.lasts, Some(600.0));
    let unseen = MarkHolder { boot: Some("another".to_owned()), ..held };
    let at = unix_seconds(later);
    assert!(unseen.is_mark_valid(at, at + 600.0));
    assert!(!unseen.is_mark_valid(at, at + 601.0));
    left(&store, &lease, &unseen);
    assert!(!renew_mark(&store, &lease, later).unwrap(), "another has taken it");
    store.delete(&lease).unwrap();
    assert!(!renew_mark(&store, &lease, later).unwrap());
    assert!(is_free(&store, later).unwrap());
}

#[test]
fn a_process_takes_the_lease_of_another_process_of_its_job_and_of_no_other() {
    let (store, now) = (store("job"), SystemTime::now());
    let lasts = Some(Duration::from_secs(600));
    let elsewhere = |job: &str| MarkHolder {
        boot: Some("another".to_owned()),
        job: Some(job.to_owned()),
        ..MarkHolder::of_this_process(now, lasts)
    };
    left(&store, "_lease-1.json", &elsewhere("mine"));
    for other in [None, Some("another's")] {
        assert_eq!(acquire_lease(&store, now, lasts, other).unwrap(), None);
    }
    let lease = acquire_lease(&store, now, lasts, Some("mine")).unwrap().unwrap();
    assert!(!store.exists("_lease-1.json").unwrap(), "whoever had it learns that it is gone");
    assert_eq!(
        acquire_lease(&store, now, lasts, Some("mine")).unwrap(),
        None,
        "this process has it"
    );
    assert!(renew_mark(&store, &lease, now).unwrap());
    let held: MarkHolder = serde_json::from_slice(&store.read(&lease).unwrap()).unwrap();
    assert_eq!(held.job.as_deref(), Some("mine"), "a renewal keeps the job");
    left(&store, &lease, &elsewhere("mine"));
    assert_eq!(mark_in_use(&store, now, None).unwrap(), None);
    assert!(!is_free(&store, now).unwrap());
}
