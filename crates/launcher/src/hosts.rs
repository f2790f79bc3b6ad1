// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Hosts and their slots: `-H`, host files, and the placement of tasks on hosts.

use std::ops::Range;

use crate::error::{Error, Result};

/// A host and its number of worker slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSlots {
    /// Name, address, or an alias that the connecting program knows.
    pub host: String,
    /// Largest number of workers on the host.
    pub slots: u32,
}

impl HostSlots {
    /// Returns a host with `slots` slots.
    pub fn new(host: impl Into<String>, slots: u32) -> Self {
        Self { host: host.into(), slots }
    }
}

/// The tasks of one host, which have consecutive numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPlacement {
    /// The host.
    pub host: String,
    /// Its tasks.
    pub tasks: Range<u32>,
}

/// Parses `host:slots,host:slots` as in `-H`. A host without slots has one; an IPv6 address with
/// slots needs brackets. If a host is named twice, its slots are added.
///
/// # Errors
/// `Usage` naming the entry.
pub fn parse_hosts(text: &str) -> Result<Vec<HostSlots>> {
    let entries = text.split(',').map(str::trim).filter(|entry| !entry.is_empty());
    let hosts = entries
        .map(|entry| {
            parse_host_entry(entry).ok_or_else(|| Error::Usage {
                reason: format!(
                    "a host is written as name:slots, such as node1:4 or [fe80::1]:4: {entry}"
                ),
            })
        })
        .collect::<Result<Vec<_>>>()?;
    if hosts.is_empty() {
        return Err(Error::Usage { reason: "the list of hosts is empty".to_owned() });
    }
    Ok(merge_hosts(hosts))
}

/// Parses a host file with one host per line, as `host slots=4` (Open MPI, Horovod), `host:4`
/// (MPICH) or `host` (one slot); a comment begins with `#`. If a host is on several lines, its
/// slots are added. `name` is the name of the file, for errors.
///
/// # Errors
/// `Usage` naming the file and the line.
pub fn parse_hostfile(name: &str, text: &str) -> Result<Vec<HostSlots>> {
    let mut hosts = Vec::new();
    // Some editors begin a file with a byte order mark.
    for (number, line) in (1..).zip(text.trim_start_matches('\u{feff}').lines()) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        // Open MPI allows spaces around `=`.
        let words = line.split('=').map(str::trim).collect::<Vec<_>>().join("=");
        hosts.push(parse_hostfile_line(&words).ok_or_else(|| Error::Usage {
            reason: format!("{name} line {number} is not a host, as in \"node1 slots=4\": {line}"),
        })?);
    }
    if hosts.is_empty() {
        return Err(Error::Usage { reason: format!("{name} names no host") });
    }
    Ok(merge_hosts(hosts))
}

/// Assigns the first `num_proc` slots, host by host, to the tasks in their order.
///
/// # Errors
/// `Usage` when there are fewer slots.
pub fn place_tasks(hosts: &[HostSlots], num_proc: u32) -> Result<Vec<HostPlacement>> {
    let available: u64 = hosts.iter().map(|host| u64::from(host.slots)).sum();
    if u64::from(num_proc) > available {
        let listed: Vec<String> =
            hosts.iter().map(|host| format!("{} has {}", host.host, host.slots)).collect();
        return Err(Error::Usage {
            reason: format!(
                "Requested more processes ({num_proc}) than there are available slots \
                 ({available}): {}",
                listed.join(", ")
            ),
        });
    }
    let mut first = 0;
    let mut placements = Vec::new();
    for host in hosts {
        let count = host.slots.min(num_proc - first);
        if count > 0 {
            placements.push(HostPlacement { host: host.host.clone(), tasks: first..first + count });
            first += count;
        }
    }
    Ok(placements)
}

/// Returns one host for each name, in the order of first mention.
pub(crate) fn merge_hosts(hosts: Vec<HostSlots>) -> Vec<HostSlots> {
    let mut merged: Vec<HostSlots> = Vec::with_capacity(hosts.len());
    for host in hosts {
        match merged.iter_mut().find(|known| known.host == host.host) {
            // PBS lists a host once for each slot.
            Some(known) => known.slots = known.slots.saturating_add(host.slots),
            None => merged.push(host),
        }
    }
    merged
}

fn parse_hostfile_line(line: &str) -> Option<HostSlots> {
    let mut words = line.split_whitespace();
    let mut host = parse_host_entry(words.next()?)?;
    for word in words {
        match word.split_once('=')? {
            ("slots" | "cpu", value) => host.slots = value.parse().ok()?,
            // Keywords of Open MPI and of Intel's and MPICH's hydra, which have no effect here.
            ("max_slots" | "max-slots" | "binding" | "ifname", _) => {}
            // Rejected: a misspelt `slots` would leave the host with one slot.
            _ => return None,
        }
    }
    Some(host)
}

fn parse_host_entry(entry: &str) -> Option<HostSlots> {
    split_host_slots(entry).map(|(host, slots)| HostSlots::new(host, slots.unwrap_or(1)))
}

