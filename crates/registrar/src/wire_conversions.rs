// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Conversions between wire types and the types of `world`, `telemetry` and this crate.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use farandole_membership::{ExitKind, ExitReport, GenerationVerdict};
use farandole_telemetry::{LogLine, OutputStream, WorkerMetric, WorkerRecord};
use farandole_world::{
    Generation, HostFacts, HostHash, Rank, TaskId, TaskPlacement, World, assign_in_task_order,
    assign_ranks, assign_ranks_as_listed,
};
use prost::Message as _;

use crate::generated as wire;

/// Largest number of tasks that is accepted in a world.
// A run of tasks is two numbers on the wire, so a short message could claim billions of tasks.
const MAX_WORLD_TASKS: usize = 1 << 20;
/// Number of hexadecimal digits at the end of a host's hash.
const HASH_DIGITS: usize = 16;

/// Encodes a world as its hosts and their tasks; the bytes are the same for every task. The
/// receiver assigns the ranks by the same rule.
pub(crate) fn encode_world(world: &World) -> Bytes {
    let mut hosts: BTreeMap<&HostHash, Vec<u32>> = BTreeMap::new();
    for seat in &world.seats {
        hosts.entry(&seat.host).or_default().push(seat.task.0);
    }
    let mut before = "";
    let hosts = hosts
        .into_iter()
        .map(|(hash, tasks)| {
            let (name, digest) = split_host_hash(&hash.0);
            // Host names of a cluster differ in a few digits, and each of thousands of tasks gets
            // this reply.
            let (shared, rest) = split_shared_prefix(before, name);
            before = name;
            wire::Host { shared, rest: rest.to_owned(), digest, runs: encode_task_runs(&tasks) }
        })
        .collect();
    // If both rules give this order, they give the same world, so `in_order` may describe it.
    let in_order = world.seats.is_sorted_by_key(|seat| seat.task);
    let is_reordered = !in_order && !follows_assignment_rule(world);
    let order = if is_reordered {
        world.seats.iter().map(|seat| seat.task.0).collect()
    } else {
        Vec::new()
    };
    wire::World { generation: world.generation.0, hosts, in_order, order }.encode_to_vec().into()
}

/// Returns whether `assign_ranks` would give the same ranks.
fn follows_assignment_rule(world: &World) -> bool {
    let placements: Vec<TaskPlacement> = world
        .seats
        .iter()
        .map(|seat| TaskPlacement { task: seat.task, host: seat.host.clone() })
        .collect();
    assign_ranks(world.generation, &placements).is_ok_and(|ruled| ruled.seats == world.seats)
}

/// Decodes a world, seen from `task`. The error describes the defect.
pub(crate) fn decode_world(bytes: Bytes, task: TaskId) -> Result<World, String> {
    let message = wire::World::decode(bytes).map_err(|error| error.to_string())?;
    let mut placements = Vec::new();
    let mut name = String::new();
    for host in message.hosts {
        let shared = name
            .get(..host.shared as usize)
            .ok_or("a host's name does not continue another host's name")?;
        name = format!("{shared}{}", host.rest);
        let hash = HostHash(match host.digest {
            Some(digest) => format!("{name}-{digest:0HASH_DIGITS$x}"),
            None => name.clone(),
        });
        let mut next = 0u32;
        for run in host.runs.chunks(2) {
            let &[left_out, taken] = run else {
                return Err("a run of tasks has no length".to_owned());
            };
            if placements.len().saturating_add(taken as usize) > MAX_WORLD_TASKS {
                return Err(format!("more than {MAX_WORLD_TASKS} tasks"));
            }
            let first = next.wrapping_add(left_out);
            next = first.wrapping_add(taken);
            placements.extend((0..taken).map(|index| TaskPlacement {
                task: TaskId(first.wrapping_add(index)),
                host: hash.clone(),
            }));
        }
    }
    let rule = match (message.order.is_empty(), message.in_order) {
        (true, true) => assign_in_task_order,
        (true, false) => assign_ranks,
        // A world after the first keeps the ranks of its survivors, which no rule gives.
        (false, _) => {
            placements = sort_placements_by_order(placements, &message.order)?;
            assign_ranks_as_listed
        }
    };
    let world =
        rule(Generation(message.generation), &placements).map_err(|error| error.to_string())?;
    let rank = (0u32..)
        .zip(&world.seats)
        .find(|(_, seat)| seat.task == task)
        .map(|(rank, _)| Rank(rank))
        .ok_or_else(|| format!("task {task} has no placement"))?;
    world.seen_from(rank).map_err(|error| error.to_string())
}

