// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Hosts of an elastic job: their slots, and their cooldowns after failures.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use farandole_world::{TaskId, format_counted_noun};
use serde::{Deserialize, Serialize};

/// Multiple of the longest cooldown after which a host without further failures has its earlier
/// failures forgotten.
// With a factor of 1, a host that fails right after the longest cooldown would begin again with the
// shortest one.
const FORGIVENESS_FACTOR: u32 = 2;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct ElasticHost {
    name: String,
    slots: u32,
    listed: bool,
    failures: u32,
    failed_at: Option<Duration>,
    cool_at: Option<Duration>,
}

/// Hosts in the order in which they were first seen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ElasticHosts {
    all: Vec<ElasticHost>,
    known: bool,
    /// Whether the hosts have not been reported since the registrar restarted.
    outdated: bool,
    /// Shortest and longest cooldown.
    cooldown: (Duration, Duration),
}

impl ElasticHosts {
    pub(super) fn new(cooldown: (Duration, Duration)) -> Self {
        Self { all: Vec::new(), known: false, outdated: false, cooldown }
    }

    /// Sets the shortest and longest cooldown.
    pub(super) fn set_cooldown(&mut self, cooldown: (Duration, Duration)) {
        self.cooldown = cooldown;
    }

    /// Returns whether a list of hosts was given; otherwise workers come by themselves.
    pub(super) fn are_hosts_known(&self) -> bool {
        self.known
    }

    /// Marks the hosts as outdated: no worker is started until a new list of hosts is given.
    pub(super) fn mark_hosts_outdated(&mut self) {
        self.outdated = true;
    }

    /// Replaces the list of available hosts. A host that is listed twice has the slots of both
    /// entries.
    pub(super) fn update_discovered_hosts(&mut self, hosts: Vec<(String, u32)>) {
        (self.known, self.outdated) = (true, false);
        for host in &mut self.all {
            // Hosts stay in the list with their failures: a host that returns must not begin
            // without them.
            (host.listed, host.slots) = (false, 0);
        }
        for (name, slots) in hosts {
            match self.all.iter_mut().find(|host| host.name == name) {
                Some(host) => {
                    host.listed = true;
                    host.slots = host.slots.saturating_add(slots);
                }
                None => self.all.push(ElasticHost {
                    name,
                    slots,
                    listed: true,
                    failures: 0,
                    failed_at: None,
                    cool_at: None,
                }),
            }
        }
    }

    /// Records that a worker failed on a host. Failures during a cooldown count as the failure that
    /// caused the cooldown.
    pub(super) fn record_host_failure(&mut self, now: Duration, name: &str) {
        let (shortest, longest) = self.cooldown;
        let Some(host) = self.all.iter_mut().find(|host| host.name == name) else { return };
        if host.cool_at.is_some_and(|until| now < until) {
            return;
        }
        if host.failed_at.is_some_and(|at| now.saturating_sub(at) > longest * FORGIVENESS_FACTOR) {
            host.failures = 0;
        }
        host.failures = host.failures.saturating_add(1);
        host.failed_at = Some(now);
        // The bound keeps the shift in range; `longest` is reached far earlier.
        let doubled = shortest.saturating_mul(1 << (host.failures - 1).min(20));
        // Add a jitter, so that hosts that failed together do not return together.
        let spread =
            shortest.mul_f64(f64::from(cooldown_jitter(name, host.failures)) / f64::from(u32::MAX));
        host.cool_at = Some(now + doubled.saturating_add(spread).min(longest));
    }

    /// Blocks new workers on a host for the shortest cooldown, because a worker there leaves by
    /// itself: the host is probably about to be removed. This counts as no failure.
    pub(super) fn block_new_workers(&mut self, now: Duration, name: &str) {
        let until = now + self.cooldown.0;
        if let Some(host) = self.all.iter_mut().find(|host| host.name == name) {
            // A longer cooldown after a failure stays.
            host.cool_at = host.cool_at.max(Some(until));
        }
    }

    /// Returns the workers without a slot, and the reason. `living` lists first the workers that
    /// should stay longest.
    pub(super) fn surplus_workers(&self, living: &[(TaskId, &str)]) -> BTreeMap<TaskId, String> {
        let mut free: HashMap<&str, u32> =
            self.all.iter().map(|host| (host.name.as_str(), host.slots)).collect();
        let mut surplus = BTreeMap::new();
        for (task, name) in living {
            let free = free.entry(name).or_default();
            if *free > 0 {
                *free -= 1;
                continue;
            }
            let reason = match self.all.iter().find(|host| host.name == *name) {
                Some(host) if host.listed => {
                    format!(
                        "host {name} has {} now",
                        format_counted_noun(host.slots.into(), "slot")
                    )
                }
                _ => format!("host {name} was removed"),
            };
            surplus.insert(*task, reason);
        }
        surplus
    }

