// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Where wire types stop: to and from the words of `world`, `telemetry` and this crate.

use std::collections::BTreeMap;

use bytes::Bytes;
use farandole_telemetry::{LogLine, Metric, Record, Stream};
use farandole_world::{Generation, HostFacts, HostHash, Rank, TaskId, TaskPlace, World, assign};
use prost::Message as _;

use crate::exit::{Exit, How, Verdict};
use crate::generated as wire;

/// A world as every task of it may be told: hosts and their tasks. The receiver numbers them by the same rule.
pub(crate) fn encode_world(world: &World) -> Bytes {
    let mut hosts: BTreeMap<&HostHash, Vec<u32>> = BTreeMap::new();
    for seat in &world.seats {
        hosts.entry(&seat.host).or_default().push(seat.task.0);
    }
    let hosts = hosts.into_iter().map(|(hash, tasks)| wire::Host { hash: hash.0.clone(), tasks }).collect();
    wire::World { generation: world.generation.0, hosts }.encode_to_vec().into()
}

/// The world in `bytes`, seen from `task`. The error says what is wrong with it.
pub(crate) fn decode_world(bytes: Bytes, task: TaskId) -> Result<World, String> {
    let message = wire::World::decode(bytes).map_err(|error| error.to_string())?;
    let places: Vec<TaskPlace> = message
        .hosts
        .into_iter()
        .flat_map(|host| {
            let hash = HostHash(host.hash);
            host.tasks.into_iter().map(move |task| TaskPlace { task: TaskId(task), host: hash.clone() })
        })
        .collect();
    let world = assign(Generation(message.generation), &places).map_err(|error| error.to_string())?;
    let rank = (0u32..)
        .zip(&world.seats)
        .find(|(_, seat)| seat.task == task)
        .map(|(rank, _)| Rank(rank))
        .ok_or_else(|| format!("task {task} has no place in it"))?;
    world.seen_from(rank).map_err(|error| error.to_string())
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
        Self { reason: verdict.reason, cause: verdict.cause.map(|task| task.0), retry: verdict.retry }
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

/// The records of a batch, lines first.
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

    proptest! {
        #[test]
        fn a_world_survives_the_wire_as_each_task_sees_it(hosts in prop::collection::vec(0u8..4, 1..20), generation: u64) {
            let places: Vec<TaskPlace> = (0u32..)
                .zip(&hosts)
                .map(|(task, host)| TaskPlace { task: TaskId(task), host: HostHash(host.to_string()) })
                .collect();
            let world = assign(Generation(generation), &places).unwrap();
            for (rank, seat) in (0u32..).zip(&world.seats) {
                let seen = decode_world(encode_world(&world), seat.task).unwrap();
                prop_assert_eq!(seen, world.seen_from(Rank(rank)).unwrap());
            }
        }

        #[test]
        fn any_bytes_decode_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            drop(decode_world(bytes.into(), TaskId(0)));
        }
    }
}