/// Sorts the placements into the order of their tasks in `order`.
fn sort_placements_by_order(
    placements: Vec<TaskPlacement>,
    order: &[u32],
) -> Result<Vec<TaskPlacement>, String> {
    if placements.len() != order.len() {
        return Err(format!(
            "placements of tasks: {}, ranks that are listed: {}",
            placements.len(),
            order.len()
        ));
    }
    let mut by_task: BTreeMap<TaskId, TaskPlacement> =
        placements.into_iter().map(|placement| (placement.task, placement)).collect();
    order
        .iter()
        .map(|task| {
            by_task.remove(&TaskId(*task)).ok_or_else(|| format!("task {task} is listed twice"))
        })
        .collect()
}

/// Splits a host's hash into its name and its digest. If the hash does not end in a digest, all of
/// it is the name.
fn split_host_hash(hash: &str) -> (&str, Option<u64>) {
    hash.rsplit_once('-')
        .filter(|(_, digits)| digits.len() == HASH_DIGITS && digits.bytes().all(is_hex_digit))
        .and_then(|(name, digits)| Some((name, Some(u64::from_str_radix(digits, 16).ok()?))))
        .unwrap_or((hash, None))
}

fn is_hex_digit(letter: u8) -> bool {
    matches!(letter, b'0'..=b'9' | b'a'..=b'f')
}

/// Returns the length in bytes of the common prefix of two names, and the rest of the second name.
fn split_shared_prefix<'a>(one: &str, other: &'a str) -> (u32, &'a str) {
    let same = one.chars().zip(other.chars()).take_while(|(left, right)| left == right);
    let shared = same.map(|(letter, _)| letter.len_utf8()).sum::<usize>();
    (u32::try_from(shared).unwrap_or(0), other.get(shared..).unwrap_or(other))
}

/// Encodes task numbers as runs: how many numbers are skipped, how many are taken, and so on.
fn encode_task_runs(tasks: &[u32]) -> Vec<u32> {
    let mut runs: Vec<u32> = Vec::new();
    let mut next = 0u32;
    for &task in tasks {
        match runs.last_mut() {
            Some(taken) if task == next => *taken += 1,
            _ => runs.extend([task.wrapping_sub(next), 1]),
        }
        next = task.wrapping_add(1);
    }
    runs
}

impl From<HostFacts> for wire::HostFacts {
    fn from(facts: HostFacts) -> Self {
        let HostFacts { hostname, boot_id, ipc_namespace, container_id } = facts;
        Self { hostname, boot_id, ipc_namespace, container_id }
    }
}

impl From<wire::HostFacts> for HostFacts {
    fn from(facts: wire::HostFacts) -> Self {
        let wire::HostFacts { hostname, boot_id, ipc_namespace, container_id } = facts;
        Self { hostname, boot_id, ipc_namespace, container_id }
    }
}

impl From<GenerationVerdict> for wire::Verdict {
    fn from(verdict: GenerationVerdict) -> Self {
        Self {
            reason: verdict.reason,
            cause: verdict.cause.map(|task| task.0),
            retry: verdict.retry,
        }
    }
}

impl From<wire::Verdict> for GenerationVerdict {
    fn from(verdict: wire::Verdict) -> Self {
        Self { reason: verdict.reason, cause: verdict.cause.map(TaskId), retry: verdict.retry }
    }
}

impl From<ExitReport> for wire::ExitRequest {
    fn from(exit: ExitReport) -> Self {
        let kind = match exit.kind {
            ExitKind::Code(code) => wire::exit_request::How::Code(code),
            ExitKind::Signal(signal) => wire::exit_request::How::Signal(signal),
            ExitKind::NotStarted(reason) => wire::exit_request::How::NotStarted(reason),
        };
        Self {
            how: Some(kind),
            peer_error: exit.peer_error,
            stopped: exit.stopped,
            stderr_tail: exit.stderr_tail,
            together: false,
        }
    }
}

