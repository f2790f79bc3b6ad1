// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One worker process: its pipes, its output and its end.

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

use farandole_config::FARANDOLE_PREFIX;
use farandole_registrar::ExitKind;
use farandole_telemetry::OutputStream;
use parking_lot::Mutex;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::error::{Error, Result};
use crate::guard::ProcessGroupGuard;
use crate::lines::{LineEnding, LineSplitter, OutputTail};
use crate::spawn::spawn_bound_child;

/// Lines of stderr kept for the report of a failure.
const STDERR_TAIL_LINES: usize = 50;
/// Longest time in which a worker must end after SIGTERM.
const TERMINATE_GRACE_PERIOD: Duration = Duration::from_secs(2);
/// Time for a last checkpoint: an interrupted worker is terminated after it.
const INTERRUPT_GRACE_PERIOD: Duration = Duration::from_secs(10);
/// Longest time for the end of the pipes after every process of the group has ended. The time
/// during which the receiver of the lines blocks is not counted.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval at which the caller is asked whether the rest of the output is still needed.
const OUTPUT_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Receives a worker's lines; blocks to slow the worker down.
pub(crate) type LineReceiver = Arc<dyn Fn(OutputStream, String) + Send + Sync>;

/// The program to start.
pub(crate) struct WorkerStartOptions {
    pub(crate) command: Vec<String>,
    /// Changes to the inherited environment; `None` removes a variable.
    pub(crate) environment: BTreeMap<String, Option<String>>,
    pub(crate) payload: Option<Vec<u8>>,
    pub(crate) collect_result: bool,
    pub(crate) take_line: LineReceiver,
}

/// Signals that end a worker, from gentle to harsh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum StopSignal {
    /// SIGINT, as Ctrl-C: Python raises `KeyboardInterrupt`.
    Interrupt,
    /// SIGTERM.
    Terminate,
    /// SIGKILL.
    Kill,
}

/// The result of a wait for a worker's exit.
pub(crate) enum ExitWait {
    /// The worker has ended.
    Exited,
    /// The time limit has passed.
    TimedOut,
    /// The caller requested a harsher signal.
    Escalated(StopSignal),
}

/// The end of a worker, its last lines and its result.
pub(crate) struct WorkerExit {
    pub(crate) exit_kind: ExitKind,
    pub(crate) stderr_tail: Vec<String>,
    pub(crate) result: Option<Vec<u8>>,
}

/// Variables that make the C library keep the memory that a training step frees, because the next
/// step needs it at once. By default, the C library returns memory at the top of the heap to the
/// system, and the kernel clears 100 MB of gradients again in every step: up to half of the step's
/// time. The last variable requests huge pages, if the kernel gives them on request: fresh memory
/// then costs one page fault for 2 MiB instead of 512. They are set for all workers whose
/// environment does not set them. `farandole.common.heap` still returns memory that stays unused
/// for longer.
pub const ALLOCATOR_VARIABLES: [(&str, &str); 3] = [
    ("MALLOC_MMAP_THRESHOLD_", "33554432"),
    ("MALLOC_TRIM_THRESHOLD_", "4294967296"),
    ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
];

#[expect(clippy::disallowed_methods, reason = "variables of the C library, not knobs")]
fn is_variable_set(name: &str) -> bool {
    std::env::var_os(name).is_some()
}

/// A thread that reads one stream of the worker.
struct WorkerOutputReader {
    stream: OutputStream,
    thread: JoinHandle<()>,
    /// Whether the reader has lines that the receiver has not taken yet.
    has_pending_lines: Arc<AtomicBool>,
    /// Disconnected when the thread ends.
    thread_end: mpsc::Receiver<()>,
}

impl WorkerOutputReader {
    /// Waits for one poll interval; returns whether the thread has ended.
    fn wait_one_poll_for_end(&self) -> bool {
        matches!(
            self.thread_end.recv_timeout(OUTPUT_POLL_INTERVAL),
            Err(mpsc::RecvTimeoutError::Disconnected)
        )
    }
}

/// A started worker.
pub(crate) struct WorkerProcess {
    group: Pid,
    /// Locked while signalling and while reaping, so that no signal goes to another process that
    /// got the same number.
    child: Arc<Mutex<Option<Child>>>,
    guard: Option<ProcessGroupGuard>,
    readers: Vec<WorkerOutputReader>,
    result: Option<JoinHandle<Vec<u8>>>,
    tail: Arc<Mutex<OutputTail>>,
}

