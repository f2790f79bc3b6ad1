// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The launcher's side of another host: one connection, one agent there.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufRead as _, BufReader, Read, Write as _};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use farandole_registrar::{Ticket, signal_name};
use farandole_world::TaskId;
use parking_lot::Mutex;
use rustix::process::{Pid, Signal};

use crate::agent::Outcome;
use crate::error::{Error, Result};
use crate::lines::{Ending, Splitter, Tail};
use crate::orders::{Ended, GREETING, Hello, Kind, Order, VERSION, read, write, write_json};
use crate::shell::{Shell, quoted};
use crate::spawn::{spawn, spawn_lasting};
use crate::worker::{kill_group, pid_of, wait_without_reaping};

/// Bytes of a login shell's own words that are skipped before an agent must have greeted.
const CHATTER: u64 = 1 << 20;
/// Lines of the program's stderr that a failure tells.
const TAIL: usize = 12;
/// Longest time for the last lines on stderr after the agent has ended.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The program to run on another host.
#[derive(Clone, Debug)]
pub struct RemoteTasks {
    /// The host, as its shell knows it.
    pub host: String,
    /// The program that connects to the host.
    pub shell: Shell,
    /// The Python interpreter there that has the package.
    pub python: String,
    /// Folders that its agent is to import from, as `PYTHONPATH` has them, if any.
    pub python_path: Option<String>,
    /// Version of the launcher's own interpreter, where workers there read what it has pickled:
    /// then theirs must be the same.
    pub same_python: Option<String>,
    /// Address and secrets of the registrar.
    pub ticket: Ticket,
    /// The host's tasks.
    pub tasks: Vec<u32>,
    /// Whether they are of an elastic job.
    pub elastic: bool,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Changes to the environment of that host; `None` removes.
    pub environment: BTreeMap<String, Option<String>>,
    /// Folder in which workers start, if it exists there.
    pub folder: Option<String>,
    /// Bytes that each worker reads from `FARANDOLE_PAYLOAD_FD`, if any.
    pub payload: Option<Arc<Vec<u8>>>,
    /// Whether workers may write a result to `FARANDOLE_RESULT_FD`.
    pub collect_result: bool,
    /// Longest time for registration and assignment.
    pub start_timeout: Duration,
    /// Longest time for which the registrar may be silent before the workers are ended.
    pub peer_timeout: Duration,
    /// The same for a registrar with a journal, which may come back; zero without one.
    pub outage: Duration,
    /// Whether the program that reaches the host continues after the end of this process.
    pub lasting: bool,
}

/// An event of another host.
#[derive(Debug)]
pub enum Notice {
    /// Its agent has started and has its order.
    Ready,
    /// A worker ended, or could not be run.
    Ended {
        /// Its task.
        task: TaskId,
        /// The outcome.
        outcome: Result<Outcome>,
    },
    /// The connection has ended, and some tasks' ends were not reported.
    Gone {
        /// The tasks.
        tasks: BTreeSet<u32>,
        /// The error, with the name of the host.
        error: Error,
    },
    /// The connection has ended, and all ends were reported.
    Done,
}

/// A connection to another host. Dropping it ends the workers there.
pub struct Remote {
    host: String,
    /// Whether the workers continue after the end of our words.
    outlives: bool,
    group: Pid,
    /// Held while signalling and while reaping, so that no signal goes to a process that took over
    /// the number.
    child: Arc<Mutex<Option<Child>>>,
    orders: Arc<Mutex<Option<ChildStdin>>>,
}

