// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Elastic jobs: several worlds, one after the other, in one process.
//!
//! Before each new world, this process sends the registrar the world that it leaves and the members
//! that it lost, and gets a rank in the next world. Only the registrar limits this wait: a spare
//! waits for as long as the job lasts.

use std::time::Instant;

use farandole_config::Config;
use farandole_registrar::{Error as RegistrarError, HostChange, TaskClient};
use farandole_transport::Error as TransportError;
use farandole_world::{FaultOrigin, Generation, Rank, TaskId, World};
use parking_lot::Mutex;

use crate::carried_sets::CarriedProcessSets;
use crate::registrar_rendezvous::{INTERRUPT_POLL_INTERVAL, InterruptCheck, check_interrupted};
use crate::session_formation::form_linked_session;
use crate::{Error, InitOptions, Result, Session};

/// The world that this process left, and the members that it lost there.
#[derive(Clone, Debug)]
struct PreviousWorld {
    generation: Generation,
    lost: Vec<TaskId>,
    /// Process sets of the last world in which this process worked.
    sets: Option<CarriedProcessSets>,
}

static PREVIOUS_WORLD: Mutex<PreviousWorld> =
    Mutex::new(PreviousWorld { generation: Generation(0), lost: Vec::new(), sets: None });
/// Changes of hosts that the caller has not taken yet.
static PENDING_HOST_CHANGES: Mutex<Vec<HostChange>> = Mutex::new(Vec::new());

/// Records the data for the next request for a world. Must be called before the engine ends: when
/// it ends, its peers leave, and would be recorded as lost.
pub(crate) fn record_previous_world(session: &Session) {
    let world = session.world();
    let lost =
        session.mesh_parker.mesh().map(farandole_transport::Mesh::lost_ranks).unwrap_or_default();
    let (generation, lost) = (world.generation, tasks_of_ranks(world, &lost));
    *PREVIOUS_WORLD.lock() =
        PreviousWorld { generation, lost, sets: Some(session.export_process_sets()) };
}

/// Returns the process sets of the world that this process left.
pub(crate) fn previous_process_sets() -> Option<CarriedProcessSets> {
    PREVIOUS_WORLD.lock().sets.clone()
}

fn tasks_of_ranks(world: &World, ranks: &[Rank]) -> Vec<TaskId> {
    ranks.iter().filter_map(|rank| world.seats.get(rank.index())).map(|seat| seat.task).collect()
}

/// Forms the next session of this process.
///
/// # Errors
/// `Registrar` with `Dismissed` when this worker is not needed any more, or with `Aborted` when the
/// job has ended; an error that keeps this process, and not a peer, from joining a world.
pub(crate) fn form_next_session(
    config: &Config,
    client: &TaskClient,
    options: &InitOptions,
    interrupted: &mut InterruptCheck<'_>,
) -> Result<Session> {
    loop {
        let previous = PREVIOUS_WORLD.lock().clone();
        let whole = await_next_world(client, &previous, interrupted)?;
        // The deadline starts with each world: a spare may have waited for hours before.
        let (generation, deadline) = (whole.generation, Instant::now() + config.start_timeout);
        // Changes that led to this world must not make its members ask for another one at once.
        PENDING_HOST_CHANGES.lock().clear();
        client.watch_host_changes(generation, |change| PENDING_HOST_CHANGES.lock().push(change));
        let seats = whole.clone();
        match form_linked_session(config, client.clone(), whole, options, deadline, interrupted) {
            Err(error) if is_peer_failure(&error) => {
                tracing::warn!(%generation, %error, "a world broke while it formed; waiting for \
                                                     the next one");
                *PREVIOUS_WORLD.lock() = PreviousWorld {
                    generation,
                    lost: blamed_tasks(&seats, &error),
                    // This world never worked, so the sets of the world before it still count.
                    sets: previous.sets,
                };
            }
            formed => return formed,
        }
    }
}

fn await_next_world(
    client: &TaskClient,
    previous: &PreviousWorld,
    interrupted: &mut InterruptCheck<'_>,
) -> Result<World> {
    loop {
        match client.join_next_world(
            previous.generation,
            &previous.lost,
            Instant::now() + INTERRUPT_POLL_INTERVAL,
        ) {
            Err(RegistrarError::Timeout { .. }) => {}
            other => return Ok(other?),
        }
        check_interrupted(interrupted)?;
    }
}

/// Returns whether a peer's failure prevented the world, so that another world may form.
fn is_peer_failure(error: &Error) -> bool {
    match error {
        Error::Registrar(RegistrarError::Aborted { retry, .. }) => *retry,
        // The registrar refuses this process itself, and would refuse it again.
        Error::Registrar(_) => false,
        Error::Transport(
            TransportError::Unreachable { .. } | TransportError::Rendezvous { .. },
        ) => true,
        other => matches!(other.fault(), FaultOrigin::Peer | FaultOrigin::Membership),
    }
}

/// Returns the member that an error names.
fn blamed_tasks(world: &World, error: &Error) -> Vec<TaskId> {
    match error {
        Error::Transport(
            TransportError::PeerLost { rank, .. } | TransportError::Unreachable { rank, .. },
        ) => tasks_of_ranks(world, &[*rank]),
        _ => Vec::new(),
    }
}

/// Takes the changes of hosts that the registrar reported since the last call, or since the current
/// world began.
pub fn take_host_changes() -> Vec<HostChange> {
    std::mem::take(&mut *PENDING_HOST_CHANGES.lock())
}

/// Announces that this worker of an elastic job will end soon, which is not a failure. Returns
/// false if the process is not in an elastic job.
///
/// # Errors
/// `Config`, `Registrar`.
pub fn resign_worker(reason: &str, deadline: Instant) -> Result<bool> {
    let config = Config::from_env()?;
    if !config.elastic {
        return Ok(false);
    }
    let Some(client) = TaskClient::for_this_process(&config, deadline)? else { return Ok(false) };
    client.announce_leave(reason, deadline)?;
    Ok(true)
}