/// Splits `name`, `name:4`, `::1`, `[::1]`, `[::1]:4` or `user@name:4` into the host and its slots,
/// if it has any.
pub(crate) fn split_host_slots(entry: &str) -> Option<(&str, Option<u32>)> {
    if let Some(rest) = entry.strip_prefix('[') {
        let (host, rest) = rest.split_once(']')?;
        let slots =
            if rest.is_empty() { None } else { Some(rest.strip_prefix(':')?.parse().ok()?) };
        return is_host_name(host).then_some((host, slots));
    }
    let (host, slots) = match entry.split_once(':') {
        // More than one colon and no brackets: an IPv6 address without slots.
        Some((_, rest)) if rest.contains(':') => {
            let (address, _) = entry.split_once('%').unwrap_or((entry, ""));
            address.parse::<std::net::Ipv6Addr>().ok()?;
            (entry, None)
        }
        Some((host, slots)) => (host, Some(slots.parse().ok()?)),
        None => (entry, None),
    };
    is_host_name(host).then_some((host, slots))
}

/// Returns whether the text may be a host. A text that starts with a dash would be an option of the
/// program that connects to the host.
fn is_host_name(text: &str) -> bool {
    let plain = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '@' | '%');
    // Also no shell characters: some connecting programs pass the name to a shell.
    !text.is_empty() && !text.starts_with('-') && text.chars().all(plain)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hosts(text: &str) -> Vec<(String, u32)> {
        parse_hosts(text).unwrap().into_iter().map(|host| (host.host, host.slots)).collect()
    }

    #[test]
    fn hosts_have_names_addresses_and_slots() {
        let found = hosts("a:2, b.example-1.org:1,10.0.0.7:3,[fe80::1%eth0]:4,::1,me@c:2,d");
        let expected = [
            ("a", 2),
            ("b.example-1.org", 1),
            ("10.0.0.7", 3),
            ("fe80::1%eth0", 4),
            ("::1", 1),
            ("me@c", 2),
            ("d", 1),
        ];
        assert_eq!(found, expected.map(|(name, slots)| (name.to_owned(), slots)));
    }

    #[test]
    fn a_host_named_twice_has_the_slots_of_both() {
        assert_eq!(hosts("a:1,b:1,a:2"), [("a".to_owned(), 3), ("b".to_owned(), 1)]);
    }

    #[test]
    fn a_wrong_entry_is_named() {
        for wrong in [
            "a:x",
            "-oProxyCommand=id:1",
            "[::1:2",
            "a b:1",
            "a:-1",
            "$(id):1",
            "a:2:3",
            "10.0.0.1:2:",
        ] {
            let error = parse_hosts(&format!("ok:1,{wrong}")).unwrap_err().to_string();
            assert!(error.ends_with(wrong), "{error}");
        }
        assert!(parse_hosts(" , ").unwrap_err().to_string().contains("empty"));
    }

    #[test]
    fn a_host_file_has_comments_blank_lines_and_every_spelling() {
        let text = "\u{feff}# cluster\n\nnode1 slots = 4 max_slots=8\r\nnode2:2 # two\n  \
                    node3\n[::1]:3\nnode1\n";
        let found = parse_hostfile("hosts", text).unwrap();
        let expected = [("node1", 5), ("node2", 2), ("node3", 1), ("::1", 3)];
        assert_eq!(found, expected.map(|(name, slots)| HostSlots::new(name, slots)));
        for wrong in ["b slots=many", "b slot=4", "b slots", "b 4", "b slots=1 slosts=4"] {
            let error = parse_hostfile("hosts", &format!("a\n{wrong}\n")).unwrap_err().to_string();
            assert!(
                error.contains("hosts line 2 is not a host") && error.ends_with(wrong),
                "{error}"
            );
        }
        assert!(
            parse_hostfile("hosts", "# none\n").unwrap_err().to_string().contains("names no host")
        );
    }

    #[test]
    fn slots_beyond_the_processes_stay_free_and_too_few_are_refused_in_horovods_words() {
        let hosts = parse_hosts("a:2,b:0,c:4").unwrap();
        let placed = place_tasks(&hosts, 3).unwrap();
        assert_eq!(
            placed,
            [
                HostPlacement { host: "a".into(), tasks: 0..2 },
                HostPlacement { host: "c".into(), tasks: 2..3 }
            ]
        );
        let error = place_tasks(&hosts, 7).unwrap_err().to_string();
        assert!(
            error.contains(
                "Requested more processes (7) than there are available slots (6): a has 2"
            ),
            "{error}"
        );
    }

    proptest! {
        #[test]
        fn every_task_has_one_host_and_no_host_more_than_its_slots(
            slots in prop::collection::vec(0u32..5, 1..8), asked in 1u32..40,
        ) {
            let hosts: Vec<HostSlots> =
                (0..).zip(&slots).map(|(number, count): (u32, _)| HostSlots::new(format!("h{number}"), *count)).collect();
            let total: u32 = slots.iter().sum();
            match place_tasks(&hosts, asked) {
                Err(_) => prop_assert!(asked > total),
                Ok(placed) => {
                    let tasks: Vec<u32> = placed.iter().flat_map(|placement| placement.tasks.clone()).collect();
                    prop_assert_eq!(tasks, (0..asked).collect::<Vec<_>>());
                    for placement in placed {
                        let host = hosts.iter().find(|host| host.host == placement.host).unwrap();
                        prop_assert!(placement.tasks.len() <= host.slots as usize);
                    }
                }
            }
        }

        #[test]
        fn any_text_is_read_or_refused(text in ".*") {
            let _ignored = (parse_hosts(&text).is_ok(), parse_hostfile("f", &text).is_ok());
        }
    }
}
