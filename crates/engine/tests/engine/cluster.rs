// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Worlds of threads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_collectives::{Device, DeviceCommunicatorFactory, HostCommunicator};
use farandole_engine::{
    CollectiveRequest, DriverParkingAndLiveness, Engine, EngineObserver, EngineOptions,
    EngineSettings, ProcessSetOptions, RequestCompletion, RequestHandle, RequestKind, Result,
    SilentObserver, control_peers,
};
use farandole_kernels::{DataType, HostMemory, ReduceOp};
use farandole_testkit::{contents, filled};
use farandole_transport::{Link, MemoryRendezvous, Mesh, MeshOptions, Parker, Unparker, loopback};
use farandole_world::{
    Generation, HostHash, ProcessSetId, Rank, TaskId, TaskPlacement, World, assign_ranks,
};

/// Longest time for actions that should take milliseconds.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// Sleeps on a parker. Links over loopback wake no thread: there every sleep is short.
struct Host {
    parker: Parker,
    unparker: Unparker,
    longest: Duration,
    mesh: Option<Mesh>,
}

impl DriverParkingAndLiveness for Host {
    fn prepare_park(&self) {
        self.parker.prepare_park();
    }

    fn park(&self, limit: Duration) {
        self.parker.park(Instant::now() + limit.min(self.longest)).unwrap();
    }

    fn cancel_park(&self) {
        self.parker.cancel_park();
    }

    fn unpark(&self) {
        self.unparker.wake_all();
    }

    fn check_peers(&self) -> farandole_transport::Result<()> {
        self.mesh.as_ref().map_or(Ok(()), Mesh::check_peers)
    }

    fn send_heartbeat(&self) {
        if let Some(mesh) = &self.mesh {
            mesh.increment_own_heartbeat();
        }
    }
}

pub(crate) type Cut = fn(Rank, Link) -> Link;

/// The parts of a test's world.
#[derive(Clone)]
pub(crate) struct Cluster {
    /// Ranks of each host.
    pub(crate) hosts: Vec<u32>,
    pub(crate) settings: EngineSettings,
    pub(crate) devices: Vec<Arc<dyn Device>>,
    pub(crate) fabric: Option<Arc<dyn DeviceCommunicatorFactory>>,
    pub(crate) observer: Arc<dyn EngineObserver>,
    /// Process sets besides the world.
    pub(crate) sets: Vec<Vec<u32>>,
    /// Changes data links.
    pub(crate) cut: Cut,
    /// Shared memory between the threads instead of loopback, with real sleep.
    pub(crate) real: bool,
}

pub(crate) fn settings() -> EngineSettings {
    EngineSettings {
        collective_timeout: LIMIT,
        fusion_threshold: 1 << 20,
        group_fusion: true,
        cache_capacity: 64,
        loss_report_allowance: Duration::from_millis(500),
        spin: Duration::from_micros(200),
        stall_check: None,
        stall_shutdown: None,
        barrier_deadlock_timeout: None,
        nvtx: false,
        timeline_limit: 0,
        tune: None,
    }
}

impl Cluster {
    pub(crate) fn new(hosts: &[u32]) -> Self {
        Self {
            hosts: hosts.to_vec(),
            settings: settings(),
            devices: Vec::new(),
            fabric: None,
            observer: Arc::new(SilentObserver),
            sets: Vec::new(),
            cut: |_, link| link,
            real: false,
        }
    }

    pub(crate) fn with(self, change: impl FnOnce(&mut EngineSettings)) -> Self {
        let mut settings = self.settings.clone();
        change(&mut settings);
        Self { settings, ..self }
    }

    fn world(&self) -> World {
        let places =
            self.hosts.iter().enumerate().flat_map(|(host, ranks)| vec![host; *ranks as usize]);
        let places: Vec<TaskPlacement> = (0u32..)
            .zip(places)
            .map(|(task, host)| TaskPlacement {
                task: TaskId(task),
                host: HostHash(format!("host{host}")),
            })
            .collect();
        assign_ranks(Generation(0), &places).unwrap()
    }

