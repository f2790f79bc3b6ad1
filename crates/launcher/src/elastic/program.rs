// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A query of an external program: its output, or why there is none.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::discovery::Stop;
use crate::guard::Guard;
use crate::spawn::spawn;
use crate::worker::{kill_group, pid_of, wait_without_reaping};

/// Interval at which the caller is asked whether the answer is still wanted.
const SLICE: Duration = Duration::from_millis(50);
/// Longest time for the rest of the output after the program and all its children have ended.
const DRAIN: Duration = Duration::from_secs(1);
/// Bytes of the output that are read.
const MOST: u64 = 4 << 20;
/// Bytes of stderr that a failure tells.
const WORDS: usize = 2000;

/// The outcome of a program.
#[derive(Debug)]
pub(super) struct Answer {
    /// Its exit code; `None` after a signal.
    pub(super) code: Option<i32>,
    pub(super) stdout: String,
    /// The end of its stderr, in one line.
    pub(super) words: String,
}

/// Runs a program to its end, and ends what it leaves behind.
///
/// # Errors
/// It could not be started, or did not end within `limit`.
pub(super) fn answer(mut command: Command, limit: Duration, stop: &Stop) -> Result<Answer, String> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child =
        spawn(command, Vec::new()).map_err(|error| format!("cannot be started: {error}"))?;
    let group = pid_of(&child).map_err(|error| error.to_string())?;
    let ended = watched(&mut child, limit, stop);
    // The leader is not reaped, so the number of the group is still its own.
    kill_group(group, Signal::KILL);
    let status = child.wait().map_err(|error| format!("cannot be waited for: {error}"))?;
    let (stdout, stderr) = ended?;
    let text = |output: &mpsc::Receiver<Vec<u8>>| {
        String::from_utf8_lossy(&output.recv_timeout(DRAIN).unwrap_or_default()).into_owned()
    };
    Ok(Answer { code: status.code(), stdout: text(&stdout), words: one_line(&text(&stderr)) })
}

/// The program's output to stdout and to stderr.
type Outputs = (mpsc::Receiver<Vec<u8>>, mpsc::Receiver<Vec<u8>>);

/// Waits until the program has ended; it is then neither reaped nor are its outputs complete.
fn watched(child: &mut Child, limit: Duration, stop: &Stop) -> Result<Outputs, String> {
    let deadline = Instant::now() + limit;
    let group = pid_of(child).map_err(|error| error.to_string())?;
    let guard = Guard::start(group).map_err(|error| error.to_string())?;
    let (sender, exited) = mpsc::channel();
    let outputs = (collected(child.stdout.take())?, collected(child.stderr.take())?);
    thread(move || {
        wait_without_reaping(group);
        // There is no receiver once the time has passed.
        let _gone = sender.send(());
    })?;
    let ended = loop {
        match exited.recv_timeout(SLICE) {
            Ok(()) => break Ok(outputs),
            Err(_) if stop.is_stopped() => break Err("is no longer needed".to_owned()),
            Err(_) if Instant::now() >= deadline => {
                break Err(format!("did not end within {} s and was killed", limit.as_secs_f64()));
            }
            Err(_) => {}
        }
    };
    guard.dismiss();
    ended
}

fn collected(
    stream: Option<impl Read + Send + 'static>,
) -> Result<mpsc::Receiver<Vec<u8>>, String> {
    let (sender, receiver) = mpsc::channel();
    let mut stream = stream.ok_or("has no pipe")?;
    thread(move || {
        let mut bytes = Vec::new();
        // Output before a failure counts; the rest is read so that the program can continue.
        drop(stream.by_ref().take(MOST).read_to_end(&mut bytes));
        drop(std::io::copy(&mut stream, &mut std::io::sink()));
        drop(sender.send(bytes));
    })?;
    Ok(receiver)
}

fn thread(work: impl FnOnce() + Send + 'static) -> Result<(), String> {
    let started = thread::Builder::new().name("farandole-discovery".to_owned()).spawn(work);
    // Detached: it ends with the program.
    started.map(drop).map_err(|error| format!("cannot be watched: {error}"))
}

fn one_line(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let text = lines.join("; ");
    let cut = text.char_indices().rev().nth(WORDS).map_or(0, |(at, _)| at);
    text[cut..].to_owned()
}
