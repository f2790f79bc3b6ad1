// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Conversions between wire types and the types of `world`, `telemetry` and this crate.

use std::collections::BTreeMap;

use bytes::Bytes;
use farandole_telemetry::{LogLine, Metric, Record, Stream};
use farandole_world::{
    Generation, HostFacts, HostHash, Rank, TaskId, TaskPlace, World, assign, assign_as_listed,
    assign_in_order,
};
use prost::Message as _;

use crate::exit::{Exit, How, Verdict};
use crate::generated as wire;

/// Tasks of a world that anybody believes in.
const MOST: usize = 1 << 20;
/// Hexadecimal digits that end the hash of a host.
const DIGITS: usize = 16;

/// Returns a world as every task of it may be told: hosts and their tasks. The receiver numbers
/// them by the same rule.
pub(crate) fn encode_world(world: &World) -> Bytes {
    let mut hosts: BTreeMap<&HostHash, Vec<u32>> = BTreeMap::new();
    for seat in &world.seats {
        hosts.entry(&seat.host).or_default().push(seat.task.0);
    }
    let mut before = "";
    let hosts = hosts
        .into_iter()
        .map(|(hash, tasks)| {
            let (name, digest) = parts(&hash.0);
            let (shared, rest) = split_at_difference(before, name);
            before = name;
            wire::Host { shared, rest: rest.to_owned(), digest, runs: runs(&tasks) }
        })
        .collect();
    // Where both rules give this order they give one world.
    let in_order = world.seats.is_sorted_by_key(|seat| seat.task);
    let kept = !in_order && !follows_rule(world);
    let order =
        if kept { world.seats.iter().map(|seat| seat.task.0).collect() } else { Vec::new() };
    wire::World { generation: world.generation.0, hosts, in_order, order }.encode_to_vec().into()
}

/// Returns whether the ranks are those of the rule of assignment.
fn follows_rule(world: &World) -> bool {
    let places: Vec<TaskPlace> = world
        .seats
        .iter()
        .map(|seat| TaskPlace { task: seat.task, host: seat.host.clone() })
        .collect();
    assign(world.generation, &places).is_ok_and(|ruled| ruled.seats == world.seats)
}

/// Returns the world in `bytes`, seen from `task`. The error says what is wrong with it.
pub(crate) fn decode_world(bytes: Bytes, task: TaskId) -> Result<World, String> {
    let message = wire::World::decode(bytes).map_err(|error| error.to_string())?;
    let mut places = Vec::new();
    let mut name = String::new();
    for host in message.hosts {
        let shared = name
            .get(..host.shared as usize)
            .ok_or("a host's name does not continue another host's name")?;
        name = format!("{shared}{}", host.rest);
        let hash = HostHash(match host.digest {
            Some(digest) => format!("{name}-{digest:0DIGITS$x}"),
            None => name.clone(),
        });
        let mut next = 0u32;
        for run in host.runs.chunks(2) {
            let &[left_out, taken] = run else {
                return Err("a run of tasks has no length".to_owned());
            };
            if places.len().saturating_add(taken as usize) > MOST {
                return Err(format!("more than {MOST} tasks"));
            }
            let first = next.wrapping_add(left_out);
            next = first.wrapping_add(taken);
            places.extend((0..taken).map(|index| TaskPlace {
                task: TaskId(first.wrapping_add(index)),
                host: hash.clone(),
            }));
        }
    }
    let rule = match (message.order.is_empty(), message.in_order) {
        (true, true) => assign_in_order,
        (true, false) => assign,
        (false, _) => {
            places = by_order(places, &message.order)?;
            assign_as_listed
        }
    };
    let world = rule(Generation(message.generation), &places).map_err(|error| error.to_string())?;
    let rank = (0u32..)
        .zip(&world.seats)
        .find(|(_, seat)| seat.task == task)
        .map(|(rank, _)| Rank(rank))
        .ok_or_else(|| format!("task {task} has no place in it"))?;
    world.seen_from(rank).map_err(|error| error.to_string())
}

/// Returns the places as `order` lists their tasks.
fn by_order(places: Vec<TaskPlace>, order: &[u32]) -> Result<Vec<TaskPlace>, String> {
    if places.len() != order.len() {
        return Err(format!("{} tasks have places, and {} ranks", places.len(), order.len()));
    }
    let mut by_task: BTreeMap<TaskId, TaskPlace> =
        places.into_iter().map(|place| (place.task, place)).collect();
    order
        .iter()
        .map(|task| {
            by_task
                .remove(&TaskId(*task))
                .ok_or_else(|| format!("task {task} has no place of its own"))
        })
        .collect()
}

/// Returns a hash's name and digest; all of it is the name where it does not end in a digest.
fn parts(hash: &str) -> (&str, Option<u64>) {
    hash.rsplit_once('-')
        .filter(|(_, digits)| digits.len() == DIGITS && digits.bytes().all(is_digit))
        .and_then(|(name, digits)| Some((name, Some(u64::from_str_radix(digits, 16).ok()?))))
        .unwrap_or((hash, None))
}

