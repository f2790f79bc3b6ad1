// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A communicator's behaviour for all behaviours of NCCL, with fake functions that the test
//! controls.

use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_collectives::{
    CollectiveOperation, Communicator as _, DeviceEvent, Error, OperationToken, TensorSegment,
};
use farandole_kernels::{Buffer, DataType, MemoryKind, ReduceOp};
use farandole_world::FaultOrigin;

use super::fake::{self, FakeCommunicatorStream, FakeEvent, fake_nccl, take_calls, with_fake};
use super::{
    NCCL_IN_PROGRESS, NCCL_SUCCESS, NcclCommunicator, NcclLibrary, UniqueId, is_nccl_operation,
};

const PATIENCE: Duration = Duration::from_secs(5);

fn say(statuses: &[i32]) {
    with_fake(|fake| fake.status = statuses.iter().copied().collect());
}

fn ahead(time: Duration) {
    with_fake(|fake| fake.ahead = time);
}

fn ending() -> Option<u32> {
    with_fake(|fake| fake.ending)
}

type Formed = Result<(NcclCommunicator<FakeCommunicatorStream>, FakeCommunicatorStream), Error>;

/// Begins to form one of this library.
pub(super) fn form(library: &NcclLibrary, member: usize, size: usize) -> Formed {
    let stream = FakeCommunicatorStream::default();
    let (id, position) = (fake::thread_unique_id(), (member, size));
    NcclCommunicator::begin_forming_with_clock(
        library.clone(),
        stream.clone(),
        id,
        position,
        PATIENCE,
        fake::fake_clock,
    )
    .map(|communicator| (communicator, stream))
}

/// Looks after it until its calls are made, or one has failed.
pub(super) fn made(
    communicator: &mut NcclCommunicator<FakeCommunicatorStream>,
    done: &mut Vec<OperationToken>,
) -> Result<(), Error> {
    let began = Instant::now();
    loop {
        communicator.make_progress(done)?;
        if communicator.is_caller_idle() {
            return Ok(());
        }
        assert!(began.elapsed() < Duration::from_secs(20), "the calls do not come back");
        std::thread::yield_now();
    }
}

/// Submits it, and has it called.
pub(super) fn call(
    communicator: &mut NcclCommunicator<FakeCommunicatorStream>,
    token: u64,
    operation: CollectiveOperation,
) {
    communicator.submit_operation(OperationToken(token), operation).unwrap();
    made(communicator, &mut Vec::new()).unwrap();
}

/// Waits until a thread is in a call that waits for members.
fn entered(call: &str) {
    let (began, mut seen) = (Instant::now(), Vec::new());
    while !seen.iter().any(|other: &String| other.starts_with(call)) {
        assert!(began.elapsed() < Duration::from_secs(20), "nobody calls {call}");
        std::thread::yield_now();
        seen.append(&mut take_calls());
    }
}

/// One that is ready, of two members, this one the second.
fn ready() -> (NcclCommunicator<FakeCommunicatorStream>, FakeCommunicatorStream) {
    say(&[NCCL_SUCCESS]);
    let (mut communicator, stream) = form(&fake_nccl().unwrap(), 1, 2).unwrap();
    made(&mut communicator, &mut Vec::new()).unwrap();
    take_calls();
    (communicator, stream)
}

fn buffer(address: usize, bytes: usize) -> Buffer {
    let address = std::ptr::without_provenance_mut(address);
    // SAFETY: never looked at.
    unsafe { Buffer::from_raw(address, bytes, MemoryKind::Device(3)) }
}

pub(super) fn segment(input: usize, read: usize, output: usize, written: usize) -> TensorSegment {
    TensorSegment { input: buffer(input, read), output: buffer(output, written) }
}

fn sum(dtype: DataType, op: ReduceOp, factors: (f64, f64)) -> CollectiveOperation {
    let segments = vec![segment(0x100, 40, 0x100, 40)];
    CollectiveOperation::Allreduce {
        dtype,
        op,
        prescale: factors.0,
        postscale: factors.1,
        segments,
    }
}

fn plain() -> CollectiveOperation {
    sum(DataType::F32, ReduceOp::Sum, (1.0, 1.0))
}