impl Remote {
    /// Starts the program that reaches the host, and hands every notice to `tell`, from threads of
    /// its own, until `Gone` or `Done`.
    ///
    /// # Errors
    /// `Host` when the program cannot be started.
    pub fn start(tasks: RemoteTasks, tell: impl Fn(Notice) + Send + 'static) -> Result<Self> {
        let argv = tasks.shell.argv(&tasks.host, &script(&tasks));
        let mut command = Command::new(tasks.shell.program());
        command
            .args(&argv[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let failed = |reason: String| Error::Host { host: tasks.host.clone(), reason };
        let start = if tasks.lasting { spawn_lasting(command) } else { spawn(command, Vec::new()) };
        let mut child = start
            .map_err(|error| failed(format!("cannot start {}: {error}", tasks.shell.program())))?;
        let group = pid_of(&child)?;
        let (Some(stdin), Some(stdout), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(failed("its program has no pipes".to_owned()));
        };
        let remote = Self {
            host: tasks.host.clone(),
            outlives: !tasks.outage.is_zero(),
            group,
            child: Arc::new(Mutex::new(Some(child))),
            orders: Arc::new(Mutex::new(Some(stdin))),
        };
        let (words, tail) = mpsc::channel();
        let named =
            |name: &str| thread::Builder::new().name(format!("farandole-{name}-{}", tasks.host));
        let system = |source| Error::System { what: "starting a thread", source };
        let host = tasks.host.clone();
        named("err").spawn(move || drop(words.send(listen(&host, stderr)))).map_err(system)?;
        let (orders, child) = (Arc::clone(&remote.orders), Arc::clone(&remote.child));
        named("host")
            .spawn(move || converse(&tasks, stdout, &orders, (group, &child), &tail, &tell))
            .map_err(system)?;
        Ok(remote)
    }

    /// Returns the host.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Asks the workers there to end.
    pub fn interrupt(&self) {
        self.say(Kind::Interrupt);
    }

    /// Tells the workers there to end.
    pub fn terminate(&self) {
        self.say(Kind::Terminate);
    }

    /// Ends the workers there at once.
    pub fn kill(&self) {
        self.say(Kind::Kill);
    }

    /// Ends the connection, however unwilling: an agent at its other end then ends the workers.
    pub fn hang_up(&self) {
        if self.outlives {
            self.terminate();
        }
        // Dropping our end of the pipe tells the agent; a program that does not pass it on is
        // ended.
        drop(self.orders.lock().take());
        if self.child.lock().is_some() {
            kill_group(self.group, Signal::TERM);
        }
    }

    fn say(&self, kind: Kind) {
        if let Some(pipe) = self.orders.lock().as_mut() {
            // An agent that is gone has ended its workers.
            drop(write(pipe, kind, b""));
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.hang_up();
    }
}

/// Returns the script that the host's shell runs. Secrets and variables come through standard
/// input, because everybody on both hosts can see a command line.
fn script(tasks: &RemoteTasks) -> String {
    let path = match &tasks.python_path {
        Some(path) => format!("PYTHONPATH={} ", quoted(path)),
        None => String::new(),
    };
    let line = format!("{path}exec {} -m farandole agent", quoted(&tasks.python));
    // Relative entries of the path, and an interpreter that is given so, mean the launcher's
    // folder.
    let line = match &tasks.folder {
        Some(folder) => format!("cd {} 2>/dev/null; {line}", quoted(folder)),
        None => line,
    };
    // Whatever the user's login shell is, it can start this one.
    format!("exec /bin/sh -c {}", quoted(&line))
}

/// Speaks with the agent until it is gone.
fn converse(
    tasks: &RemoteTasks,
    stdout: impl Read,
    orders: &Mutex<Option<ChildStdin>>,
    (group, child): (Pid, &Mutex<Option<Child>>),
    tail: &mpsc::Receiver<Vec<String>>,
    tell: &impl Fn(Notice),
) {
    let mut open: BTreeSet<u32> = tasks.tasks.iter().copied().collect();
    let mut input = BufReader::new(stdout);
    let heard = hear(tasks, &mut input, orders, &mut open, tell);
    drop(orders.lock().take());
    drop(input);
    if let Err(Said::Refused(_)) = &heard {
        // It waits for an order that will not come.
        kill_group(group, Signal::TERM);
    }
    wait_without_reaping(group);
    let status = child
        .lock()
        .take()
        .map_or_else(|| Err(io::ErrorKind::NotFound.into()), |mut child| child.wait());
    if open.is_empty() {
        return tell(Notice::Done);
    }
    let reason = match heard {
        Err(Said::Refused(reason)) => reason,
        Err(Said::Broken(error)) => {
            tracing::debug!(%error, host = tasks.host, "the agent's words broke off");
            epitaph(status, &last_words(tail))
        }
        Ok(()) => epitaph(status, &last_words(tail)),
    };
    tell(Notice::Gone { tasks: open, error: Error::Host { host: tasks.host.clone(), reason } });
}

/// The reason why an agent sends no more messages.
enum Said {
    /// It is not one that we may work with.
    Refused(String),
    /// A message was not understood, or could not be answered.
    Broken(io::Error),
}

impl From<io::Error> for Said {
    fn from(error: io::Error) -> Self {
        Self::Broken(error)
    }
}

fn hear(
    tasks: &RemoteTasks,
    input: &mut impl io::BufRead,
    orders: &Mutex<Option<ChildStdin>>,
    open: &mut BTreeSet<u32>,
    tell: &impl Fn(Notice),
) -> std::result::Result<(), Said> {
    skip_chatter(input)?;
    let Some((Kind::Hello, body)) = read(input)? else { return Ok(()) };
    let hello: Hello = serde_json::from_slice(&body).map_err(io::Error::other)?;
    admissible(&hello, tasks.same_python.as_deref()).map_err(Said::Refused)?;
    give_order(tasks, orders)?;
    tell(Notice::Ready);
    while let Some((kind, body)) = read(input)? {
        if kind != Kind::Ended {
            continue;
        }
        let ended: Ended = serde_json::from_slice(&body).map_err(io::Error::other)?;
        let result = match ended.result.then(|| read(input)).transpose()?.flatten() {
            Some((Kind::Result, bytes)) => Some(bytes),
            Some(_) => return Err(io::Error::from(io::ErrorKind::InvalidData).into()),
            None => None,
        };
        let task = ended.task();
        if open.remove(&task.0) {
            tell(Notice::Ended { task, outcome: ended.outcome(&tasks.host, result) });
        }
    }
    Ok(())
}

/// Reads past what a login shell prints.
fn skip_chatter(input: &mut impl io::BufRead) -> io::Result<()> {
    let mut limited = input.take(CHATTER);
    loop {
        let mut line = Vec::new();
        if limited.read_until(b'\n', &mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if line.trim_ascii_end() == GREETING.as_bytes() {
            return Ok(());
        }
    }
}

fn admissible(hello: &Hello, same_python: Option<&str>) -> std::result::Result<(), String> {
    let ours = env!("CARGO_PKG_VERSION");
    if hello.version != VERSION && hello.farandole == ours {
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
        Some(python) if minor(python) != minor(&hello.python) => Err(format!(
            "Python {} runs there ({}), and {python} here; a function travels only between \
             interpreters of one minor version",
            hello.python, hello.executable
        )),
        _ => Ok(()),
    }
}

fn give_order(tasks: &RemoteTasks, orders: &Mutex<Option<ChildStdin>>) -> io::Result<()> {
    let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let order = Order {
        ticket: tasks.ticket.encode(),
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
    write_json(pipe, Kind::Order, &order)?;
    if let Some(payload) = &tasks.payload {
        write(pipe, Kind::Payload, payload)?;
    }
    pipe.flush()
}

/// Reads the program's stderr to its end and keeps the last lines; each is also an event, for a job
/// that continues.
fn listen(host: &str, mut stderr: impl Read) -> Vec<String> {
    let mut splitter = Splitter::default();
    let mut tail = Tail::new(TAIL);
    let mut take = |line: String, ending: Ending| {
        tracing::info!(host, "{line}");
        tail.push(&line, ending);
    };
    let mut buffer = [0; 8 << 10];
    while let Ok(length) = stderr.read(&mut buffer) {
        if length == 0 {
            break;
        }
        splitter.feed(&buffer[..length], &mut take);
    }
    splitter.finish(&mut take);
    tail.lines().map(str::to_owned).collect()
}

fn last_words(tail: &mpsc::Receiver<Vec<String>>) -> Vec<String> {
    // A process that the program left behind may hold the pipe.
    tail.recv_timeout(LAST_WORDS).unwrap_or_default()
}

/// Describes the end of a connection: the program's own last words, or its exit status.
fn epitaph(status: io::Result<ExitStatus>, words: &[String]) -> String {
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

    fn hello(farandole: &str, python: &str) -> Hello {
        Hello {
            farandole: farandole.to_owned(),
            ..Hello::new(python.to_owned(), "/usr/bin/python3".to_owned())
        }
    }

    #[test]
    fn another_version_is_refused_by_name_and_another_python_only_where_functions_travel() {
        let ours = env!("CARGO_PKG_VERSION");
        assert_eq!(admissible(&hello(ours, "3.12.1"), None), Ok(()));
        assert_eq!(admissible(&hello(ours, "3.12.1"), Some("3.12.9")), Ok(()));
        let python = admissible(&hello(ours, "3.12.1"), Some("3.11.2")).unwrap_err();
        assert!(
            python.starts_with("Python 3.12.1 runs there (/usr/bin/python3), and 3.11.2 here"),
            "{python}"
        );
        let version = admissible(&hello("9.9.9", "3.11.2"), None).unwrap_err();
        assert!(version.starts_with("farandole 9.9.9 is installed there"), "{version}");
    }

    #[test]
    fn output_of_a_login_shell_is_skipped() {
        let mut input =
            io::Cursor::new([b"Welcome!\n\xff\n", GREETING.as_bytes(), b"\nrest"].concat());
        skip_chatter(&mut input).unwrap();
        let mut rest = String::new();
        input.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "rest");
        assert!(skip_chatter(&mut io::Cursor::new(b"no agent\n")).is_err());
    }

    #[test]
    fn the_programs_own_words_are_the_reason() {
        use std::os::unix::process::ExitStatusExt as _;
        let words =
            ["ssh: connect to host h3 port 22: Connection refused\r".to_owned(), String::new()];
        assert_eq!(
            epitaph(Ok(ExitStatus::from_raw(255 << 8)), &words),
            "ssh: connect to host h3 port 22: Connection refused"
        );
        assert_eq!(
            epitaph(Ok(ExitStatus::from_raw(9)), &[]),
            "the connection was ended by SIGKILL"
        );
    }
}
