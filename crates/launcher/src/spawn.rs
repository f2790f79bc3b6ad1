// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Starts processes that end with this one.
//!
//! `PR_SET_PDEATHSIG` takes effect when the forking *thread* ends, so one thread that never ends
//! forks for all callers. Between fork and exec there are only system calls, because this process
//! has several threads.

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

struct SpawnRequest {
    command: Command,
    inherited: Vec<OwnedFd>,
    detached: bool,
    reply: mpsc::SyncSender<io::Result<Child>>,
}

/// The spawner thread of this process. A forked process has no threads of its parent, and starts a
/// new one.
static SPAWNER_THREAD: Mutex<Option<(Pid, mpsc::Sender<SpawnRequest>)>> = Mutex::new(None);

/// Starts `command` as leader of a session. The kernel kills it when this process ends. The
/// descriptors in `inherited` stay open in the child under their numbers, and are closed here.
///
/// # Errors
/// Like `Command::spawn`; `ESRCH` when this process ended meanwhile.
pub(crate) fn spawn_bound_child(command: Command, inherited: Vec<OwnedFd>) -> io::Result<Child> {
    request_spawn(command, inherited, false)
}

/// Like [`spawn_bound_child`], for a process that continues when this one ends.
///
/// # Errors
/// Like `Command::spawn`.
pub(crate) fn spawn_detached_child(command: Command) -> io::Result<Child> {
    request_spawn(command, Vec::new(), true)
}

fn request_spawn(command: Command, inherited: Vec<OwnedFd>, lasting: bool) -> io::Result<Child> {
    let (reply, answer) = mpsc::sync_channel(1);
    let request = SpawnRequest { command, inherited, detached: lasting, reply };
    spawner_sender()?.send(request).map_err(|_| io::Error::other("the spawner thread is gone"))?;
    answer.recv().map_err(|_| io::Error::other("the spawner thread is gone"))?
}

fn spawner_sender() -> io::Result<mpsc::Sender<SpawnRequest>> {
    let mut slot = SPAWNER_THREAD.lock();
    if let Some((made_in, sender)) = slot.as_ref()
        && *made_in == getpid()
    {
        return Ok(sender.clone());
    }
    let (sender, requests) = mpsc::channel::<SpawnRequest>();
    // `SPAWNER_THREAD` always keeps a sender, so this thread ends only with the process.
    thread::Builder::new().name("farandole-spawner".to_owned()).spawn(move || {
        for request in requests {
            let SpawnRequest { command, inherited, detached: lasting, reply } = request;
            // A caller that gave up has dropped the receiver. Its child is not reaped until this
            // process ends.
            drop(reply.send(fork_and_exec(command, &inherited, lasting)));
        }
    })?;
    *slot = Some((getpid(), sender.clone()));
    Ok(sender)
}

fn fork_and_exec(mut command: Command, inherited: &[OwnedFd], lasting: bool) -> io::Result<Child> {
    let parent = getpid();
    let numbers: Vec<RawFd> = inherited.iter().map(AsRawFd::as_raw_fd).collect();
    let prepare = move || {
        // An own session and group: the launcher signals the whole group, and Ctrl-C does not reach
        // it twice.
        setsid()?;
        if lasting {
            return Ok(());
        }
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // If the parent ended before the call above, the signal will not be sent.
        if getppid() != Some(parent) {
            return Err(Errno::SRCH.into());
        }
        for &number in &numbers {
            // SAFETY: the descriptors are open in the parent until `fork_and_exec` returns, hence
            // also in this forked copy, and the borrow ends within the call.
            fcntl_setfd(unsafe { BorrowedFd::borrow_raw(number) }, FdFlags::empty())?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec, `prepare` makes only system calls: no lock, no allocation (the
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
        let child = spawn_bound_child(
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
        let error = spawn_bound_child(Command::new("/no/such/program"), Vec::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
