// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Synchronous and asynchronous sums through the whole engine, ranks being threads over shared
//! memory.
//!
//! `cargo bench -p farandole-engine`; with `-- --busy 4`, beside four threads that only compute.

#![expect(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a bench")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use farandole_collectives::HostCommunicator;
use farandole_config::{Config, environment_variable};
use farandole_engine::{
    CollectiveRequest, DriverParkingAndLiveness, Engine, EngineOptions, EngineSettings,
    EngineStatistics, ProcessSetOptions, RequestKind, SilentObserver, control_peers,
};
use farandole_kernels::{DataType, HostMemory, ReduceOp};
use farandole_transport::{MemoryRendezvous, Mesh, MeshOptions, Parker, Unparker};
use farandole_world::{
    Generation, HostHash, ProcessSetId, Rank, TaskId, TaskPlacement, World, assign_ranks,
};

const LIMIT: Duration = Duration::from_secs(30);
/// Operations where threads wait for cores: each may take many milliseconds.
const BUSY_ROUNDS: usize = 300;

struct Host {
    mesh: Mesh,
    parker: Parker,
    unparker: Unparker,
}

impl DriverParkingAndLiveness for Host {
    fn prepare_park(&self) {
        self.parker.prepare_park();
    }
    fn park(&self, limit: Duration) {
        self.parker.park(Instant::now() + limit).unwrap();
    }
    fn cancel_park(&self) {
        self.parker.cancel_park();
    }
    fn unpark(&self) {
        self.unparker.wake_all();
    }
    fn check_peers(&self) -> farandole_transport::Result<()> {
        self.mesh.check_peers()
    }
    fn send_heartbeat(&self) {
        self.mesh.increment_own_heartbeat();
    }
}

fn engine(world: World, meeting: &MemoryRendezvous) -> Engine {
    let (rank, size) = (world.rank, world.size() as u32);
    let mesh = Mesh::join(
        MeshOptions::new(rank, size, world.own_placement().host.clone(), [7; 32]),
        meeting,
    )
    .unwrap();
    let members: Vec<Rank> = (0..size).map(Rank).collect();
    let control = mesh.open_links(0, &control_peers(&world, &members), 64 << 10).unwrap();
    let data = mesh.open_links(1, &members, 1 << 20).unwrap();
    let communicator = Box::new(HostCommunicator::new(rank, data).unwrap());
    let parker = mesh.parker().clone();
    let config = Config::read(environment_variable, &BTreeMap::new()).unwrap();
    Engine::start(EngineOptions {
        settings: EngineSettings::from(&config),
        host: Arc::new(Host { unparker: parker.unparker(), parker, mesh }),
        sets: vec![ProcessSetOptions { id: ProcessSetId::GLOBAL, members, control, communicator }],
        foreign: Vec::new(),
        devices: Vec::new(),
        fabric: None,
        observer: Arc::new(SilentObserver),
        world,
    })
    .unwrap()
}

fn sum(name: &str, memory: &HostMemory) -> CollectiveRequest {
    CollectiveRequest {
        name: name.to_owned(),
        kind: RequestKind::Allreduce { op: ReduceOp::Sum, prescale: 1.0, postscale: 1.0 },
        dtype: DataType::F32,
        shape: vec![(memory.len() / 4) as u64],
        input: memory.as_buffer(),
        output: Some(memory.as_buffer()),
        process_set: ProcessSetId::GLOBAL,
        ready: None,
        priority: 0,
    }
}

/// Times of `rounds` runs on rank 0, and its statistics.
fn measure(
    ranks: u32,
    rounds: usize,
    step: impl Fn(&Engine) + Sync,
) -> (Vec<Duration>, EngineStatistics) {
    let place = |task| TaskPlacement { task: TaskId(task), host: HostHash("host".to_owned()) };
    let world = assign_ranks(Generation(0), &(0..ranks).map(place).collect::<Vec<_>>()).unwrap();
    let meeting = MemoryRendezvous::default();
    let (step, world, meeting) = (&step, &world, &meeting);
    std::thread::scope(|scope| {
        let run = |rank| {
            let engine = engine(world.seen_from(Rank(rank)).unwrap(), meeting);
            (0..rounds / 10).for_each(|_| step(&engine));
            let times: Vec<Duration> = (0..rounds)
                .map(|_| {
                    let start = Instant::now();
                    step(&engine);
                    start.elapsed()
                })
                .collect();
            (times, engine.statistics())
        };
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).next().unwrap()
    })
}

