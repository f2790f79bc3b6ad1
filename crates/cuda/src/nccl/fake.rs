// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A table of functions that record their calls and return the results that a test sets. Each
//! test's thread has its own state; the threads that make calls for the test find it by the
//! communicator's name.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use farandole_collectives::{DeviceEvent, Result, ResultMemory};
use farandole_kernels::{Buffer, DeviceStream as FrameworkStream, MemoryKind};
use parking_lot::Mutex;

use super::{
    Comm, CommunicatorStream, NCCL_SUCCESS, NcclConfig, NcclLibrary, NcclTable, RawStream, UniqueId,
};

/// The calls and the behaviour of a test's NCCL.
pub(crate) struct FakeNcclState {
    calls: Vec<String>,
    /// The threads that began to form communicators, and the threads that ended groups of calls.
    pub(super) callers: Vec<ThreadId>,
    /// The result of `ncclGetUniqueId`.
    pub(crate) naming: i32,
    /// The result of `ncclCommInitRankConfig`.
    pub(super) init: i32,
    /// The results of `ncclCommGetAsyncError` in order; the last one repeats.
    pub(super) status: VecDeque<i32>,
    /// The result of `ncclGroupEnd`.
    pub(super) group: i32,
    /// Calls that wait for members return when this is false, or the communicator is aborted.
    pub(super) alone: bool,
    /// Time by which the clock is ahead.
    pub(super) ahead: Duration,
    pub(crate) version: i32,
    /// Number of looks at the device for which kernels continue after the order to end; `None`
    /// before that order.
    pub(super) ending: Option<u32>,
    /// The same, for the next time.
    pub(super) late: u32,
    /// Number of times that memory was given.
    given: usize,
    /// The result of `ncclMemAlloc`.
    pub(super) memory: i32,
    /// The result of `ncclCommRegister`.
    pub(super) registering: i32,
}

/// All there are: the place of one is in the names that it gives.
static ALL_FAKES: Mutex<Vec<Arc<Mutex<FakeNcclState>>>> = Mutex::new(Vec::new());

thread_local! {
    static THREAD_FAKE: RefCell<(usize, Arc<Mutex<FakeNcclState>>)> = RefCell::new({
        let state = FakeNcclState {
            calls: Vec::new(),
            callers: Vec::new(),
            naming: NCCL_SUCCESS,
            init: NCCL_SUCCESS,
            status: VecDeque::new(),
            group: NCCL_SUCCESS,
            alone: false,
            ahead: Duration::ZERO,
            version: 23_007,
            ending: None,
            late: 0,
            given: 0,
            memory: NCCL_SUCCESS,
            registering: NCCL_SUCCESS,
        };
        let (state, mut all) = (Arc::new(Mutex::new(state)), ALL_FAKES.lock());
        all.push(Arc::clone(&state));
        (all.len() - 1, state)
    });
}

pub(crate) fn with_fake<T>(change: impl FnOnce(&mut FakeNcclState) -> T) -> T {
    let own = THREAD_FAKE.with_borrow(|(_, state)| Arc::clone(state));
    change(&mut own.lock())
}

/// Returns the name that this thread's NCCL gives.
pub(super) fn thread_unique_id() -> UniqueId {
    let mut id = [9; 128];
    let number = THREAD_FAKE.with_borrow(|(number, _)| *number);
    id[8..16].copy_from_slice(&number.to_le_bytes());
    UniqueId(id)
}

/// Takes this thread for one of the test that has given the name.
pub(super) fn join_fake_nccl(id: &UniqueId) {
    let number = id.0[8..16].try_into().map_or(0, usize::from_le_bytes);
    let state = ALL_FAKES.lock().get(number).map(Arc::clone);
    THREAD_FAKE.with_borrow_mut(|own| *own = (number, state.unwrap_or_else(|| Arc::clone(&own.1))));
}

