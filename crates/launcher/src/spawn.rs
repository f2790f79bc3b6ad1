// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Starts a process that dies with this one.
//!
//! `PR_SET_PDEATHSIG` fires when the *thread* that forked ends, so one thread that never ends forks
//! for all callers. Between fork and exec only system calls are made, as a fork of a process with
//! threads demands.

#![expect(unsafe_code, reason = "a hook between fork and exec")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};
use std::sync::mpsc;
use std::thread;

use parking_lot::Mutex;
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal, setsid};

struct Request {
    command: Command,
    inherited: Vec<OwnedFd>,
    lasting: bool,
    reply: mpsc::SyncSender<io::Result<Child>>,
}

/// The spawner of this process; a fork, which has no threads of its parent, starts its own.
static SPAWNER: Mutex<Option<(Pid, mpsc::Sender<Request>)>> = Mutex::new(None);

/// Starts `command` as leader of a session, to be killed by the kernel when this process ends. The
/// descriptors in `inherited` stay open in it under their numbers, and are closed here.
///
/// # Errors
/// Like `Command::spawn`; `ESRCH` when this process ended in the meantime.
pub(crate) fn spawn(command: Command, inherited: Vec<OwnedFd>) -> io::Result<Child> {
    ask(command, inherited, false)
}

/// Like [`spawn`], of a process that continues when this one ends.
///
/// # Errors
/// Like `Command::spawn`.
pub(crate) fn spawn_lasting(command: Command) -> io::Result<Child> {
    ask(command, Vec::new(), true)
}

fn ask(command: Command, inherited: Vec<OwnedFd>, lasting: bool) -> io::Result<Child> {
    let (reply, answer) = mpsc::sync_channel(1);
    let request = Request { command, inherited, lasting, reply };
    spawner()?.send(request).map_err(|_| io::Error::other("the spawner thread is gone"))?;
    answer.recv().map_err(|_| io::Error::other("the spawner thread is gone"))?
}

fn spawner() -> io::Result<mpsc::Sender<Request>> {
    let mut slot = SPAWNER.lock();
    if let Some((made_in, sender)) = slot.as_ref()
        && *made_in == getpid()
    {
        return Ok(sender.clone());
    }
    let (sender, requests) = mpsc::channel::<Request>();
    // The static keeps a sender for good, so this thread ends only with the process.
    thread::Builder::new().name("farandole-spawner".to_owned()).spawn(move || {
        for request in requests {
            let Request { command, inherited, lasting, reply } = request;
            // A caller that gave up has dropped its end; its child is then not reaped until this
            // process ends.
            drop(reply.send(start(command, &inherited, lasting)));
        }
    })?;
    *slot = Some((getpid(), sender.clone()));
    Ok(sender)
}

fn start(mut command: Command, inherited: &[OwnedFd], lasting: bool) -> io::Result<Child> {
    let parent = getpid();
    let numbers: Vec<RawFd> = inherited.iter().map(AsRawFd::as_raw_fd).collect();
    let prepare = move || {
        setsid()?;
        if lasting {
            return Ok(());
        }
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have ended before the call above: then the signal will not be sent.
        if getppid() != Some(parent) {
            return Err(Errno::SRCH.into());
        }
        for &number in &numbers {
            // SAFETY: the descriptors are open in the parent until `start` returns, hence in this
            // copy of it, and the borrow ends within the call.
            fcntl_setfd(unsafe { BorrowedFd::borrow_raw(number) }, FdFlags::empty())?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec `prepare` makes system calls only: no lock, no allocation (the
    // numbers were collected before; the errors are plain codes), no destructor.
    unsafe { command.pre_exec(prepare) };
    command.spawn()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::process::Stdio;

    use super::*;

    #[test]
    fn a_child_leads_its_own_session_and_inherits_what_it_was_given() {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let mut command = Command::new("/bin/sh");
        command.args([
            "-c",
            &format!(
                "echo hello >/proc/self/fd/{}; cut -d' ' -f6 /proc/$$/stat",
                write.as_raw_fd()
            ),
        ]);
        let child = spawn(
            {
                command.stdout(Stdio::piped());
                command
            },
            vec![write],
        )
        .unwrap();
        let pid = child.id();
        let output = child.wait_with_output().unwrap();
        let mut text = String::new();
        std::fs::File::from(read).read_to_string(&mut text).unwrap();
        assert_eq!(text, "hello\n");
        assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), pid.to_string());
    }

    #[test]
    fn a_missing_program_is_an_error_here() {
        let error = spawn(Command::new("/no/such/program"), Vec::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
