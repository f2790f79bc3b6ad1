// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A driver whose device is host memory. It queues copies, and carries them out after a number of
//! queries.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{c_char, c_uint, c_void};

use farandole_kernels::HostMemory;

use super::super::*;
use crate::driver::{
    DriverTable, IpcMemoryHandle, MemoryPool, MemoryPoolProperties, RawEvent, RawStream,
};

const NOT_READY: i32 = 600;
pub(super) const OUT_OF_MEMORY: i32 = 2;

/// The calls and the behaviour of a thread's driver.
#[derive(Default)]
pub(super) struct Fake {
    pub(super) log: Vec<String>,
    /// Copies not carried out: from, to, bytes.
    pub(super) queue: VecDeque<(usize, usize, usize)>,
    /// Copies ever queued and carried out.
    pub(super) queued: usize,
    pub(super) done: usize,
    /// The number of copies that were queued before each event, by the number of the event.
    pub(super) events: Vec<usize>,
    pub(super) streams: usize,
    /// Contexts that are current.
    pub(super) depth: usize,
    /// The effect of the thread's calls on captures of others.
    pub(super) mode: i32,
    /// The stream that a graph is captured on.
    pub(super) captured: Option<usize>,
    /// Questions that still find nothing done.
    pub(super) polls: usize,
    /// Memory of the device that was taken; it stays to the end of the test, whose copies are late.
    pub(super) taken: Vec<HostMemory>,
    /// Number of times that memory was given back.
    pub(super) given: usize,
    /// Bytes that the pool keeps.
    pub(super) kept: u64,
    /// A function that fails.
    pub(super) broken: Option<&'static str>,
}

thread_local! {
    static FAKE: RefCell<Fake> = RefCell::default();
}

pub(super) fn fake<T>(change: impl FnOnce(&mut Fake) -> T) -> T {
    FAKE.with_borrow_mut(change)
}

pub(super) fn did(call: &'static str) -> i32 {
    fake(|fake| {
        fake.log.push(call.to_owned());
        if fake.broken == Some(call) { OUT_OF_MEMORY } else { 0 }
    })
}

/// Like `did`, for what needs a context.
fn within(call: &'static str) -> i32 {
    assert!(fake(|fake| fake.depth) > 0, "{call} without a context");
    assert_eq!(fake(|fake| fake.mode), 2, "{call} ends captures of others");
    did(call)
}

pub(crate) fn log() -> Vec<String> {
    fake(|fake| std::mem::take(&mut fake.log))
}

/// From here on a function fails.
pub(crate) fn break_one(function: &'static str) {
    fake(|fake| fake.broken = Some(function));
}

/// Carries copies out up to a number.
pub(super) fn carry_out(fake: &mut Fake, upto: usize) {
    while fake.done < upto {
        let Some((from, to, bytes)) = fake.queue.pop_front() else { break };
        let from = std::ptr::with_exposed_provenance::<u8>(from);
        // SAFETY: tests keep both memories until the copy was waited for.
        unsafe { std::ptr::copy(from, std::ptr::with_exposed_provenance_mut::<u8>(to), bytes) }
        fake.done += 1;
    }
}

pub(super) fn enqueue(from: usize, to: usize, bytes: usize) {
    fake(|fake| {
        fake.queue.push_back((from, to, bytes));
        fake.queued += 1;
    });
}