/// Notes a call that waits for other members, and waits for them.
fn note_and_wait(call: String) {
    with_fake(|fake| fake.callers.push(std::thread::current().id()));
    note_call(call);
    let began = Instant::now();
    while with_fake(|fake| fake.alone) && began.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(super) fn fake_clock() -> Instant {
    static CLOCK_START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    *CLOCK_START.get_or_init(Instant::now) + with_fake(|fake| fake.ahead)
}

fn note_call(call: String) -> i32 {
    with_fake(|fake| fake.calls.push(call));
    NCCL_SUCCESS
}

/// Returns the calls since the last look.
pub(crate) fn take_calls() -> Vec<String> {
    with_fake(|fake| std::mem::take(&mut fake.calls))
}

fn format_address(address: *const c_void) -> String {
    if address.is_null() { "-".to_owned() } else { format!("{:#x}", address.addr()) }
}

unsafe extern "C" fn fake_version(version: *mut i32) -> i32 {
    // SAFETY: the caller's place.
    unsafe { *version = with_fake(|fake| fake.version) };
    NCCL_SUCCESS
}

unsafe extern "C" fn unique_id(id: *mut UniqueId) -> i32 {
    note_call("name".to_owned());
    // SAFETY: the caller's place.
    unsafe { *id = thread_unique_id() };
    with_fake(|fake| fake.naming)
}

unsafe extern "C" fn fake_init(
    comm: *mut Comm,
    size: i32,
    id: UniqueId,
    rank: i32,
    settings: *mut NcclConfig,
) -> i32 {
    join_fake_nccl(&id);
    with_fake(|fake| fake.ending = None);
    // SAFETY: the caller's places.
    let settings = unsafe {
        *comm = std::ptr::without_provenance_mut(0x77);
        &*settings
    };
    note_and_wait(format!("init {rank}/{size} id {} blocking {}", id.0[0], settings.blocking));
    with_fake(|fake| fake.init)
}

unsafe extern "C" fn fake_abort(_: Comm) -> i32 {
    with_fake(|fake| (fake.ending, fake.alone) = (Some(fake.late), false));
    note_call("abort".to_owned())
}

unsafe extern "C" fn async_error(_: Comm, status: *mut i32) -> i32 {
    let reported = with_fake(|fake| match fake.status.len() {
        0 => NCCL_SUCCESS,
        1 => fake.status[0],
        _ => fake.status.pop_front().unwrap_or_default(),
    });
    // SAFETY: the caller's place.
    unsafe { *status = reported };
    NCCL_SUCCESS
}

unsafe extern "C" fn group_start() -> i32 {
    note_call("{".to_owned())
}

unsafe extern "C" fn group_end() -> i32 {
    note_and_wait("}".to_owned());
    with_fake(|fake| fake.group)
}

type Read = *const c_void;
type Write = *mut c_void;

unsafe extern "C" fn fake_allreduce(
    from: Read,
    to: Write,
    count: usize,
    kind: i32,
    op: i32,
    _: Comm,
    _: RawStream,
) -> i32 {
    note_call(format!(
        "allreduce {}>{} {count} of {kind} by {op}",
        format_address(from),
        format_address(to)
    ))
}

unsafe extern "C" fn fake_broadcast(
    from: Read,
    to: Write,
    count: usize,
    _: i32,
    root: i32,
    _: Comm,
    _: RawStream,
) -> i32 {
    note_call(format!(
        "broadcast {}>{} {count} from {root}",
        format_address(from),
        format_address(to)
    ))
}

unsafe extern "C" fn fake_reduce(
    from: Read,
    to: Write,
    count: usize,
    kind: i32,
    op: i32,
    root: i32,
    _: Comm,
    _: RawStream,
) -> i32 {
    note_call(format!(
        "reduce {}>{} {count} of {kind} by {op} to {root}",
        format_address(from),
        format_address(to)
    ))
}

unsafe extern "C" fn fake_allgather(
    from: Read,
    to: Write,
    count: usize,
    _: i32,
    _: Comm,
    _: RawStream,
) -> i32 {
    note_call(format!("allgather {}>{} {count}", format_address(from), format_address(to)))
}

unsafe extern "C" fn fake_reduce_scatter(
    from: Read,
    to: Write,
    count: usize,
    kind: i32,
    op: i32,
    _: Comm,
    _: RawStream,
) -> i32 {
    note_call(format!(
        "reducescatter {}>{} {count} of {kind} by {op}",
        format_address(from),
        format_address(to)
    ))
}

unsafe extern "C" fn fake_send(
    from: Read,
    count: usize,
    _: i32,
    peer: i32,
    _: Comm,
    _: RawStream,
) -> i32 {
    note_call(format!("send {} {count} to {peer}", format_address(from)))
}

unsafe extern "C" fn fake_receive(
    to: Write,
    count: usize,
    _: i32,
    peer: i32,
    _: Comm,
    _: RawStream,
) -> i32 {
    note_call(format!("receive {} {count} from {peer}", format_address(to)))
}

unsafe extern "C" fn create_premul_sum(
    op: *mut i32,
    scalar: Write,
    kind: i32,
    _: i32,
    _: Comm,
) -> i32 {
    // SAFETY: the caller's places; a factor has the type that is named.
    let factor = unsafe {
        *op = 42;
        if kind == 8 { *scalar.cast::<f64>() } else { f64::from(*scalar.cast::<f32>()) }
    };
    note_call(format!("factor {factor} of {kind}"))
}

unsafe extern "C" fn destroy_premul_sum(op: i32, _: Comm) -> i32 {
    note_call(format!("no factor {op}"))
}

/// Memory of a test lies where its number says: all that was given is the process's.
const FAKE_AREA_BYTES: usize = 1 << 32;

unsafe extern "C" fn fake_allocate(start: *mut Write, bytes: usize) -> i32 {
    let number = THREAD_FAKE.with_borrow(|(number, _)| *number);
    let at = with_fake(|fake| {
        fake.given += 1;
        (number + 1) * FAKE_AREA_BYTES + fake.given * 0x10_0000
    });
    // SAFETY: the caller's place.
    unsafe { *start = std::ptr::with_exposed_provenance_mut(at) };
    note_call(format!("memory of {bytes} at {at:#x}"));
    with_fake(|fake| fake.memory)
}

unsafe extern "C" fn fake_register(_: Comm, start: Write, bytes: usize, handle: *mut Write) -> i32 {
    // SAFETY: the caller's place.
    unsafe { *handle = std::ptr::without_provenance_mut(0x55) };
    note_call(format!("register {bytes} at {}", format_address(start)));
    with_fake(|fake| fake.registering)
}

unsafe extern "C" fn fake_error_text(status: i32) -> *const c_char {
    let text: &CStr = match status {
        2 => c"unhandled system error",
        6 => c"remote process exited",
        _ => c"no error",
    };
    text.as_ptr()
}

pub(crate) fn fake_nccl() -> crate::Result<NcclLibrary> {
    let table = NcclTable {
        version: fake_version,
        unique_id,
        init: fake_init,
        abort: fake_abort,
        async_error,
        group_start,
        group_end,
        allreduce: fake_allreduce,
        broadcast: fake_broadcast,
        reduce: fake_reduce,
        allgather: fake_allgather,
        reducescatter: fake_reduce_scatter,
        send: fake_send,
        receive: fake_receive,
        create_premul_sum,
        destroy_premul_sum,
        allocate: Some(fake_allocate),
        register: Some(fake_register),
    };
    NcclLibrary::from_table(table, Some(fake_error_text), "libfake.so".to_owned())
}

/// A device whose work is done when a test says so.
#[derive(Clone, Default)]
pub(super) struct FakeCommunicatorStream {
    recorded_events: Arc<Mutex<Vec<Arc<AtomicBool>>>>,
}

pub(super) struct FakeEvent(pub(super) Arc<AtomicBool>);

impl DeviceEvent for FakeEvent {
    fn is_ready(&self) -> Result<bool> {
        let ended = with_fake(|fake| {
            let ended = fake.ending == Some(0);
            fake.ending = fake.ending.map(|looks| looks.saturating_sub(1));
            ended
        });
        Ok(ended || self.0.load(Ordering::Relaxed))
    }

    fn device_ordinal(&self) -> u32 {
        3
    }

    fn make_stream_wait(&self, stream: FrameworkStream) -> Result<()> {
        note_call(format!("stream {:#x} waits", stream.raw_handle()));
        Ok(())
    }
}

struct FakeResultMemory(usize);

impl ResultMemory for FakeResultMemory {
    fn as_buffer(&self) -> Buffer {
        // SAFETY: never looked at.
        unsafe {
            Buffer::from_raw(std::ptr::without_provenance_mut(0x900), self.0, MemoryKind::Device(3))
        }
    }

    fn copy_out_then_release(
        &self,
        _: &Buffer,
        _: Option<&Arc<dyn DeviceEvent>>,
        _: FrameworkStream,
    ) -> Result<()> {
        Ok(())
    }
}

impl FakeCommunicatorStream {
    /// Completes the first `marks` recorded events.
    pub(super) fn finish_events(&self, marks: usize) {
        let mut all = self.recorded_events.lock();
        let count = marks.min(all.len());
        for done in all.drain(..count) {
            done.store(true, Ordering::Relaxed);
        }
    }
}

impl CommunicatorStream for FakeCommunicatorStream {
    fn device_ordinal(&self) -> u32 {
        3
    }

    fn raw_stream(&self) -> RawStream {
        std::ptr::without_provenance_mut(0x33)
    }

    fn record_event(&self) -> Result<Arc<dyn DeviceEvent>> {
        let done = Arc::new(AtomicBool::new(false));
        self.recorded_events.lock().push(Arc::clone(&done));
        Ok(Arc::new(FakeEvent(done)))
    }

    fn allocate_result(&self, bytes: usize) -> Result<Arc<dyn ResultMemory>> {
        Ok(Arc::new(FakeResultMemory(bytes)))
    }

    fn with_current_device(&self, work: &mut dyn FnMut()) -> Result<()> {
        work();
        Ok(())
    }
}
