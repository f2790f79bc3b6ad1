// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! How a session comes up: each step with what is left of one deadline, each wait ready to give up.

use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_collectives::HostCommunicator;
use farandole_config::Config;
use farandole_engine::{Engine, EngineOptions, Request, SetOptions, control_peers};
use farandole_registrar::{Client, Error as RegistrarError, host};
use farandole_transport::{Link, Mesh, MeshOptions};
use farandole_world::{ProcessSetId, Rank, World};

use crate::meeting::{Interrupted, Meeting, SLICE};
use crate::rest::Rest;
use crate::stalls::{Stacks, Stderr, contradiction};
use crate::{Error, Result, Session, links};

/// The longest one attempt to reach the registrar takes before `interrupted` is asked.
const DIAL: Duration = Duration::from_secs(2);

/// Forms the `number`th session of this process.
pub(crate) fn form(number: u64, interrupted: &mut Interrupted<'_>) -> Result<Session> {
    let config = Config::from_env()?;
    let deadline = Instant::now() + config.start_timeout;
    match connect(&config, deadline, interrupted)? {
        Some(client) => launched(&config, client, number, deadline, interrupted),
        None => {
            let world = World::alone(host::facts().hash());
            let engine = start(&config, &world, Rest::alone()?, Vec::new(), Vec::new())?;
            Ok(Session::new(engine, None, Arc::new(world)))
        }
    }
}

/// Forms the session of a worker that a launcher has started.
fn launched(
    config: &Config,
    client: Client,
    number: u64,
    deadline: Instant,
    interrupted: &mut Interrupted<'_>,
) -> Result<Session> {
    let world = await_assignment(&client, deadline, interrupted)?;
    if world.size() == 1 {
        let engine = start(config, &world, Rest::alone()?, Vec::new(), Vec::new())?;
        return Ok(Session::new(engine, Some(client), Arc::new(world)));
    }
    let mesh = join(config, &client, &world, number, deadline, interrupted)?;
    let everybody: Vec<Rank> = (0u32..).take(world.size()).map(Rank).collect();
    let mut open =
        |channel, peers: &[Rank], capacity| mesh.open_until(channel, peers, capacity, deadline, interrupted);
    let control = open(links::CONTROL, &control_peers(&world, &everybody), links::CONTROL_CAPACITY)?;
    let others: Vec<Rank> = everybody.into_iter().filter(|rank| *rank != world.rank).collect();
    let data = open(links::DATA, &others, links::data_capacity(&world, config.shared_memory_bytes))?;
    if let Some(warning) = links::fallbacks(&mesh.fallbacks()) {
        eprintln!("farandole: warning: {warning}");
    }
    let engine = start(config, &world, Rest::among(mesh), control, data)?;
    let session = Session::new(engine, Some(client), Arc::new(world));
    first_barrier(&session, deadline, interrupted).inspect_err(|_| session.shutdown())?;
    Ok(session)
}

fn connect(config: &Config, deadline: Instant, interrupted: &mut Interrupted<'_>) -> Result<Option<Client>> {
    loop {
        match Client::of_process(config, deadline.min(Instant::now() + DIAL)) {
            Err(RegistrarError::Unreachable { .. }) if Instant::now() < deadline => {}
            other => return Ok(other?),
        }
        give_up_if(interrupted)?;
    }
}

fn await_assignment(client: &Client, deadline: Instant, interrupted: &mut Interrupted<'_>) -> Result<World> {
    loop {
        match client.await_assignment(deadline.min(Instant::now() + SLICE)) {
            Err(RegistrarError::Timeout { .. }) if Instant::now() < deadline => {}
            other => return Ok(other?),
        }
        give_up_if(interrupted)?;
    }
}

fn join(
    config: &Config,
    client: &Client,
    world: &World,
    number: u64,
    deadline: Instant,
    interrupted: &mut Interrupted<'_>,
) -> Result<Mesh> {
    let size = u32::try_from(world.size()).unwrap_or(u32::MAX);
    let key = client.ticket().link_key();
    let options = MeshOptions {
        generation: world.generation,
        ports: config.port_range,
        use_shared_memory: config.shared_memory,
        shared_memory_bytes: links::share(world, config.shared_memory_bytes),
        streams: u16::try_from(config.tcp_streams).unwrap_or(u16::MAX),
        congestion: config.tcp_congestion.clone(),
        peer_timeout: config.peer_timeout,
        patience: deadline.saturating_duration_since(Instant::now()),
        ..MeshOptions::new(world.rank, size, world.seat().host.clone(), key)
    };
    let mut given_up = false;
    let mut ask = || {
        given_up = interrupted();
        given_up
    };
    let meeting = Meeting::new(client, number, &mut ask);
    let joined = Mesh::join(options, &meeting);
    match (meeting.failure(), given_up) {
        (_, true) => Err(Error::Interrupted),
        (Some(failure), _) => Err(failure.into()),
        (None, false) => Ok(joined?),
    }
}

fn start(
    config: &Config,
    world: &World,
    rest: Rest,
    control: Vec<Link>,
    data: Vec<Link>,
) -> Result<(Engine, Arc<Stacks>)> {
    if let (Some(warning), 0) = (contradiction(config), world.rank.0) {
        eprintln!("farandole: warning: {warning}");
    }
    let stacks = Arc::new(Stacks::default());
    let everybody = SetOptions {
        id: ProcessSetId::GLOBAL,
        members: (0u32..).take(world.size()).map(Rank).collect(),
        control,
        communicator: Box::new(HostCommunicator::new(world.rank, data)?),
    };
    let engine = Engine::start(EngineOptions {
        world: world.clone(),
        settings: config.into(),
        host: Arc::new(rest),
        sets: vec![everybody],
        foreign: Vec::new(),
        devices: Vec::new(),
        observer: Arc::new(Stderr(Arc::clone(&stacks))),
    })?;
    if !matches!(&*config.timeline, "" | "DYNAMIC") {
        engine.start_timeline(&config.timeline, config.timeline_mark_cycles)?;
    }
    Ok((engine, stacks))
}

/// Returns when everybody's engine runs (SE-2).
fn first_barrier(session: &Session, deadline: Instant, interrupted: &mut Interrupted<'_>) -> Result<()> {
    let started = Instant::now();
    let engine = session.engine();
    let handle = engine.submit_attended(Request::barrier("farandole.init", ProcessSetId::GLOBAL))?;
    while engine.wait(handle, SLICE)?.is_none() {
        give_up_if(interrupted)?;
        if Instant::now() >= deadline {
            return Err(Error::Timeout { size: session.world().size(), elapsed: started.elapsed() });
        }
    }
    Ok(())
}

fn give_up_if(interrupted: &mut Interrupted<'_>) -> Result<()> {
    if interrupted() { Err(Error::Interrupted) } else { Ok(()) }
}

#[cfg(test)]
mod tests;
