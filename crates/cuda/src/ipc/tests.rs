// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Communicators over windows of host memory, whose work is late and done when a test says so.
#![expect(unsafe_code, reason = "memory of the host that plays the device's")]

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use farandole_collectives::{
    CollectiveOperation, Communicator, DeviceEvent, Error as CollectiveError, OperationToken,
    Result, ResultMemory, TensorSegment,
};
use farandole_kernels::{Buffer, DataType, DeviceStream, HostMemory, MemoryKind, ReduceOp};
use farandole_shm::{RegionHandle, SharedRegion};
use parking_lot::Mutex;

use super::communicator::IpcCommunicator;
use super::mailbox::IpcMailbox;
use super::member_device::{IpcDevice, PieceReduction, SLOTS_PER_WINDOW};
use super::pieces::PieceSpan;
use super::{REGION_HANDLE_BYTES, decode_region_handle, encode_region_handle, region_namespace_id};
use crate::IpcMemoryHandle;

const PIECE: usize = 32;

/// Work that was put on a stream, and a point after it.
type Job = (Box<dyn FnOnce() + Send>, Arc<AtomicBool>);

/// A stream that does its work when it is told to.
#[derive(Clone, Default)]
struct Late(Arc<Mutex<VecDeque<Job>>>);

impl Late {
    fn put(&self, work: impl FnOnce() + Send + 'static) -> Arc<AtomicBool> {
        let done = Arc::new(AtomicBool::new(false));
        self.0.lock().push_back((Box::new(work), Arc::clone(&done)));
        done
    }

    fn work(&self) {
        loop {
            let next = self.0.lock().pop_front();
            let Some((work, done)) = next else { return };
            work();
            done.store(true, Ordering::Release);
        }
    }
}

/// A point of a stream. If it has the stream itself, the work is done right after a look at the
/// point, so that the next look at any point finds it done.
struct Point(Arc<AtomicBool>, Option<Late>);

impl DeviceEvent for Point {
    fn is_ready(&self) -> Result<bool> {
        let ready = self.0.load(Ordering::Acquire);
        if let Some(stream) = &self.1 {
            stream.work();
        }
        Ok(ready)
    }

    fn device_ordinal(&self) -> u32 {
        0
    }

    fn make_stream_wait(&self, _: DeviceStream) -> Result<()> {
        Ok(())
    }
}

#[derive(Default)]
struct Fate {
    closed: AtomicBool,
    left: AtomicBool,
}

/// Windows are host memory of this process, and floats are added.
struct HostSite {
    stream: Late,
    /// Does its work at once where a test does not care.
    prompt: bool,
    /// Does its work between two looks at its points.
    between: Arc<AtomicBool>,
    window: HostMemory,
    starts: Vec<usize>,
    broken: Option<&'static str>,
    fate: Arc<Fate>,
}

fn floats(address: usize, count: usize) -> Vec<f32> {
    let source = std::ptr::with_exposed_provenance::<f32>(address);
    // SAFETY: tests pass memory of so many floats.
    (0..count).map(|at| unsafe { source.add(at).read_unaligned() }).collect()
}

fn put(address: usize, values: &[f32]) {
    let target = std::ptr::with_exposed_provenance_mut::<f32>(address);
    for (at, value) in values.iter().enumerate() {
        // SAFETY: as above.
        unsafe { target.add(at).write_unaligned(*value) };
    }
}

fn exposed(buffer: &Buffer) -> usize {
    buffer.address().expose_provenance()
}

impl HostSite {
    fn job(&self, work: impl FnOnce() + Send + 'static) {
        self.stream.put(work);
        if self.prompt {
            self.stream.work();
        }
    }
}

impl IpcDevice for HostSite {
    fn device_ordinal(&self) -> u32 {
        0
    }

    fn piece_bytes(&self) -> usize {
        PIECE
    }

    fn poll_window_handle(&mut self) -> Option<Result<IpcMemoryHandle, String>> {
        match self.broken {
            Some("never") => return None,
            Some("offer") => return Some(Err("no memory".to_owned())),
            _ => {}
        }
        let mut handle = IpcMemoryHandle([0; 64]);
        handle.0[..8].copy_from_slice(&self.window.address().expose_provenance().to_ne_bytes());
        Some(Ok(handle))
    }

    fn open_windows(&mut self, handles: &[IpcMemoryHandle], _: usize) -> Result<(), String> {
        if self.broken == Some("open") {
            return Err("another container".to_owned());
        }
        let start =
            |handle: &IpcMemoryHandle| usize::from_ne_bytes(*handle.0.first_chunk().unwrap());
        self.starts = handles.iter().map(start).collect();
        Ok(())
    }

