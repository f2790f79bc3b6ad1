// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The launcher's connection to another host and its agent.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufRead as _, BufReader, Read, Write as _};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use farandole_registrar::{Ticket, signal_name};
use farandole_world::TaskId;
use parking_lot::Mutex;
use rustix::process::{Pid, Signal};

use crate::agent::WorkerOutcome;
use crate::agent_protocol::{
    AGENT_GREETING, AGENT_PROTOCOL_VERSION, AgentFrameKind, AgentHello, AgentLaunchRequest,
    TaskEndMessage, read_frame, write_frame, write_json_frame,
};
use crate::error::{Error, Result};
use crate::lines::{LineEnding, LineSplitter, OutputTail};
use crate::shell::{RemoteShell, quote_word};
use crate::spawn::{spawn_bound_child, spawn_detached_child};
use crate::worker::{child_pid, kill_group, wait_without_reaping};

/// Largest number of bytes that a login shell may print before the agent's greeting.
// A host that prints without an end must become an error, not a full memory.
const MAX_LOGIN_OUTPUT_BYTES: u64 = 1 << 20;
/// Lines of the program's stderr that an error quotes.
const STDERR_TAIL_LINES: usize = 12;
/// Longest time to wait for the last lines on stderr after the agent has ended.
const STDERR_END_TIMEOUT: Duration = Duration::from_secs(1);

/// The tasks of another host, and their program.
#[derive(Clone, Debug)]
pub struct RemoteTasks {
    /// Name of the host, as `shell` accepts it.
    pub host: String,
    /// The program that connects to the host.
    pub shell: RemoteShell,
    /// The Python interpreter with the package, on that host.
    pub python: String,
    /// Folders from which the agent imports, in the format of `PYTHONPATH`, if any.
    pub python_path: Option<String>,
    /// Version of the launcher's own interpreter, if workers load objects that it pickled: then the
    /// workers' version must be the same.
    pub same_python: Option<String>,
    /// Address and secrets of the registrar.
    pub ticket: Ticket,
    /// The host's tasks.
    pub tasks: Vec<u32>,
    /// Whether the tasks belong to an elastic job.
    pub elastic: bool,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Changes to the environment of that host; `None` removes a variable.
    pub environment: BTreeMap<String, Option<String>>,
    /// Folder in which workers start, if it exists there.
    pub folder: Option<String>,
    /// Bytes that each worker reads from `FARANDOLE_PAYLOAD_FD`, if any.
    pub payload: Option<Arc<Vec<u8>>>,
    /// Whether workers may write a result to `FARANDOLE_RESULT_FD`.
    pub collect_result: bool,
    /// Longest time for registration and assignment.
    pub start_timeout: Duration,
    /// Longest time for which the registrar may be silent before the agent ends the workers.
    pub peer_timeout: Duration,
    /// Like `peer_timeout`, for a registrar with a journal, which may be restarted; zero without
    /// one.
    pub outage: Duration,
    /// Whether the program that connects to the host continues after the end of this process.
    pub detached: bool,
}

/// An event of another host.
#[derive(Debug)]
pub enum AgentNotice {
    /// The agent there has started and has its order.
    Ready,
    /// A worker ended, or could not be run.
    WorkerEnded {
        /// The task of the worker.
        task: TaskId,
        /// The outcome.
        outcome: Result<WorkerOutcome>,
    },
    /// The connection has ended, and the ends of some tasks were not reported.
    HostLost {
        /// The tasks.
        tasks: BTreeSet<u32>,
        /// The error, with the name of the host.
        error: Error,
    },
    /// The connection has ended, and the ends of all tasks were reported.
    AllReported,
}

