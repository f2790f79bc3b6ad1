// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The start of a session: all steps share one deadline, and every wait can be interrupted.

use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_config::Config;
use farandole_cuda::Gpus;
use farandole_engine::{Engine, EngineOptions, SetOptions, control_peers};
use farandole_registrar::{Client, Error as RegistrarError, host};
use farandole_transport::{Gateway, Interface, Link, Mesh, MeshOptions};
use farandole_world::{ProcessSetId, Rank, World};

use crate::gateway::ByRegistrar;
use crate::meeting::{Interrupted, Meeting, SLICE};
use crate::rest::Rest;
use crate::stalls::{Events, Stacks, contradiction};
use crate::{Error, Result, Session, Wishes, devices, links, rejoin, started};

/// The longest one attempt to reach the registrar takes before `interrupted` is asked.
const DIAL: Duration = Duration::from_secs(2);

/// Forms a session of this process.
pub(crate) fn form(wishes: &Wishes, interrupted: &mut Interrupted<'_>) -> Result<Session> {
    let mut config = Config::from_env()?;
    config.dynamic_process_sets |= wishes.dynamic;
    let deadline = Instant::now() + config.start_timeout;
    if let Some(told) = &wishes.told {
        let client = started::as_told(told, &config, deadline, interrupted)?;
        return launched(&config, client, wishes, deadline, interrupted);
    }
    let client = match connect(&config, deadline, interrupted)? {
        None => started::client(&config, deadline, interrupted)?,
        launched => launched,
    };
    match client {
        Some(client) if config.elastic => rejoin::form(&config, &client, wishes, interrupted),
        Some(client) => launched(&config, client, wishes, deadline, interrupted),
        None => {
            let world = World::alone(host::facts().hash());
            wishes.part_of(&world)?;
            alone(&config, world, None, wishes, deadline, interrupted)
        }
    }
}

/// Forms the session of a worker that a launcher has started.
fn launched(
    config: &Config,
    client: Client,
    wishes: &Wishes,
    deadline: Instant,
    interrupted: &mut Interrupted<'_>,
) -> Result<Session> {
    let whole = await_assignment(&client, deadline, interrupted)?;
    linked(config, client, whole, wishes, deadline, interrupted)
}

/// Links this process up with the world that it has a place in.
pub(crate) fn linked(
    config: &Config,
    client: Client,
    whole: World,
    wishes: &Wishes,
    deadline: Instant,
    interrupted: &mut Interrupted<'_>,
) -> Result<Session> {
    let part = wishes.part_of(&whole)?;
    let world = match &part {
        None => whole.clone(),
        Some(part) => whole
            .part(part)
            .map_err(|_| Error::NotAmong { rank: whole.rank, ranks: part.clone() })?,
    };
    let meeting = Meeting::new(&client, &whole, part.as_deref(), interrupted);
    if world.size() == 1 {
        // No other process has this rank, and none waits for it.
        meeting.ask(b"", deadline)?;
        return alone(config, world, Some(client), wishes, deadline, interrupted);
    }
    let mesh = join(config, &client, &world, meeting, deadline)?;
    let everybody: Vec<Rank> = (0u32..).take(world.size()).map(Rank).collect();
    let neighbours = control_peers(&world, &everybody);
    let control = mesh.open_until(
        links::CONTROL,
        &neighbours,
        links::CONTROL_CAPACITY,
        deadline,
        interrupted,
    )?;
    let data = links::Data {
        world: &world,
        members: &everybody,
        channel: links::DATA,
        capacity: links::data_capacity(&world, links::budget(&world, config)),
        most: config.links_at_start,
        deadline,
    };
    let data = data.open(&mesh, interrupted)?;
    if let Some(warning) = links::fallbacks(&mesh.fallbacks()) {
        tracing::warn!("{warning}");
    }
    let rest = Arc::new(Rest::among(mesh));
    let engine = start(config, &world, &rest, control, data)?;
    let session = Session::new(engine, Some(client), Arc::new(world), rest, config);
    begin(session, wishes, deadline, interrupted)
}

/// Forms a world of one.
fn alone(
    config: &Config,
    world: World,
    client: Option<Client>,
    wishes: &Wishes,
    deadline: Instant,
    interrupted: &mut Interrupted<'_>,
) -> Result<Session> {
    let rest = Arc::new(Rest::alone()?);
    let engine = start(config, &world, &rest, Vec::new(), Vec::new())?;
    begin(
        Session::new(engine, client, Arc::new(world), rest, config),
        wishes,
        deadline,
        interrupted,
    )
}