    /// Returns a host name for each slot that a new worker may take now, host by host.
    pub(super) fn vacant_slots(
        &self,
        now: Duration,
        living: &[(TaskId, &str)],
    ) -> impl Iterator<Item = String> {
        let mut taken: HashMap<&str, usize> = HashMap::new();
        for (_, name) in living {
            *taken.entry(name).or_default() += 1;
        }
        let free = move |host: &ElasticHost| {
            (host.slots as usize)
                .saturating_sub(taken.get(host.name.as_str()).copied().unwrap_or(0))
        };
        self.all
            .iter()
            .filter(move |host| !self.outdated && !host.is_cooling_down(now))
            .flat_map(move |host| std::iter::repeat_n(host.name.clone(), free(host)))
    }

    /// Describes every host, its slots and its remaining cooldown, for messages.
    pub(super) fn describe_slots(&self, now: Duration) -> String {
        let each: Vec<String> = self
            .all
            .iter()
            .filter(|host| host.listed)
            .map(|host| match host.cool_at.filter(|until| now < *until) {
                Some(until) => {
                    format!("{}:{} (no new worker for {:.1?})", host.name, host.slots, until - now)
                }
                None => format!("{}:{}", host.name, host.slots),
            })
            .collect();
        if each.is_empty() { "none".to_owned() } else { each.join(", ") }
    }
}

impl ElasticHost {
    fn is_cooling_down(&self, now: Duration) -> bool {
        self.cool_at.is_some_and(|until| now < until)
    }
}

/// Returns a number that differs between hosts and failures and is the same in every run (FNV-1a).
fn cooldown_jitter(name: &str, failures: u32) -> u32 {
    let bytes = name.bytes().chain(failures.to_le_bytes());
    // Not random: a replay of the journal must give the same times.
    bytes.fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn vacant(hosts: &ElasticHosts, now: Duration, living: &[(TaskId, &str)]) -> Vec<String> {
        hosts.vacant_slots(now, living).collect()
    }

    #[test]
    fn a_host_cools_down_longer_after_each_failure_and_is_forgiven_one_day() {
        let mut hosts = ElasticHosts::new((SECOND, 20 * SECOND));
        hosts.update_discovered_hosts(vec![("a".to_owned(), 1)]);
        let mut now = Duration::ZERO;
        let mut waits = Vec::new();
        for _ in 0..7 {
            hosts.record_host_failure(now, "a");
            assert!(vacant(&hosts, now, &[]).is_empty());
            let until = hosts.all[0].cool_at.unwrap();
            waits.push(until - now);
            now = until;
            assert_eq!(vacant(&hosts, now, &[]), ["a"]);
        }
        assert!(waits[0] >= SECOND && waits[0] <= 2 * SECOND, "{waits:?}");
        assert!(waits.is_sorted() && waits[6] == 20 * SECOND, "{waits:?}");
        hosts.record_host_failure(now + 100 * SECOND, "a");
        assert!(hosts.all[0].cool_at.unwrap() <= now + 102 * SECOND);
    }

    #[test]
    fn a_host_that_a_worker_leaves_rests_and_has_not_failed() {
        let mut hosts = ElasticHosts::new((SECOND, 20 * SECOND));
        hosts.update_discovered_hosts(vec![("a".to_owned(), 1)]);
        for turn in 0..5 {
            hosts.block_new_workers(10 * turn * SECOND, "a");
            assert!(vacant(&hosts, 10 * turn * SECOND, &[]).is_empty());
            assert_eq!(
                vacant(&hosts, (10 * turn + 1) * SECOND, &[]),
                ["a"],
                "not longer each time"
            );
        }
        hosts.record_host_failure(100 * SECOND, "a");
        let cooled = hosts.all[0].cool_at;
        hosts.block_new_workers(100 * SECOND, "a");
        assert_eq!(hosts.all[0].cool_at, cooled, "a failure counts for longer");
    }

    #[test]
    fn slots_decide_which_workers_stay_and_where_there_is_room() {
        let mut hosts = ElasticHosts::new((SECOND, SECOND));
        hosts.update_discovered_hosts(vec![("a".to_owned(), 1), ("b".to_owned(), 2)]);
        let living = [(0, "a"), (1, "a"), (2, "c")].map(|(task, host)| (TaskId(task), host));
        let surplus: Vec<u32> = hosts.surplus_workers(&living).keys().map(|task| task.0).collect();
        assert_eq!(surplus, [1, 2]);
        assert_eq!(vacant(&hosts, SECOND, &living[..1]), ["b", "b"]);
    }
}
