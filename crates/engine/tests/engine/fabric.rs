// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Routes of batches with a communicator among devices: here one of hosts, over memory said to be
//! on a device.
#![expect(unsafe_code, reason = "memory of a device that is the host's")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use farandole_collectives::{
    CollectiveOperation, Communicator, DeviceCommunicatorFactory, DeviceEvent, HostCommunicator,
    MAX_CAPABILITIES_BYTES, OperationToken, Result, ResultMemory, TensorSegment,
};
use farandole_engine::{
    CollectiveRequest, Engine, EngineObserver, Error, RequestCompletion, RequestKind, StallReport,
};
use farandole_kernels::{Buffer, DeviceStream, HostMemory, MemoryKind, ReduceOp};
use farandole_testkit::{HostDevice, contents};
use farandole_transport::{Link, loopback};
use farandole_world::Rank;
use parking_lot::Mutex;

use crate::cluster::{Cluster, SUM, bytes, call, floats, request, wait};
use crate::devices::Later;

/// Communicators over loopback, if there may be any.
struct Loops {
    links: Mutex<Vec<Vec<Link>>>,
    allowed: bool,
    /// Whether the first member finds no name.
    nameless: bool,
    /// Whether members find out while forming that no communicator is possible.
    refused: bool,
    /// Looks after an operation until its progress is published, for which peers wait.
    owed: usize,
    /// Looks that are left, of all members.
    left: Arc<AtomicUsize>,
    /// Number of times that a name was requested.
    names: AtomicUsize,
    /// Operations they had, and events those came after.
    operations: Arc<AtomicUsize>,
    events: Arc<AtomicUsize>,
    /// Ends of communicators, in order.
    ends: Arc<Mutex<Vec<String>>>,
}

impl Loops {
    fn new(size: usize, allowed: bool) -> Self {
        let links = Mutex::new(loopback::link_mesh(size, 1 << 16).unwrap());
        let (operations, events) = (Arc::default(), Arc::default());
        let (names, ends, left) = (AtomicUsize::default(), Arc::default(), Arc::default());
        let (nameless, refused, owed) = (false, false, 0);
        Self { links, allowed, nameless, refused, owed, left, names, operations, events, ends }
    }
}

impl DeviceCommunicatorFactory for Loops {
    fn device_capabilities(&self, device: u32) -> Vec<u8> {
        vec![7, u8::try_from(device).unwrap()]
    }

    fn formation_obstacle(
        &self,
        all_capabilities: &[&[u8]],
        ranks: &[Rank],
        _: usize,
    ) -> Option<String> {
        assert_eq!(all_capabilities.len(), ranks.len());
        assert!(
            all_capabilities
                .iter()
                .all(|capabilities| capabilities.len() == MAX_CAPABILITIES_BYTES
                    && capabilities[..2] == [7, 0])
        );
        (!self.allowed).then(|| "nobody may".to_owned())
    }

    fn formation_notice(&self, _: &[&[u8]], ranks: &[Rank], member: usize) -> Option<String> {
        self.refused.then(|| format!("{} ranks, told by {member}", ranks.len()))
    }

    fn create_communicator_id(&self, all_capabilities: &[&[u8]]) -> Result<Vec<u8>, String> {
        self.names.fetch_add(1, Ordering::Relaxed);
        assert_eq!(all_capabilities.len(), 2);
        if self.nameless { Err("nobody has a name".to_owned()) } else { Ok(b"loops".to_vec()) }
    }

    fn form_communicator(
        &self,
        _: u32,
        name: &[u8],
        (member, _): (usize, usize),
        _: Duration,
    ) -> Result<Box<dyn Communicator>> {
        assert!(name.starts_with(b"loops\0"));
        let links = std::mem::take(&mut self.links.lock()[member]);
        let inner = HostCommunicator::new(Rank(u32::try_from(member).unwrap()), links)?;
        let (operations, events) = (Arc::clone(&self.operations), Arc::clone(&self.events));
        let (forming, remark) =
            (3 * (member + 1), self.refused.then(|| format!("{member} was refused")));
        let (refused, ends) = (self.refused, Arc::clone(&self.ends));
        let (owed, left, owes) = (self.owed, Arc::clone(&self.left), 0);
        Ok(Box::new(Among {
            inner,
            operations,
            events,
            ends,
            forming,
            refused,
            remark,
            owed,
            left,
            owes,
        }))
    }
}

struct Among {
    inner: HostCommunicator,
    operations: Arc<AtomicUsize>,
    events: Arc<AtomicUsize>,
    ends: Arc<Mutex<Vec<String>>>,
    /// Looks until it is formed.
    forming: usize,
    refused: bool,
    remark: Option<String>,
    owed: usize,
    left: Arc<AtomicUsize>,
    /// Looks until the progress of the last operation is published.
    owes: usize,
}

