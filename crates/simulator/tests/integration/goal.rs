// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Exported schedules are whole.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};

use farandole_config::Config;
use farandole_simulator::{AllreduceSimulator, SimulatedCluster, goal_format};

fn exported(hosts: u32, ranks: u32, bytes: u64) -> String {
    let cluster = SimulatedCluster::new(hosts, ranks).unwrap();
    let config = Config::read(|_| None, &BTreeMap::new()).unwrap();
    let mut out = Vec::new();
    goal_format::write_goal_schedule(
        &mut out,
        &AllreduceSimulator::new(&cluster, &config).unwrap(),
        bytes,
    )
    .unwrap();
    String::from_utf8(out).unwrap()
}

/// Number of a label.
fn label(word: &str) -> usize {
    word.strip_prefix('l').unwrap().parse().unwrap()
}

#[test]
fn every_send_has_its_receive_and_every_label_comes_before_its_use() {
    for (hosts, ranks, bytes) in
        [(1, 4, 1000), (4, 4, 1000), (4, 4, 1 << 20), (2, 4, 1 << 20), (3, 6, 100_000)]
    {
        let text = exported(hosts, ranks, bytes);
        let mut lines = text.lines();
        assert_eq!(lines.next(), Some(format!("num_ranks {ranks}").as_str()));
        // Sender, receiver, tag and bytes.
        let (mut sent, mut received) = (BTreeSet::new(), BTreeSet::new());
        let (mut rank, mut known) = (String::new(), 0);
        for line in lines.filter(|line| !line.is_empty() && *line != "}") {
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["rank", number, "{"] => (rank, known) = (number.to_owned(), 0),
                [after, "requires", before] => {
                    assert!(label(after) < known && label(before) < label(after), "{line}");
                }
                [_, "send", bytes, "to", to, "tag", tag] => {
                    assert!(sent.insert((
                        rank.clone(),
                        to.to_owned(),
                        tag.to_owned(),
                        bytes.to_owned()
                    )));
                    known += 1;
                }
                [_, "recv", bytes, "from", from, "tag", tag] => {
                    assert!(received.insert((
                        from.to_owned(),
                        rank.clone(),
                        tag.to_owned(),
                        bytes.to_owned()
                    )));
                    known += 1;
                }
                [_, "calc", time] => {
                    time.parse::<u64>().unwrap();
                    known += 1;
                }
                _ => unreachable!("{line}"),
            }
        }
        assert!(!sent.is_empty() && sent == received, "{ranks} ranks on {hosts} hosts");
    }
}