    fn wait_for_events(&self, _: &[Arc<dyn DeviceEvent>]) -> Result<()> {
        Ok(())
    }

    fn record_event(&self) -> Result<Arc<dyn DeviceEvent>> {
        let point = self.stream.put(|| {});
        if self.prompt {
            self.stream.work();
        }
        let between = self.between.load(Ordering::Acquire).then(|| self.stream.clone());
        Ok(Arc::new(Point(point, between)))
    }

    fn allocate_result(&self, _: usize) -> Result<Arc<dyn ResultMemory>> {
        Err(CollectiveError::Shape { reason: "there is none".to_owned() })
    }

    fn fill_slot(
        &self,
        slot: u64,
        piece: &[PieceSpan],
        segments: &[TensorSegment],
        _: DataType,
    ) -> Result<()> {
        let base =
            self.window.address().expose_provenance() + usize::try_from(slot).unwrap() * PIECE;
        for span in piece.iter().copied() {
            let from = exposed(&segments[span.segment].input) + span.segment_offset;
            self.job(move || put(base + span.piece_offset, &floats(from, span.bytes / 4)));
        }
        Ok(())
    }

    fn reduce_slot(
        &self,
        slot: u64,
        piece: &[PieceSpan],
        segments: &[TensorSegment],
        reduction: PieceReduction,
    ) -> Result<()> {
        assert_eq!((reduction.dtype, reduction.op), (DataType::F32, ReduceOp::Sum));
        for span in piece.iter().copied() {
            let to = exposed(&segments[span.segment].output) + span.segment_offset;
            let starts = self.starts.clone();
            self.job(move || {
                let mut sum = vec![0.0; span.bytes / 4];
                for start in starts {
                    let there = start + usize::try_from(slot).unwrap() * PIECE + span.piece_offset;
                    for (sum, value) in sum.iter_mut().zip(floats(there, span.bytes / 4)) {
                        *sum += value;
                    }
                }
                put(to, &sum);
            });
        }
        Ok(())
    }

    fn close_windows(&mut self) {
        self.fate.closed.store(true, Ordering::Release);
    }

    fn leak_resources(&mut self) {
        self.fate.left.store(true, Ordering::Release);
    }
}

struct Member {
    all: IpcCommunicator<HostSite>,
    stream: Late,
    between: Arc<AtomicBool>,
    fate: Arc<Fate>,
    done: Vec<OperationToken>,
}

impl Member {
    fn step(&mut self) -> Result<bool> {
        self.all.make_progress(&mut self.done)
    }
}

