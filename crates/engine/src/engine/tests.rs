// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use farandole_collectives::{CollectiveOperation, Communicator, HostCommunicator, OperationToken};
use farandole_world::{FaultOrigin, HostHash};

use super::*;
use crate::{
    DriverParkingAndLiveness, EngineSettings, ProcessSetOptions, SilentObserver, StopCause,
};

struct Awake;

impl DriverParkingAndLiveness for Awake {
    fn prepare_park(&self) {}
    fn park(&self, _limit: Duration) {
        std::thread::yield_now();
    }
    fn cancel_park(&self) {}
    fn unpark(&self) {}
    fn check_peers(&self) -> farandole_transport::Result<()> {
        Ok(())
    }
    fn send_heartbeat(&self) {}
}

fn options(id: u32) -> EngineOptions {
    EngineOptions {
        world: World::single_rank_world(HostHash("host".to_owned())),
        settings: EngineSettings {
            collective_timeout: Duration::from_secs(20),
            fusion_threshold: 0,
            group_fusion: true,
            cache_capacity: 0,
            loss_report_allowance: Duration::from_millis(500),
            spin: Duration::ZERO,
            stall_check: None,
            stall_shutdown: None,
            barrier_deadlock_timeout: None,
            nvtx: false,
            timeline_limit: 0,
            tune: None,
        },
        host: Arc::new(Awake),
        sets: vec![ProcessSetOptions {
            id: ProcessSetId(id),
            members: vec![Rank(0)],
            control: Vec::new(),
            communicator: Box::new(HostCommunicator::new(Rank(0), Vec::new()).unwrap()),
        }],
        foreign: Vec::new(),
        devices: Vec::new(),
        fabric: None,
        observer: Arc::new(SilentObserver),
    }
}

#[test]
fn a_forked_child_gets_an_error_that_says_how_to_start_workers() {
    let mut engine = Engine::start(options(0)).unwrap();
    let barrier = || CollectiveRequest::barrier("b", ProcessSetId::GLOBAL);
    let handle = engine.submit(barrier()).unwrap();
    let pid = std::mem::replace(&mut engine.pid, 1);
    for error in [
        engine.submit(barrier()).unwrap_err(),
        engine.submit_group(vec![barrier()]).unwrap_err(),
        engine.submit_group_with_callbacks(vec![barrier()], vec![Box::new(drop)]).unwrap_err(),
        engine.poll(handle).unwrap_err(),
        engine.wait(handle, Duration::ZERO).unwrap_err(),
    ] {
        assert!(error.to_string().ends_with("with the spawn or forkserver method"), "{error}");
        assert_eq!(error.fault(), FaultOrigin::Usage);
    }
    engine.shutdown();
    engine.pid = pid;
    assert!(engine.wait(handle, Duration::from_secs(20)).unwrap().is_some());
}

#[test]
fn each_request_of_a_group_has_its_callback() {
    let engine = Engine::start(options(0)).unwrap();
    let (sender, results) = std::sync::mpsc::channel();
    let done = |number: u32| -> CompletionCallback {
        let sender = sender.clone();
        Box::new(move |result| sender.send((number, result.is_ok())).unwrap())
    };
    let requests = || {
        vec![
            CollectiveRequest::barrier("a", ProcessSetId::GLOBAL),
            CollectiveRequest::barrier("b", ProcessSetId::GLOBAL),
        ]
    };
    assert!(matches!(
        engine.submit_group_with_callbacks(requests(), vec![done(0)]),
        Err(Error::Group { members: 2, .. })
    ));
    engine.submit_group_with_callbacks(requests(), vec![done(1), done(2)]).unwrap();
    let mut seen: Vec<_> =
        (0..2).map(|_| results.recv_timeout(Duration::from_secs(20)).unwrap()).collect();
    seen.sort_unstable();
    assert_eq!(seen, [(1, true), (2, true)]);
}

#[test]
fn a_callback_that_is_handed_over_after_the_end_is_called_all_the_same() {
    let engine = Engine::start(options(0)).unwrap();
    let handle =
        engine.submit_before_wait(CollectiveRequest::barrier("a", ProcessSetId::GLOBAL)).unwrap();
    engine.shutdown();
    let (sender, results) = std::sync::mpsc::channel();
    let done: CompletionCallback = Box::new(move |result| sender.send(result.is_ok()).unwrap());
    engine.deliver_or_attach_callbacks(&[handle], Vec::new(), vec![done]);
    assert!(results.try_recv().is_ok());
}

