// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use super::*;
use crate::generation_key_values::KeyValuePair;
use crate::secret::JobSecret;
use bytes::Bytes;
use farandole_membership::{ElasticRules, LivenessLimits};
use farandole_world::{Generation, JobId};

const SECOND: Duration = Duration::from_secs(1);

fn machine() -> ElasticMembership {
    let liveness = LivenessLimits { heartbeat_timeout: 5 * SECOND, disconnect_grace: SECOND };
    ElasticMembership::new(ElasticRules {
        first: 2,
        min_workers: 1,
        max_workers: 4,
        spares: 0,
        timeout: SECOND,
        reset_limit: None,
        cooldown: (SECOND, SECOND),
        start_timeout: SECOND,
        liveness,
    })
}

fn started(path: &Path) -> MembershipJournal {
    let secret = JobSecret::new("sixteen letters.", &JobId("job".to_owned())).unwrap();
    let ticket = secret.make_ticket(vec!["a:1".to_owned()]).unwrap();
    let mut journal = MembershipJournal::open_or_create(path, "train").unwrap();
    assert!(journal.take_unfinished_job().is_none());
    journal.begin_new_journal(&ticket, &secret.derive_identity().unwrap(), 7, &machine()).unwrap();
    journal
}

fn put(key: &str) -> JournalRecord {
    let (key, value) = (key.to_owned(), Bytes::from_static(b"\x00\xff"));
    JournalRecord::Put(KeyValuePair { generation: Generation(1), key, value })
}

fn keys(path: &Path) -> Vec<String> {
    let unfinished =
        MembershipJournal::open_or_create(path, "train").unwrap().take_unfinished_job().unwrap();
    assert_eq!(unfinished.head.port, 7);
    let key = |record: JournalRecord| match record {
        JournalRecord::Put(pair) => Some(pair.key),
        _ => None,
    };
    unfinished.records.into_iter().filter_map(key).collect()
}

#[test]
fn a_line_that_is_cut_off_is_left_out_and_the_next_one_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let journal = started(&path);
    [put("a"), put("b")].iter().for_each(|record| journal.append_record(record));
    drop(journal);
    let text = std::fs::read(&path).unwrap();
    std::fs::write(&path, &text[..text.len() - 3]).unwrap();
    let again = MembershipJournal::open_or_create(&path, "train").unwrap();
    again.append_record(&put("c"));
    drop(again);
    assert_eq!(keys(&path), ["a", "c"]);
}

#[test]
fn it_is_for_its_owner_for_one_process_and_for_one_job() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    let refused = |purpose: &str| {
        MembershipJournal::open_or_create(&path, purpose).err().unwrap().to_string()
    };
    let journal = started(&path);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(refused("train").contains("another launcher uses it"), "{}", refused("train"));
    drop(journal);
    assert!(refused("other").contains("it is of another job: run train"), "{}", refused("other"));
}

#[test]
fn a_journal_of_another_release_is_refused_and_left_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    drop(started(&path));
    let good = std::fs::read_to_string(&path).unwrap();
    let (head, state) = good.split_once('\n').unwrap();
    let old = head.replacen(RELEASE_VERSION, "0.0.0", 1);
    for (text, reason) in [
        ("import farandole".to_owned(), "it is not a journal: use another path"),
        ("no journal\n".to_owned(), "it is not a journal"),
        ("{\"a\": 1}\n".to_owned(), "it is not a journal"),
        (good.replacen(head, &old, 1), "farandole 0.0.0 wrote it"),
        (good.replacen("\"port\"", "\"part\"", 1), "line 1 is damaged"),
        (head.to_owned(), "line 2 is damaged"),
        (format!("{head}\n"), "line 2 is damaged"),
        (format!("{head}\n{}", &state[..9]), "line 2 is damaged"),
        (format!("{good}nonsense\n{{"), "line 3 is damaged"),
    ] {
        std::fs::write(&path, &text).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let refused = MembershipJournal::open_or_create(&path, "train").err().unwrap().to_string();
        assert!(refused.contains(reason), "{refused}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
    }
    let refused =
        MembershipJournal::open_or_create(folder.path(), "train").err().unwrap().to_string();
    assert!(refused.contains("directory"), "{refused}");
    let refused = MembershipJournal::open_or_create(Path::new("/dev/null"), "train")
        .err()
        .unwrap()
        .to_string();
    assert!(refused.contains("not a regular file"), "{refused}");
}