impl TryFrom<wire::ExitRequest> for ExitReport {
    type Error = &'static str;

    fn try_from(request: wire::ExitRequest) -> Result<Self, &'static str> {
        let kind = match request.how.ok_or("it does not say how the worker ended")? {
            wire::exit_request::How::Code(code) => ExitKind::Code(code),
            wire::exit_request::How::Signal(signal) => ExitKind::Signal(signal),
            wire::exit_request::How::NotStarted(reason) => ExitKind::NotStarted(reason),
        };
        Ok(Self {
            kind,
            peer_error: request.peer_error,
            stopped: request.stopped,
            stderr_tail: request.stderr_tail,
        })
    }
}

/// Returns the records of a batch, lines first.
pub(crate) fn telemetry_records(
    batch: wire::RecordBatch,
    task: u32,
    rank: Option<u32>,
) -> impl Iterator<Item = WorkerRecord> {
    let lines = batch.lines.into_iter().map(move |line| {
        let stream = if line.stderr { OutputStream::Stderr } else { OutputStream::Stdout };
        WorkerRecord::Log(LogLine { task, rank, stream, text: line.text })
    });
    let metrics = batch.metrics.into_iter().map(move |metric| {
        WorkerRecord::Metric(WorkerMetric {
            task,
            rank,
            kind: metric.kind,
            data: metric.data.into(),
        })
    });
    lines.chain(metrics)
}

/// Returns a time as the milliseconds of a message.
pub(crate) fn duration_millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn hosts_of_one_kind_are_sent_in_few_bytes() {
        let hash = |host: u32| {
            HostFacts { hostname: format!("host-{host:05}"), ..HostFacts::default() }.host_hash()
        };
        let placements: Vec<TaskPlacement> = (0..8_000)
            .map(|task| TaskPlacement { task: TaskId(task), host: hash(task / 8) })
            .collect();
        let encoded = encode_world(&assign_ranks(Generation(1), &placements).unwrap());
        // 22 bytes for each of a thousand hosts.
        assert!(encoded.len() < 22 * 1_000, "{}", encoded.len());
    }

    #[test]
    fn hashes_of_any_form_come_back() {
        for hash in [
            "a",
            "a-",
            "-0123456789abcdef",
            "a-0123456789ABCDEF",
            "a-+123456789abcdef",
            "é-b",
            "è-b",
            "è-bc",
        ] {
            let placements = [TaskPlacement { task: TaskId(0), host: HostHash(hash.to_owned()) }];
            let world = assign_ranks(Generation(1), &placements).unwrap();
            assert_eq!(decode_world(encode_world(&world), TaskId(0)).unwrap(), world, "{hash}");
        }
    }

    /// Assigns ranks in an order that no rule gives.
    fn backwards(
        generation: Generation,
        placements: &[TaskPlacement],
    ) -> Result<World, farandole_world::Error> {
        let placements: Vec<TaskPlacement> = placements.iter().rev().cloned().collect();
        assign_ranks_as_listed(generation, &placements)
    }

    proptest! {
        #[test]
        fn a_world_survives_the_wire_as_each_task_sees_it(
            hosts in prop::collection::vec("[ab]{0,2}(-[0-9a-f]{16})?", 1..20), generation: u64, gap in 1u32..3
        ) {
            let placements: Vec<TaskPlacement> = (0u32..)
                .zip(&hosts)
                .map(|(task, host)| TaskPlacement { task: TaskId(task * gap), host: HostHash(host.clone()) })
                .collect();
            for rule in [assign_ranks, assign_in_task_order, assign_ranks_as_listed, backwards] {
                let world = rule(Generation(generation), &placements).unwrap();
                for (rank, seat) in (0u32..).zip(&world.seats) {
                    let seen = decode_world(encode_world(&world), seat.task).unwrap();
                    prop_assert_eq!(seen, world.seen_from(Rank(rank)).unwrap());
                }
            }
        }

        #[test]
        fn any_bytes_decode_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            drop(decode_world(bytes.into(), TaskId(0)));
        }
    }
}
