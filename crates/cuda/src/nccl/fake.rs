// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A table of functions that do what a test says and write down what they are asked for. One of
//! each test's thread, and of the threads that make calls for it: they find it by the
//! communicator's name.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use farandole_collectives::{Buffer, Event, Place, Result, Room, Stream as Theirs};
use parking_lot::Mutex;

use super::{Comm, Lane, Nccl, SUCCESS, Settings, Stream, Table, UniqueId};

/// The calls and the behaviour of a test's NCCL.
pub(crate) struct State {
    calls: Vec<String>,
    /// The threads that began to form communicators, and those that ended groups of calls.
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
static ALL: Mutex<Vec<Arc<Mutex<State>>>> = Mutex::new(Vec::new());

thread_local! {
    static OWN: RefCell<(usize, Arc<Mutex<State>>)> = RefCell::new({
        let state = State {
            calls: Vec::new(),
            callers: Vec::new(),
            naming: SUCCESS,
            init: SUCCESS,
            status: VecDeque::new(),
            group: SUCCESS,
            alone: false,
            ahead: Duration::ZERO,
            version: 23_007,
            ending: None,
            late: 0,
            given: 0,
            memory: SUCCESS,
            registering: SUCCESS,
        };
        let (state, mut all) = (Arc::new(Mutex::new(state)), ALL.lock());
        all.push(Arc::clone(&state));
        (all.len() - 1, state)
    });
}

pub(crate) fn fake<T>(change: impl FnOnce(&mut State) -> T) -> T {
    let own = OWN.with_borrow(|(_, state)| Arc::clone(state));
    change(&mut own.lock())
}

/// Returns the name that this thread's NCCL gives.
pub(super) fn name() -> UniqueId {
    let mut id = [9; 128];
    let number = OWN.with_borrow(|(number, _)| *number);
    id[8..16].copy_from_slice(&number.to_le_bytes());
    UniqueId(id)
}

/// Takes this thread for one of the test that has given the name.
pub(super) fn adopt(id: &UniqueId) {
    let number = id.0[8..16].try_into().map_or(0, usize::from_le_bytes);
    let state = ALL.lock().get(number).map(Arc::clone);
    OWN.with_borrow_mut(|own| *own = (number, state.unwrap_or_else(|| Arc::clone(&own.1))));
}

/// Notes a call that waits for other members, and waits for them.
fn meet(call: String) {
    fake(|fake| fake.callers.push(std::thread::current().id()));
    note(call);
    let began = Instant::now();
    while fake(|fake| fake.alone) && began.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(super) fn clock() -> Instant {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    *START.get_or_init(Instant::now) + fake(|fake| fake.ahead)
}

fn note(call: String) -> i32 {
    fake(|fake| fake.calls.push(call));
    SUCCESS
}

/// Returns the calls since the last look.
pub(crate) fn calls() -> Vec<String> {
    fake(|fake| std::mem::take(&mut fake.calls))
}

fn at(address: *const c_void) -> String {
    if address.is_null() { "-".to_owned() } else { format!("{:#x}", address.addr()) }
}

unsafe extern "C" fn version(version: *mut i32) -> i32 {
    // SAFETY: the caller's place.
    unsafe { *version = fake(|fake| fake.version) };
    SUCCESS
}

unsafe extern "C" fn unique_id(id: *mut UniqueId) -> i32 {
    note("name".to_owned());
    // SAFETY: the caller's place.
    unsafe { *id = name() };
    fake(|fake| fake.naming)
}

unsafe extern "C" fn init(
    comm: *mut Comm,
    size: i32,
    id: UniqueId,
    rank: i32,
    settings: *mut Settings,
) -> i32 {
    adopt(&id);
    fake(|fake| fake.ending = None);
    // SAFETY: the caller's places.
    let settings = unsafe {
        *comm = std::ptr::without_provenance_mut(0x77);
        &*settings
    };
    meet(format!("init {rank}/{size} id {} blocking {}", id.0[0], settings.blocking));
    fake(|fake| fake.init)
}

unsafe extern "C" fn abort(_: Comm) -> i32 {
    fake(|fake| (fake.ending, fake.alone) = (Some(fake.late), false));
    note("abort".to_owned())
}

unsafe extern "C" fn async_error(_: Comm, status: *mut i32) -> i32 {
    let told = fake(|fake| match fake.status.len() {
        0 => SUCCESS,
        1 => fake.status[0],
        _ => fake.status.pop_front().unwrap_or_default(),
    });
    // SAFETY: the caller's place.
    unsafe { *status = told };
    SUCCESS
}

unsafe extern "C" fn group_start() -> i32 {
    note("{".to_owned())
}

unsafe extern "C" fn group_end() -> i32 {
    meet("}".to_owned());
    fake(|fake| fake.group)
}

type Read = *const c_void;
type Write = *mut c_void;

unsafe extern "C" fn allreduce(
    from: Read,
    to: Write,
    count: usize,
    kind: i32,
    op: i32,
    _: Comm,
    _: Stream,
) -> i32 {
    note(format!("allreduce {}>{} {count} of {kind} by {op}", at(from), at(to)))
}

unsafe extern "C" fn broadcast(
    from: Read,
    to: Write,
    count: usize,
    _: i32,
    root: i32,
    _: Comm,
    _: Stream,
) -> i32 {
    note(format!("broadcast {}>{} {count} from {root}", at(from), at(to)))
}

unsafe extern "C" fn reduce(
    from: Read,
    to: Write,
    count: usize,
    kind: i32,
    op: i32,
    root: i32,
    _: Comm,
    _: Stream,
) -> i32 {
    note(format!("reduce {}>{} {count} of {kind} by {op} to {root}", at(from), at(to)))
}

unsafe extern "C" fn allgather(
    from: Read,
    to: Write,
    count: usize,
    _: i32,
    _: Comm,
    _: Stream,
) -> i32 {
    note(format!("allgather {}>{} {count}", at(from), at(to)))
}

unsafe extern "C" fn scatter(
    from: Read,
    to: Write,
    count: usize,
    kind: i32,
    op: i32,
    _: Comm,
    _: Stream,
) -> i32 {
    note(format!("reducescatter {}>{} {count} of {kind} by {op}", at(from), at(to)))
}

unsafe extern "C" fn send(from: Read, count: usize, _: i32, peer: i32, _: Comm, _: Stream) -> i32 {
    note(format!("send {} {count} to {peer}", at(from)))
}

unsafe extern "C" fn receive(
    to: Write,
    count: usize,
    _: i32,
    peer: i32,
    _: Comm,
    _: Stream,
) -> i32 {
    note(format!("receive {} {count} from {peer}", at(to)))
}

unsafe extern "C" fn scaled_sum(op: *mut i32, scalar: Write, kind: i32, _: i32, _: Comm) -> i32 {
    // SAFETY: the caller's places; a factor has the type that is named.
    let factor = unsafe {
        *op = 42;
        if kind == 8 { *scalar.cast::<f64>() } else { f64::from(*scalar.cast::<f32>()) }
    };
    note(format!("factor {factor} of {kind}"))
}

unsafe extern "C" fn scaled_sum_destroy(op: i32, _: Comm) -> i32 {
    note(format!("no factor {op}"))
}

/// Memory of a test lies where its number says: all that was given is the process's.
const AREA: usize = 1 << 32;

unsafe extern "C" fn allocate(start: *mut Write, bytes: usize) -> i32 {
    let number = OWN.with_borrow(|(number, _)| *number);
    let at = fake(|fake| {
        fake.given += 1;
        (number + 1) * AREA + fake.given * 0x10_0000
    });
    // SAFETY: the caller's place.
    unsafe { *start = std::ptr::with_exposed_provenance_mut(at) };
    note(format!("memory of {bytes} at {at:#x}"));
    fake(|fake| fake.memory)
}

unsafe extern "C" fn register(_: Comm, start: Write, bytes: usize, handle: *mut Write) -> i32 {
    // SAFETY: the caller's place.
    unsafe { *handle = std::ptr::without_provenance_mut(0x55) };
    note(format!("register {bytes} at {}", at(start)));
    fake(|fake| fake.registering)
}

unsafe extern "C" fn words(status: i32) -> *const c_char {
    let text: &CStr = match status {
        2 => c"unhandled system error",
        6 => c"remote process exited",
        _ => c"no error",
    };
    text.as_ptr()
}

pub(crate) fn nccl() -> crate::Result<Nccl> {
    let table = Table {
        version,
        unique_id,
        init,
        abort,
        async_error,
        group_start,
        group_end,
        allreduce,
        broadcast,
        reduce,
        allgather,
        reducescatter: scatter,
        send,
        receive,
        scaled_sum,
        scaled_sum_destroy,
        allocate: Some(allocate),
        register: Some(register),
    };
    Nccl::over(table, Some(words), "libfake.so".to_owned())
}

/// A device whose work is done when a test says so.
#[derive(Clone, Default)]
pub(super) struct FakeLane {
    marks: Arc<Mutex<Vec<Arc<AtomicBool>>>>,
}

pub(super) struct FakeEvent(pub(super) Arc<AtomicBool>);

impl Event for FakeEvent {
    fn is_ready(&self) -> Result<bool> {
        let ended = fake(|fake| {
            let ended = fake.ending == Some(0);
            fake.ending = fake.ending.map(|looks| looks.saturating_sub(1));
            ended
        });
        Ok(ended || self.0.load(Ordering::Relaxed))
    }

    fn ordinal(&self) -> u32 {
        3
    }

    fn hold(&self, stream: Theirs) -> Result<()> {
        note(format!("stream {:#x} waits", stream.handle()));
        Ok(())
    }
}

struct FakeRoom(usize);

impl Room for FakeRoom {
    fn buffer(&self) -> Buffer {
        // SAFETY: never looked at.
        unsafe {
            Buffer::from_raw(std::ptr::without_provenance_mut(0x900), self.0, Place::Device(3))
        }
    }

    fn fetch(&self, _: &Buffer, _: Option<&Arc<dyn Event>>, _: Theirs) -> Result<()> {
        Ok(())
    }
}

impl FakeLane {
    /// The work behind so many marks is done.
    pub(super) fn finish(&self, marks: usize) {
        let mut all = self.marks.lock();
        let count = marks.min(all.len());
        for done in all.drain(..count) {
            done.store(true, Ordering::Relaxed);
        }
    }
}

impl Lane for FakeLane {
    fn ordinal(&self) -> u32 {
        3
    }

    fn stream(&self) -> Stream {
        std::ptr::without_provenance_mut(0x33)
    }

    fn mark(&self) -> Result<Arc<dyn Event>> {
        let done = Arc::new(AtomicBool::new(false));
        self.marks.lock().push(Arc::clone(&done));
        Ok(Arc::new(FakeEvent(done)))
    }

    fn room(&self, bytes: usize) -> Result<Arc<dyn Room>> {
        Ok(Arc::new(FakeRoom(bytes)))
    }

    fn with(&self, work: &mut dyn FnMut()) -> Result<()> {
        work();
        Ok(())
    }
}
