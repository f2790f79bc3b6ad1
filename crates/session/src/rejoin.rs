// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Elastic jobs: several worlds, one after the other, in one process.
//!
//! Each time the registrar gets the world that this process leaves and the lost members, and gives
//! it a place in the next world. There is no limit to that wait but the registrar's own: a spare
//! waits for as long as the job lasts.

use std::time::Instant;

use farandole_config::Config;
use farandole_registrar::{Client, Error as RegistrarError, HostChange};
use farandole_transport::Error as TransportError;
use farandole_world::{Fault, Generation, Rank, TaskId, World};
use parking_lot::Mutex;

use crate::carried::Carried;
use crate::form::{give_up_if, linked};
use crate::meeting::{Interrupted, SLICE};
use crate::{Error, Result, Session, Wishes};

/// The world that this process has left, and the members that it lost there.
#[derive(Clone, Debug)]
struct Left {
    generation: Generation,
    lost: Vec<TaskId>,
    /// Process sets of the last world that this process has worked in.
    sets: Option<Carried>,
}

static LEFT: Mutex<Left> =
    Mutex::new(Left { generation: Generation(0), lost: Vec::new(), sets: None });
/// Changes of hosts that were not fetched yet.
static CHANGES: Mutex<Vec<HostChange>> = Mutex::new(Vec::new());

/// Notes what the next world is asked for with. Before the engine ends: its peers leave in answer
/// to that.
pub(crate) fn left(session: &Session) {
    let world = session.world();
    let lost = session.rest.mesh().map(farandole_transport::Mesh::lost).unwrap_or_default();
    let (generation, lost) = (world.generation, tasks(world, &lost));
    *LEFT.lock() = Left { generation, lost, sets: Some(session.carried()) };
}

/// The process sets of the world that this process has left.
pub(crate) fn left_sets() -> Option<Carried> {
    LEFT.lock().sets.clone()
}

fn tasks(world: &World, ranks: &[Rank]) -> Vec<TaskId> {
    ranks.iter().filter_map(|rank| world.seats.get(rank.index())).map(|seat| seat.task).collect()
}

/// Forms the next session of this process.
///
/// # Errors
/// `Registrar` with `Dismissed` when this worker is not wanted any more, or with `Aborted` when the
/// job has ended; what keeps this process, and not a peer, from joining a world.
pub(crate) fn form(
    config: &Config,
    client: &Client,
    wishes: &Wishes,
    interrupted: &mut Interrupted<'_>,
) -> Result<Session> {
    loop {
        let left = LEFT.lock().clone();
        let whole = next(client, &left, interrupted)?;
        let (generation, deadline) = (whole.generation, Instant::now() + config.start_timeout);
        CHANGES.lock().clear();
        client.watch_changes(generation, |change| CHANGES.lock().push(change));
        let seats = whole.clone();
        match linked(config, client.clone(), whole, wishes, deadline, interrupted) {
            Err(error) if is_a_peers(&error) => {
                tracing::warn!(%generation, %error, "a world broke while it formed; waiting for \
                                                     the next one");
                *LEFT.lock() = Left { generation, lost: blamed(&seats, &error), sets: left.sets };
            }
            formed => return formed,
        }
    }
}

fn next(client: &Client, left: &Left, interrupted: &mut Interrupted<'_>) -> Result<World> {
    loop {
        match client.join(left.generation, &left.lost, Instant::now() + SLICE) {
            Err(RegistrarError::Timeout { .. }) => {}
            other => return Ok(other?),
        }
        give_up_if(interrupted)?;
    }
}

/// Returns whether another rank's failure prevented a world, so that another world may form.
fn is_a_peers(error: &Error) -> bool {
    match error {
        Error::Registrar(RegistrarError::Aborted { retry, .. }) => *retry,
        Error::Registrar(_) => false,
        Error::Transport(
            TransportError::Unreachable { .. } | TransportError::Rendezvous { .. },
        ) => true,
        other => matches!(other.fault(), Fault::Peer | Fault::Membership),
    }
}

/// The member that an error names.
fn blamed(world: &World, error: &Error) -> Vec<TaskId> {
    match error {
        Error::Transport(
            TransportError::PeerLost { rank, .. } | TransportError::Unreachable { rank, .. },
        ) => tasks(world, &[*rank]),
        _ => Vec::new(),
    }
}

/// Takes the changes of hosts that the registrar has told since the last call, or since the present
/// world began.
pub fn host_changes() -> Vec<HostChange> {
    std::mem::take(&mut *CHANGES.lock())
}

/// Says that this worker of an elastic job will end at its next chance, which is no failure. False
/// where the job is not elastic, or there is none.
///
/// # Errors
/// `Registrar`.
pub fn resign(reason: &str, deadline: Instant) -> Result<bool> {
    let config = Config::from_env()?;
    if !config.elastic {
        return Ok(false);
    }
    let Some(client) = Client::of_process(&config, deadline)? else { return Ok(false) };
    client.resign(reason, deadline)?;
    Ok(true)
}
