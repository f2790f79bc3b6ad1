// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The forming of a world without connections, for simulators.

use std::time::Duration;

use farandole_world::{HostHash, TaskId, World};

use crate::convert;
use crate::membership::{Decision, Liveness, Membership, Options};

/// Calls that a rank of a job makes at the registrar until it has its links: it registers, begins
/// its heartbeat, waits for its rank, and meets the others.
pub const CALLS: u64 = 4;
/// Connections that a rank of a job opens to the registrar: its agent's and its worker's.
pub const CONNECTIONS: u64 = 2;

/// A world that was assigned.
#[derive(Clone, Debug)]
pub struct Formed {
    /// The world, seen from rank 0.
    pub world: World,
    /// The time at which the last task had registered.
    pub at: Duration,
    /// Registrations that were taken in.
    pub registrations: u64,
    /// Bytes of the answer that every task gets.
    pub answer: u64,
}

/// Registers tasks in the membership of a job as they arrive; `None` when not all `tasks` come.
pub fn form(
    tasks: u32,
    arrivals: impl IntoIterator<Item = (Duration, TaskId, HostHash)>,
) -> Option<Formed> {
    let liveness = Liveness { heartbeat_timeout: Duration::MAX, disconnect_grace: Duration::MAX };
    let options = Options { tasks, liveness, failure_grace: Duration::ZERO, in_order: false };
    let mut membership = Membership::new(options);
    for (registrations, (at, task, host)) in (1..).zip(arrivals) {
        let (_, decisions) = membership.register(at, task, 0, task.0.into(), host).ok()?;
        for decision in decisions {
            if let Decision::Assigned { world } = decision {
                let answer = convert::encode_world(&world).len() as u64;
                return Some(Formed { world, at, registrations, answer });
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
        let formed = form(4, (0..4).map(arrival)).unwrap();
        assert_eq!((formed.at, formed.registrations), (Duration::from_millis(3), 4));
        assert_eq!(formed.world.seats.len(), 4);
        assert!(form(4, (0..3).map(arrival)).is_none());
    }
}