/// A connection to another host. Dropping it ends the workers there.
pub struct RemoteAgent {
    host: String,
    group: Pid,
    /// Locked while signalling and while reaping, so that no signal goes to another process that
    /// got the same number.
    child: Arc<Mutex<Option<Child>>>,
    /// Locked while writing: a payload may take long, or for ever if the connection is silent.
    orders: Arc<Mutex<Option<ChildStdin>>>,
    last_received_at: Arc<Mutex<Instant>>,
}

/// A stream that records the time of the last received bytes.
struct ReceiptTimeReader<R> {
    stream: R,
    last_received_at: Arc<Mutex<Instant>>,
}

impl<R: Read> Read for ReceiptTimeReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.stream.read(buffer)?;
        // A large result takes long, and a host that still sends is not silent.
        *self.last_received_at.lock() = Instant::now();
        Ok(length)
    }
}

impl RemoteAgent {
    /// Starts the program that connects to the host. From then on, background threads call
    /// `on_event` with every notice until `HostLost` or `AllReported`.
    ///
    /// # Errors
    /// `Host` when the program cannot be started.
    pub fn connect_agent(
        tasks: RemoteTasks,
        on_event: impl Fn(AgentNotice) + Send + 'static,
    ) -> Result<Self> {
        let argv = tasks.shell.build_argv(&tasks.host, &remote_shell_script(&tasks));
        let mut command = Command::new(tasks.shell.program_name());
        command
            .args(&argv[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let failed = |reason: String| Error::Host { host: tasks.host.clone(), reason };
        let start = if tasks.detached {
            spawn_detached_child(command)
        } else {
            spawn_bound_child(command, Vec::new())
        };
        let mut child = start.map_err(|error| {
            failed(format!("cannot start {}: {error}", tasks.shell.program_name()))
        })?;
        let group = child_pid(&child)?;
        let (Some(stdin), Some(stdout), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(failed("its program has no pipes".to_owned()));
        };
        let remote = Self {
            host: tasks.host.clone(),
            group,
            child: Arc::new(Mutex::new(Some(child))),
            orders: Arc::new(Mutex::new(Some(stdin))),
            last_received_at: Arc::new(Mutex::new(Instant::now())),
        };
        let stdout = ReceiptTimeReader {
            stream: stdout,
            last_received_at: Arc::clone(&remote.last_received_at),
        };
        let (words, tail) = mpsc::channel();
        let named =
            |name: &str| thread::Builder::new().name(format!("farandole-{name}-{}", tasks.host));
        let system = |source| Error::System { what: "starting a thread", source };
        let host = tasks.host.clone();
        named("err")
            .spawn(move || drop(words.send(read_stderr_tail(&host, stderr))))
            .map_err(system)?;
        let (orders, child) = (Arc::clone(&remote.orders), Arc::clone(&remote.child));
        named("host")
            .spawn(move || {
                exchange_agent_messages(&tasks, stdout, &orders, (group, &child), &tail, &on_event)
            })
            .map_err(system)?;
        Ok(remote)
    }

    /// Returns the name of the host.
    pub fn host_name(&self) -> &str {
        &self.host
    }

    /// Returns the time at which the last bytes came from there, or the time of the start.
    pub(crate) fn last_received_at(&self) -> Instant {
        *self.last_received_at.lock()
    }

    /// Interrupts the workers there with SIGINT.
    pub fn interrupt_workers(&self) {
        self.send_frame(AgentFrameKind::Interrupt);
    }

    /// Terminates the workers there with SIGTERM.
    pub fn terminate_workers(&self) {
        self.send_frame(AgentFrameKind::Terminate);
    }

    /// Kills the workers there with SIGKILL.
    pub fn kill_workers(&self) {
        self.send_frame(AgentFrameKind::Kill);
    }

    /// Closes the connection, by a signal if necessary: the agent at its other end then ends the
    /// workers.
    pub fn close_connection(&self) {
        // The closed pipe alone does not end the workers while the registrar answers.
        self.terminate_workers();
        // A connecting program that does not pass the closed pipe on is ended by the signal. So is
        // one to which the order is still being written: then the pipe cannot be closed here.
        if let Some(mut orders) = self.orders.try_lock() {
            drop(orders.take());
        }
        if self.child.lock().is_some() {
            kill_group(self.group, Signal::TERM);
        }
    }

    fn send_frame(&self, kind: AgentFrameKind) {
        // While the order is still being written, no worker runs there.
        let Some(mut orders) = self.orders.try_lock() else { return };
        if let Some(pipe) = orders.as_mut() {
            // An agent that has ended has also ended its workers.
            drop(write_frame(pipe, kind, b""));
        }
    }
}

impl Drop for RemoteAgent {
    fn drop(&mut self) {
        self.close_connection();
    }
}

/// Returns the script that the host's shell runs. Secrets and variables are sent on standard input,
/// because all users of both hosts can see a command line.
fn remote_shell_script(tasks: &RemoteTasks) -> String {
    let path = match &tasks.python_path {
        Some(path) => format!("PYTHONPATH={} ", quote_word(path)),
        None => String::new(),
    };
    // `exec`, so that signals of the connecting program reach the agent and no shell stays in
    // between.
    let line = format!("{path}exec {} -m farandole agent", quote_word(&tasks.python));
    // A relative interpreter, or relative entries of its path, refer to the launcher's folder.
    let line = match &tasks.folder {
        Some(folder) => format!("cd {} 2>/dev/null; {line}", quote_word(folder)),
        None => line,
    };
    // Any login shell of the user can start /bin/sh.
    format!("exec /bin/sh -c {}", quote_word(&line))
}

/// Exchanges messages with the agent until it has ended.
fn exchange_agent_messages(
    tasks: &RemoteTasks,
    stdout: impl Read,
    orders: &Mutex<Option<ChildStdin>>,
    (group, child): (Pid, &Mutex<Option<Child>>),
    tail: &mpsc::Receiver<Vec<String>>,
    on_event: &impl Fn(AgentNotice),
) {
    let mut open: BTreeSet<u32> = tasks.tasks.iter().copied().collect();
    let mut input = BufReader::new(stdout);
    let conversation = handle_agent_messages(tasks, &mut input, orders, &mut open, on_event);
    // Closed before the wait: the connecting program ends only when its input ends.
    drop(orders.lock().take());
    drop(input);
    if let Err(ConversationEnd::Refused(_)) = &conversation {
        // The agent waits for an order that will not come.
        kill_group(group, Signal::TERM);
    }
    // The number stays taken while the child is a zombie, so a signal meets no other process.
    wait_without_reaping(group);
    let status = child
        .lock()
        .take()
        .map_or_else(|| Err(io::ErrorKind::NotFound.into()), |mut child| child.wait());
    if open.is_empty() {
        return on_event(AgentNotice::AllReported);
    }
    let reason = match conversation {
        Err(ConversationEnd::Refused(reason)) => reason,
        Err(ConversationEnd::Broken(error)) => {
            tracing::debug!(%error, host = tasks.host, "the connection to the agent ended in the middle of a message");
            describe_connection_end(status, &last_stderr_lines(tail))
        }
        Ok(()) => describe_connection_end(status, &last_stderr_lines(tail)),
    };
    on_event(AgentNotice::HostLost {
        tasks: open,
        error: Error::Host { host: tasks.host.clone(), reason },
    });
}

/// The reason why an agent sends no more messages.
enum ConversationEnd {
    /// The agent is incompatible.
    Refused(String),
    /// A message was malformed, or could not be answered.
    Broken(io::Error),
}

impl From<io::Error> for ConversationEnd {
    fn from(error: io::Error) -> Self {
        Self::Broken(error)
    }
}

fn handle_agent_messages(
    tasks: &RemoteTasks,
    input: &mut impl io::BufRead,
    orders: &Mutex<Option<ChildStdin>>,
    open: &mut BTreeSet<u32>,
    on_event: &impl Fn(AgentNotice),
) -> std::result::Result<(), ConversationEnd> {
    skip_login_output(input)?;
    let Some((AgentFrameKind::Hello, body)) = read_frame(input)? else { return Ok(()) };
    let hello: AgentHello = serde_json::from_slice(&body).map_err(io::Error::other)?;
    // Before the order, which contains the ticket: an incompatible agent gets no secret.
    check_agent_version(&hello, tasks.same_python.as_deref()).map_err(ConversationEnd::Refused)?;
    send_launch_request(tasks, orders)?;
    on_event(AgentNotice::Ready);
    while let Some((kind, body)) = read_frame(input)? {
        if kind != AgentFrameKind::Ended {
            continue;
        }
        let ended: TaskEndMessage = serde_json::from_slice(&body).map_err(io::Error::other)?;
        let result = match ended.result.then(|| read_frame(input)).transpose()?.flatten() {
            Some((AgentFrameKind::Result, bytes)) => Some(bytes),
            Some(_) => return Err(io::Error::from(io::ErrorKind::InvalidData).into()),
            None => None,
        };
        let task = ended.task_id();
        if open.remove(&task.0) {
            on_event(AgentNotice::WorkerEnded {
                task,
                outcome: ended.into_outcome(&tasks.host, result),
            });
        }
    }
    Ok(())
}

/// Skips the output of a login shell.
fn skip_login_output(input: &mut impl io::BufRead) -> io::Result<()> {
    let mut limited = input.take(MAX_LOGIN_OUTPUT_BYTES);
    loop {
        let mut line = Vec::new();
        if limited.read_until(b'\n', &mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if line.trim_ascii_end() == AGENT_GREETING.as_bytes() {
            return Ok(());
        }
    }
}

fn check_agent_version(
    hello: &AgentHello,
    same_python: Option<&str>,
) -> std::result::Result<(), String> {
    let ours = env!("CARGO_PKG_VERSION");
    if hello.version != AGENT_PROTOCOL_VERSION && hello.farandole == ours {
        return Err(format!(
            "another build of farandole {ours} is installed there ({}); install one build \
             everywhere",
            hello.executable
        ));
    }
    if hello.farandole != ours {
        return Err(format!(
            "farandole {} is installed there ({}), and {ours} here; install one version everywhere",
            hello.farandole, hello.executable
        ));
    }
    let minor = |version: &str| version.split('.').take(2).collect::<Vec<_>>().join(".");
    match same_python {
        // Bytecode in a pickled function changes between minor versions.
        Some(python) if minor(python) != minor(&hello.python) => Err(format!(
            "Python {} runs there ({}), and {python} here; a function travels only between \
             interpreters of one minor version",
            hello.python, hello.executable
        )),
        _ => Ok(()),
    }
}

fn send_launch_request(tasks: &RemoteTasks, orders: &Mutex<Option<ChildStdin>>) -> io::Result<()> {
    let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let order = AgentLaunchRequest {
        ticket: tasks.ticket.encode_text(),
        tasks: tasks.tasks.clone(),
        command: tasks.command.clone(),
        environment: tasks.environment.clone(),
        folder: tasks.folder.clone(),
        payload: tasks.payload.is_some(),
        collect_result: tasks.collect_result,
        elastic: tasks.elastic,
        start_timeout_ms: milliseconds(tasks.start_timeout),
        peer_timeout_ms: milliseconds(tasks.peer_timeout),
        outage_ms: milliseconds(tasks.outage),
    };
    let mut pipe = orders.lock();
    let pipe = pipe.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
    write_json_frame(pipe, AgentFrameKind::Order, &order)?;
    if let Some(payload) = &tasks.payload {
        write_frame(pipe, AgentFrameKind::Payload, payload)?;
    }
    pipe.flush()
}

/// Reads the program's stderr to its end and returns the last lines. Also logs each line at once,
/// for a job that continues.
fn read_stderr_tail(host: &str, mut stderr: impl Read) -> Vec<String> {
    let mut splitter = LineSplitter::default();
    let mut tail = OutputTail::new(STDERR_TAIL_LINES);
    let mut take = |line: String, ending: LineEnding| {
        tracing::info!(host, "{line}");
        tail.push(&line, ending);
    };
    let mut buffer = [0; 8 << 10];
    while let Ok(length) = stderr.read(&mut buffer) {
        if length == 0 {
            break;
        }
        splitter.push_bytes(&buffer[..length], &mut take);
    }
    splitter.finish_stream(&mut take);
    tail.last_lines().map(str::to_owned).collect()
}

fn last_stderr_lines(tail: &mpsc::Receiver<Vec<String>>) -> Vec<String> {
    // A process that the program left behind may hold the pipe.
    tail.recv_timeout(STDERR_END_TIMEOUT).unwrap_or_default()
}

/// Describes the end of a connection: by the program's last lines, or else by its exit status.
fn describe_connection_end(status: io::Result<ExitStatus>, words: &[String]) -> String {
    let how = match status {
        Ok(status) => match (status.code(), std::os::unix::process::ExitStatusExt::signal(&status))
        {
            (Some(0), _) => "the connection ended before the work was done".to_owned(),
            (Some(code), _) => format!("the connection ended with status {code}"),
            (None, Some(signal)) => {
                format!("the connection was ended by {}", signal_name(signal).unwrap_or("a signal"))
            }
            (None, None) => "the connection ended".to_owned(),
        },
        Err(error) => format!("the connection ended: {error}"),
    };
    let words: Vec<&str> =
        words.iter().map(|line| line.trim()).filter(|line| !line.is_empty()).collect();
    if words.is_empty() { how } else { words.join("; ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(farandole: &str, python: &str) -> AgentHello {
        AgentHello {
            farandole: farandole.to_owned(),
            ..AgentHello::new(python.to_owned(), "/usr/bin/python3".to_owned())
        }
    }

    #[test]
    fn another_version_is_refused_by_name_and_another_python_only_where_functions_travel() {
        let ours = env!("CARGO_PKG_VERSION");
        assert_eq!(check_agent_version(&hello(ours, "3.12.1"), None), Ok(()));
        assert_eq!(check_agent_version(&hello(ours, "3.12.1"), Some("3.12.9")), Ok(()));
        let python = check_agent_version(&hello(ours, "3.12.1"), Some("3.11.2")).unwrap_err();
        assert!(
            python.starts_with("Python 3.12.1 runs there (/usr/bin/python3), and 3.11.2 here"),
            "{python}"
        );
        let version = check_agent_version(&hello("9.9.9", "3.11.2"), None).unwrap_err();
        assert!(version.starts_with("farandole 9.9.9 is installed there"), "{version}");
    }

    #[test]
    fn output_of_a_login_shell_is_skipped() {
        let mut input =
            io::Cursor::new([b"Welcome!\n\xff\n", AGENT_GREETING.as_bytes(), b"\nrest"].concat());
        skip_login_output(&mut input).unwrap();
        let mut rest = String::new();
        input.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "rest");
        assert!(skip_login_output(&mut io::Cursor::new(b"no agent\n")).is_err());
    }

    #[test]
    fn the_programs_own_words_are_the_reason() {
        use std::os::unix::process::ExitStatusExt as _;
        let words =
            ["ssh: connect to host h3 port 22: Connection refused\r".to_owned(), String::new()];
        assert_eq!(
            describe_connection_end(Ok(ExitStatus::from_raw(255 << 8)), &words),
            "ssh: connect to host h3 port 22: Connection refused"
        );
        assert_eq!(
            describe_connection_end(Ok(ExitStatus::from_raw(9)), &[]),
            "the connection was ended by SIGKILL"
        );
    }
}