#[test]
fn it_forms_without_blocking_and_accepts_operations_meanwhile() {
    with_fake(|fake| fake.alone = true);
    let (mut communicator, stream) = form(&fake_nccl().unwrap(), 1, 2).unwrap();
    entered("init 1/2 id 9 blocking 1");
    communicator.submit_operation(OperationToken(1), plain()).unwrap();
    let mut done = Vec::new();
    assert!(!communicator.make_progress(&mut done).unwrap());
    assert!(!communicator.make_progress(&mut done).unwrap());
    assert_eq!(take_calls(), Vec::<String>::new());
    with_fake(|fake| fake.alone = false);
    made(&mut communicator, &mut done).unwrap();
    assert_eq!(take_calls(), ["{", "allreduce 0x100>0x100 10 of 7 by 0", "}"]);
    assert_eq!((done.len(), communicator.pending_count()), (0, 1));
    stream.finish_events(1);
    assert!(communicator.make_progress(&mut done).unwrap());
    assert_eq!((done, communicator.pending_count()), (vec![OperationToken(1)], 0));
}

#[test]
fn all_calls_come_from_one_thread_for_which_no_other_thread_waits() {
    let (mut communicator, stream) = ready();
    for token in 1..=3 {
        call(&mut communicator, token, plain());
    }
    let callers = with_fake(|fake| std::mem::take(&mut fake.callers));
    assert_eq!(callers.len(), 4, "to form it, and three groups");
    assert!(
        callers.iter().all(|caller| *caller == callers[0]),
        "before 2.27 groups are a thread's own"
    );
    assert_ne!(callers[0], std::thread::current().id());
    // Another call waits for a member, to connect to it.
    with_fake(|fake| fake.alone = true);
    take_calls();
    communicator.submit_operation(OperationToken(4), plain()).unwrap();
    let mut done = Vec::new();
    communicator.make_progress(&mut done).unwrap();
    entered("}");
    stream.finish_events(3);
    assert!(communicator.make_progress(&mut done).unwrap());
    assert_eq!(
        (done, communicator.pending_count()),
        (vec![OperationToken(1), OperationToken(2), OperationToken(3)], 1)
    );
    with_fake(|fake| fake.alone = false);
    made(&mut communicator, &mut Vec::new()).unwrap();
}

#[test]
fn launched_work_is_reported_with_its_event_and_completes_later() {
    with_fake(|fake| fake.alone = true);
    let (mut communicator, stream) = form(&fake_nccl().unwrap(), 0, 1).unwrap();
    let before: Arc<dyn DeviceEvent> = Arc::new(FakeEvent(Arc::default()));
    communicator.submit_after_events(OperationToken(4), plain(), vec![before]).unwrap();
    let (mut done, mut launched) = (Vec::new(), Vec::new());
    communicator.make_progress(&mut done).unwrap();
    communicator.take_launched_operations(&mut launched);
    assert!(launched.is_empty(), "it is not formed");
    entered("init");
    with_fake(|fake| fake.alone = false);
    made(&mut communicator, &mut done).unwrap();
    communicator.take_launched_operations(&mut launched);
    assert_eq!(
        take_calls()[..2],
        ["stream 0x33 waits", "{"],
        "the stream waits for what comes before"
    );
    let [(OperationToken(4), event)] = &launched[..] else { panic!("one was launched") };
    assert!(done.is_empty() && !event.is_ready().unwrap());
    assert_eq!(communicator.pending_count(), 1);
    stream.finish_events(1);
    communicator.wait_for_launched_operations(PATIENCE);
    assert!(event.is_ready().unwrap() && communicator.pending_count() == 0);
    communicator.take_launched_operations(&mut launched);
    assert_eq!(launched.len(), 1, "each is told once");
}

#[test]
fn an_orderly_end_waits_for_launched_work_with_a_deadline() {
    let (mut communicator, _stream) = ready();
    call(&mut communicator, 1, plain());
    communicator.wait_for_launched_operations(Duration::from_millis(1));
    assert_eq!(communicator.pending_count(), 1);
    communicator.abandon_operations();
    assert!(take_calls().contains(&"abort".to_owned()));
}

