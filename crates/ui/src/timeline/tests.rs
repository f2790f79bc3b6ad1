// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use std::collections::HashMap;
use std::fmt::Write as _;

use serde_json::Value;

use super::*;

/// Microseconds by which the clock of host b is ahead.
const AHEAD: i64 = 3_000_000;
const STEPS: i64 = 40;
const RANKS: u32 = 4;
const EPOCH: i64 = 1_700_000_000_000_000;
/// Lines of a rank's file before its first step, and those of a step.
const HEAD: usize = 4;
const LINES: usize = 9;

fn host(rank: u32) -> &'static str {
    if rank < 2 { "a-1" } else { "b-2" }
}

/// Returns the time at which a rank asks for the gradient of a step, by a clock that all share.
/// Rank 2 is 20 ms late.
fn asks(rank: u32, step: i64) -> i64 {
    1000 + step * 100_000 + i64::from(rank) * 50 + if rank == 2 { 20_000 } else { 0 }
}

/// Returns the time of the result: after all have asked.
fn done(rank: u32, step: i64) -> i64 {
    asks(2, step) + 300 + 10 * i64::from(rank)
}

/// The file of a rank of such a job.
fn file(rank: u32) -> String {
    let ahead = if host(rank) == "a-1" { 0 } else { AHEAD };
    // Ranks start at different times.
    let start = EPOCH - 5000 * i64::from(rank);
    let at = |time: i64| EPOCH + time - start;
    let mut text = format!(
        "[\n{{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":0,\"args\":{{\"name\":\"farandole \
         rank {rank}\",\
         \"start_time_since_epoch_in_micros\":{},\"rank\":{rank},\"host\":\"{}\",\"size\":{},\"generation\":2}}}}",
        start + ahead,
        host(rank),
        RANKS
    );
    text.push_str(
        ",\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":1,\"args\":{\"name\":\"gradient \\\"1\\\"\"}}",
    );
    text.push_str(
        ",\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":2,\"args\":{\"name\":\"steps\"}}",
    );
    for step in 0..STEPS {
        let mut line = |record: String| write!(text, ",\n{{{record}}}").unwrap();
        let (asked, ended) = (at(asks(rank, step)), at(done(rank, step)));
        line(format!("\"name\":\"data\",\"ph\":\"B\",\"ts\":{},\"pid\":2", asked - 100));
        line(format!("\"ph\":\"E\",\"ts\":{},\"pid\":2", asked - 50));
        line(format!("\"name\":\"NEGOTIATE_ALLREDUCE\",\"ph\":\"B\",\"ts\":{asked},\"pid\":1"));
        line(format!("\"name\":\"{rank}\",\"ph\":\"X\",\"ts\":{asked},\"pid\":1,\"dur\":0"));
        line(format!("\"ph\":\"E\",\"ts\":{},\"pid\":1", ended - 20));
        line(format!(
            "\"name\":\"ALLREDUCE\",\"ph\":\"B\",\"ts\":{},\"pid\":1,\"args\":{{\"list\":{}}}",
            ended - 20,
            step + 5
        ));
        line(format!("\"name\":\"QUEUE\",\"ph\":\"B\",\"ts\":{},\"pid\":1", ended - 10));
        line(format!("\"ph\":\"E\",\"ts\":{},\"pid\":1", ended - 5));
        line(format!(
            "\"ph\":\"E\",\"ts\":{ended},\"pid\":1,\"args\":{{\"dtype\":\"float32\",\"shape\":\"[2]\"}}"
        ));
    }
    text.push_str("\n]\n");
    text
}

fn job(ranks: &[u32]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for rank in ranks {
        std::fs::write(folder.path().join(format!("{rank}.json")), file(*rank)).unwrap();
    }
    folder
}

fn merged(folder: &Path) -> (TimelineSummary, Vec<Value>) {
    let output = folder.join("merged.trace");
    let summary = merge_timeline_files(&[folder.to_owned()], &output).unwrap();
    let trace: Value = serde_json::from_slice(&std::fs::read(output).unwrap()).unwrap();
    (summary, trace["traceEvents"].as_array().unwrap().clone())
}