#[test]
fn an_engine_needs_the_set_of_all_ranks_and_links_to_its_neighbours() {
    let error = Engine::start(options(1)).unwrap_err();
    assert!(error.to_string().contains("process set 0 is missing"), "{error}");
    let mut twice = options(0);
    twice.sets.extend(options(0).sets);
    assert!(Engine::start(twice).is_err());
    let mut foreign = options(0);
    foreign.sets[0].members = vec![Rank(3)];
    let error = Engine::start(foreign).unwrap_err();
    assert_eq!(error.to_string(), "cannot start the engine: rank 0 is not in process set 0");
}

/// Takes one operation, and panics when it is to be moved; or takes none, and panics.
struct Panicking {
    pending: usize,
    at_once: bool,
}

impl Communicator for Panicking {
    fn member_count(&self) -> usize {
        1
    }
    fn member_index(&self) -> usize {
        0
    }
    fn submit_operation(
        &mut self,
        _: OperationToken,
        _: CollectiveOperation,
    ) -> farandole_collectives::Result<()> {
        assert!(!self.at_once, "as the test wants it");
        self.pending = 1;
        Ok(())
    }
    fn make_progress(
        &mut self,
        _: &mut Vec<OperationToken>,
    ) -> farandole_collectives::Result<bool> {
        assert_eq!(self.pending, 0, "as the test wants it");
        Ok(false)
    }
    fn abandon_operations(&mut self) {
        self.pending = 0;
    }
    fn pending_count(&self) -> usize {
        self.pending
    }
}

fn barrier() -> CollectiveRequest {
    CollectiveRequest::barrier("b", ProcessSetId::GLOBAL)
}

fn ended(engine: &Engine, result: Result<RequestCompletion>) {
    let error = result.unwrap_err();
    assert!(
        error.to_string().contains("the engine panicked (see stderr for the location)"),
        "{error}"
    );
    assert_eq!(error.fault(), FaultOrigin::Bug);
    assert!(engine.submit(barrier()).is_err(), "it is over");
}

#[test]
fn operations_that_a_panic_interrupted_end_too() {
    let engine = Engine::start(options(0)).unwrap();
    let mut driver = engine.inner.preempt_driver();
    let handle = engine.submit_before_wait(barrier()).unwrap();
    let (sender, results) = std::sync::mpsc::channel();
    let called = CollectiveRequest::barrier("called", ProcessSetId::GLOBAL);
    let done: CompletionCallback = Box::new(move |result| sender.send(result).unwrap());
    engine.submit_group_with_callbacks(vec![called], vec![done]).unwrap();
    let mut lost = std::collections::VecDeque::new();
    engine.inner.submissions.lock().drain_queue(&mut lost);
    assert_eq!(lost.len(), 2);
    drop(lost);
    engine.inner.stop_engine(&mut driver, StopCause::Panicked);
    engine.inner.release_driver(driver);
    ended(&engine, engine.wait(handle, Duration::from_secs(20)).transpose().unwrap());
    ended(&engine, results.recv_timeout(Duration::from_secs(20)).unwrap());
}

#[test]
fn a_panic_ends_the_engine_on_any_driving_thread() {
    let start = |at_once| {
        let mut options = options(0);
        options.sets[0].communicator = Box::new(Panicking { at_once, pending: 0 });
        Engine::start(options).unwrap()
    };
    for at_once in [false, true] {
        // A thread that waits also drives.
        let engine = start(at_once);
        let handle = engine.submit_before_wait(barrier()).unwrap();
        ended(&engine, engine.wait(handle, Duration::from_secs(20)).transpose().unwrap());
        // Nobody waits.
        let engine = start(at_once);
        let (sender, results) = std::sync::mpsc::channel();
        let done: CompletionCallback = Box::new(move |result| sender.send(result).unwrap());
        engine.submit_group_with_callbacks(vec![barrier()], vec![done]).unwrap();
        ended(&engine, results.recv_timeout(Duration::from_secs(20)).unwrap());
    }
}