impl WorkerProcess {
    /// Starts the process. Another thread calls `on_exit` when the process has ended by itself or
    /// by a signal.
    ///
    /// # Errors
    /// `Spawn`, `System`, `Usage` for an empty command.
    pub(crate) fn spawn_process(
        start: WorkerStartOptions,
        on_exit: impl FnOnce() + Send + 'static,
    ) -> Result<Self> {
        let WorkerStartOptions { command, environment, payload, collect_result, take_line } = start;
        let (program, arguments) = command
            .split_first()
            .ok_or(Error::Usage { reason: "the command is empty".to_owned() })?;
        let mut prepared = Command::new(program);
        // Several workers cannot share the launcher's input, and a prompt would stop the job.
        prepared.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        for (name, value) in ALLOCATOR_VARIABLES {
            if !is_variable_set(name) {
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
            let (read, write) = create_pipe()?;
            prepared.env(format!("{FARANDOLE_PREFIX}PAYLOAD_FD"), read.as_raw_fd().to_string());
            inherited.push(read);
            payload_to = Some((write, payload));
        }
        let mut result_from = None;
        if collect_result {
            let (read, write) = create_pipe()?;
            prepared.env(format!("{FARANDOLE_PREFIX}RESULT_FD"), write.as_raw_fd().to_string());
            inherited.push(write);
            result_from = Some(read);
        }
        let mut child = spawn_bound_child(prepared, inherited)
            .map_err(|source| Error::Spawn { program: program.clone(), source })?;
        let group = child_pid(&child)?;
        let guard = ProcessGroupGuard::spawn_guard(group)
            .map_err(|source| Error::System { what: "starting a guard", source });
        let tail = Arc::new(Mutex::new(OutputTail::new(STDERR_TAIL_LINES)));
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
        // If a later step fails, the worker is dropped, which ends the process.
        worker.guard = Some(guard?);
        if let Some(pipe) = stdout {
            let take = Arc::clone(&take_line);
            worker.spawn_output_reader("stdout", OutputStream::Stdout, pipe, move |line, _| {
                take(OutputStream::Stdout, line)
            })?;
        }
        if let Some(pipe) = stderr {
            let tail = Arc::clone(&worker.tail);
            worker.spawn_output_reader(
                "stderr",
                OutputStream::Stderr,
                pipe,
                move |line, ending| {
                    tail.lock().push(&line, ending);
                    take_line(OutputStream::Stderr, line);
                },
            )?;
        }
        if let Some((pipe, payload)) = payload_to {
            // Detached: the thread ends with the pipe, which the worker reads.
            drop(spawn_named_thread("payload", move || {
                // A worker that does not read its payload reports that by its exit.
                drop(File::from(pipe).write_all(&payload));
            })?);
        }
        if let Some(pipe) = result_from {
            worker.result = Some(spawn_named_thread("result", move || {
                let mut bytes = Vec::new();
                // Output before a failure is still returned; its receiver checks it.
                drop(File::from(pipe).read_to_end(&mut bytes));
                bytes
            })?);
        }
        drop(spawn_named_thread("exit", move || {
            wait_without_reaping(group);
            on_exit();
        })?);
        Ok(worker)
    }

    /// Ends the worker's whole group: first with the signal `manner`, then with every harsher one.
    /// `exited` waits until `on_exit` was called, the given time has passed, or the caller requests
    /// a harsher signal.
    pub(crate) fn stop_group(
        &self,
        mut manner: StopSignal,
        exited: impl Fn(StopSignal, Instant) -> ExitWait,
    ) {
        loop {
            let (signal, grace, next) = match manner {
                StopSignal::Interrupt => {
                    (Signal::INT, INTERRUPT_GRACE_PERIOD, StopSignal::Terminate)
                }
                StopSignal::Terminate => (Signal::TERM, TERMINATE_GRACE_PERIOD, StopSignal::Kill),
                // Only a process that is stuck in the kernel survives this; then reaping it blocks,
                // too.
                StopSignal::Kill => (Signal::KILL, 5 * TERMINATE_GRACE_PERIOD, StopSignal::Kill),
            };
            self.signal_group(signal);
            manner = match exited(manner, Instant::now() + grace) {
                ExitWait::Exited => return,
                ExitWait::TimedOut if manner == StopSignal::Kill => return,
                ExitWait::TimedOut => next,
                ExitWait::Escalated(harsher) => harsher,
            };
        }
    }

    /// Reaps the ended worker, kills the processes that it left behind, and collects its output. It
    /// waits for a slow receiver of the output, unless `given_up` returns true.
    ///
    /// # Errors
    /// `System` when waiting for the process fails.
    pub(crate) fn reap_and_collect_output(
        mut self,
        mut given_up: impl FnMut() -> bool,
    ) -> Result<WorkerExit> {
        // Kills the rest of the group first, because a process that is left would keep the pipes
        // open.
        let status = self.reap_process();
        let mut deadline = Instant::now() + OUTPUT_DRAIN_TIMEOUT;
        for reader in self.readers.drain(..) {
            loop {
                if reader.wait_one_poll_for_end() {
                    break drop(reader.thread.join());
                }
                if reader.has_pending_lines.load(Ordering::Acquire) {
                    deadline = Instant::now() + OUTPUT_DRAIN_TIMEOUT;
                }
                if given_up() || Instant::now() >= deadline {
                    break warn_unread_output(reader.stream);
                }
            }
        }
        let result = self.result.take().and_then(|reader| join_thread_until(reader, deadline));
        let stderr_tail = self.tail.lock().last_lines().map(str::to_owned).collect();
        Ok(WorkerExit {
            exit_kind: exit_kind(status?),
            stderr_tail,
            // A worker that ended early wrote nothing, which is no result.
            result: result.filter(|bytes| !bytes.is_empty()),
        })
    }

    fn reap_process(&mut self) -> Result<ExitStatus> {
        let mut child = self.child.lock();
        // The leader is a zombie until it is reaped below, so no other process can have the group's
        // number.
        kill_group(self.group, Signal::KILL);
        let status = match child.take() {
            Some(mut child) => child.wait(),
            None => Err(io::Error::other("it was reaped before")),
        };
        // Only now: if this process is killed before, the guard must still end the group.
        if let Some(guard) = self.guard.take() {
            guard.dismiss_guard();
        }
        status.map_err(|source| Error::System { what: "waiting for the worker", source })
    }

    fn signal_group(&self, signal: Signal) {
        let child = self.child.lock();
        if child.is_some() {
            kill_group(self.group, signal);
        }
    }

    fn spawn_output_reader(
        &mut self,
        name: &str,
        stream: OutputStream,
        mut pipe: impl Read + Send + 'static,
        mut take: impl FnMut(String, LineEnding) + Send + 'static,
    ) -> Result<()> {
        let handing_on = Arc::new(AtomicBool::new(false));
        let hands_on = Arc::clone(&handing_on);
        let (ends, end) = mpsc::channel::<()>();
        let thread = spawn_named_thread(name, move || {
            let mut splitter = LineSplitter::default();
            // The capacity of a pipe, so that one read empties it.
            let mut buffer = vec![0; 64 << 10];
            loop {
                match pipe.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(length) => {
                        hands_on.store(true, Ordering::Release);
                        splitter.push_bytes(&buffer[..length], &mut take);
                        hands_on.store(false, Ordering::Release);
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => break,
                }
            }
            hands_on.store(true, Ordering::Release);
            splitter.finish_stream(&mut take);
            drop(ends);
        })?;
        self.readers.push(WorkerOutputReader {
            stream,
            thread,
            has_pending_lines: handing_on,
            thread_end: end,
        });
        Ok(())
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        if self.child.lock().is_some() {
            drop(self.reap_process());
        }
    }
}

pub(crate) fn kill_group(group: Pid, signal: Signal) {
    if let Err(error) = kill_process_group(group, signal) {
        // If all processes of the group have ended, the signal has no receiver.
        tracing::debug!(%error, group = group.as_raw_pid(), "no process took the signal");
    }
}

fn warn_unread_output(stream: OutputStream) {
    tracing::warn!(%stream, "the rest of a worker's output is not read");
}

fn exit_kind(status: ExitStatus) -> ExitKind {
    match (status.code(), status.signal()) {
        (Some(code), _) => ExitKind::Code(code),
        (None, Some(signal)) => ExitKind::Signal(signal),
        (None, None) => ExitKind::NotStarted("the system does not say how it ended".to_owned()),
    }
}

/// Blocks until the process has ended, without reaping it.
pub(crate) fn wait_without_reaping(pid: Pid) {
    loop {
        match waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Err(rustix::io::Errno::INTR) => {}
            // Other code of this process reaped it: it has ended in this case, too.
            Ok(_) | Err(_) => return,
        }
    }
}