#[test]
fn a_refused_beginning_is_reported_in_the_librarys_words() {
    with_fake(|fake| fake.init = 2);
    let (mut communicator, _) = form(&fake_nccl().unwrap(), 0, 2).unwrap();
    let error = made(&mut communicator, &mut Vec::new()).unwrap_err();
    assert_eq!(error.fault(), FaultOrigin::Peer);
    assert!(
        error
            .to_string()
            .contains("ncclCommInitRankConfig failed: unhandled system error (status 2)")
    );
    assert_eq!(take_calls(), ["init 0/2 id 9 blocking 1", "abort"]);
}

#[test]
fn missing_members_are_waited_for_until_the_deadline() {
    with_fake(|fake| fake.alone = true);
    let (mut communicator, _) = form(&fake_nccl().unwrap(), 0, 2).unwrap();
    communicator.submit_operation(OperationToken(1), plain()).unwrap();
    entered("init");
    ahead(PATIENCE);
    assert!(!communicator.make_progress(&mut Vec::new()).unwrap());
    ahead(PATIENCE + Duration::from_millis(1));
    let error = communicator.make_progress(&mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("device 3: forming it took longer than 5s"), "{error}");
    assert_eq!((take_calls(), communicator.pending_count()), (vec!["abort".to_owned()], 0));
    drop(communicator);
    assert_eq!(take_calls(), Vec::<String>::new(), "what was aborted is not ended again");
}

#[test]
fn a_call_that_waits_for_a_dead_peer_is_aborted_at_the_deadline() {
    let (mut communicator, _stream) = ready();
    with_fake(|fake| fake.alone = true);
    communicator.submit_operation(OperationToken(1), plain()).unwrap();
    communicator.make_progress(&mut Vec::new()).unwrap();
    entered("}");
    ahead(PATIENCE + Duration::from_millis(1));
    let error = communicator.make_progress(&mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("starting an operation took longer than 5s"), "{error}");
    assert_eq!((take_calls(), communicator.pending_count()), (vec!["abort".to_owned()], 0));
}

#[test]
fn a_running_call_returns_before_its_communicator_is_aborted() {
    let (mut communicator, _stream) = ready();
    with_fake(|fake| fake.alone = true);
    communicator.submit_operation(OperationToken(1), plain()).unwrap();
    communicator.submit_operation(OperationToken(2), plain()).unwrap();
    communicator.make_progress(&mut Vec::new()).unwrap();
    entered("}");
    let id = fake::thread_unique_id();
    let comes = std::thread::spawn(move || {
        fake::join_fake_nccl(&id);
        std::thread::sleep(Duration::from_millis(20));
        with_fake(|fake| fake.alone = false);
        take_calls()
    });
    communicator.abandon_operations();
    assert_eq!(comes.join().unwrap(), Vec::<String>::new(), "it is not aborted meanwhile");
    assert_eq!(take_calls(), ["abort"], "and nothing more is called");
}

#[test]
fn a_dead_peer_ends_the_kernels_that_wait_for_it() {
    let (mut communicator, _stream) = ready();
    call(&mut communicator, 1, plain());
    take_calls();
    say(&[6]);
    let error = communicator.make_progress(&mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("remote process exited"), "{error}");
    assert_eq!((take_calls(), error.fault()), (vec!["abort".to_owned()], FaultOrigin::Peer));
    assert_eq!(
        communicator.make_progress(&mut Vec::new()).unwrap_err().to_string(),
        error.to_string()
    );
    assert_eq!(
        communicator.submit_operation(OperationToken(2), plain()).unwrap_err().to_string(),
        error.to_string()
    );
}

#[test]
fn an_operation_that_hangs_is_aborted_at_the_deadline() {
    let (mut communicator, stream) = ready();
    communicator.submit_operation(OperationToken(1), plain()).unwrap();
    communicator.submit_operation(OperationToken(2), plain()).unwrap();
    let mut done = Vec::new();
    made(&mut communicator, &mut done).unwrap();
    // Whoever makes progress is not late.
    ahead(PATIENCE);
    stream.finish_events(1);
    communicator.make_progress(&mut done).unwrap();
    assert_eq!(done, [OperationToken(1)]);
    // Whoever is given more to do all the time is.
    ahead(PATIENCE * 2);
    call(&mut communicator, 3, plain());
    take_calls();
    ahead(PATIENCE * 2 + Duration::from_millis(1));
    let error = communicator.make_progress(&mut done).unwrap_err();
    assert!(error.to_string().contains("an operation took longer than 5s"), "{error}");
    assert_eq!(take_calls(), ["abort"]);
}

