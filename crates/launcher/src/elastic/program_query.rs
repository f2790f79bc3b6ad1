// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A query of an external program: its output, or the reason why there is none.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::discovery::DiscoveryStopFlag;
use crate::guard::ProcessGroupGuard;
use crate::spawn::spawn_bound_child;
use crate::worker::{child_pid, kill_group, wait_without_reaping};

/// Interval at which the caller is asked whether the answer is still needed.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Longest time for the rest of the output after the program and all its children have ended.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Largest number of bytes that are read of the output.
// A script that prints without an end must not fill the launcher's memory.
const MAX_OUTPUT_BYTES: u64 = 4 << 20;
/// Largest number of characters of stderr in an error.
const MAX_STDERR_CHARS: usize = 2000;

/// The result of a program.
#[derive(Debug)]
pub(crate) struct ProgramOutput {
    /// Exit code of the program; `None` after a signal.
    pub(crate) exit_code: Option<i32>,
    pub(crate) stdout: String,
    /// The end of the program's stderr, in one line.
    pub(crate) stderr_line: String,
}

/// Runs a program to its end, then kills the processes that it left behind.
///
/// # Errors
/// It could not be started, or did not end within `limit`.
pub(crate) fn query_program(
    mut command: Command,
    limit: Duration,
    stop: &DiscoveryStopFlag,
) -> Result<ProgramOutput, String> {
    // A program that asks for input must fail, and not read the user's terminal.
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = spawn_bound_child(command, Vec::new())
        .map_err(|error| format!("cannot be started: {error}"))?;
    let group = child_pid(&child).map_err(|error| error.to_string())?;
    let ended = wait_for_exit(&mut child, limit, stop);
    // The leader is not reaped yet, so no other process can have the group's number.
    kill_group(group, Signal::KILL);
    let status = child.wait().map_err(|error| format!("cannot be waited for: {error}"))?;
    let (stdout, stderr) = ended?;
    let text = |output: &mpsc::Receiver<Vec<u8>>| {
        String::from_utf8_lossy(&output.recv_timeout(OUTPUT_DRAIN_TIMEOUT).unwrap_or_default())
            .into_owned()
    };
    Ok(ProgramOutput {
        exit_code: status.code(),
        stdout: text(&stdout),
        stderr_line: join_last_stderr_lines(&text(&stderr)),
    })
}

/// The program's output to stdout and to stderr.
type PendingProgramOutput = (mpsc::Receiver<Vec<u8>>, mpsc::Receiver<Vec<u8>>);

/// Waits until the program has ended. It is not reaped, and its output may still be incomplete.
fn wait_for_exit(
    child: &mut Child,
    limit: Duration,
    stop: &DiscoveryStopFlag,
) -> Result<PendingProgramOutput, String> {
    let deadline = Instant::now() + limit;
    let group = child_pid(child).map_err(|error| error.to_string())?;
    // If this process is killed, a script such as `kubectl` with a pipe would stay behind.
    let guard = ProcessGroupGuard::spawn_guard(group).map_err(|error| error.to_string())?;
    let (sender, exited) = mpsc::channel();
    let outputs = (collect_output(child.stdout.take())?, collect_output(child.stderr.take())?);
    spawn_query_thread(move || {
        wait_without_reaping(group);
        // The receiver is gone after the time limit.
        let _gone = sender.send(());
    })?;
    let ended = loop {
        match exited.recv_timeout(STOP_POLL_INTERVAL) {
            Ok(()) => break Ok(outputs),
            Err(_) if stop.is_stopped() => break Err("is no longer needed".to_owned()),
            Err(_) if Instant::now() >= deadline => {
                break Err(format!("did not end within {} s and was killed", limit.as_secs_f64()));
            }
            Err(_) => {}
        }
    };
    guard.dismiss_guard();
    ended
}

fn collect_output(
    stream: Option<impl Read + Send + 'static>,
) -> Result<mpsc::Receiver<Vec<u8>>, String> {
    let (sender, receiver) = mpsc::channel();
    let mut stream = stream.ok_or("has no pipe")?;
    spawn_query_thread(move || {
        let mut bytes = Vec::new();
        // Output before a failure counts. The rest is read too, so that the program can continue.
        drop(stream.by_ref().take(MAX_OUTPUT_BYTES).read_to_end(&mut bytes));
        drop(std::io::copy(&mut stream, &mut std::io::sink()));
        drop(sender.send(bytes));
    })?;
    Ok(receiver)
}

fn spawn_query_thread(work: impl FnOnce() + Send + 'static) -> Result<(), String> {
    let started = thread::Builder::new().name("farandole-discovery".to_owned()).spawn(work);
    // Detached: the thread ends with the program.
    started.map(drop).map_err(|error| format!("cannot be watched: {error}"))
}

fn join_last_stderr_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let text = lines.join("; ");
    let cut = text.char_indices().rev().nth(MAX_STDERR_CHARS).map_or(0, |(at, _)| at);
    text[cut..].to_owned()
}