impl Drop for Among {
    fn drop(&mut self) {
        self.ends.lock().push(format!("{} ends", self.inner.member_index()));
    }
}

/// Memory of the device as what it is.
fn here(buffer: &Buffer) -> Buffer {
    assert!(buffer.memory_kind() == MemoryKind::Device(0) || buffer.is_empty());
    // SAFETY: that of the buffer; a device of testkit has host memory.
    unsafe { Buffer::from_raw(buffer.address(), buffer.len(), MemoryKind::Host) }
}

impl Among {
    fn place(segment: &mut TensorSegment) {
        *segment = TensorSegment { input: here(&segment.input), output: here(&segment.output) };
    }
}

/// Memory of the device, which is the host's.
struct Kept(HostMemory);

impl ResultMemory for Kept {
    fn as_buffer(&self) -> Buffer {
        // SAFETY: its users keep this.
        unsafe { Buffer::from_raw(self.0.address(), self.0.len(), MemoryKind::Device(0)) }
    }

    fn copy_out_then_release(
        &self,
        to: &Buffer,
        reached: Option<&Arc<dyn DeviceEvent>>,
        _: DeviceStream,
    ) -> Result<()> {
        assert!(to.len() == self.0.len() && reached.is_none());
        // SAFETY: both have so many bytes, which no other code touches.
        unsafe { std::ptr::copy(self.0.address(), to.address(), to.len()) };
        Ok(())
    }
}

impl Communicator for Among {
    fn member_count(&self) -> usize {
        self.inner.member_count()
    }

    fn member_index(&self) -> usize {
        self.inner.member_index()
    }

    fn can_execute(&self, operation: &CollectiveOperation) -> bool {
        assert!(!self.is_forming(), "it does not know yet");
        let gathers = matches!(
            operation,
            CollectiveOperation::Allgather { .. } | CollectiveOperation::Alltoall { .. }
        );
        !self.refused
            && (gathers
                || matches!(operation, CollectiveOperation::Allreduce { op: ReduceOp::Sum, .. }))
    }

    fn allocate_result(&mut self, bytes: usize) -> Result<Arc<dyn ResultMemory>> {
        Ok(Arc::new(Kept(HostMemory::new(bytes))))
    }

    fn submit_operation(
        &mut self,
        token: OperationToken,
        operation: CollectiveOperation,
    ) -> Result<()> {
        self.submit_after_events(token, operation, Vec::new())
    }

    fn submit_after_events(
        &mut self,
        token: OperationToken,
        mut operation: CollectiveOperation,
        events: Vec<Arc<dyn DeviceEvent>>,
    ) -> Result<()> {
        self.operations.fetch_add(1, Ordering::Relaxed);
        self.events.fetch_add(events.len(), Ordering::Relaxed);
        match &mut operation {
            CollectiveOperation::Allreduce { segments, .. }
            | CollectiveOperation::Allgather { segments, .. } => {
                segments.iter_mut().for_each(Self::place);
            }
            CollectiveOperation::Alltoall { segment, .. } => Self::place(segment),
            _ => {}
        }
        self.inner.submit_operation(token, operation)
    }

    fn is_forming(&self) -> bool {
        self.forming > 0
    }

    fn take_user_notice(&mut self) -> Option<String> {
        if self.is_forming() { None } else { self.remark.take() }
    }

    fn make_progress(&mut self, completed: &mut Vec<OperationToken>) -> Result<bool> {
        self.forming = self.forming.saturating_sub(1);
        if self.owes > 0 {
            self.owes -= 1;
            self.left.fetch_sub(1, Ordering::Relaxed);
        }
        let before = completed.len();
        let moved = self.inner.make_progress(completed)?;
        if completed.len() > before {
            self.owes += self.owed;
            self.left.fetch_add(self.owed, Ordering::Relaxed);
        }
        Ok(moved)
    }

    fn has_waiting_peers(&self) -> bool {
        self.owes > 0
    }

    fn wait_for_launched_operations(&mut self, _: Duration) {
        // The device of the second member takes longer.
        if self.inner.member_index() == 1 {
            std::thread::sleep(Duration::from_millis(50));
        }
        self.ends.lock().push(format!("{} is done", self.inner.member_index()));
    }

    fn abandon_operations(&mut self) {
        self.inner.abandon_operations();
    }

    fn pending_count(&self) -> usize {
        self.inner.pending_count() + usize::from(self.is_forming()) + self.owes.min(1)
    }
}

#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl EngineObserver for Notes {
    fn on_stall(&self, _: &StallReport) {}

    fn on_notice(&self, text: &str) {
        self.0.lock().push(text.to_owned());
    }
}