/// Returns a pipe whose ends do not collide with the child's standard descriptors.
fn create_pipe() -> Result<(OwnedFd, OwnedFd)> {
    let system =
        |what| move |error: rustix::io::Errno| Error::System { what, source: error.into() };
    let (read, write) = pipe_with(PipeFlags::CLOEXEC).map_err(system("making a pipe"))?;
    let above = |end: OwnedFd| {
        // A process that was started without standard streams gets their numbers for its first
        // pipes.
        if end.as_raw_fd() > 2 {
            return Ok(end);
        }
        rustix::io::fcntl_dupfd_cloexec(&end, 3).map_err(system("moving a pipe"))
    };
    Ok((above(read)?, above(write)?))
}

pub(crate) fn child_pid(child: &Child) -> Result<Pid> {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or_else(|| Error::System {
        what: "reading the worker's number",
        source: io::Error::other(child.id().to_string()),
    })
}

fn spawn_named_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    thread::Builder::new()
        .name(format!("farandole-{name}"))
        .spawn(work)
        .map_err(|source| Error::System { what: "starting a thread", source })
}

/// Returns the result of a thread if it ends before the deadline; otherwise, the thread is
/// detached.
fn join_thread_until<T: Send + 'static>(thread: JoinHandle<T>, deadline: Instant) -> Option<T> {
    let (sender, receiver) = mpsc::channel();
    let joiner = thread::Builder::new().name("farandole-join".to_owned()).spawn(move || {
        // There is no receiver after the deadline.
        drop(sender.send(thread.join()));
    });
    drop(joiner.ok()?);
    receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()?.ok()
}
