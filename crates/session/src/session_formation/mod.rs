// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The start of a session: all steps share one deadline, and every wait can be interrupted.

mod linked_session;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use farandole_config::Config;
use farandole_registrar::{Error as RegistrarError, TaskClient, local_host_facts};
use farandole_world::World;

use self::linked_session::form_single_session;
use crate::registrar_rendezvous::{INTERRUPT_POLL_INTERVAL, InterruptCheck, check_interrupted};
use crate::{InitOptions, Result, Session, foreign_launcher, rejoin};

pub(crate) use linked_session::form_linked_session;

/// Longest attempt to reach the registrar before `interrupted` is called again.
const REGISTRAR_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Forms a session of this process.
pub(crate) fn form_session(
    options: &InitOptions,
    interrupted: &mut InterruptCheck<'_>,
) -> Result<Session> {
    let mut config = Config::from_env()?;
    config.dynamic_process_sets |= options.dynamic;
    let deadline = Instant::now() + config.start_timeout;
    // First: the caller knows more than the environment, for example with an MPI communicator.
    if let Some(assigned_rank) = &options.assigned_rank {
        let client =
            foreign_launcher::connect_assigned_rank(assigned_rank, &config, deadline, interrupted)?;
        return form_launched_session(&config, client, options, deadline, interrupted);
    }
    let client = match connect_registrar(&config, deadline, interrupted)? {
        // Our own ticket comes first, because our launcher also sets the variables of other
        // launchers.
        None => foreign_launcher::connect_detected_rank(&config, deadline, interrupted)?,
        launched => launched,
    };
    match client {
        Some(client) if config.elastic => {
            rejoin::form_next_session(&config, &client, options, interrupted)
        }
        Some(client) => form_launched_session(&config, client, options, deadline, interrupted),
        None => {
            let world = World::single_rank_world(local_host_facts::host_facts().host_hash());
            options.selected_ranks(&world)?;
            form_single_session(&config, world, None, options, deadline, interrupted)
        }
    }
}

/// Forms the session of a worker that a launcher has started.
fn form_launched_session(
    config: &Config,
    client: TaskClient,
    options: &InitOptions,
    deadline: Instant,
    interrupted: &mut InterruptCheck<'_>,
) -> Result<Session> {
    let whole = await_assignment(&client, deadline, interrupted)?;
    form_linked_session(config, client, whole, options, deadline, interrupted)
}

fn connect_registrar(
    config: &Config,
    deadline: Instant,
    interrupted: &mut InterruptCheck<'_>,
) -> Result<Option<TaskClient>> {
    loop {
        match TaskClient::for_this_process(
            config,
            deadline.min(Instant::now() + REGISTRAR_CONNECT_TIMEOUT),
        ) {
            Err(RegistrarError::Unreachable { .. }) if Instant::now() < deadline => {}
            other => return Ok(other?),
        }
        check_interrupted(interrupted)?;
    }
}

fn await_assignment(
    client: &TaskClient,
    deadline: Instant,
    interrupted: &mut InterruptCheck<'_>,
) -> Result<World> {
    loop {
        match client.await_assignment(deadline.min(Instant::now() + INTERRUPT_POLL_INTERVAL)) {
            Err(RegistrarError::Timeout { .. }) if Instant::now() < deadline => {}
            other => return Ok(other?),
        }
        check_interrupted(interrupted)?;
    }
}
