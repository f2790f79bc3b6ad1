// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Copies, events and streams over a driver whose device is host memory.

mod fake_driver;

use farandole_collectives::{Device as _, Error as CollectiveError, ResultMemory};
use farandole_kernels::{Buffer, DeviceStream as FrameworkStream, HostMemory, MemoryKind};
use farandole_testkit::{contents, filled};

pub(crate) use self::fake_driver::{break_one, driver, log};
use self::fake_driver::{carry_out, fake, table};
use super::*;
use crate::driver::{DriverTable, MemoryPoolProperties};
use crate::nccl::CommunicatorStream as _;

/// Returns a buffer that claims to be on a device: its memory plays the device's.
fn on_device(memory: &HostMemory, ordinal: u32) -> Buffer {
    let address = memory.address();
    address.expose_provenance();
    // SAFETY: tests keep the memory for as long as they use the buffer.
    unsafe { Buffer::from_raw(address, memory.len(), MemoryKind::Device(ordinal)) }
}

#[test]
fn nothing_is_made_before_a_gpu_is_used_and_everything_ends_with_it() {
    let gpu = GpuDevice::new(driver(), 1);
    assert_eq!(log(), ["init"]);
    let staging = gpu.allocate_staging(10).unwrap();
    assert!(staging.len() >= 10 && staging.is_shareable());
    assert_eq!(log(), ["retain", "stream_create", "stream_create", "lock"]);
    drop((gpu, staging));
    let (wait, destroy) = ("stream_synchronize", "stream_destroy");
    assert_eq!(log(), [wait, wait, destroy, destroy, "unlock", "release"]);
    assert_eq!(fake(|fake| (fake.depth, fake.mode)), (0, 0), "threads are left as they were");
}

#[test]
fn a_copy_is_done_when_its_event_says_so_and_not_before() {
    let gpu = GpuDevice::new(driver(), 0);
    let source = filled(&[1, 2, 3, 4]);
    let staging = gpu.allocate_staging(4).unwrap().as_buffer().slice(0, 4);
    let target = filled(&[0; 4]);
    fake(|fake| fake.polls = 2);
    let down = gpu.copy_async(&on_device(&source, 0), &staging).unwrap();
    let up = gpu.copy_async(&staging, &on_device(&target, 0)).unwrap();
    assert!(!down.is_ready().unwrap() && !up.is_ready().unwrap());
    assert_eq!(contents(&target), [0; 4]);
    assert!(up.is_ready().unwrap() && down.is_ready().unwrap());
    assert_eq!(contents(&target), [1, 2, 3, 4]);
}

#[test]
fn a_copy_that_is_given_up_is_over_before_its_tensors_are_free() {
    let gpu = GpuDevice::new(driver(), 0);
    let (source, target) = (filled(&[7; 8]), filled(&[0; 8]));
    fake(|fake| fake.polls = usize::MAX);
    drop(gpu.copy_async(&source.as_buffer(), &on_device(&target, 0)).unwrap());
    assert!(log().contains(&"event_synchronize".to_owned()));
    assert_eq!(contents(&target), [7; 8], "nothing writes to it from now on");
}

#[test]
fn the_frameworks_own_work_is_never_waited_for_when_it_is_given_up() {
    let gpu = GpuDevice::new(driver(), 0);
    // SAFETY: the fake knows no streams.
    let ready = unsafe { gpu.record_event_after(9) }.unwrap();
    fake(|fake| fake.polls = 1);
    assert!(!ready.is_ready().unwrap());
    assert!(log().contains(&"event 1 on stream 9".to_owned()));
    drop(ready);
    assert_eq!(log(), Vec::<String>::new());
}

#[test]
fn nothing_is_asked_of_a_stream_that_a_graph_is_captured_on() {
    let gpu = GpuDevice::new(driver(), 1);
    fake(|fake| fake.captured = Some(9));
    // SAFETY: the fake knows no streams.
    let error = unsafe { gpu.record_event_after(9) }.map(drop).unwrap_err();
    assert_eq!(error.fault(), farandole_world::FaultOrigin::Usage);
    assert!(
        error.to_string().starts_with("a CUDA graph is being captured on device 1: "),
        "{error}"
    );
    assert!(!log().iter().any(|call| call.starts_with("event")));
    // SAFETY: as above.
    assert!(unsafe { gpu.record_event_after(8) }.is_ok(), "another stream is no part of it");
}

#[test]
fn events_are_used_again() {
    let gpu = GpuDevice::new(driver(), 0);
    let (source, target) = (filled(&[7; 8]), filled(&[0; 8]));
    for _ in 0..5 {
        assert!(
            gpu.copy_async(&source.as_buffer(), &on_device(&target, 0))
                .unwrap()
                .is_ready()
                .unwrap()
        );
    }
    assert_eq!(log().iter().filter(|call| *call == "event_create").count(), 1);
}