/// Sums and maxima of two ranks in turns, two sums as a group.
fn work(fabric: &Arc<Loops>, observer: &Arc<Notes>) -> u64 {
    let device = HostDevice::new(0, 1);
    let cluster = Cluster {
        devices: vec![Arc::new(device.clone())],
        fabric: Some(Arc::clone(fabric) as _),
        observer: Arc::clone(observer) as _,
        ..Cluster::new(&[2])
    };
    cluster.run(|rank, engine| {
        let max = RequestKind::Allreduce { op: ReduceOp::Max, prescale: 1.0, postscale: 1.0 };
        for round in 0..3 {
            let mine = [rank as f32, round as f32];
            let one = |name: &str, kind: &RequestKind| {
                let (input, from) = device.upload(&bytes(&mine));
                let (output, to) = device.upload(&bytes(&[-1.0, -1.0]));
                let base = request(name, kind.clone(), &[2], &mine);
                // Whatever it comes after is passed on, or waited for.
                let ready: Option<Arc<dyn DeviceEvent>> = Some(Arc::new(Later(AtomicU32::new(3))));
                (
                    (input, output),
                    CollectiveRequest { input: from, output: Some(to), ready, ..base },
                )
            };
            let (kept, sum) = one("sum", &SUM);
            call(&engine, sum).unwrap();
            assert_eq!(floats(&contents(&kept.1)), [1.0, 2.0 * round as f32]);
            let (kept, largest) = one("max", &max);
            call(&engine, largest).unwrap();
            assert_eq!(floats(&contents(&kept.1)), [1.0, round as f32]);
            let ((a, first), (b, second)) = (one("a", &SUM), one("b", &SUM));
            for handle in engine.submit_group(vec![first, second]).unwrap() {
                wait(&engine, handle).unwrap();
            }
            assert_eq!(contents(&a.1), contents(&b.1));
        }
    });
    device.finished()
}

#[test]
fn the_device_communicator_carries_supported_operations_and_the_host_the_others() {
    let (fabric, notes) = (Arc::new(Loops::new(2, true)), Arc::new(Notes::default()));
    // Of 3 rounds on 2 ranks: a sum and a group each; only maxima are copied in and out.
    assert_eq!(work(&fabric, &notes), 2 * 3 * 2);
    assert_eq!(fabric.operations.load(Ordering::Relaxed), 2 * 3 * 2);
    assert_eq!(
        fabric.events.load(Ordering::Relaxed),
        2 * 3 * 3,
        "what tensors come after is passed on"
    );
    assert!(notes.0.lock().is_empty());
    assert_eq!(fabric.names.load(Ordering::Relaxed), 1, "the first member names it, for all");
}

#[test]
fn where_there_can_be_none_the_first_rank_says_why_and_all_goes_through_the_host() {
    let (fabric, notes) = (Arc::new(Loops::new(2, false)), Arc::new(Notes::default()));
    assert_eq!(work(&fabric, &notes), 2 * 3 * 8);
    assert_eq!(fabric.operations.load(Ordering::Relaxed), 0);
    assert_eq!(*notes.0.lock(), ["nobody may"]);
    assert_eq!(fabric.names.load(Ordering::Relaxed), 0, "a name that nobody uses is not asked for");
}

#[test]
fn where_the_first_member_finds_no_name_all_go_through_the_host() {
    let fabric = Arc::new(Loops { nameless: true, ..Loops::new(2, true) });
    let notes = Arc::new(Notes::default());
    assert_eq!(work(&fabric, &notes), 2 * 3 * 8);
    assert_eq!(*notes.0.lock(), ["nobody has a name"]);
}

#[test]
fn where_members_find_out_while_forming_that_there_is_none_all_go_through_the_host() {
    let fabric = Arc::new(Loops { refused: true, ..Loops::new(2, true) });
    let notes = Arc::new(Notes::default());
    assert_eq!(work(&fabric, &notes), 2 * 3 * 8);
    assert_eq!(fabric.operations.load(Ordering::Relaxed), 0);
    assert_eq!(
        *notes.0.lock(),
        ["2 ranks, told by 0", "0 was refused"],
        "only the first rank says it"
    );
}

/// Two ranks sum a tensor of a device, and then each does something.
fn after_a_sum(fabric: &Arc<Loops>, then: impl Fn(&Engine) + Sync) {
    let device = HostDevice::new(0, 1);
    let cluster = Cluster {
        devices: vec![Arc::new(device.clone())],
        fabric: Some(Arc::clone(fabric) as _),
        ..Cluster::new(&[2])
    };
    cluster.run(|_, engine| {
        let (_kept, buffer) = device.upload(&bytes(&[1.0]));
        let base = request("last", SUM, &[1], &[1.0]);
        call(&engine, CollectiveRequest { input: buffer.clone(), output: Some(buffer), ..base })
            .unwrap();
        then(&engine);
    });
}

