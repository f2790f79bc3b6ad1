// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One worker process: its pipes, its output, its end.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use farandole_config::PREFIX;
use farandole_registrar::How;
use farandole_telemetry::Stream;
use parking_lot::Mutex;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::error::{Error, Result};
use crate::guard::Guard;
use crate::lines::{Ending, Splitter, Tail};
use crate::spawn::spawn;

/// Lines of stderr kept for the report of a failure.
const TAIL: usize = 50;
/// Longest time in which a worker must end after SIGTERM.
const GRACE: Duration = Duration::from_secs(2);
/// Time for a last checkpoint: a worker that was asked to end is ended after it.
const ASKED: Duration = Duration::from_secs(10);
/// Longest time for the end of the pipes after every process of the group has ended, not counting
/// the time for which the receiver of the lines keeps them waiting.
const DRAIN: Duration = Duration::from_secs(2);
/// Interval at which the caller is asked whether the rest of the output is still wanted.
const SLICE: Duration = Duration::from_millis(50);

/// Takes a worker's lines; blocks to slow it down.
pub(crate) type TakeLine = Arc<dyn Fn(Stream, String) + Send + Sync>;

/// The program to start.
pub(crate) struct Start {
    pub(crate) command: Vec<String>,
    /// Changes to the inherited environment; `None` removes.
    pub(crate) environment: BTreeMap<String, Option<String>>,
    pub(crate) payload: Option<Vec<u8>>,
    pub(crate) collect_result: bool,
    pub(crate) take_line: TakeLine,
}

/// A way to end a worker, from gentle to harsh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Manner {
    /// SIGINT, as Ctrl-C: Python raises `KeyboardInterrupt`.
    Ask,
    /// SIGTERM.
    Terminate,
    /// SIGKILL.
    Kill,
}

/// The result of a wait for a worker's exit.
pub(crate) enum Waited {
    /// It has ended.
    Exited,
    /// Time has passed.
    Passed,
    /// A harsher end was requested.
    Hurried(Manner),
}

/// The end of a worker, its last lines and its result.
pub(crate) struct Remains {
    pub(crate) how: How,
    pub(crate) stderr_tail: Vec<String>,
    pub(crate) result: Option<Vec<u8>>,
}

/// Variables with which the C library keeps the memory that a training step frees for the next
/// step, which needs it again at once. By default it goes back to the system whenever it lies at
/// the top of the heap, and the kernel clears 100 MB of gradients again in every step: up to half
/// of the step's time. The last one asks for huge pages, where the kernel gives them on request:
/// fresh memory then costs one fault for 2 MiB and not 512. Set for all workers that do not set
/// them themselves. `farandole.common.heap` still returns memory that stays unused for longer.
pub const ALLOCATOR: [(&str, &str); 3] = [
    ("MALLOC_MMAP_THRESHOLD_", "33554432"),
    ("MALLOC_TRIM_THRESHOLD_", "4294967296"),
    ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
];

#[expect(clippy::disallowed_methods, reason = "variables of the C library, not knobs")]
fn is_set(name: &str) -> bool {
    std::env::var_os(name).is_some()
}

/// A thread that reads one stream of the worker.
struct Reader {
    stream: Stream,
    thread: JoinHandle<()>,
    /// It has lines that are not taken yet.
    handing_on: Arc<AtomicBool>,
    /// Its other end goes with the thread.
    end: mpsc::Receiver<()>,
}

impl Reader {
    /// Waits for a moment; whether it has ended.
    fn ends(&self) -> bool {
        matches!(self.end.recv_timeout(SLICE), Err(mpsc::RecvTimeoutError::Disconnected))
    }
}

/// A started worker.
pub(crate) struct Worker {
    group: Pid,
    /// Held while signalling and while reaping, so that no signal goes to a process that took over
    /// the number.
    child: Arc<Mutex<Option<Child>>>,
    guard: Option<Guard>,
    readers: Vec<Reader>,
    result: Option<JoinHandle<Vec<u8>>>,
    tail: Arc<Mutex<Tail>>,
}