#[test]
fn a_communicators_stream_and_the_frameworks_wait_for_each_other_not_the_host() {
    let gpu = GpuDevice::new(driver(), 0);
    let stream = gpu.create_stream().unwrap();
    log();
    // SAFETY: the fake knows no streams.
    let (own, theirs) = unsafe {
        (FrameworkStream::from_raw(stream.raw_stream().addr()), FrameworkStream::from_raw(9))
    };
    // SAFETY: as above.
    unsafe { gpu.record_event_after(9) }.unwrap().make_stream_wait(own).unwrap();
    stream.record_event().unwrap().make_stream_wait(theirs).unwrap();
    let expected = [
        "event_create",
        "event 1 on stream 9",
        "stream 3 waits for event 1",
        "event 1 on stream 3",
        "stream 9 waits for event 1",
    ];
    assert_eq!(log(), expected);
}

#[test]
fn a_stream_is_told_once_to_wait_for_what_many_tensors_share() {
    let gpu = GpuDevice::new(driver(), 0);
    let stream = gpu.create_stream().unwrap();
    let event = stream.record_event().unwrap();
    log();
    for stream in [9, 9, 8, 8] {
        // SAFETY: the fake knows no streams.
        event.make_stream_wait(unsafe { FrameworkStream::from_raw(stream) }).unwrap();
    }
    assert_eq!(log(), ["stream 9 waits for event 1", "stream 8 waits for event 1"]);
}

#[test]
fn a_copy_that_a_stream_waits_for_keeps_its_memory_and_blocks_no_thread() {
    let gpu = GpuDevice::new(driver(), 0);
    let staging = gpu.allocate_staging(8).unwrap();
    let target = filled(&[0; 8]);
    fake(|fake| fake.polls = usize::MAX);
    let pairs = [
        (staging.as_buffer().slice(0, 3), on_device(&target, 0).slice(0, 3)),
        (staging.as_buffer().slice(3, 5), on_device(&target, 0).slice(3, 5)),
    ];
    let event = gpu.copy_all_async(&pairs).unwrap();
    // SAFETY: the fake knows no streams.
    event.make_stream_wait(unsafe { FrameworkStream::from_raw(9) }).unwrap();
    let address = staging.address();
    drop((pairs, event, staging));
    assert!(!log().contains(&"event_synchronize".to_owned()), "the host goes on");
    assert_ne!(gpu.allocate_staging(8).unwrap().address(), address, "it is still read");
    fake(|fake| fake.polls = 0);
    let other = gpu.allocate_staging(8).unwrap();
    drop(gpu.copy_async(&other.as_buffer().slice(0, 8), &on_device(&target, 0)).unwrap());
    drop(other);
    assert!(
        (0..2).any(|_| gpu.allocate_staging(8).unwrap().address() == address),
        "and free again later"
    );
}

#[test]
fn failures_name_the_device_the_function_and_the_drivers_words() {
    let gpu = GpuDevice::new(driver(), 1);
    let (source, target) = (filled(&[7; 8]), filled(&[0; 8]));
    fake(|fake| fake.broken = Some("to_device"));
    let error = gpu.copy_async(&source.as_buffer(), &on_device(&target, 1)).map(drop).unwrap_err();
    let words = "cuMemcpyHtoDAsync failed on device 1: CUDA_ERROR_OUT_OF_MEMORY, out of memory";
    assert_eq!(error.to_string(), format!("device 1 failed: {words}"));
    fake(|fake| fake.broken = Some("event_query"));
    let event = gpu.copy_async(&source.as_buffer(), &on_device(&target, 1)).unwrap();
    assert!(matches!(event.is_ready(), Err(CollectiveError::Device { ordinal: 1, .. })));
    assert!(
        gpu.copy_async(&source.as_buffer(), &on_device(&target, 0)).is_err(),
        "another device's memory"
    );
    assert!(
        gpu.copy_async(&source.as_buffer().slice(0, 4), &on_device(&target, 1)).is_err(),
        "other lengths"
    );
    assert!(GpuDevice::new(driver(), 5).allocate_staging(1).is_err(), "no such device");
}

#[test]
fn memory_that_cannot_be_locked_is_used_all_the_same() {
    fake(|fake| fake.broken = Some("lock"));
    let gpu = GpuDevice::new(driver(), 0);
    assert!(gpu.allocate_staging(100).unwrap().len() >= 100);
    drop(gpu);
    assert!(!log().contains(&"unlock".to_owned()));
}

#[test]
fn facts_of_a_device_are_asked_without_a_context() {
    let driver = driver();
    let facts = driver.device_properties(1).unwrap();
    assert_eq!(
        (facts.name.as_str(), facts.arch, facts.uuid, facts.bytes >> 30),
        ("Fake", 90, [1; 16], 80)
    );
    assert_eq!(driver.device_count().unwrap(), 2);
    assert_eq!(log(), ["init"]);
}

