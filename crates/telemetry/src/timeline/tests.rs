// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use std::time::Instant;

use serde_json::Value;

use super::*;

fn old(path: &Path) -> std::path::PathBuf {
    path.with_file_name(format!("{}{OLD_FILE_SUFFIX}", path.file_name().unwrap().to_string_lossy()))
}

fn track(set: u32, tensor: &str) -> TimelineTrack {
    TimelineTrack { set, tensor: tensor.into() }
}

fn read(path: &Path) -> Vec<Value> {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_tensor_is_a_process_with_nested_spans() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let (timeline, a) = (Timeline::default(), track(0, "a\"\n"));
    timeline.begin_span(&a, "BEFORE");
    assert!(!timeline.is_recording_events());
    timeline
        .start_writing(
            &path,
            TimelineOwner { name: "rank 0", ..TimelineOwner::default() },
            TimelineOptions { mark_cycles: true, ..TimelineOptions::default() },
        )
        .unwrap();
    assert_eq!(read(&path).len(), 2, "valid before anything happened");
    timeline.begin_span(&a, "NEGOTIATE_ALLREDUCE");
    timeline.record_arrival(&a, 3);
    timeline.end_span(&a, None);
    timeline.mark_cycle();
    timeline.begin_span(&track(2, "b"), "BROADCAST");
    timeline.end_span(&track(2, "b"), Some(ProducedTensor { dtype: "float32", shape: vec![2, 3] }));
    timeline.stop_writing().unwrap();
    assert!(!timeline.is_recording_events());
    let records = read(&path);
    let of = |key: &str| records.iter().map(|record| record[key].clone()).collect::<Vec<_>>();
    assert_eq!(of("ph"), ["M", "M", "M", "M", "B", "X", "E", "i", "M", "M", "B", "E"]);
    assert!(records[0]["args"]["start_time_since_epoch_in_micros"].as_u64().unwrap() > 0);
    assert_eq!(records[2]["args"]["name"], "a\"\n");
    assert_eq!((&records[5]["name"], &records[5]["dur"]), (&Value::from("3"), &Value::from(0)));
    assert!(records[6].get("name").is_none() && records[6].get("args").is_none());
    assert_eq!(
        (&records[7]["name"], &records[7]["s"]),
        (&Value::from("CYCLE_START"), &Value::from("g"))
    );
    assert_eq!(records[8]["args"]["name"], "b (process set 2)");
    assert_eq!(records[11]["args"], serde_json::json!({"dtype": "float32", "shape": "[2, 3]"}));
    assert_eq!(of("pid")[4..8], [1, 1, 1, 0]);
}

#[test]
fn earlier_spans_are_left_out_and_open_spans_end_with_the_timeline() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (folder.path().join("1"), folder.path().join("2"));
    let (timeline, a) = (Timeline::default(), track(0, "a"));
    timeline.start_writing(&one, TimelineOwner::default(), TimelineOptions::default()).unwrap();
    timeline.begin_span(&a, "ALLREDUCE");
    timeline.mark_cycle();
    timeline.start_writing(&two, TimelineOwner::default(), TimelineOptions::default()).unwrap();
    timeline.end_span(&a, None);
    timeline.end_span(&track(0, "b"), None);
    timeline.begin_span(&a, "ALLREDUCE");
    drop(timeline);
    for path in [one, two] {
        let spans: Vec<Value> =
            read(&path).split_off(4).into_iter().map(|mut r| r["ph"].take()).collect();
        assert_eq!(spans, ["B", "E"], "{path:?}");
    }
}

#[test]
fn the_file_is_valid_while_events_keep_coming_and_growing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let (timeline, a) = (Timeline::default(), track(0, "a"));
    timeline.start_writing(&path, TimelineOwner::default(), TimelineOptions::default()).unwrap();
    let (end, mut seen) = (Instant::now() + Duration::from_secs(20), 0);
    while seen < 100 {
        timeline.begin_span(&a, "ALLREDUCE");
        timeline.end_span(&a, None);
        // One write: a reader sees the file before it or after it, or an end that is about to be
        // overwritten.
        if let Ok(records) = serde_json::from_slice::<Vec<Value>>(&std::fs::read(&path).unwrap()) {
            seen = seen.max(records.len());
        }
        assert!(Instant::now() < end, "{seen}");
    }
    timeline.stop_writing().unwrap();
    assert!(read(&path).len() >= seen);
}

#[test]
fn a_file_that_cannot_be_made_is_refused_and_nothing_runs() {
    let timeline = Timeline::default();
    assert!(
        timeline
            .start_writing(
                Path::new("/nonexistent/x.json"),
                TimelineOwner::default(),
                TimelineOptions::default()
            )
            .is_err()
    );
    assert!(!timeline.is_recording_events() && timeline.stop_writing().is_ok());
}