    /// Runs `body` on every rank, in a thread each; returns what they return in rank order.
    pub(crate) fn run<T: Send>(&self, body: impl Fn(u32, Engine) -> T + Sync) -> Vec<T> {
        let world = self.world();
        let size = world.size();
        let sets = self.process_sets(size);
        let mut meshes: Vec<Vec<Vec<Link>>> = (0..size).map(|_| Vec::new()).collect();
        if !self.real {
            for _ in 0..2 * sets.len() {
                for (rank, links) in
                    loopback::link_mesh(size, 1 << 16).unwrap().into_iter().enumerate()
                {
                    meshes[rank].push(links);
                }
            }
        }
        let rendezvous = MemoryRendezvous::default();
        let (body, world, sets, rendezvous) = (&body, &world, &sets, &rendezvous);
        std::thread::scope(|scope| {
            let start = |(rank, links): (u32, Vec<Vec<Link>>)| {
                scope.spawn(move || {
                    body(
                        rank,
                        self.engine(world.seen_from(Rank(rank)).unwrap(), sets, links, rendezvous),
                    )
                })
            };
            let threads: Vec<_> = (0..).zip(meshes).map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn process_sets(&self, size: usize) -> Vec<Vec<Rank>> {
        let all = (0..size as u32).collect();
        [all]
            .iter()
            .chain(&self.sets)
            .map(|set: &Vec<u32>| set.iter().copied().map(Rank).collect())
            .collect()
    }

    fn engine(
        &self,
        world: World,
        sets: &[Vec<Rank>],
        mut links: Vec<Vec<Link>>,
        meeting: &MemoryRendezvous,
    ) -> Engine {
        let (rank, size) = (world.rank, world.size() as u32);
        let mesh = self.real.then(|| {
            let options = MeshOptions::new(rank, size, world.own_placement().host.clone(), [7; 32]);
            Mesh::join(options, meeting).unwrap()
        });
        let parker =
            mesh.as_ref().map_or_else(|| Parker::new().unwrap(), |mesh| mesh.parker().clone());
        let mut open = |channel: usize, peers: Vec<Rank>| match &mesh {
            Some(mesh) => mesh.open_links(channel as u32, &peers, 1 << 16).unwrap(),
            None => {
                let all = std::mem::take(&mut links[channel]);
                all.into_iter().filter(|link| peers.contains(&link.peer)).collect()
            }
        };
        let mut options = Vec::new();
        for (id, members) in sets.iter().enumerate().filter(|(_, members)| members.contains(&rank))
        {
            let others = members.iter().copied().filter(|member| *member != rank).collect();
            let control = open(2 * id, control_peers(&world, members));
            let data =
                open(2 * id + 1, others).into_iter().map(|link| (self.cut)(rank, link)).collect();
            options.push(ProcessSetOptions {
                id: ProcessSetId(id as u32),
                members: members.clone(),
                control,
                communicator: Box::new(HostCommunicator::new(rank, data).unwrap()),
            });
        }
        let foreign = (0..sets.len() as u32)
            .map(ProcessSetId)
            .filter(|id| !options.iter().any(|set| set.id == *id));
        let longest = if self.real { LIMIT } else { Duration::from_micros(200) };
        Engine::start(EngineOptions {
            settings: self.settings.clone(),
            host: Arc::new(Host { unparker: parker.unparker(), parker, longest, mesh }),
            foreign: foreign.collect(),
            sets: options,
            devices: self.devices.clone(),
            fabric: self.fabric.clone(),
            observer: Arc::clone(&self.observer),
            world,
        })
        .unwrap()
    }
}

pub(crate) const SUM: RequestKind =
    RequestKind::Allreduce { op: ReduceOp::Sum, prescale: 1.0, postscale: 1.0 };

pub(crate) fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(|four| f32::from_ne_bytes([four[0], four[1], four[2], four[3]]))
        .collect()
}

/// A request over memory of its own, the output left to the engine.
pub(crate) fn request(
    name: &str,
    kind: RequestKind,
    shape: &[u64],
    values: &[f32],
) -> CollectiveRequest {
    CollectiveRequest {
        name: name.to_owned(),
        kind,
        dtype: DataType::F32,
        shape: shape.to_vec(),
        input: filled(&bytes(values)).as_buffer(),
        output: None,
        process_set: ProcessSetId::GLOBAL,
        ready: None,
        priority: 0,
    }
}

pub(crate) fn sum(name: &str, values: &[f32]) -> CollectiveRequest {
    request(name, SUM, &[values.len() as u64], values)
}

/// Waits to the end, also that of the device's work.
pub(crate) fn wait(engine: &Engine, handle: RequestHandle) -> Result<RequestCompletion> {
    let completion =
        engine.wait(handle, LIMIT)?.unwrap_or_else(|| panic!("{handle} takes too long"));
    let deadline = Instant::now() + LIMIT;
    while completion.reached.as_ref().is_some_and(|event| !event.is_ready().unwrap()) {
        assert!(Instant::now() < deadline, "the device takes too long");
        std::thread::yield_now();
    }
    Ok(completion)
}

/// Waits for the floats in the engine's output.
pub(crate) fn values(engine: &Engine, handle: RequestHandle) -> Vec<f32> {
    floats(&contents(&wait(engine, handle).unwrap().output.unwrap()))
}

pub(crate) fn call(engine: &Engine, request: CollectiveRequest) -> Result<RequestCompletion> {
    wait(engine, engine.submit_before_wait(request)?)
}

pub(crate) fn call_sum(engine: &Engine, name: &str, values: &[f32]) -> Vec<f32> {
    floats(&contents(&call(engine, sum(name, values)).unwrap().output.unwrap()))
}

/// Memory of our own to read a result from.
pub(crate) fn memory(values: &[f32]) -> HostMemory {
    filled(&bytes(values))
}