/// Returns when the engines of all ranks run and have all process sets (SE-2).
fn begin(
    session: Session,
    wishes: &Wishes,
    deadline: Instant,
    interrupted: &mut Interrupted<'_>,
) -> Result<Session> {
    session
        .begin_sets(&wishes.process_sets, deadline, interrupted)
        .inspect_err(|_| session.shutdown())?;
    Ok(session)
}

fn connect(
    config: &Config,
    deadline: Instant,
    interrupted: &mut Interrupted<'_>,
) -> Result<Option<Client>> {
    loop {
        match Client::of_process(config, deadline.min(Instant::now() + DIAL)) {
            Err(RegistrarError::Unreachable { .. }) if Instant::now() < deadline => {}
            other => return Ok(other?),
        }
        give_up_if(interrupted)?;
    }
}

fn await_assignment(
    client: &Client,
    deadline: Instant,
    interrupted: &mut Interrupted<'_>,
) -> Result<World> {
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
    meeting: Meeting<'_, '_>,
    deadline: Instant,
) -> Result<Mesh> {
    let size = u32::try_from(world.size()).unwrap_or(u32::MAX);
    let key = client.ticket().link_key();
    let gateway: Option<Arc<dyn Gateway>> =
        if config.dial_out { Some(Arc::new(ByRegistrar::new(client, world)?)) } else { None };
    let options = MeshOptions {
        generation: world.generation,
        ports: config.port_range,
        bind: interfaces(config, world)?,
        gateway,
        use_shared_memory: config.shared_memory,
        shared_memory_bytes: links::share(world, links::budget(world, config)),
        streams: u16::try_from(config.tcp_streams).unwrap_or(u16::MAX),
        congestion: config.tcp_congestion.clone(),
        peer_timeout: config.peer_timeout,
        patience: deadline.saturating_duration_since(Instant::now()),
        ..MeshOptions::new(world.rank, size, world.seat().host.clone(), key)
    };
    let joined = Mesh::join(options, &meeting);
    match meeting.failure() {
        Some(failure) => Err(failure),
        None => Ok(joined?),
    }
}

/// Returns the addresses to listen on; none means all.
fn interfaces(config: &Config, world: &World) -> Result<Vec<Interface>> {
    let bound = host::all_bound(&config.bind_address)?;
    if !bound.missing.is_empty() {
        let addresses = bound.addresses.iter().map(|(_, address)| address.to_string());
        tracing::warn!(
            "no address of this host is in {} of FARANDOLE_BIND_ADDRESS, so links use {} only",
            bound.missing.join(", "),
            addresses.collect::<Vec<_>>().join(", "),
        );
    }
    if bound.addresses.is_empty() {
        return Ok(loopback(world).into_iter().map(Interface::from).collect());
    }
    let interface = |(number, address)| Interface { number, address };
    Ok(bound.addresses.into_iter().map(interface).collect())
}

/// Returns the loopback address if all ranks are on one host: no other host has a reason to
/// connect.
fn loopback(world: &World) -> Option<IpAddr> {
    let own = &world.seat().host;
    let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
    // Some sandboxes have no loopback.
    let usable = || TcpListener::bind((local, 0)).is_ok();
    (world.seats.iter().all(|seat| seat.host == *own) && usable()).then_some(local)
}

fn start(
    config: &Config,
    world: &World,
    rest: &Arc<Rest>,
    control: Vec<Link>,
    data: Vec<Link>,
) -> Result<(Engine, Arc<Stacks>, Arc<Gpus>)> {
    if let (Some(warning), 0) = (contradiction(config), world.rank.0) {
        tracing::warn!("{warning}");
    }
    let stacks = Arc::new(Stacks::default());
    let gpus = Arc::new(devices::gpus(config)?);
    let everybody: Vec<Rank> = (0u32..).take(world.size()).map(Rank).collect();
    let all = SetOptions {
        id: ProcessSetId::GLOBAL,
        communicator: Box::new(links::communicator(
            world,
            &everybody,
            data,
            links::crossover(config)?,
        )?),
        members: everybody,
        control,
    };
    let engine = Engine::start(EngineOptions {
        world: world.clone(),
        settings: config.into(),
        host: Arc::clone(rest) as _,
        sets: vec![all],
        foreign: Vec::new(),
        devices: Vec::new(),
        fabric: Some(Arc::clone(&gpus) as _),
        observer: Arc::new(Events(Arc::clone(&stacks))),
    })?;
    if !matches!(&*config.timeline, "" | "DYNAMIC" | "GATHER") {
        engine.start_timeline(&config.timeline, config.timeline_mark_cycles)?;
    }
    Ok((engine, stacks, gpus))
}

pub(crate) fn give_up_if(interrupted: &mut Interrupted<'_>) -> Result<()> {
    if interrupted() { Err(Error::Interrupted) } else { Ok(()) }
}

#[cfg(test)]
mod tests;