#[test]
fn calls_that_return_late_are_waited_for_before_the_next() {
    let (mut communicator, stream) = ready();
    with_fake(|fake| fake.group = NCCL_IN_PROGRESS);
    say(&[NCCL_IN_PROGRESS, NCCL_IN_PROGRESS, NCCL_SUCCESS]);
    communicator.submit_operation(OperationToken(1), plain()).unwrap();
    communicator.submit_operation(OperationToken(2), plain()).unwrap();
    let mut done = Vec::new();
    made(&mut communicator, &mut done).unwrap();
    assert_eq!((take_calls().len(), communicator.pending_count()), (6, 2));
    stream.finish_events(1);
    communicator.make_progress(&mut done).unwrap();
    assert_eq!(done, [OperationToken(1)]);
    say(&[NCCL_IN_PROGRESS]);
    communicator.submit_operation(OperationToken(3), plain()).unwrap();
    communicator.make_progress(&mut done).unwrap();
    entered("}");
    ahead(PATIENCE + Duration::from_millis(1));
    let error = communicator.make_progress(&mut done).unwrap_err();
    assert!(error.to_string().contains("starting an operation took longer than 5s"), "{error}");
    assert_eq!(take_calls(), ["abort"]);
}

#[test]
fn a_device_gets_only_as_much_work_as_it_accepts_without_waiting() {
    let (mut communicator, stream) = ready();
    for token in 0..300 {
        communicator.submit_operation(OperationToken(token), plain()).unwrap();
    }
    let (mut done, mut launched, began) = (Vec::new(), Vec::new(), Instant::now());
    while launched.len() < 256 {
        communicator.make_progress(&mut done).unwrap();
        communicator.take_launched_operations(&mut launched);
        assert!(began.elapsed() < Duration::from_secs(20));
    }
    communicator.make_progress(&mut done).unwrap();
    assert_eq!(take_calls().len(), 256 * 3, "the others wait");
    stream.finish_events(256);
    made(&mut communicator, &mut done).unwrap();
    assert_eq!((done.len(), take_calls().len(), communicator.pending_count()), (256, 44 * 3, 44));
}

#[test]
fn an_abandoned_operation_is_aborted_at_once() {
    let (mut communicator, _stream) = ready();
    call(&mut communicator, 1, plain());
    take_calls();
    communicator.abandon_operations();
    assert_eq!((take_calls(), communicator.pending_count()), (vec!["abort".to_owned()], 0));
    assert!(communicator.make_progress(&mut Vec::new()).is_err());
}

#[test]
fn tensors_are_free_after_kernels_have_ended_and_not_after_an_abort() {
    with_fake(|fake| fake.late = 3);
    let (mut communicator, _stream) = ready();
    communicator.abandon_operations();
    assert_eq!(ending(), Some(3), "nothing was launched, so nobody looks");
    let (mut communicator, _stream) = ready();
    call(&mut communicator, 1, plain());
    take_calls();
    communicator.abandon_operations();
    assert_eq!((take_calls(), ending()), (vec!["abort".to_owned()], Some(0)));
}

#[test]
fn kernels_that_do_not_end_are_not_waited_for_for_ever() {
    with_fake(|fake| fake.late = u32::MAX);
    let (mut communicator, _stream) = ready();
    call(&mut communicator, 1, plain());
    let began = Instant::now();
    communicator.abandon_operations();
    assert!(began.elapsed() < Duration::from_secs(5) && communicator.pending_count() == 0);
}

