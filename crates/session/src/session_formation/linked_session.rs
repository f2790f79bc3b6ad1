// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A session with a known rank: the links to the other ranks, and the engine.

use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::sync::Arc;
use std::time::Instant;

use farandole_config::Config;
use farandole_cuda::ProcessGpus;
use farandole_engine::{Engine, EngineOptions, ProcessSetOptions, control_peers};
use farandole_registrar::{TaskClient, local_host_facts};
use farandole_transport::{Link, LinkRelay, Mesh, MeshOptions, NumberedInterfaceAddress};
use farandole_world::{ProcessSetId, Rank, World};

use crate::gpu_policy::create_gpus;
use crate::mesh_parker::MeshParker;
use crate::registrar_relay::RegistrarRelay;
use crate::registrar_rendezvous::{InterruptCheck, RegistrarRendezvous};
use crate::stalls::{StackRequests, StallLogger, stall_time_warning};
use crate::{Error, InitOptions, Result, Session, rank_links};

/// Links this process with the other ranks of the world in which it has a rank.
pub(crate) fn form_linked_session(
    config: &Config,
    client: TaskClient,
    whole: World,
    options: &InitOptions,
    deadline: Instant,
    interrupted: &mut InterruptCheck<'_>,
) -> Result<Session> {
    let part = options.selected_ranks(&whole)?;
    let world = match &part {
        None => whole.clone(),
        Some(part) => whole
            .sub_world(part)
            .map_err(|_| Error::NotInWorld { rank: whole.rank, ranks: part.clone() })?,
    };
    let rendezvous = RegistrarRendezvous::new(&client, &whole, part.as_deref(), interrupted);
    if world.size() == 1 {
        // The world has one rank: the call only checks that no other process has it.
        rendezvous.form_world(b"", deadline)?;
        return form_single_session(config, world, Some(client), options, deadline, interrupted);
    }
    let mesh = join_mesh(config, &client, &world, rendezvous, deadline)?;
    let everybody: Vec<Rank> = (0u32..).take(world.size()).map(Rank).collect();
    let neighbours = control_peers(&world, &everybody);
    let control = mesh.open_links_until(
        rank_links::CONTROL_CHANNEL,
        &neighbours,
        rank_links::CONTROL_RING_BYTES,
        deadline,
        interrupted,
    )?;
    let data = rank_links::DataLinks {
        world: &world,
        members: &everybody,
        channel: rank_links::DATA_CHANNEL,
        capacity: rank_links::data_ring_bytes(
            &world,
            rank_links::shared_memory_budget(&world, config),
        ),
        max_eager_peers: config.links_at_start,
        deadline,
    };
    let data = data.open_links(&mesh, interrupted)?;
    if let Some(warning) = rank_links::tcp_fallback_warning(&mesh.tcp_fallbacks()) {
        tracing::warn!("{warning}");
    }
    let mesh_parker = Arc::new(MeshParker::with_mesh(mesh));
    let engine = start_engine(config, &world, &mesh_parker, control, data)?;
    let session = Session::new(engine, Some(client), Arc::new(world), mesh_parker, config);
    create_sets_and_await_ranks(session, options, deadline, interrupted)
}

/// Forms a world of one.
pub(super) fn form_single_session(
    config: &Config,
    world: World,
    client: Option<TaskClient>,
    options: &InitOptions,
    deadline: Instant,
    interrupted: &mut InterruptCheck<'_>,
) -> Result<Session> {
    let mesh_parker = Arc::new(MeshParker::without_mesh()?);
    let engine = start_engine(config, &world, &mesh_parker, Vec::new(), Vec::new())?;
    create_sets_and_await_ranks(
        Session::new(engine, client, Arc::new(world), mesh_parker, config),
        options,
        deadline,
        interrupted,
    )
}

/// Waits until the engines of all ranks run and have all process sets (SE-2).
fn create_sets_and_await_ranks(
    session: Session,
    options: &InitOptions,
    deadline: Instant,
    interrupted: &mut InterruptCheck<'_>,
) -> Result<Session> {
    session
        .create_initial_sets(&options.process_sets, deadline, interrupted)
        // Otherwise the engine would keep its threads, and peers would wait for this rank.
        .inspect_err(|_| session.shutdown())?;
    Ok(session)
}