impl Worker {
    /// Starts the process; `on_exit` is called from another thread when it has ended by itself or
    /// by a signal.
    ///
    /// # Errors
    /// `Spawn`, `System`, `Usage` for an empty command.
    pub(crate) fn start(start: Start, on_exit: impl FnOnce() + Send + 'static) -> Result<Self> {
        let Start { command, environment, payload, collect_result, take_line } = start;
        let (program, arguments) = command
            .split_first()
            .ok_or(Error::Usage { reason: "the command is empty".to_owned() })?;
        let mut prepared = Command::new(program);
        prepared.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        for (name, value) in ALLOCATOR {
            if !is_set(name) {
                prepared.env(name, value);
            }
        }
        for (name, value) in &environment {
            match value {
                Some(value) => prepared.env(name, value),
                None => prepared.env_remove(name),
            };
        }
        let mut inherited = Vec::new();
        let mut payload_to = None;
        if let Some(payload) = payload {
            let (read, write) = pipe()?;
            prepared.env(format!("{PREFIX}PAYLOAD_FD"), read.as_raw_fd().to_string());
            inherited.push(read);
            payload_to = Some((write, payload));
        }
        let mut result_from = None;
        if collect_result {
            let (read, write) = pipe()?;
            prepared.env(format!("{PREFIX}RESULT_FD"), write.as_raw_fd().to_string());
            inherited.push(write);
            result_from = Some(read);
        }
        let mut child = spawn(prepared, inherited)
            .map_err(|source| Error::Spawn { program: program.clone(), source })?;
        let group = pid_of(&child)?;
        let guard = Guard::start(group)
            .map_err(|source| Error::System { what: "starting a guard", source });
        let tail = Arc::new(Mutex::new(Tail::new(TAIL)));
        let stdout = child.stdout.take();
        let stderr = child.stderr.take();
        let mut worker = Self {
            group,
            child: Arc::new(Mutex::new(Some(child))),
            guard: None,
            readers: Vec::new(),
            result: None,
            tail,
        };
        // From here on a failure drops the worker, which ends the process.
        worker.guard = Some(guard?);
        if let Some(pipe) = stdout {
            let take = Arc::clone(&take_line);
            worker
                .read("stdout", Stream::Stdout, pipe, move |line, _| take(Stream::Stdout, line))?;
        }
        if let Some(pipe) = stderr {
            let tail = Arc::clone(&worker.tail);
            worker.read("stderr", Stream::Stderr, pipe, move |line, ending| {
                tail.lock().push(&line, ending);
                take_line(Stream::Stderr, line);
            })?;
        }
        if let Some((pipe, payload)) = payload_to {
            // Detached: it ends with the pipe, whose reader is the worker.
            drop(named("payload", move || {
                // A worker that does not read its payload says so by its exit.
                drop(File::from(pipe).write_all(&payload));
            })?);
        }
        if let Some(pipe) = result_from {
            worker.result = Some(named("result", move || {
                let mut bytes = Vec::new();
                // Output before a failure is still passed on; its reader judges it.
                drop(File::from(pipe).read_to_end(&mut bytes));
                bytes
            })?);
        }
        drop(named("exit", move || {
            wait_without_reaping(group);
            on_exit();
        })?);
        Ok(worker)
    }

    /// Ends the worker and its whole group, in the way that `manner` begins with and then in every
    /// harsher one. `exited` waits for `on_exit` to be called, at most until the given time, or
    /// until a harsher manner is asked for.
    pub(crate) fn end(&self, mut manner: Manner, exited: impl Fn(Manner, Instant) -> Waited) {
        loop {
            let (signal, grace, next) = match manner {
                Manner::Ask => (Signal::INT, ASKED, Manner::Terminate),
                Manner::Terminate => (Signal::TERM, GRACE, Manner::Kill),
                // Only a process stuck in the kernel outlasts this; reaping it then waits with it.
                Manner::Kill => (Signal::KILL, 5 * GRACE, Manner::Kill),
            };
            self.signal(signal);
            manner = match exited(manner, Instant::now() + grace) {
                Waited::Exited => return,
                Waited::Passed if manner == Manner::Kill => return,
                Waited::Passed => next,
                Waited::Hurried(harsher) => harsher,
            };
        }
    }

    /// Reaps the ended worker, ends what it left behind, and collects its output: all of it,
    /// however slowly it is taken, unless `given_up` says that the rest is not wanted.
    ///
    /// # Errors
    /// `System` when the process cannot be waited for.
    pub(crate) fn finish(mut self, mut given_up: impl FnMut() -> bool) -> Result<Remains> {
        let status = self.reap();
        let mut deadline = Instant::now() + DRAIN;
        for reader in self.readers.drain(..) {
            loop {
                if reader.ends() {
                    break drop(reader.thread.join());
                }
                if reader.handing_on.load(Ordering::Acquire) {
                    deadline = Instant::now() + DRAIN;
                }
                if given_up() || Instant::now() >= deadline {
                    break report_unread(reader.stream);
                }
            }
        }
        let result = self.result.take().and_then(|reader| join_value(reader, deadline));
        let stderr_tail = self.tail.lock().lines().map(str::to_owned).collect();
        Ok(Remains {
            how: how(status?),
            stderr_tail,
            result: result.filter(|bytes| !bytes.is_empty()),
        })
    }

