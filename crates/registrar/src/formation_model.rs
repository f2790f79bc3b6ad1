// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A model of world formation without connections, for simulators.

use std::time::Duration;

use farandole_membership::{
    FixedMembership, LivenessLimits, MembershipDecision, MembershipOptions,
};
use farandole_world::{HostHash, TaskId, World};

use crate::wire_conversions;

/// Calls that a rank makes to the registrar until it has its links: registration, heartbeats,
/// assignment, and formation.
pub const CALLS_PER_RANK: u64 = 4;
/// Connections that a rank opens to the registrar: one from its agent and one from its worker.
pub const CONNECTIONS_PER_RANK: u64 = 2;

/// An assigned world, and the cost of its assignment.
#[derive(Clone, Debug)]
pub struct ModeledFormation {
    /// The world, seen from rank 0.
    pub world: World,
    /// The time at which the last task had registered.
    pub at: Duration,
    /// Number of accepted registrations.
    pub registrations: u64,
    /// Bytes of the answer that each task gets.
    pub reply_bytes: u64,
}

/// Registers tasks in the membership of a job as they arrive; `None` when not all `tasks` come.
pub fn model_formation(
    tasks: u32,
    arrivals: impl IntoIterator<Item = (Duration, TaskId, HostHash)>,
) -> Option<ModeledFormation> {
    let liveness =
        LivenessLimits { heartbeat_timeout: Duration::MAX, disconnect_grace: Duration::MAX };
    let options =
        MembershipOptions { tasks, liveness, failure_grace: Duration::ZERO, in_order: false };
    let mut membership = FixedMembership::new(options);
    for (registrations, (at, task, host)) in (1..).zip(arrivals) {
        let (_, decisions) = membership.register_task(at, task, 0, task.0.into(), host).ok()?;
        for decision in decisions {
            if let MembershipDecision::Assigned { world } = decision {
                let answer = wire_conversions::encode_world(&world).len() as u64;
                return Some(ModeledFormation { world, at, registrations, reply_bytes: answer });
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_world_forms_when_the_last_task_has_registered() {
        let arrival = |task: u32| {
            let host = HostHash(format!("host-{}", task / 2));
            (Duration::from_millis(task.into()), TaskId(task), host)
        };
        let formed = model_formation(4, (0..4).map(arrival)).unwrap();
        assert_eq!((formed.at, formed.registrations), (Duration::from_millis(3), 4));
        assert_eq!(formed.world.seats.len(), 4);
        assert!(model_formation(4, (0..3).map(arrival)).is_none());
    }
}