#[test]
fn tl_1_and_tl_2_clocks_of_hosts_are_aligned_by_the_operations() {
    let folder = job(&[0, 1, 2, 3]);
    let (summary, records) = merged(folder.path());
    for row in &summary.ranks {
        let (shift, error) = (row.clock_shift_us.unwrap(), row.clock_error_us.unwrap());
        let expected = if row.host == "a-1" { 0.0 } else { -AHEAD as f64 };
        assert!((shift - expected).abs() <= error, "rank {}: {shift} +- {error}", row.rank);
        assert!((shift - expected).abs() <= 50.0, "results come at the same time: {shift}");
        assert!(error < 21_000.0, "the late rank leaves this much open: {error}");
    }
    let times = |name: &str, ph: &str| {
        let mut all: HashMap<u64, Vec<i64>> = HashMap::new();
        for record in records.iter().filter(|record| record["ph"] == ph) {
            if record["name"] == name || (ph == "E" && record["args"].get("dtype").is_some()) {
                all.entry(record["pid"].as_u64().unwrap())
                    .or_default()
                    .push(record["ts"].as_i64().unwrap());
            }
        }
        all
    };
    let (begun, ended) = (times("NEGOTIATE_ALLREDUCE", "B"), times("", "E"));
    for step in 0..usize::try_from(STEPS).unwrap() {
        let last_begun = begun.values().map(|times| times[step]).max().unwrap();
        let first_ended = ended.values().map(|times| times[step]).min().unwrap();
        assert!(last_begun <= first_ended + 1, "step {step}: {last_begun} {first_ended}");
        assert_eq!(begun[&1][step] - begun[&0][step], 50, "ranks of one host keep their distance");
        assert_eq!(ended[&3][step] - ended[&2][step], 10);
    }
}

#[test]
fn the_late_rank_is_named_and_has_spans_of_its_own() {
    let folder = job(&[0, 1, 2, 3]);
    let (summary, records) = merged(folder.path());
    let straggler = summary.straggler.clone().unwrap();
    assert_eq!(straggler.rank, 2);
    assert!((0.15..0.25).contains(&straggler.share), "20 of 100 ms: {}", straggler.share);
    assert_eq!(summary.ranks[2].last, u64::try_from(STEPS).unwrap());
    assert!(summary.ranks[0].waited_ms > summary.ranks[2].waited_ms + 100.0);
    let waits: Vec<_> = records.iter().filter(|record| record["cat"] == "straggler").collect();
    assert_eq!(waits.len(), usize::try_from(STEPS).unwrap());
    assert!(
        waits
            .iter()
            .all(|wait| wait["name"] == "rank 2" && wait["args"]["tensor"] == "gradient \"1\"")
    );
    let lines = summary.summary_lines();
    assert_eq!(lines.len(), 6);
    assert!(lines[5].starts_with("rank 2 is a straggler: for "), "{}", lines[5]);
}

#[test]
fn every_rank_is_a_process_whose_spans_nest_and_phases_come_first() {
    let folder = job(&[0, 1, 2, 3]);
    let (_, records) = merged(folder.path());
    let named =
        |name: &str| records.iter().filter(|record| record["name"] == name).collect::<Vec<_>>();
    assert_eq!(named("process_name").len(), 5);
    assert!(
        named("thread_name").iter().any(|one| one["tid"] == 1 && one["args"]["name"] == "steps")
    );
    let mut depths: HashMap<(u64, u64), i64> = HashMap::new();
    for record in &records {
        let place = || (record["pid"].as_u64().unwrap(), record["tid"].as_u64().unwrap());
        match record["ph"].as_str().unwrap() {
            "B" => *depths.entry(place()).or_default() += 1,
            "E" => *depths.entry(place()).or_default() -= 1,
            _ => {}
        }
        assert!(depths.values().all(|depth| *depth >= 0));
    }
    assert!(depths.values().all(|depth| *depth == 0));
    assert!(
        records.iter().all(|record| record.get("ts").is_none_or(|ts| ts.as_i64().unwrap() >= 0))
    );
}

#[test]
fn a_job_without_a_late_rank_has_no_straggler_and_one_rank_is_enough() {
    let folder = job(&[0, 1]);
    let (summary, _) = merged(folder.path());
    assert!(summary.straggler.is_none());
    let lines = summary.summary_lines();
    assert!(lines[lines.len() - 2].starts_with("no straggler in "), "{lines:?}");
    assert_eq!(
        lines.last().unwrap(),
        "the timelines of these ranks are missing or incomplete: 2, 3"
    );
    let (summary, records) = merged(job(&[3]).path());
    assert_eq!((summary.ranks.len(), summary.ranks[0].operations), (1, 0));
    assert!(records.len() > 100);
}