#[test]
fn tensors_of_one_operation_are_one_group() {
    let (mut communicator, _stream) = ready();
    let segments = vec![segment(0x100, 8, 0x200, 8), segment(0x300, 16, 0x400, 16)];
    let (dtype, op) = (DataType::C64, ReduceOp::Average);
    let all = CollectiveOperation::Allreduce { dtype, op, prescale: 1.0, postscale: 1.0, segments };
    call(&mut communicator, 1, all);
    let expected =
        ["{", "allreduce 0x100>0x200 2 of 7 by 4", "allreduce 0x300>0x400 4 of 7 by 4", "}"];
    assert_eq!(take_calls(), expected);
}

#[test]
fn factors_become_part_of_a_sum() {
    let (mut communicator, _stream) = ready();
    call(&mut communicator, 1, sum(DataType::F64, ReduceOp::Average, (0.5, 3.0)));
    let expected =
        ["factor 0.75 of 8", "{", "allreduce 0x100>0x100 5 of 8 by 42", "}", "no factor 42"];
    assert_eq!(take_calls(), expected);
}

#[test]
fn uneven_gathers_scatters_and_exchanges_go_by_parts() {
    let (mut communicator, _stream) = ready();
    let gather = |bytes: &[usize]| CollectiveOperation::Allgather {
        segments: vec![segment(0x100, bytes[1], 0x200, bytes.iter().sum())],
        bytes: vec![bytes.to_vec()],
    };
    let scatter = |bytes: &[usize]| CollectiveOperation::Reducescatter {
        dtype: DataType::F32,
        op: ReduceOp::Sum,
        prescale: 1.0,
        postscale: 1.0,
        segments: vec![segment(0x100, bytes.iter().sum(), 0x200, bytes[1])],
        bytes: vec![bytes.to_vec()],
    };
    let exchange = CollectiveOperation::Alltoall {
        segment: segment(0x100, 12, 0x200, 8),
        sends: vec![4, 8],
        receives: vec![0, 8],
    };
    let broadcast =
        CollectiveOperation::Broadcast { root: 1, segments: vec![segment(0x100, 4, 0x200, 4)] };
    let cases: [(CollectiveOperation, &[&str]); 6] = [
        (gather(&[8, 8]), &["allgather 0x100>0x200 8"]),
        (gather(&[8, 4]), &["broadcast 0x100>0x200 8 from 0", "broadcast 0x100>0x208 4 from 1"]),
        (scatter(&[8, 8]), &["reducescatter 0x100>0x200 2 of 7 by 0"]),
        (
            scatter(&[8, 4]),
            &["reduce 0x100>- 2 of 7 by 0 to 0", "reduce 0x108>0x200 1 of 7 by 0 to 1"],
        ),
        (exchange, &["send 0x100 4 to 0", "send 0x104 8 to 1", "receive 0x200 8 from 1"]),
        (broadcast, &["broadcast 0x100>0x200 4 from 1"]),
    ];
    for (number, (operation, expected)) in (1..).zip(cases) {
        call(&mut communicator, number, operation);
        let calls = take_calls();
        assert_eq!(calls[1..calls.len() - 1], *expected);
    }
}

#[test]
fn gathers_of_nothing_call_for_nothing() {
    let (mut communicator, _stream) = ready();
    let segments = vec![segment(0x100, 0, 0x200, 0)];
    call(
        &mut communicator,
        1,
        CollectiveOperation::Allgather { segments, bytes: vec![vec![0, 0]] },
    );
    assert_eq!(take_calls(), ["{", "}"]);
}

#[test]
fn gathers_and_exchanges_are_for_members_with_room_for_their_results() {
    let gather = CollectiveOperation::Allgather { segments: Vec::new(), bytes: Vec::new() };
    let nothing = segment(0x100, 0, 0x200, 0);
    let exchange =
        CollectiveOperation::Alltoall { segment: nothing, sends: Vec::new(), receives: Vec::new() };
    let (communicator, _stream) = ready();
    assert!(!communicator.can_execute(&gather) && !communicator.can_execute(&exchange));
    let mut communicator = communicator.with_result_memory_enabled();
    assert!(communicator.can_execute(&gather) && communicator.can_execute(&exchange));
    assert!(
        communicator.can_execute(&plain())
            && !communicator.can_execute(&CollectiveOperation::Barrier)
    );
    assert_eq!(communicator.allocate_result(24).unwrap().as_buffer().len(), 24);
    communicator.abandon_operations();
    assert!(communicator.allocate_result(24).is_err());
}