unsafe extern "C" fn init(_: c_uint) -> i32 {
    did("init")
}
unsafe extern "C" fn number(out: *mut i32) -> i32 {
    // SAFETY: the caller's place.
    unsafe { *out = 2 };
    0
}
unsafe extern "C" fn device(out: *mut i32, ordinal: i32) -> i32 {
    // SAFETY: the caller's place.
    unsafe { *out = ordinal };
    if ordinal < 2 { 0 } else { 101 }
}
unsafe extern "C" fn attribute(out: *mut i32, which: i32, _: i32) -> i32 {
    // SAFETY: the caller's place.
    unsafe { *out = i32::from(which == 75) * 9 + i32::from(which == 115) };
    0
}
unsafe extern "C" fn name(out: *mut c_char, _: i32, _: i32) -> i32 {
    // SAFETY: the caller's place has room for more.
    unsafe { std::ptr::copy(c"Fake".as_ptr(), out, 5) };
    0
}
unsafe extern "C" fn uuid(out: *mut [u8; 16], device: i32) -> i32 {
    // SAFETY: the caller's place.
    unsafe { *out = [u8::try_from(device).unwrap_or_default(); 16] };
    0
}
unsafe extern "C" fn memory(out: *mut usize, _: i32) -> i32 {
    // SAFETY: the caller's place.
    unsafe { *out = 80 << 30 };
    0
}
unsafe extern "C" fn retain(out: *mut *mut c_void, _: i32) -> i32 {
    // SAFETY: the caller's place.
    unsafe { *out = std::ptr::without_provenance_mut(0xc0) };
    did("retain")
}
unsafe extern "C" fn release(_: i32) -> i32 {
    did("release")
}
unsafe extern "C" fn push(_: *mut c_void) -> i32 {
    fake(|fake| fake.depth += 1);
    0
}
unsafe extern "C" fn pop(_: *mut *mut c_void) -> i32 {
    fake(|fake| fake.depth -= 1);
    0
}
unsafe extern "C" fn priorities(least: *mut i32, greatest: *mut i32) -> i32 {
    // SAFETY: the caller's places.
    unsafe { (*least, *greatest) = (0, -5) };
    0
}
unsafe extern "C" fn stream_create(out: *mut RawStream, flags: c_uint, priority: i32) -> i32 {
    assert_eq!((flags, priority), (1, -5), "beside the default stream, before all others");
    let number = fake(|fake| {
        fake.streams += 1;
        fake.streams
    });
    // SAFETY: the caller's place.
    unsafe { *out = std::ptr::without_provenance_mut(number) };
    within("stream_create")
}
unsafe extern "C" fn stream_destroy(_: RawStream) -> i32 {
    within("stream_destroy")
}
unsafe extern "C" fn stream_wait(then: RawStream, event: RawEvent, _: c_uint) -> i32 {
    fake(|fake| fake.log.push(format!("stream {} waits for event {}", then.addr(), event.addr())));
    0
}
unsafe extern "C" fn stream_synchronize(_: RawStream) -> i32 {
    fake(|fake| carry_out(fake, usize::MAX));
    within("stream_synchronize")
}
unsafe extern "C" fn capturing(stream: RawStream, state: *mut i32) -> i32 {
    // SAFETY: the caller's place.
    unsafe { *state = i32::from(fake(|fake| fake.captured) == Some(stream.addr())) };
    0
}
unsafe extern "C" fn capture_mode(mode: *mut i32) -> i32 {
    // SAFETY: the caller's place.
    unsafe { *mode = fake(|fake| std::mem::replace(&mut fake.mode, *mode)) };
    0
}
unsafe extern "C" fn event_create(out: *mut RawEvent, flags: c_uint) -> i32 {
    assert_eq!(flags, 2, "events take no time");
    let number = fake(|fake| {
        fake.events.push(0);
        fake.events.len()
    });
    // SAFETY: the caller's place.
    unsafe { *out = std::ptr::without_provenance_mut(number) };
    within("event_create")
}
unsafe extern "C" fn event_destroy(_: RawEvent) -> i32 {
    within("event_destroy")
}
unsafe extern "C" fn event_record(event: RawEvent, stream: RawStream) -> i32 {
    fake(|fake| {
        fake.events[event.addr() - 1] = fake.queued;
        fake.log.push(format!("event {} on stream {}", event.addr(), stream.addr()));
    });
    0
}
unsafe extern "C" fn event_query(event: RawEvent) -> i32 {
    fake(|fake| {
        if fake.broken == Some("event_query") {
            return OUT_OF_MEMORY;
        }
        if fake.polls > 0 {
            fake.polls -= 1;
            return NOT_READY;
        }
        let upto = fake.events[event.addr() - 1];
        carry_out(fake, upto);
        0
    })
}
unsafe extern "C" fn event_synchronize(event: RawEvent) -> i32 {
    fake(|fake| {
        let upto = fake.events[event.addr() - 1];
        carry_out(fake, upto);
    });
    within("event_synchronize")
}
unsafe extern "C" fn host_register(_: *mut c_void, _: usize, _: c_uint) -> i32 {
    within("lock")
}
unsafe extern "C" fn host_unregister(_: *mut c_void) -> i32 {
    within("unlock")
}
unsafe extern "C" fn to_device(to: u64, from: *const c_void, bytes: usize, _: RawStream) -> i32 {
    enqueue(from.expose_provenance(), usize::try_from(to).unwrap_or_default(), bytes);
    within("to_device")
}
unsafe extern "C" fn to_host(to: *mut c_void, from: u64, bytes: usize, _: RawStream) -> i32 {
    enqueue(usize::try_from(from).unwrap_or_default(), to.expose_provenance(), bytes);
    within("to_host")
}
unsafe extern "C" fn move_within(to: u64, from: u64, bytes: usize, stream: RawStream) -> i32 {
    let address = |number: u64| usize::try_from(number).unwrap_or_default();
    fake(|fake| fake.log.push(format!("move {bytes} bytes on stream {}", stream.addr())));
    let status = within("within");
    if status == 0 {
        enqueue(address(from), address(to), bytes);
    }
    status
}
unsafe extern "C" fn allocate(out: *mut u64, bytes: usize, stream: RawStream) -> i32 {
    let memory = HostMemory::new(bytes);
    // SAFETY: the caller's place.
    unsafe { *out = memory.address().expose_provenance() as u64 };
    fake(|fake| {
        fake.log.push(format!("take {bytes} bytes on stream {}", stream.addr()));
        fake.taken.push(memory);
    });
    within("allocate")
}
unsafe extern "C" fn free(address: u64, stream: RawStream) -> i32 {
    fake(|fake| {
        let known = fake.taken.iter().any(|memory| memory.address().addr() as u64 == address);
        assert!(known, "it was taken");
        fake.given += 1;
        fake.log.push(format!("give back on stream {}", stream.addr()));
    });
    within("free")
}
unsafe extern "C" fn pool_create(
    out: *mut MemoryPool,
    settings: *const MemoryPoolProperties,
) -> i32 {
    // SAFETY: the caller's places.
    unsafe {
        *out = std::ptr::without_provenance_mut(0x99);
        fake(|fake| fake.log.push(format!("{:?}", *settings)));
    }
    within("pool_create")
}
unsafe extern "C" fn pool_set(pool: MemoryPool, attribute: i32, value: *mut c_void) -> i32 {
    assert_eq!((pool.addr(), attribute), (0x99, 4));
    // SAFETY: the attribute's type.
    fake(|fake| fake.kept = unsafe { *value.cast::<u64>() });
    within("pool_set")
}
unsafe extern "C" fn pool_destroy(_: MemoryPool) -> i32 {
    within("pool_destroy")
}
unsafe extern "C" fn allocate_from(
    out: *mut u64,
    bytes: usize,
    pool: MemoryPool,
    stream: RawStream,
) -> i32 {
    assert_eq!(pool.addr(), 0x99);
    fake(|fake| fake.log.push("from the pool".to_owned()));
    // SAFETY: the caller's place.
    unsafe { allocate(out, bytes, stream) }
}
unsafe extern "C" fn window(out: *mut u64, bytes: usize) -> i32 {
    // SAFETY: the caller's place.
    unsafe { *out = 0x5000 };
    fake(|fake| fake.log.push(format!("window of {bytes} bytes")));
    within("window")
}
unsafe extern "C" fn window_free(start: u64) -> i32 {
    assert_eq!(start, 0x5000);
    within("window_free")
}
unsafe extern "C" fn window_offer(out: *mut IpcMemoryHandle, start: u64) -> i32 {
    // SAFETY: the caller's place.
    unsafe { *out = IpcMemoryHandle([u8::try_from(start >> 8).unwrap_or_default(); 64]) };
    within("window_offer")
}
unsafe extern "C" fn window_open(out: *mut u64, offer: IpcMemoryHandle, flags: c_uint) -> i32 {
    assert_eq!(flags, 1, "the driver knows no other way");
    // SAFETY: the caller's place.
    unsafe { *out = u64::from(offer.0[63]) << 12 };
    within("window_open")
}
unsafe extern "C" fn window_close(_: u64) -> i32 {
    within("window_close")
}
unsafe extern "C" fn module_load(_: *mut *mut c_void, _: *const c_void) -> i32 {
    within("module_load")
}
unsafe extern "C" fn module_unload(_: *mut c_void) -> i32 {
    within("module_unload")
}
unsafe extern "C" fn function(_: *mut *mut c_void, _: *mut c_void, _: *const c_char) -> i32 {
    within("function")
}
unsafe extern "C" fn launch(
    _: *mut c_void,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: RawStream,
    _: *mut *mut c_void,
    _: *mut *mut c_void,
) -> i32 {
    within("launch")
}
unsafe extern "C" fn error_name(_: i32, out: *mut *const c_char) -> i32 {
    // SAFETY: the caller's place.
    unsafe { *out = c"CUDA_ERROR_OUT_OF_MEMORY".as_ptr() };
    0
}
unsafe extern "C" fn error_string(_: i32, out: *mut *const c_char) -> i32 {
    // SAFETY: the caller's place.
    unsafe { *out = c"out of memory".as_ptr() };
    0
}

pub(crate) fn driver() -> CudaDriver {
    CudaDriver::from_table(table()).unwrap()
}

pub(super) fn table() -> DriverTable {
    DriverTable {
        init,
        version: number,
        count: number,
        device,
        attribute,
        name,
        uuid,
        memory,
        retain,
        release,
        push,
        pop,
        priorities,
        stream_create,
        stream_destroy,
        stream_wait,
        stream_synchronize,
        capturing,
        capture_mode,
        event_create,
        event_destroy,
        event_record,
        event_query,
        event_synchronize,
        host_register,
        host_unregister,
        to_device,
        to_host,
        within: move_within,
        module_load,
        module_unload,
        function,
        launch,
        error_name,
        error_string,
        allocate: Some(allocate),
        free: Some(free),
        pool_create: Some(pool_create),
        pool_set: Some(pool_set),
        pool_destroy: Some(pool_destroy),
        allocate_from: Some(allocate_from),
        window: Some(window),
        window_free: Some(window_free),
        window_offer: Some(window_offer),
        window_open: Some(window_open),
        window_close: Some(window_close),
    }
}