fn is_digit(letter: u8) -> bool {
    matches!(letter, b'0'..=b'9' | b'a'..=b'f')
}

/// Returns the number of bytes that two names have in common, and the rest of the second one.
fn split_at_difference<'a>(one: &str, other: &'a str) -> (u32, &'a str) {
    let same = one.chars().zip(other.chars()).take_while(|(left, right)| left == right);
    let shared = same.map(|(letter, _)| letter.len_utf8()).sum::<usize>();
    (u32::try_from(shared).unwrap_or(0), other.get(shared..).unwrap_or(other))
}

/// Returns the numbers as how many are left out, how many taken, and so on.
fn runs(tasks: &[u32]) -> Vec<u32> {
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

impl From<Verdict> for wire::Verdict {
    fn from(verdict: Verdict) -> Self {
        Self {
            reason: verdict.reason,
            cause: verdict.cause.map(|task| task.0),
            retry: verdict.retry,
        }
    }
}

impl From<wire::Verdict> for Verdict {
    fn from(verdict: wire::Verdict) -> Self {
        Self { reason: verdict.reason, cause: verdict.cause.map(TaskId), retry: verdict.retry }
    }
}

impl From<Exit> for wire::ExitRequest {
    fn from(exit: Exit) -> Self {
        let how = match exit.how {
            How::Code(code) => wire::exit_request::How::Code(code),
            How::Signal(signal) => wire::exit_request::How::Signal(signal),
            How::NotStarted(reason) => wire::exit_request::How::NotStarted(reason),
        };
        Self {
            how: Some(how),
            peer_error: exit.peer_error,
            stopped: exit.stopped,
            stderr_tail: exit.stderr_tail,
            together: false,
        }
    }
}

impl TryFrom<wire::ExitRequest> for Exit {
    type Error = &'static str;

    fn try_from(request: wire::ExitRequest) -> Result<Self, &'static str> {
        let how = match request.how.ok_or("it does not say how the worker ended")? {
            wire::exit_request::How::Code(code) => How::Code(code),
            wire::exit_request::How::Signal(signal) => How::Signal(signal),
            wire::exit_request::How::NotStarted(reason) => How::NotStarted(reason),
        };
        Ok(Self {
            how,
            peer_error: request.peer_error,
            stopped: request.stopped,
            stderr_tail: request.stderr_tail,
        })
    }
}

/// Returns the records of a batch, lines first.
pub(crate) fn records(
    batch: wire::RecordBatch,
    task: u32,
    rank: Option<u32>,
) -> impl Iterator<Item = Record> {
    let lines = batch.lines.into_iter().map(move |line| {
        let stream = if line.stderr { Stream::Stderr } else { Stream::Stdout };
        Record::Log(LogLine { task, rank, stream, text: line.text })
    });
    let metrics = batch.metrics.into_iter().map(move |metric| {
        Record::Metric(Metric { task, rank, kind: metric.kind, data: metric.data.into() })
    });
    lines.chain(metrics)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn hosts_of_one_kind_are_sent_in_few_bytes() {
        let hash = |host: u32| {
            HostFacts { hostname: format!("host-{host:05}"), ..HostFacts::default() }.hash()
        };
        let places: Vec<TaskPlace> =
            (0..8_000).map(|task| TaskPlace { task: TaskId(task), host: hash(task / 8) }).collect();
        let encoded = encode_world(&assign(Generation(1), &places).unwrap());
        // Of a thousand hosts.
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
            let places = [TaskPlace { task: TaskId(0), host: HostHash(hash.to_owned()) }];
            let world = assign(Generation(1), &places).unwrap();
            assert_eq!(decode_world(encode_world(&world), TaskId(0)).unwrap(), world, "{hash}");
        }
    }

    /// Returns the ranks that no rule gives.
    fn backwards(
        generation: Generation,
        places: &[TaskPlace],
    ) -> Result<World, farandole_world::Error> {
        let places: Vec<TaskPlace> = places.iter().rev().cloned().collect();
        assign_as_listed(generation, &places)
    }

    proptest! {
        #[test]
        fn a_world_survives_the_wire_as_each_task_sees_it(
            hosts in prop::collection::vec("[ab]{0,2}(-[0-9a-f]{16})?", 1..20), generation: u64, gap in 1u32..3
        ) {
            let places: Vec<TaskPlace> = (0u32..)
                .zip(&hosts)
                .map(|(task, host)| TaskPlace { task: TaskId(task * gap), host: HostHash(host.clone()) })
                .collect();
            for rule in [assign, assign_in_order, assign_as_listed, backwards] {
                let world = rule(Generation(generation), &places).unwrap();
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