#[test]
fn lost_events_are_counted_and_leave_no_span_open() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let mut writer = TraceWriter::new(&path, TimelineOwner::default(), None).unwrap();
    let begin = TimelineEvent {
        at: Instant::now(),
        kind: TimelineEventKind::Begin(track(0, "a"), "ALLREDUCE", None),
    };
    writer.write_events(std::slice::from_ref(&begin), 0).unwrap();
    writer.write_events(&[begin], 7).unwrap();
    writer.finish_trace().unwrap();
    let spans: Vec<Value> = read(&path).split_off(4);
    let kinds: Vec<_> = spans.iter().map(|record| record["ph"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["B", "E", "i", "B", "E"]);
    assert_eq!(spans[2]["args"]["count"], 7);
}

#[test]
fn phases_of_steps_have_a_track_and_the_file_says_whose_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let timeline = Timeline::default();
    timeline.enter_step_phase("nobody listens");
    timeline
        .start_writing(
            &path,
            TimelineOwner { name: "rank 3", rank: 3, host: "a-1\"", size: 4, generation: 2 },
            TimelineOptions::default(),
        )
        .unwrap();
    timeline.leave_step_phase();
    timeline.enter_step_phase("step \"1\"");
    timeline.enter_step_phase("data");
    timeline.leave_step_phase();
    timeline.begin_response_list_span(&track(0, "steps"), "ALLREDUCE", 7);
    timeline.stop_writing().unwrap();
    let records = read(&path);
    assert_eq!(records[0]["args"]["rank"], 3);
    assert_eq!(records[0]["args"]["host"], "a-1\"");
    assert_eq!(
        (&records[0]["args"]["size"], &records[0]["args"]["generation"]),
        (&Value::from(4), &Value::from(2))
    );
    let phases: Vec<_> = records.iter().filter(|record| record["pid"] == 1).collect();
    let names: Vec<_> = phases.iter().map(|record| &record["ph"]).collect();
    assert_eq!(
        names,
        ["M", "M", "B", "B", "E", "E"],
        "what did not begin does not end, what is open does"
    );
    assert_eq!(phases[2]["name"], "step \"1\"");
    let listed = records.iter().find(|record| record["name"] == "ALLREDUCE").unwrap();
    assert_eq!((&listed["args"]["list"], &listed["pid"]), (&Value::from(7), &Value::from(2)));
}

#[test]
fn a_limit_keeps_what_came_last_in_two_valid_files_that_name_their_tracks() {
    const LIMIT: u64 = 128 << 10;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("0.json");
    std::fs::write(old(&path), "[\n{}]").unwrap();
    let extent = TimelineOptions { max_bytes: Some(LIMIT), ..TimelineOptions::default() };
    let timeline = Timeline::default();
    timeline
        .start_writing(&path, TimelineOwner { rank: 5, ..TimelineOwner::default() }, extent)
        .unwrap();
    assert!(!old(&path).exists());
    for list in 0..10_000 {
        let tensor = track(0, ["a", "b"][usize::try_from(list % 2).unwrap()]);
        timeline.begin_response_list_span(&tensor, "ALLREDUCE", list);
        timeline.end_span(&tensor, None);
    }
    timeline.stop_writing().unwrap();
    let (before, after) = (read(&old(&path)), read(&path));
    let sizes = [&path, &old(&path)].map(|path| path.metadata().unwrap().len());
    assert!(sizes.iter().sum::<u64>() <= LIMIT + 1024, "{sizes:?}");
    let lists: Vec<u64> =
        before.iter().chain(&after).filter_map(|record| record["args"]["list"].as_u64()).collect();
    assert_eq!(lists.last(), Some(&9_999));
    assert!(lists[0] > 0 && lists.len() > 300, "{} from {}", lists.len(), lists[0]);
    assert!(
        lists.windows(2).all(|pair| pair[1] == pair[0] + 1),
        "nothing is missing between the files"
    );
    for records in [before, after] {
        let title = &records[0]["args"];
        assert_eq!(title["rank"], 5);
        let first = records.iter().find_map(|record| record["ts"].as_u64()).unwrap();
        assert_eq!(title["since"].as_u64(), Some(first));
        let names: Vec<_> =
            records.iter().filter(|record| record["name"] == "process_name").collect();
        assert!(names.iter().any(|one| one["args"]["name"] == "a" && one["pid"] == 1));
        assert!(names.iter().any(|one| one["args"]["name"] == "b" && one["pid"] == 2));
    }
}

#[test]
fn another_file_with_the_name_of_an_earlier_timeline_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("0.json");
    let limited = TimelineOptions { max_bytes: Some(1), ..TimelineOptions::default() };
    for other in ["", "[\n", "[{}]", "a user's notes"] {
        std::fs::write(old(&path), other).unwrap();
        let start = |options| {
            let timeline = Timeline::default();
            timeline.start_writing(&path, TimelineOwner::default(), options)
        };
        let error = start(limited).unwrap_err().to_string();
        assert!(error.contains("0.json.old is no timeline"), "{error}");
        start(TimelineOptions::default()).unwrap();
        assert_eq!(std::fs::read_to_string(old(&path)).unwrap(), other);
    }
}