#[test]
fn operations_that_nccl_does_differently_are_refused() {
    let all = |dtype, op, factor| is_nccl_operation(&sum(dtype, op, (factor, 1.0)));
    assert!(all(DataType::Bf16, ReduceOp::Max, 1.0) && all(DataType::I64, ReduceOp::Product, 1.0));
    assert!(all(DataType::F32, ReduceOp::Sum, 0.5) && all(DataType::C128, ReduceOp::Average, 1.0));
    for (dtype, op, factor) in [
        (DataType::I32, ReduceOp::Average, 1.0),
        (DataType::I32, ReduceOp::Sum, 0.5),
        (DataType::Bool, ReduceOp::Sum, 1.0),
        (DataType::I16, ReduceOp::Sum, 1.0),
        (DataType::F16, ReduceOp::Sum, 0.5),
        (DataType::F32, ReduceOp::Max, 0.5),
        (DataType::F32, ReduceOp::Adasum, 1.0),
        (DataType::C64, ReduceOp::Product, 1.0),
    ] {
        assert!(!all(dtype, op, factor), "{op:?} of {dtype} by {factor}");
    }
    let (mut communicator, _stream) = ready();
    assert!(
        communicator.submit_operation(OperationToken(1), CollectiveOperation::Barrier).is_err()
    );
}

#[test]
fn floats_of_eight_bits_are_reduced_where_all_members_can() {
    let of = |dtype, op| sum(dtype, op, (1.0, 1.0));
    let ops = [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];
    for dtype in [DataType::F8E4M3, DataType::F8E5M2] {
        let (mut communicator, _stream) = ready();
        assert!(!ops.into_iter().any(|op| communicator.can_execute(&of(dtype, op))));
        assert!(
            communicator.submit_operation(OperationToken(1), of(dtype, ReduceOp::Sum)).is_err()
        );
        let communicator = communicator.with_float8_enabled();
        assert!(ops.into_iter().all(|op| communicator.can_execute(&of(dtype, op))));
        assert!(
            !communicator.can_execute(&sum(dtype, ReduceOp::Sum, (0.5, 1.0))),
            "its factor would be rounded"
        );
        assert!(!communicator.can_execute(&of(dtype, ReduceOp::Adasum)));
    }
    let (communicator, _stream) = ready();
    let mut communicator = communicator.with_float8_enabled();
    call(&mut communicator, 1, of(DataType::F8E4M3, ReduceOp::Average));
    call(&mut communicator, 2, of(DataType::F8E5M2, ReduceOp::Max));
    let averaged = ["{", "allreduce 0x100>0x100 40 of 10 by 4", "}"];
    assert_eq!(
        take_calls(),
        [averaged, ["{", "allreduce 0x100>0x100 40 of 11 by 2", "}"]].concat()
    );
}

#[test]
fn averages_of_eight_bits_are_for_as_many_members_as_have_an_exact_inverse() {
    let averages = |dtype, size| {
        let (communicator, _stream) = form(&fake_nccl().unwrap(), 1, size).unwrap();
        communicator.with_float8_enabled().can_execute(&sum(dtype, ReduceOp::Average, (1.0, 1.0)))
    };
    assert!(averages(DataType::F8E4M3, 64) && averages(DataType::F8E5M2, 1 << 14));
    assert!(!averages(DataType::F8E4M3, 128) && !averages(DataType::F8E5M2, 1 << 15));
    assert!(!averages(DataType::F8E4M3, 3) && !averages(DataType::F8E5M2, 12));
}

#[test]
fn a_version_that_lacks_what_is_needed_is_refused() {
    with_fake(|fake| fake.version = 21_705);
    let error = fake_nccl().map(drop).unwrap_err();
    assert_eq!(error.to_string(), "libfake.so has version 2.17.5, at least 2.18 is needed");
    with_fake(|fake| fake.version = 21_800);
    assert_eq!(fake_nccl().unwrap().version_text(), "2.18.0");
    assert_eq!(size_of::<UniqueId>(), 128);
}