#[test]
fn a_job_from_before_the_host_started_is_not_continued() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    drop(started(&path));
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replacen(&boot_id(), "another boot", 1)).unwrap();
    assert!(
        MembershipJournal::open_or_create(&path, "train").unwrap().take_unfinished_job().is_none()
    );
}

#[test]
fn a_journal_of_which_no_job_has_begun_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let journal = MembershipJournal::open_or_create(&path, "train").unwrap();
    assert!(path.exists());
    drop(journal);
    assert!(!path.exists());
    drop(started(&path));
    drop(MembershipJournal::open_or_create(&path, "train").unwrap());
    assert!(path.exists(), "a job that was left is still to be continued");
}

#[test]
fn a_new_file_takes_the_place_of_a_long_one_and_none_is_left_in_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let journal = started(&path);
    let record = put(&"k".repeat(1000));
    while !journal.needs_replacement() {
        journal.append_record(&record);
    }
    let state = JournalRecord::State { at: SECOND, machine: Box::new(machine()) };
    journal.replace_records(&[state, put("a")]);
    assert!(
        !journal.needs_replacement()
            && std::fs::metadata(&path).unwrap().len() < REPLACE_AFTER_BYTES / 100
    );
    journal.append_record(&put("b"));
    assert!(
        MembershipJournal::open_or_create(&path, "train").is_err(),
        "the new file is locked, too"
    );
    drop(journal);
    assert_eq!(keys(&path), ["a", "b"]);
    let journal = MembershipJournal::open_or_create(&path, "train").unwrap();
    journal.remove_finished_journal();
    journal.append_record(&put("c"));
    assert!(!path.exists());
}

#[test]
fn records_during_a_rewrite_are_in_both_files() {
    let folder = tempfile::tempdir().unwrap();
    let [path, unfinished] = ["journal", "left"].map(|name| folder.path().join(name));
    let journal = started(&path);
    journal.append_record(&put("a"));
    assert!(journal.begin_replacement());
    assert!(!journal.begin_replacement(), "one at a time");
    journal.append_record(&put("b"));
    // What a process leaves that is killed before the new file is finished.
    std::fs::copy(&path, &unfinished).unwrap();
    assert_eq!(keys(&unfinished), ["a", "b"]);
    let state = JournalRecord::State { at: SECOND, machine: Box::new(machine()) };
    journal.replace_records(&[state, put("c")]);
    journal.append_record(&put("d"));
    drop(journal);
    assert_eq!(keys(&path), ["c", "b", "d"]);
    let journal = MembershipJournal::open_or_create(&path, "train").unwrap();
    assert!(journal.begin_replacement());
    std::fs::write(folder.path().join("journal.new"), "secrets").unwrap();
    journal.remove_finished_journal();
    journal.replace_records(&[put("e")]);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "only the copy is left");
}

#[test]
fn another_file_of_its_name_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let journal = started(&path);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "another").unwrap();
    journal.replace_records(&[put("a")]);
    journal.append_record(&put("b"));
    journal.remove_finished_journal();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "another");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_journal_that_cannot_be_shortened_stays_complete() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let journal = started(&path);
    journal.append_record(&put("a"));
    // A full disk refuses the new file; here a directory has its name.
    std::fs::create_dir(journal.replacement_path()).unwrap();
    assert!(journal.begin_replacement());
    journal.append_record(&put("b"));
    journal.replace_records(&[put("state")]);
    journal.append_record(&put("c"));
    let text = std::fs::read_to_string(&path).unwrap();
    let records =
        ["a", "b", "c"].map(|key| String::from_utf8(json_line(&put(key)).unwrap()).unwrap());
    assert!(text.ends_with(&records.concat()), "{text}");
    std::fs::remove_dir(journal.replacement_path()).unwrap();
    assert!(journal.begin_replacement(), "a later call tries again");
    journal.replace_records(&[put("state")]);
    assert!(!std::fs::read_to_string(&path).unwrap().contains(&records[0]));
}

#[test]
fn a_journal_that_cannot_be_written_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let journal = started(&path);
    // A file that takes no more.
    journal.writing.lock().file = Some(File::open(&path).unwrap());
    journal.append_record(&put("a"));
    assert!(!path.exists(), "half of what happened is worse than nothing");
}