pub(super) fn join_mesh(
    config: &Config,
    client: &TaskClient,
    world: &World,
    rendezvous: RegistrarRendezvous<'_, '_>,
    deadline: Instant,
) -> Result<Mesh> {
    let size = u32::try_from(world.size()).unwrap_or(u32::MAX);
    let key = client.ticket().link_key();
    let gateway: Option<Arc<dyn LinkRelay>> =
        if config.dial_out { Some(Arc::new(RegistrarRelay::new(client, world)?)) } else { None };
    let options = MeshOptions {
        generation: world.generation,
        ports: config.port_range,
        bind: listen_interfaces(config, world)?,
        relay: gateway,
        use_shared_memory: config.shared_memory,
        shared_memory_bytes: rank_links::per_process_memory_share(
            world,
            rank_links::shared_memory_budget(world, config),
        ),
        streams: u16::try_from(config.tcp_streams).unwrap_or(u16::MAX),
        congestion: config.tcp_congestion.clone(),
        peer_timeout: config.peer_timeout,
        // All steps of `init` share one deadline (SE-3).
        setup_timeout: deadline.saturating_duration_since(Instant::now()),
        ..MeshOptions::new(world.rank, size, world.own_placement().host.clone(), key)
    };
    let joined = Mesh::join(options, &rendezvous);
    // The transport only knows that the rendezvous failed; this error says why.
    match rendezvous.into_formation_failure() {
        Some(failure) => Err(failure),
        None => Ok(joined?),
    }
}

/// Returns the addresses to listen on; an empty list means all.
fn listen_interfaces(config: &Config, world: &World) -> Result<Vec<NumberedInterfaceAddress>> {
    let bound = local_host_facts::resolve_bind_addresses(&config.bind_address)?;
    if !bound.missing.is_empty() {
        let addresses = bound.addresses.iter().map(|(_, address)| address.to_string());
        tracing::warn!(
            "no address of this host is in {} of FARANDOLE_BIND_ADDRESS, so links use {} only",
            bound.missing.join(", "),
            addresses.collect::<Vec<_>>().join(", "),
        );
    }
    if bound.addresses.is_empty() {
        return Ok(single_host_loopback(world)
            .into_iter()
            .map(NumberedInterfaceAddress::from)
            .collect());
    }
    let interface = |(number, address)| NumberedInterfaceAddress { number, address };
    Ok(bound.addresses.into_iter().map(interface).collect())
}

/// Returns the loopback address if all ranks are on one host: then no other host has a reason to
/// connect.
fn single_host_loopback(world: &World) -> Option<IpAddr> {
    let own = &world.own_placement().host;
    let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
    // Some sandboxes have no loopback.
    let usable = || TcpListener::bind((local, 0)).is_ok();
    (world.seats.iter().all(|seat| seat.host == *own) && usable()).then_some(local)
}

fn start_engine(
    config: &Config,
    world: &World,
    mesh_parker: &Arc<MeshParker>,
    control: Vec<Link>,
    data: Vec<Link>,
) -> Result<(Engine, Arc<StackRequests>, Arc<ProcessGpus>)> {
    // One rank is enough: all have the same setting, and the warning would appear once for each.
    if let (Some(warning), 0) = (stall_time_warning(config), world.rank.0) {
        tracing::warn!("{warning}");
    }
    let stacks = Arc::new(StackRequests::default());
    let gpus = Arc::new(create_gpus(config)?);
    let everybody: Vec<Rank> = (0u32..).take(world.size()).map(Rank).collect();
    let all = ProcessSetOptions {
        id: ProcessSetId::GLOBAL,
        communicator: Box::new(rank_links::build_communicator(
            world,
            &everybody,
            data,
            rank_links::read_crossover_rules(config)?,
        )?),
        members: everybody,
        control,
    };
    let engine = Engine::start(EngineOptions {
        world: world.clone(),
        settings: config.into(),
        host: Arc::clone(mesh_parker) as _,
        sets: vec![all],
        foreign: Vec::new(),
        devices: Vec::new(),
        fabric: Some(Arc::clone(&gpus) as _),
        observer: Arc::new(StallLogger(Arc::clone(&stacks))),
    })?;
    if !matches!(&*config.timeline, "" | "DYNAMIC" | "GATHER") {
        engine.start_timeline(&config.timeline, config.timeline_mark_cycles)?;
    }
    Ok((engine, stacks, gpus))
}