fn report(what: &str, rounds: usize, (mut times, statistics): (Vec<Duration>, EngineStatistics)) {
    times.sort_unstable();
    let at = |part: usize| times[(times.len() - 1) * part / 100].as_secs_f64() * 1e6;
    let frames = (statistics.frames_sent + statistics.frames_received) as f64
        / (rounds + rounds / 10) as f64;
    let mean = times.iter().sum::<Duration>().as_secs_f64() / times.len() as f64 * 1e6;
    println!(
        "{what:<36} min {:>9.2} mean {mean:>9.2} p50 {:>9.2} p99 {:>9.2} us; {frames:.1} control \
         messages at rank 0",
        at(0),
        at(50),
        at(99)
    );
}

/// Computes in `count` threads as long as `work` runs.
fn beside_busy_threads(count: usize, work: impl FnOnce()) {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..count {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        work();
        is_over.store(true, Ordering::Relaxed);
    });
}

/// Measures small operations of ranks that wait for cores.
fn measure_on_busy_cores(busy: usize) {
    for ranks in [2, 4] {
        let step = |engine: &Engine| {
            let memory = HostMemory::new(4);
            let handle = engine.submit_before_wait(sum("gradient", &memory)).unwrap();
            engine.wait(handle, LIMIT).unwrap().unwrap();
        };
        let what = format!("{ranks} ranks, {busy} busy threads, 4 B");
        beside_busy_threads(busy, || report(&what, BUSY_ROUNDS, measure(ranks, BUSY_ROUNDS, step)));
        // The caller waits only after the submission, as in `send` of torch.
        let step = |engine: &Engine| {
            let memory = HostMemory::new(4);
            let handle = engine.submit(sum("gradient", &memory)).unwrap();
            engine.wait(handle, LIMIT).unwrap().unwrap();
        };
        let what = format!("{ranks} ranks, {busy} busy threads, 4 B, submit");
        beside_busy_threads(busy, || report(&what, BUSY_ROUNDS, measure(ranks, BUSY_ROUNDS, step)));
    }
}

fn main() {
    let mut arguments = std::env::args().skip_while(|argument| argument != "--busy").skip(1);
    if let Some(busy) = arguments.next() {
        return measure_on_busy_cores(busy.parse().unwrap());
    }
    for (ranks, bytes, rounds) in [
        (2, 4, 20_000),
        (2, 1 << 10, 20_000),
        (2, 64 << 10, 5000),
        (2, 256 << 10, 5000),
        (2, 4 << 20, 300),
        (4, 4, 20_000),
        (4, 256 << 10, 1000),
    ] {
        let step = |engine: &Engine| {
            thread_local!(static MEMORY: std::cell::RefCell<Option<HostMemory>> = const { std::cell::RefCell::new(None) });
            let memory = MEMORY.with_borrow_mut(|memory| {
                memory.get_or_insert_with(|| HostMemory::new(bytes)).clone()
            });
            let handle = engine.submit_before_wait(sum("gradient", &memory)).unwrap();
            engine.wait(handle, LIMIT).unwrap().unwrap();
        };
        report(
            &format!("{ranks} ranks, {bytes} B, synchronous"),
            rounds,
            measure(ranks, rounds, step),
        );
    }
    let step = |engine: &Engine| {
        thread_local!(static MEMORY: Vec<HostMemory> = (0..100).map(|_| HostMemory::new(64 << 10)).collect());
        let memory = MEMORY.with(Clone::clone);
        let submit = |(k, memory)| engine.submit(sum(&format!("gradient.{k}"), memory)).unwrap();
        let handles: Vec<_> = memory.iter().enumerate().map(submit).collect();
        handles.into_iter().for_each(|handle| drop(engine.wait(handle, LIMIT).unwrap().unwrap()));
    };
    report("2 ranks, 100 x 64 KiB, asynchronous", 200, measure(2, 200, step));
}