#[test]
fn files_that_are_no_timelines_are_named() {
    let folder = job(&[0, 1]);
    let output = folder.path().join("out");
    let fails = |folder: &Path| {
        merge_timeline_files(&[folder.to_owned()], &output).unwrap_err().to_string()
    };
    std::fs::write(folder.path().join("2.json"), "[\n{\"name\":\"x\",\"ph\":\"B\",\"pid\":1}\n]\n")
        .unwrap();
    assert!(fails(folder.path()).contains("2.json: it is no timeline"), "{}", fails(folder.path()));
    std::fs::write(folder.path().join("2.json"), file(1)).unwrap();
    assert!(fails(folder.path()).contains("it is of rank 1, as is "), "{}", fails(folder.path()));
    std::fs::write(folder.path().join("2.json"), file(2).replace("\"ph\":\"B\"", "\"ph\""))
        .unwrap();
    assert!(
        fails(folder.path()).contains("is no record of a timeline"),
        "{}",
        fails(folder.path())
    );
    let empty = tempfile::tempdir().unwrap();
    assert!(fails(empty.path()).contains("no files that end in .json"));
    assert!(!output.exists());
}

#[test]
fn pieces_make_files_again_and_missing_ones_are_reported() {
    let mut pieces = TimelinePieces::new().unwrap();
    let mut send = |rank: u32, whole: bool| {
        let text = file(rank);
        let size = text.len();
        for (number, chunk) in text.as_bytes().chunks(1000).enumerate() {
            if !whole && number == 3 {
                continue;
            }
            let mut piece =
                format!("{{\"offset\":{},\"size\":{size}}}\n", number * 1000).into_bytes();
            piece.extend_from_slice(chunk);
            pieces.add_piece(rank + 7, &piece).unwrap();
        }
    };
    send(0, true);
    send(1, true);
    send(3, false);
    pieces.add_piece(9, b"no piece").unwrap();
    pieces.add_piece(9, b"{\"offset\":\"../x\",\"size\":1}\nx").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let summary = pieces.merge_pieces(&folder.path().join("trace.json")).unwrap();
    assert_eq!(summary.ranks.iter().map(|row| row.rank).collect::<Vec<_>>(), [0, 1, 3]);
    assert_eq!(summary.incomplete, [2, 3]);
    assert!(summary.summary_lines().last().unwrap().ends_with("missing or incomplete: 2, 3"));
}

/// Splits a rank's file after some of its lines: earlier lines go to their own file.
fn split(folder: &Path, rank: u32, lines: usize) {
    let path = folder.join(format!("{rank}.json"));
    let text = std::fs::read_to_string(&path).unwrap();
    let all: Vec<&str> = text.lines().collect();
    let (before, after) = all.split_at(lines);
    let last = before.last().unwrap().trim_end_matches(',');
    let before = format!("{}\n{last}\n]\n", before[..lines - 1].join("\n"));
    // The next file begins with the title and the tracks.
    std::fs::write(folder.join(format!("{rank}.json.old")), before).unwrap();
    std::fs::write(path, format!("{}\n{}\n", all[..4].join("\n"), after.join("\n"))).unwrap();
}

#[test]
fn a_bounded_timeline_in_two_files_is_as_one_in_a_whole() {
    let (whole, parts) = (job(&[0, 1, 2, 3]), job(&[0, 1, 2, 3]));
    split(parts.path(), 2, 101);
    let (summary, records) = merged(parts.path());
    let (expected, all) = merged(whole.path());
    assert_eq!(summary.to_json(), expected.to_json());
    assert_eq!(records, all);
}

#[test]
fn operations_that_a_rank_dropped_do_not_count_for_lateness() {
    let folder = job(&[0, 1, 2, 3]);
    // Rank 3 has given up the first half of its steps.
    let path = folder.path().join("3.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let cut = 4 + 8 * usize::try_from(STEPS).unwrap() / 2;
    let since = 5000 * 3 + asks(3, STEPS / 2) - 100;
    let title = lines[1].replace("\"rank\":3", &format!("\"since\":{since},\"rank\":3"));
    let kept = format!("[\n{title}\n{}\n{}\n", lines[2..4].join("\n"), lines[cut..].join("\n"));
    std::fs::write(&path, kept).unwrap();
    let (summary, records) = merged(folder.path());
    // Rank 0 came to the first of the steps that are left before rank 3's part begins.
    assert!(
        summary.ranks.iter().all(|row| row.operations == STEPS as u64 / 2 - 1),
        "{}",
        summary.to_json()
    );
    assert_eq!(summary.straggler.unwrap().rank, 2);
    assert!(
        records.iter().all(|record| record.get("ts").is_none_or(|ts| ts.as_i64().unwrap() >= 0))
    );
}

#[test]
fn an_elastic_job_has_the_timeline_of_its_last_world() {
    let folder = job(&[0, 1, 2, 3]);
    // Rank 1 of an earlier world was another worker, and rank 3 of that world is lost.
    let earlier = |rank: u32| file(rank).replace("\"generation\":2", "\"generation\":1");
    std::fs::write(folder.path().join("earlier.json"), earlier(1)).unwrap();
    let (summary, records) = merged(folder.path());
    let (expected, all) = merged(job(&[0, 1, 2, 3]).path());
    assert_eq!(summary.to_json(), expected.to_json());
    assert_eq!(records, all);
    std::fs::write(folder.path().join("3.json"), earlier(3)).unwrap();
    assert_eq!(merged(folder.path()).0.incomplete, [3]);
}

#[test]
fn a_track_that_has_another_number_in_the_next_file_is_one_track() {
    let (whole, parts) = (job(&[0, 1, 2, 3]), job(&[0, 1, 2, 3]));
    split(parts.path(), 2, HEAD + 10 * LINES);
    let path = parts.path().join("2.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"pid\":1", "\"pid\":9")).unwrap();
    let (summary, records) = merged(parts.path());
    let (expected, all) = merged(whole.path());
    assert_eq!(summary.to_json(), expected.to_json());
    assert_eq!(records, all);
}