#[test]
fn progress_that_peers_wait_for_is_published_soon_also_if_this_rank_calls_nothing() {
    let fabric = Arc::new(Loops { owed: 40, ..Loops::new(2, true) });
    after_a_sum(&fabric, |_| {
        // At a look each 250 ms this would take 10 s.
        let limit = Instant::now() + Duration::from_secs(4);
        while fabric.left.load(Ordering::Relaxed) > 0 {
            assert!(Instant::now() < limit, "a peer waits for progress that nobody looks at");
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}

/// Returns a result without memory of the caller.
fn fetched(device: &HostDevice, result: RequestCompletion) -> Vec<f32> {
    assert!(result.output.is_none(), "it is on the device");
    let room = result.room.unwrap();
    let (memory, to) = device.upload(&vec![0; room.as_buffer().len()]);
    // SAFETY: this device knows no streams.
    room.copy_out_then_release(&to, None, unsafe { DeviceStream::from_raw(9) }).unwrap();
    floats(&contents(&memory))
}

#[test]
fn no_communicator_among_devices_ends_before_all_members_are_done() {
    let fabric = Arc::new(Loops::new(2, true));
    after_a_sum(&fabric, Engine::shutdown);
    let ends = fabric.ends.lock().clone();
    assert_eq!(ends.len(), 4, "{ends:?}");
    assert!(ends[..2].iter().all(|end| end.ends_with("is done")), "{ends:?}");
}

#[test]
fn gathers_and_exchanges_among_devices_leave_their_results_there() {
    let (fabric, device) = (Arc::new(Loops::new(2, true)), HostDevice::new(0, 1));
    let cluster = Cluster {
        devices: vec![Arc::new(device.clone())],
        fabric: Some(Arc::clone(&fabric) as _),
        ..Cluster::new(&[2])
    };
    cluster.run(|rank, engine| {
        let mine = [rank as f32, 2.0, 3.0];
        let given = |name: &str, kind: RequestKind, values: &[f32]| {
            let (memory, input) = device.upload(&bytes(values));
            (
                memory,
                CollectiveRequest { input, ..request(name, kind, &[values.len() as u64], values) },
            )
        };
        let (_kept, gather) = given("gather", RequestKind::Allgather, &mine[..=rank as usize]);
        let result = call(&engine, gather).unwrap();
        assert_eq!(result.rows, [1, 2]);
        assert_eq!(fetched(&device, result), [0.0, 1.0, 2.0]);
        let (_kept, exchange) =
            given("exchange", RequestKind::Alltoall { splits: Some(vec![1, 2]) }, &mine);
        let result = call(&engine, exchange).unwrap();
        let expected: &[f32] = if rank == 0 { &[0.0, 1.0] } else { &[2.0, 3.0, 2.0, 3.0] };
        assert_eq!(fetched(&device, result), expected);
        let ((_a, a), (_b, b)) = (
            given("a", RequestKind::Allgather, &mine),
            given("b", RequestKind::Allgather, &mine[1..]),
        );
        let results = engine
            .submit_group(vec![a, b])
            .unwrap()
            .into_iter()
            .map(|handle| wait(&engine, handle));
        let results: Vec<_> = results.map(|result| fetched(&device, result.unwrap())).collect();
        assert_eq!(results, [vec![0.0, 2.0, 3.0, 1.0, 2.0, 3.0], vec![2.0, 3.0, 2.0, 3.0]]);
        let (_kept, nothing) = given("nothing", RequestKind::Allgather, &[]);
        let result = call(&engine, nothing).unwrap();
        assert_eq!((result.rows, result.output.unwrap().len()), (vec![0, 0], 0));
        // One that brings memory for its result, and one whose memory is too small for it.
        let (_kept, gather) = given("brought", RequestKind::Allgather, &mine[..1]);
        let (memory, output) = device.upload(&bytes(&[0.0; 2]));
        let room = 8 - 4 * rank as usize;
        let result =
            call(&engine, CollectiveRequest { output: Some(output.slice(0, room)), ..gather });
        match rank {
            0 => assert!(result.is_ok() && floats(&contents(&memory)) == [0.0, 1.0]),
            _ => assert!(matches!(result, Err(Error::BufferSize { expected: 8, actual: 4, .. }))),
        }
    });
    assert_eq!(device.finished(), 0, "nothing went through the host");
    assert_eq!(fabric.operations.load(Ordering::Relaxed), 2 * 5);
}
