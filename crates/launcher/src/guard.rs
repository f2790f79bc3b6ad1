// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A small process that outlives this one until it has ended the worker's whole process group.
//!
//! The kernel's parent-death signal reaches the worker alone; its children (data loaders) would
//! live on. The guard is a program blocked on a pipe that only this process holds: a line means all
//! is well, an end of file that we are gone. A shell does it; where an image has none, the
//! interpreter that this process may be does as well.

use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::process::Pid;

const SHELL: &str = r#"read -r word || kill -9 "-$1""#;
const PYTHON: &str =
    "import os, sys\nif not sys.stdin.readline():\n    os.killpg(int(sys.argv[1]), 9)";

/// The guard of one process group.
pub(crate) struct Guard {
    program: Child,
}

/// A program that can be a guard: the group's number is its last argument.
struct Candidate {
    program: PathBuf,
    arguments: &'static [&'static str],
}

impl Guard {
    /// Starts to guard `group`.
    ///
    /// # Errors
    /// What kept each program from being started, when none could.
    pub(crate) fn start(group: Pid) -> io::Result<Self> {
        Self::first_of(&candidates(std::env::current_exe().ok()), group)
    }

    fn first_of(candidates: &[Candidate], group: Pid) -> io::Result<Self> {
        let mut failures = Vec::new();
        for candidate in candidates {
            match candidate.spawn(group) {
                Ok(program) => return Ok(Self { program }),
                Err(error) => failures.push(format!("{}: {error}", candidate.program.display())),
            }
        }
        Err(io::Error::other(format!(
            "no program to end a worker's processes with if this one is killed: {}",
            failures.join("; ")
        )))
    }

    /// Dismisses the guard: the group is gone.
    pub(crate) fn dismiss(mut self) {
        if let Some(mut pipe) = self.program.stdin.take() {
            // A guard that is gone already needs no dismissal.
            drop(pipe.write_all(b"done\n"));
        }
        drop(self.program.wait());
    }
}

impl Candidate {
    fn spawn(&self, group: Pid) -> io::Result<Child> {
        Command::new(&self.program)
            .args(self.arguments)
            .arg(group.as_raw_nonzero().to_string())
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Out of the terminal's foreground group, so that Ctrl-C does not end it.
            .process_group(0)
            .spawn()
    }
}

/// Best first.
fn candidates(this: Option<PathBuf>) -> Vec<Candidate> {
    let shell =
        Candidate { program: "/bin/sh".into(), arguments: &["-c", SHELL, "farandole-guard"] };
    let is_python = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python"))
    };
    let python = this
        .filter(is_python)
        .map(|program| Candidate { program, arguments: &["-I", "-S", "-c", PYTHON] });
    [shell].into_iter().chain(python).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nowhere() -> Candidate {
        Candidate { program: "/no/such/shell".into(), arguments: &[] }
    }

    /// Returns a process with a group of its own, and the guard `candidate` makes for it.
    fn guarded(candidate: Candidate) -> (Child, Guard) {
        let sleeper = Command::new("sleep").arg("600").process_group(0).spawn().unwrap();
        let group = Pid::from_raw(sleeper.id().try_into().unwrap()).unwrap();
        (sleeper, Guard::first_of(&[nowhere(), candidate], group).unwrap())
    }

    fn python() -> Candidate {
        Candidate { program: "python3".into(), arguments: &["-I", "-S", "-c", PYTHON] }
    }

    #[test]
    fn without_a_shell_the_interpreter_ends_the_group_when_this_process_is_gone() {
        use std::os::unix::process::ExitStatusExt as _;
        let (mut sleeper, mut guard) = guarded(python());
        // What the kernel does to the pipe of a process that was killed.
        drop(guard.program.stdin.take());
        assert_eq!(sleeper.wait().unwrap().signal(), Some(9));
        guard.dismiss();
    }

    #[test]
    fn a_dismissed_guard_leaves_the_group_alone() {
        for candidate in [python(), candidates(None).remove(0)] {
            let (mut sleeper, guard) = guarded(candidate);
            guard.dismiss();
            assert!(sleeper.try_wait().unwrap().is_none());
            sleeper.kill().unwrap();
            sleeper.wait().unwrap();
        }
    }

    #[test]
    fn programs_that_cannot_be_started_are_named() {
        let group = rustix::process::getpid();
        let error = Guard::first_of(&[nowhere()], group).err().unwrap().to_string();
        assert!(error.contains("/no/such/shell: No such file"), "{error}");
    }

    #[test]
    fn only_an_interpreter_is_asked_to_interpret() {
        let programs = |path: &str| -> Vec<PathBuf> {
            candidates(Some(path.into())).into_iter().map(|candidate| candidate.program).collect()
        };
        assert_eq!(
            programs("/usr/bin/python3.11"),
            ["/bin/sh", "/usr/bin/python3.11"].map(PathBuf::from)
        );
        assert_eq!(programs("/usr/bin/driver"), [PathBuf::from("/bin/sh")]);
    }
}