#[test]
fn a_rank_that_only_its_process_set_waits_for_is_no_straggler() {
    let folder = tempfile::tempdir().unwrap();
    for rank in 0..8 {
        let mut text = file(rank).replace("\"size\":4", "\"size\":8");
        if ![2, 5].contains(&rank) {
            text = text.replace("gradient", "of the others");
        }
        std::fs::write(folder.path().join(format!("{rank}.json")), text).unwrap();
    }
    let (summary, records) = merged(folder.path());
    assert!(summary.straggler.is_none(), "{}", summary.to_json());
    assert!(records.iter().all(|record| record["cat"] != "straggler"));
    assert_eq!(summary.ranks[2].last, u64::try_from(STEPS).unwrap());
    assert_eq!((summary.ranks[2].waited_for_ms, summary.ranks[5].operations), (0.0, STEPS as u64));
}

#[test]
fn no_rank_is_late_if_a_rank_has_no_timeline() {
    let folder = job(&[0, 1, 2, 3]);
    let path = folder.path().join("3.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let (cut, after) = (HEAD + 10 * LINES, HEAD + 11 * LINES);
    std::fs::write(&path, format!("{}\n{}\n", lines[..cut].join("\n"), lines[after..].join("\n")))
        .unwrap();
    let (summary, records) = merged(folder.path());
    let waits = records.iter().filter(|record| record["cat"] == "straggler").count();
    assert_eq!(waits, usize::try_from(STEPS).unwrap() - 1);
    assert_eq!(summary.ranks[3].operations, STEPS as u64 - 1);
}

#[test]
fn numbers_that_no_timeline_has_are_refused() {
    let folder = job(&[0, 1, 2, 3]);
    let output = folder.path().join("out");
    let refuses = |from: &str, to: &str, says: &str| {
        let text = file(3);
        assert!(text.contains(from), "{from}");
        std::fs::write(folder.path().join("3.json"), text.replacen(from, to, 1)).unwrap();
        let error = merge_timeline_files(&[folder.path().to_owned()], &output)
            .map(|summary| summary.to_json())
            .unwrap_err();
        assert!(error.to_string().contains(says), "{from}, {to}: {error}");
    };
    let start = format!("micros\":{}", EPOCH - 15_000 + AHEAD);
    let far = i64::MAX - 10;
    let ts = format!("\"ts\":{}", EPOCH + asks(3, 0) - (EPOCH - 15_000));
    refuses("\"size\":4", "\"size\":1048577", "of size 1048577");
    refuses("\"rank\":3", "\"rank\":4", "rank 4 of 4");
    refuses(&start, &format!("micros\":{far}"), "begins at");
    refuses(&start, &format!("micros\":{}", i64::MIN), "begins at");
    refuses("\"rank\":3", &format!("\"rank\":3,\"since\":{far}"), "begins at");
    refuses(&ts, &format!("\"ts\":{far}"), "line 7");
    refuses(&ts, &format!("\"ts\":-{far}"), "line 7");
    refuses("\"pid\":1,\"args\"", &format!("\"pid\":{},\"args\"", u64::MAX), "line 3");
}

#[test]
fn a_file_that_is_cut_within_a_character_is_merged_to_there() {
    let folder = job(&[0, 1, 2, 3]);
    let text = file(3).replace("QUEUE", "Qü");
    let cut = text.rfind('ü').unwrap() + 1;
    std::fs::write(folder.path().join("3.json"), &text.as_bytes()[..cut]).unwrap();
    let (summary, _) = merged(folder.path());
    let operations: Vec<u64> = summary.ranks.iter().map(|row| row.operations).collect();
    assert_eq!(operations, [STEPS as u64, STEPS as u64, STEPS as u64, STEPS as u64 - 1]);
    std::fs::write(
        folder.path().join("3.json"),
        text.replace("Qü", "Q").replace("ph", "p\u{fffd}"),
    )
    .unwrap();
    assert!(merge_timeline_files(&[folder.path().to_owned()], &folder.path().join("out")).is_err());
}

/// Sends a timeline in pieces of 1000 bytes, of which `takes` takes some.
fn send(
    pieces: &mut TimelinePieces,
    task: u32,
    text: &[u8],
    size: usize,
    takes: impl Fn(usize) -> bool,
) {
    for (number, chunk) in text.chunks(1000).enumerate().filter(|(number, _)| takes(*number)) {
        let mut piece = format!("{{\"offset\":{},\"size\":{size}}}\n", number * 1000).into_bytes();
        piece.extend_from_slice(chunk);
        pieces.add_piece(task, &piece).unwrap();
    }
}

fn merged_pieces(pieces: &TimelinePieces) -> TimelineSummary {
    let folder = tempfile::tempdir().unwrap();
    pieces.merge_pieces(&folder.path().join("trace.json")).unwrap()
}

fn ranks_of(summary: &TimelineSummary) -> Vec<u32> {
    summary.ranks.iter().map(|row| row.rank).collect()
}

#[test]
fn pieces_beyond_the_size_that_was_told_are_left() {
    let mut pieces = TimelinePieces::new().unwrap();
    for (rank, told) in [(0, usize::MAX), (1, 10), (2, 1500), (3, usize::MAX)] {
        let text = file(rank);
        send(&mut pieces, rank, text.as_bytes(), told.min(text.len()), |_| true);
    }
    let summary = merged_pieces(&pieces);
    assert_eq!((ranks_of(&summary), &*summary.incomplete), (vec![0, 2, 3], &[1, 2][..]));
    assert!(summary.ranks[1].operations < 10, "{}", summary.to_json());
}

#[test]
fn a_timeline_that_cannot_be_read_leaves_those_of_other_ranks() {
    let mut pieces = TimelinePieces::new().unwrap();
    for rank in [0, 2] {
        let text = file(rank);
        send(&mut pieces, rank, text.as_bytes(), text.len(), |_| true);
    }
    // Its agent was lost within the first record.
    let cut = &file(1)[..60];
    send(&mut pieces, 1, cut.as_bytes(), 9000, |_| true);
    let broken = file(3).replace("\"ph\":\"E\"", "\"ph\"");
    send(&mut pieces, 3, broken.as_bytes(), broken.len(), |_| true);
    let summary = merged_pieces(&pieces);
    assert_eq!((ranks_of(&summary), &*summary.incomplete), (vec![0, 2], &[1, 3][..]));
    let mut pieces = TimelinePieces::new().unwrap();
    let output = tempfile::tempdir().unwrap();
    let output = output.path().join("trace.json");
    assert!(pieces.merge_pieces(&output).is_err(), "none has come");
    send(&mut pieces, 1, cut.as_bytes(), 9000, |_| true);
    assert!(pieces.merge_pieces(&output).unwrap_err().to_string().contains("it is no timeline"));
}

#[test]
fn a_rank_of_an_earlier_world_is_not_missing_in_the_last() {
    let mut pieces = TimelinePieces::new().unwrap();
    for rank in 0..RANKS {
        let text = file(rank);
        send(&mut pieces, rank, text.as_bytes(), text.len(), |_| true);
    }
    let earlier = file(1).replace("\"generation\":2", "\"generation\":1");
    send(&mut pieces, 9, earlier.as_bytes(), earlier.len(), |number| number != 3);
    assert_eq!(merged_pieces(&pieces).incomplete, [0; 0]);
}

#[test]
fn all_pieces_together_have_a_limit() {
    let mut pieces = TimelinePieces::new().unwrap();
    let texts: Vec<String> = (0..RANKS).map(file).collect();
    pieces.bytes_left = texts[0].len() as u64 + 5000;
    // A worker that sends its timeline again takes the place of what it has sent.
    for rank in [0, 0, 1, 2] {
        let text = &texts[rank as usize];
        send(&mut pieces, rank, text.as_bytes(), text.len(), |_| true);
    }
    let summary = merged_pieces(&pieces);
    assert_eq!((ranks_of(&summary), &*summary.incomplete), (vec![0, 1], &[1, 2, 3][..]));
    assert_eq!(pieces.bytes_left, 0);
}