fn members(broken: &[Option<&'static str>], prompt: bool, timeout: Duration) -> Vec<Member> {
    let size = broken.len();
    let region = SharedRegion::create(IpcMailbox::bytes_for_members(size)).unwrap();
    let handle = *region.region_handle();
    let mut own = Some(region);
    let member = |(place, broken): (usize, &Option<&'static str>)| {
        let region = own.take().unwrap_or_else(|| SharedRegion::open_peer_region(&handle).unwrap());
        let (stream, fate) = (Late::default(), Arc::new(Fate::default()));
        let between = Arc::new(AtomicBool::new(false));
        let window = HostMemory::new(usize::try_from(SLOTS_PER_WINDOW).unwrap() * PIECE);
        let device = HostSite {
            stream: stream.clone(),
            prompt,
            between: Arc::clone(&between),
            window,
            starts: Vec::new(),
            broken: *broken,
            fate: Arc::clone(&fate),
        };
        let mailbox = IpcMailbox::from_region(region, (place, size)).unwrap();
        Member {
            all: IpcCommunicator::begin_forming(device, mailbox, timeout),
            stream,
            between,
            fate,
            done: Vec::new(),
        }
    };
    broken.iter().enumerate().map(member).collect()
}

/// Lets all members take steps until none moves.
fn settle(members: &mut [Member]) {
    while members
        .iter_mut()
        .map(|member| member.step().unwrap())
        .fold(false, |any, moved| any | moved)
    {}
}

fn formed(size: usize, prompt: bool) -> Vec<Member> {
    let mut all = members(&vec![None; size], prompt, Duration::from_secs(20));
    settle(&mut all);
    assert!(
        all.iter()
            .all(|member| !member.all.is_forming() && member.all.can_execute(&allreduce(&[])))
    );
    all
}

/// Tensors on the device.
struct Tensors(Vec<HostMemory>);

impl Tensors {
    fn of(lengths: &[usize], value: impl Fn(usize) -> f32) -> Self {
        let memory = |count: &usize| {
            let memory = HostMemory::new(count * 4);
            let values: Vec<f32> = (0..*count).map(&value).collect();
            put(memory.address().expose_provenance(), &values);
            memory
        };
        Self(lengths.iter().map(memory).collect())
    }

    fn values(&self) -> Vec<Vec<f32>> {
        let each = self.0.iter();
        each.map(|memory| floats(memory.address().expose_provenance(), memory.len() / 4)).collect()
    }
}

fn on_device(memory: &HostMemory) -> Buffer {
    // SAFETY: tests keep the memory for as long as they use the buffer.
    unsafe { Buffer::from_raw(memory.address(), memory.len(), MemoryKind::Device(0)) }
}

fn allreduce(tensors: &[(&HostMemory, &HostMemory)]) -> CollectiveOperation {
    let segment = |(input, output): &(&HostMemory, &HostMemory)| TensorSegment {
        input: on_device(input),
        output: on_device(output),
    };
    CollectiveOperation::Allreduce {
        dtype: DataType::F32,
        op: ReduceOp::Sum,
        prescale: 1.0,
        postscale: 1.0,
        segments: tensors.iter().map(segment).collect(),
    }
}

fn in_place(tensors: &Tensors) -> CollectiveOperation {
    allreduce(&tensors.0.iter().map(|memory| (memory, memory)).collect::<Vec<_>>())
}

fn number(value: usize) -> f32 {
    f32::from(u16::try_from(value).unwrap())
}

#[test]
fn a_member_that_completes_has_published_what_others_wait_for() {
    let mut all = formed(2, false);
    // A GPU completes work between two looks at its events.
    all[0].between.store(true, Ordering::Release);
    let tensors = [Tensors::of(&[4], |_| 1.0), Tensors::of(&[4], |_| 2.0)];
    for (member, tensors) in all.iter_mut().zip(&tensors) {
        member.all.submit_operation(OperationToken(1), in_place(tensors)).unwrap();
    }
    // The other one is first, so that the pieces of this one are filled and reduced at once.
    all[1].step().unwrap();
    all[1].stream.work();
    all[1].step().unwrap();
    for _ in 0..20 {
        // An engine takes no steps of a communicator that has nothing to do.
        for member in all.iter_mut().filter(|member| member.all.pending_count() > 0) {
            member.step().unwrap();
        }
        all[1].stream.work();
    }
    assert!(
        all.iter().all(|member| member.done == [OperationToken(1)]),
        "a member waits for the other"
    );
    assert!(tensors.iter().all(|tensors| tensors.values() == [vec![3.0; 4]]));
}

#[test]
fn tensors_of_any_length_are_reduced_piece_by_piece() {
    for size in [2, 3] {
        let mut all = formed(size, true);
        let lengths = [3, 0, 100, 1, 8];
        let tensors: Vec<Tensors> =
            (0..size).map(|member| Tensors::of(&lengths, |at| number(at + member))).collect();
        for round in 0..3 {
            let inputs: Vec<Tensors> = tensors
                .iter()
                .enumerate()
                .map(|(member, _)| Tensors::of(&lengths, |at| number(at + member + round)))
                .collect();
            for (member, (own, out)) in all.iter_mut().zip(inputs.iter().zip(&tensors)) {
                let pairs: Vec<_> = own.0.iter().zip(&out.0).collect();
                member
                    .all
                    .submit_operation(OperationToken(round as u64), allreduce(&pairs))
                    .unwrap();
            }
            settle(&mut all);
            let sum = |at: usize| (0..size).map(|member| number(at + member + round)).sum::<f32>();
            let expected = Tensors::of(&lengths, sum).values();
            assert!(tensors.iter().all(|out| out.values() == expected));
        }
        assert!(all.iter().all(|member| member.done == [0, 1, 2].map(OperationToken)
            && member.all.pending_count() == 0));
    }
}

#[test]
fn nothing_is_reduced_before_all_windows_are_filled_nor_overwritten_before_all_have_read() {
    let mut all = formed(2, false);
    // Four pieces, twice as many as a window holds.
    let tensors: Vec<Tensors> =
        (0..2).map(|member| Tensors::of(&[32], |at| number(at + member))).collect();
    for (member, own) in all.iter_mut().zip(&tensors) {
        member.all.submit_operation(OperationToken(5), in_place(own)).unwrap();
    }
    settle(&mut all);
    all[0].stream.work();
    settle(&mut all);
    assert_eq!(tensors[0].values()[0][0], 0.0, "the other's part is still on its way");
    let mut launched = Vec::new();
    all[0].all.take_launched_operations(&mut launched);
    assert!(launched.is_empty());
    all[1].stream.work();
    settle(&mut all);
    // The first reads everything it can; the second is late with it.
    for _ in 0..10 {
        all[0].stream.work();
        settle(&mut all);
    }
    assert_eq!(tensors[0].values()[0][15], 31.0, "two pieces are reduced");
    assert_eq!(tensors[0].values()[0][16], 16.0, "and no more, for the second still reads");
    for _ in 0..10 {
        all.iter().for_each(|member| member.stream.work());
        settle(&mut all);
    }
    let expected = Tensors::of(&[32], |at| number(2 * at + 1)).values();
    assert!(tensors.iter().all(|own| own.values() == expected));
    assert!(all.iter().all(|member| member.done == [OperationToken(5)]));
}

#[test]
fn an_operation_is_reported_when_it_is_on_the_stream_and_completes_with_it() {
    let mut all = formed(2, false);
    let tensors: Vec<Tensors> = (0..2).map(|_| Tensors::of(&[4], |_| 1.0)).collect();
    for (member, own) in all.iter_mut().zip(&tensors) {
        member.all.submit_operation(OperationToken(1), in_place(own)).unwrap();
    }
    settle(&mut all);
    all.iter().for_each(|member| member.stream.work());
    settle(&mut all);
    let mut launched = Vec::new();
    all[0].all.take_launched_operations(&mut launched);
    let (token, event) = launched.pop().unwrap();
    assert_eq!(
        (token, event.is_ready().unwrap(), all[0].all.pending_count()),
        (OperationToken(1), false, 1)
    );
    assert!(all[0].done.is_empty());
    all.iter().for_each(|member| member.stream.work());
    settle(&mut all);
    assert!(event.is_ready().unwrap() && all[0].done == [OperationToken(1)]);
}

#[test]
fn tensors_without_elements_are_over_at_once() {
    let mut all = formed(2, true);
    let tensors = Tensors::of(&[0, 0], |_| 0.0);
    all[0].all.submit_operation(OperationToken(1), in_place(&tensors)).unwrap();
    all[0].all.submit_operation(OperationToken(2), in_place(&tensors)).unwrap();
    settle(&mut all);
    assert_eq!(all[0].done, [OperationToken(1), OperationToken(2)]);
}

#[test]
fn all_members_refuse_if_one_cannot_take_part_and_name_it_with_the_reason() {
    for (broken, why) in [("offer", "no memory"), ("open", "another container")] {
        let mut all = members(&[None, Some(broken), None], true, Duration::from_secs(20));
        settle(&mut all);
        for member in &mut all {
            assert!(!member.all.is_forming() && member.all.pending_count() == 0);
            assert!(!member.all.can_execute(&allreduce(&[])));
            assert_eq!(
                member.all.take_user_notice().unwrap(),
                format!("member 1 cannot use CUDA IPC: {why}")
            );
            assert_eq!(member.all.take_user_notice(), None);
        }
        // One has ended before the last has looked.
        let mut all = members(&[None, Some(broken), None], true, Duration::from_secs(20));
        for _ in 0..5 {
            for member in &mut all[1..] {
                member.step().unwrap();
            }
            if broken == "open" {
                all[0].step().unwrap();
            }
        }
        drop(all.remove(1));
        settle(&mut all);
        assert!(all.iter().all(|member| !member.all.is_forming()));
    }
}

#[test]
fn a_wait_for_an_absent_member_has_a_deadline() {
    let mut all = members(&[None, Some("never")], true, Duration::from_millis(20));
    settle(&mut all);
    std::thread::sleep(Duration::from_millis(30));
    let error = all[0].step().unwrap_err();
    assert!(error.to_string().contains("forming it took longer than 20ms"), "{error}");
    assert!(all[0].step().is_err(), "and stays so");
    let error = all[1].step().unwrap_err();
    assert!(error.to_string().contains("member 0 has ended"), "{error}");
}

#[test]
fn members_that_wait_for_a_member_that_aborts_get_an_error_and_access_no_memory() {
    let mut all = formed(2, true);
    let tensors: Vec<Tensors> = (0..2).map(|_| Tensors::of(&[4], |_| 1.0)).collect();
    for (member, own) in all.iter_mut().zip(&tensors) {
        member.all.submit_operation(OperationToken(1), in_place(own)).unwrap();
    }
    settle(&mut all[..1]);
    all[1].all.abandon_operations();
    assert!(all[1].fate.closed.load(Ordering::Acquire));
    let error = all[0].step().unwrap_err();
    assert!(error.to_string().contains("device 0: member 1 has ended"), "{error}");
    assert_eq!(error.fault(), farandole_world::FaultOrigin::Peer);
    assert!(all[0].all.submit_operation(OperationToken(2), in_place(&tensors[0])).is_err());
    assert_eq!(all[0].all.pending_count(), 0);
    let fates: Vec<Arc<Fate>> = all.iter().map(|member| Arc::clone(&member.fate)).collect();
    drop(all);
    assert!(
        fates.iter().all(|fate| !fate.left.load(Ordering::Acquire)),
        "windows go back when all have closed them"
    );
}

#[test]
fn a_window_that_may_still_be_read_is_never_freed() {
    let mut all = formed(2, true);
    let fate = Arc::clone(&all[0].fate);
    drop(all.remove(0));
    assert!(fate.closed.load(Ordering::Acquire) && fate.left.load(Ordering::Acquire));
    // Work that does not end keeps even the opened memory.
    let mut all = formed(2, false);
    let tensors: Vec<Tensors> = (0..2).map(|_| Tensors::of(&[4], |_| 1.0)).collect();
    for (member, own) in all.iter_mut().zip(&tensors) {
        member.all.submit_operation(OperationToken(1), in_place(own)).unwrap();
    }
    settle(&mut all);
    all[0].all.abandon_operations();
    assert!(!all[0].fate.closed.load(Ordering::Acquire));
    let fate = Arc::clone(&all[0].fate);
    all[1].stream.work();
    drop(all);
    assert!(fate.left.load(Ordering::Acquire));
}

#[test]
fn an_orderly_end_waits_for_no_member() {
    let mut all = formed(2, true);
    let tensors: Vec<Tensors> = (0..2).map(|_| Tensors::of(&[4], |_| 1.0)).collect();
    for (member, own) in all.iter_mut().zip(&tensors) {
        member.all.submit_operation(OperationToken(1), in_place(own)).unwrap();
    }
    settle(&mut all);
    let fates: Vec<Arc<Fate>> = all.iter().map(|member| Arc::clone(&member.fate)).collect();
    std::thread::scope(|scope| {
        for member in all {
            scope.spawn(move || drop(member));
        }
    });
    assert!(fates.iter().all(|fate| !fate.left.load(Ordering::Acquire)));
}

#[test]
fn operations_without_a_kernel_are_not_carried() {
    let all = formed(2, true);
    let carried = |dtype, op, prescale| {
        let segments = Vec::new();
        all[0].all.can_execute(&CollectiveOperation::Allreduce {
            dtype,
            op,
            prescale,
            postscale: 1.0,
            segments,
        })
    };
    assert!(
        carried(DataType::F32, ReduceOp::Average, 0.5)
            && carried(DataType::I16, ReduceOp::Average, 1.0)
    );
    assert!(
        carried(DataType::Bool, ReduceOp::Max, 1.0)
            && !carried(DataType::Bool, ReduceOp::Average, 1.0)
    );
    assert!(
        !carried(DataType::Bool, ReduceOp::Sum, 0.5)
            && !carried(DataType::F32, ReduceOp::Adasum, 1.0)
    );
    assert!(!carried(DataType::C64, ReduceOp::Sum, 1.0));
    assert!(carried(DataType::F8E4M3, ReduceOp::Average, 0.5));
    assert!(!carried(DataType::F8E5M2, ReduceOp::Adasum, 1.0));
    assert!(!all[0].all.can_execute(&CollectiveOperation::Barrier));
    let mut member = members(&[None, None], true, Duration::from_secs(1)).remove(0);
    assert!(member.all.submit_operation(OperationToken(1), CollectiveOperation::Barrier).is_err());
}

#[test]
fn a_region_handle_is_decoded_as_it_was_encoded() {
    let handle = RegionHandle { pid: 1, descriptor: 2, bytes: 3, nonce: [u64::MAX, 5] };
    let written = encode_region_handle(&handle);
    assert_eq!(
        (written.len(), decode_region_handle(&[&written[..], &[9]].concat())),
        (REGION_HANDLE_BYTES, Some(handle))
    );
    assert_eq!(decode_region_handle(&written[..REGION_HANDLE_BYTES - 1]), None);
    assert_eq!(region_namespace_id(), region_namespace_id());
}