fn room_of(bytes: &[u8]) -> (GpuDevice, Arc<dyn ResultMemory>) {
    let gpu = GpuDevice::new(driver(), 0);
    let room = gpu.create_stream().unwrap().allocate_result(bytes.len()).unwrap();
    // SAFETY: the fake's memory is the host's, of so many bytes, and nobody else's.
    unsafe { std::ptr::copy(bytes.as_ptr(), room.as_buffer().address(), bytes.len()) };
    log();
    (gpu, room)
}

fn framework() -> FrameworkStream {
    // SAFETY: the fake knows any stream.
    unsafe { FrameworkStream::from_raw(9) }
}

#[test]
fn a_result_of_unknown_size_is_fetched_behind_its_event_and_its_memory_given_back_behind_that() {
    let (gpu, room) = room_of(&[1, 2, 3]);
    let target = filled(&[0; 3]);
    // SAFETY: the fake knows any stream.
    let reached = unsafe { gpu.record_event_after(8) }.unwrap();
    log();
    room.copy_out_then_release(&on_device(&target, 0), Some(&reached), framework()).unwrap();
    let steps = log();
    assert!(steps[0].starts_with("stream 9 waits for event"), "{steps:?}");
    assert_eq!(steps[1..], ["move 3 bytes on stream 9", "within", "give back on stream 9", "free"]);
    fake(|fake| carry_out(fake, usize::MAX));
    assert_eq!(contents(&target), [1, 2, 3]);
    assert!(
        room.copy_out_then_release(&on_device(&target, 0), None, framework()).is_err(),
        "only once"
    );
    drop(room);
    assert_eq!(fake(|fake| fake.given), 1);
}

#[test]
fn an_unfetched_result_is_freed_after_the_work_that_writes_it() {
    let (_gpu, room) = room_of(&[1, 2, 3]);
    // Two streams are the GPU's own. The `GpuStream` is dropped, but its CUDA stream still exists.
    drop(room);
    assert_eq!(log(), ["give back on stream 3", "free", "stream_destroy"]);
}

#[test]
fn a_result_is_fetched_whole_or_not_at_all() {
    let (_gpu, room) = room_of(&[1, 2, 3]);
    let target = filled(&[0; 4]);
    for to in
        [on_device(&target, 0), on_device(&target, 1).slice(0, 3), target.as_buffer().slice(0, 3)]
    {
        let error = room.copy_out_then_release(&to, None, framework()).unwrap_err();
        assert!(error.to_string().contains("3 bytes of device 0 are fetched to"), "{error}");
    }
    assert_eq!(log(), Vec::<String>::new());
    fake(|fake| fake.broken = Some("within"));
    let error = room
        .copy_out_then_release(&on_device(&target, 0).slice(0, 3), None, framework())
        .unwrap_err();
    assert!(error.to_string().contains("cuMemcpyDtoDAsync failed on device 0"), "{error}");
    drop(room);
    assert_eq!(fake(|fake| fake.given), 1);
}

#[test]
fn a_full_gpu_is_named_with_the_function_that_failed() {
    let gpu = GpuDevice::new(driver(), 0);
    fake(|fake| fake.broken = Some("allocate"));
    let error = gpu.create_stream().unwrap().allocate_result(3).map(drop).unwrap_err();
    assert!(error.to_string().contains("cuMemAllocAsync failed on device 0"), "{error}");
    assert!(error.to_string().contains("out of memory"), "{error}");
}

#[test]
fn memory_for_results_comes_from_a_pool_that_keeps_some_when_streams_are_waited_for() {
    let gpu = GpuDevice::new(driver(), 1);
    let stream = gpu.create_stream().unwrap();
    log();
    drop((stream.allocate_result(3).unwrap(), stream.allocate_result(4).unwrap()));
    let steps = log();
    assert!(
        steps[0].starts_with(
            "MemoryPoolProperties { kind: 1, handles: 0, location_kind: 1, device: 1,"
        ),
        "{steps:?}"
    );
    let expected =
        ["pool_create", "pool_set", "from the pool", "take 3 bytes on stream 3", "allocate"];
    assert_eq!(steps[1..6], expected);
    assert_eq!(
        steps[6..9],
        ["from the pool", "take 4 bytes on stream 3", "allocate"],
        "there is one pool"
    );
    assert_eq!((fake(|fake| fake.kept), size_of::<MemoryPoolProperties>()), (256 << 20, 88));
    drop((stream, gpu));
    assert_eq!(log()[5..], ["pool_destroy", "release"]);
}

#[test]
fn without_a_pool_of_our_own_memory_comes_from_the_default_one() {
    fake(|fake| fake.broken = Some("pool_create"));
    let without = CudaDriver::from_table(DriverTable { pool_create: None, ..table() }).unwrap();
    for driver in [driver(), without] {
        let gpu = GpuDevice::new(driver, 0);
        let room = gpu.create_stream().unwrap().allocate_result(3).unwrap();
        let steps = log();
        assert!(
            steps.contains(&"allocate".to_owned()) && !steps.contains(&"from the pool".to_owned())
        );
        drop((room, gpu));
        assert!(!log().contains(&"pool_destroy".to_owned()));
    }
}