#[test]
fn it_gets_the_rank_whose_arrivals_are_wanted() {
    let folder = tempfile::tempdir().unwrap();
    let timeline = Timeline::default();
    let title = TimelineOwner { rank: 1, ..TimelineOwner::default() };
    timeline
        .start_writing(
            &folder.path().join("1"),
            title,
            TimelineOptions { own_arrivals_only: true, ..TimelineOptions::default() },
        )
        .unwrap();
    assert_eq!(timeline.arrival_filter_rank(), Some(1));
    timeline.start_writing(&folder.path().join("2"), title, TimelineOptions::default()).unwrap();
    assert_eq!(timeline.arrival_filter_rank(), None);
}

/// The numbers of lists in both files, oldest first.
fn lists_of(path: &Path) -> Vec<u64> {
    let files = [old(path), path.to_owned()];
    let records = files.iter().filter(|path| path.exists()).flat_map(|path| read(path));
    records.filter_map(|record| record["args"]["list"].as_u64()).collect()
}

fn bytes_of(path: &Path) -> u64 {
    [old(path), path.to_owned()].iter().map(|path| path.metadata().unwrap().len()).sum()
}

#[test]
fn names_that_are_used_once_do_not_fill_a_bounded_file() {
    const LIMIT: u64 = 128 << 10;
    const NAMES: u64 = 50_000;
    // Records of one name take less.
    const BYTES: u64 = 512;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("0.json");
    let mut writer = TraceWriter::new(&path, TimelineOwner::default(), Some(LIMIT)).unwrap();
    let often = track(0, "often");
    let event = |what| TimelineEvent { at: Instant::now(), kind: what };
    for list in 0..NAMES {
        let once = track(0, &format!("allreduce.noname.{list}"));
        for tensor in [&once, &often] {
            let begin = event(TimelineEventKind::Begin(tensor.clone(), "ALLREDUCE", Some(list)));
            writer
                .write_events(&[begin, event(TimelineEventKind::End(tensor.clone(), None))], 0)
                .unwrap();
        }
    }
    writer.finish_trace().unwrap();
    assert!(bytes_of(&path) <= LIMIT + 2048, "{}", bytes_of(&path));
    let lists = lists_of(&path);
    assert_eq!(lists.last(), Some(&(NAMES - 1)));
    // A file begins anew when less than a quarter of it is free, so the one before has three
    // quarters at least.
    let least = LIMIT / 2 * 3 / 4 / BYTES;
    assert!(lists.len() as u64 >= 2 * least, "{} of {least}", lists.len());
    let mut names: std::collections::HashMap<u64, Value> = std::collections::HashMap::new();
    for record in [old(&path), path].iter().flat_map(|path| read(path)) {
        let pid = record["pid"].as_u64().unwrap();
        if record["name"] == "process_name" && pid > 0 {
            let name = record["args"]["name"].clone();
            assert_eq!(
                *names.entry(pid).or_insert_with(|| name.clone()),
                name,
                "a number has one track"
            );
        }
        assert!(pid == 0 || names.contains_key(&pid), "{record}");
    }
    let used_often: Vec<_> = names.iter().filter(|(_, name)| *name == "often").collect();
    assert_eq!(used_often.len(), 1, "a track in use keeps its number: {used_often:?}");
}

#[test]
fn a_share_that_is_smaller_than_the_names_of_the_tracks_keeps_records() {
    // The default limit for 4096 ranks.
    const LIMIT: u64 = (256 << 20) / 4096;
    const TENSORS: u64 = 200;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("0.json");
    let mut writer = TraceWriter::new(&path, TimelineOwner::default(), Some(LIMIT)).unwrap();
    let tensors: Vec<TimelineTrack> = (0..TENSORS)
        .map(|number| track(0, &format!("transformer.layers.{number}.weight")))
        .collect();
    let event = |what| TimelineEvent { at: Instant::now(), kind: what };
    for step in 0..20 {
        // In some steps, all begin before the first ends.
        let together = step % 3 == 0;
        for (tensor, list) in tensors.iter().zip(step * TENSORS..) {
            let begin = event(TimelineEventKind::Begin(tensor.clone(), "ALLREDUCE", Some(list)));
            let end = (!together).then(|| event(TimelineEventKind::End(tensor.clone(), None)));
            writer
                .write_events(&[Some(begin), end].into_iter().flatten().collect::<Vec<_>>(), 0)
                .unwrap();
        }
        for tensor in tensors.iter().filter(|_| together) {
            writer.write_events(&[event(TimelineEventKind::End(tensor.clone(), None))], 0).unwrap();
        }
    }
    writer.finish_trace().unwrap();
    let lists = lists_of(&path);
    assert_eq!(lists.last(), Some(&(20 * TENSORS - 1)));
    assert!(lists.len() > 80, "{}", lists.len());
    assert!(bytes_of(&path) <= LIMIT + 2048, "{}", bytes_of(&path));
}