    fn reap(&mut self) -> Result<ExitStatus> {
        let mut child = self.child.lock();
        // The leader is a zombie until it is reaped below, so the number of the group is still its
        // own.
        kill_group(self.group, Signal::KILL);
        let status = match child.take() {
            Some(mut child) => child.wait(),
            None => Err(io::Error::other("it was reaped before")),
        };
        if let Some(guard) = self.guard.take() {
            guard.dismiss();
        }
        status.map_err(|source| Error::System { what: "waiting for the worker", source })
    }

    fn signal(&self, signal: Signal) {
        let child = self.child.lock();
        if child.is_some() {
            kill_group(self.group, signal);
        }
    }

    fn read(
        &mut self,
        name: &str,
        stream: Stream,
        mut pipe: impl Read + Send + 'static,
        mut take: impl FnMut(String, Ending) + Send + 'static,
    ) -> Result<()> {
        let handing_on = Arc::new(AtomicBool::new(false));
        let hands_on = Arc::clone(&handing_on);
        let (ends, end) = mpsc::channel::<()>();
        let thread = named(name, move || {
            let mut splitter = Splitter::default();
            let mut buffer = vec![0; 64 << 10];
            loop {
                match pipe.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(length) => {
                        hands_on.store(true, Ordering::Release);
                        splitter.feed(&buffer[..length], &mut take);
                        hands_on.store(false, Ordering::Release);
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => break,
                }
            }
            hands_on.store(true, Ordering::Release);
            splitter.finish(&mut take);
            drop(ends);
        })?;
        self.readers.push(Reader { stream, thread, handing_on, end });
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.child.lock().is_some() {
            drop(self.reap());
        }
    }
}

pub(crate) fn kill_group(group: Pid, signal: Signal) {
    if let Err(error) = kill_process_group(group, signal) {
        // A group whose processes have all ended has no receiver of signals.
        tracing::debug!(%error, group = group.as_raw_pid(), "no process took the signal");
    }
}

fn report_unread(stream: Stream) {
    tracing::warn!(%stream, "the rest of a worker's output is not read");
}

fn how(status: ExitStatus) -> How {
    match (status.code(), status.signal()) {
        (Some(code), _) => How::Code(code),
        (None, Some(signal)) => How::Signal(signal),
        (None, None) => How::NotStarted("the system does not say how it ended".to_owned()),
    }
}

/// Blocks until the process has ended, and leaves it to be reaped.
pub(crate) fn wait_without_reaping(pid: Pid) {
    loop {
        match waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Err(rustix::io::Errno::INTR) => {}
            // Other code of this process reaped it: it has ended in this case, too.
            Ok(_) | Err(_) => return,
        }
    }
}

/// Returns a pipe whose ends are above the standard descriptors, which the child sets again.
fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    let system =
        |what| move |error: rustix::io::Errno| Error::System { what, source: error.into() };
    let (read, write) = pipe_with(PipeFlags::CLOEXEC).map_err(system("making a pipe"))?;
    let above = |end: OwnedFd| {
        if end.as_raw_fd() > 2 {
            return Ok(end);
        }
        rustix::io::fcntl_dupfd_cloexec(&end, 3).map_err(system("moving a pipe"))
    };
    Ok((above(read)?, above(write)?))
}

pub(crate) fn pid_of(child: &Child) -> Result<Pid> {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or_else(|| Error::System {
        what: "reading the worker's number",
        source: io::Error::other(child.id().to_string()),
    })
}

fn named<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    thread::Builder::new()
        .name(format!("farandole-{name}"))
        .spawn(work)
        .map_err(|source| Error::System { what: "starting a thread", source })
}

/// Returns the result of a thread, if it ends in time; otherwise it is left alone.
fn join_value<T: Send + 'static>(thread: JoinHandle<T>, deadline: Instant) -> Option<T> {
    let (sender, receiver) = mpsc::channel();
    let joiner = thread::Builder::new().name("farandole-join".to_owned()).spawn(move || {
        // There is no receiver after the deadline.
        drop(sender.send(thread.join()));
    });
    drop(joiner.ok()?);
    receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()?.ok()
}
