// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A small process that survives this one and then kills the worker's whole process group.
//!
//! The kernel's parent-death signal reaches only the worker; its children, such as data loaders,
//! would survive. The guard is a program blocked on a pipe whose other end only this process holds:
//! a line dismisses the guard, and an end of file means that this process has ended. The guard is a
//! shell; in an image without a shell, it is the Python interpreter, if this process is one.

use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::process::Pid;

// `read` fails only at the end of the pipe, so a dismissal must be a whole line.
const SHELL_GUARD_SCRIPT: &str = r#"read -r word || kill -9 "-$1""#;
const PYTHON_GUARD_SCRIPT: &str =
    "import os, sys\nif not sys.stdin.readline():\n    os.killpg(int(sys.argv[1]), 9)";

/// The guard of one process group.
pub(crate) struct ProcessGroupGuard {
    program: Child,
}

/// A program that can be a guard. Its last argument is the number of the group.
struct GuardProgram {
    program: PathBuf,
    arguments: &'static [&'static str],
}

impl ProcessGroupGuard {
    /// Starts a guard of `group`.
    ///
    /// # Errors
    /// None of the programs could be started; the error has the reason of each.
    pub(crate) fn spawn_guard(group: Pid) -> io::Result<Self> {
        Self::spawn_first_working_guard(&guard_programs(std::env::current_exe().ok()), group)
    }

    fn spawn_first_working_guard(candidates: &[GuardProgram], group: Pid) -> io::Result<Self> {
        let mut failures = Vec::new();
        for candidate in candidates {
            match candidate.spawn_guard_program(group) {
                Ok(program) => return Ok(Self { program }),
                Err(error) => failures.push(format!("{}: {error}", candidate.program.display())),
            }
        }
        Err(io::Error::other(format!(
            "no program to end a worker's processes with if this one is killed: {}",
            failures.join("; ")
        )))
    }

    /// Dismisses the guard after the group has ended.
    pub(crate) fn dismiss_guard(mut self) {
        if let Some(mut pipe) = self.program.stdin.take() {
            // A guard that has ended needs no dismissal.
            drop(pipe.write_all(b"done\n"));
        }
        drop(self.program.wait());
    }
}

impl GuardProgram {
    fn spawn_guard_program(&self, group: Pid) -> io::Result<Child> {
        Command::new(&self.program)
            .args(self.arguments)
            .arg(group.as_raw_nonzero().to_string())
            // The guard needs no variables, and the environment of the launcher may have secrets.
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Outside the terminal's foreground group, so that Ctrl-C does not end it.
            .process_group(0)
            .spawn()
    }
}

/// Returns the programs that can be guards, best first.
fn guard_programs(this: Option<PathBuf>) -> Vec<GuardProgram> {
    let shell = GuardProgram {
        program: "/bin/sh".into(),
        arguments: &["-c", SHELL_GUARD_SCRIPT, "farandole-guard"],
    };
    let is_python = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python"))
    };
    let python = this.filter(is_python).map(|program| GuardProgram {
        program,
        // Without site packages, which take long to import and may print.
        arguments: &["-I", "-S", "-c", PYTHON_GUARD_SCRIPT],
    });
    [shell].into_iter().chain(python).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nowhere() -> GuardProgram {
        GuardProgram { program: "/no/such/shell".into(), arguments: &[] }
    }

    /// Returns a process that leads a group, and the guard that `candidate` starts for it.
    fn guarded(candidate: GuardProgram) -> (Child, ProcessGroupGuard) {
        let sleeper = Command::new("sleep").arg("600").process_group(0).spawn().unwrap();
        let group = Pid::from_raw(sleeper.id().try_into().unwrap()).unwrap();
        (
            sleeper,
            ProcessGroupGuard::spawn_first_working_guard(&[nowhere(), candidate], group).unwrap(),
        )
    }

    fn python() -> GuardProgram {
        GuardProgram {
            program: "python3".into(),
            arguments: &["-I", "-S", "-c", PYTHON_GUARD_SCRIPT],
        }
    }

    #[test]
    fn without_a_shell_the_interpreter_ends_the_group_when_this_process_is_gone() {
        use std::os::unix::process::ExitStatusExt as _;
        let (mut sleeper, mut guard) = guarded(python());
        // The kernel closes the pipe of a killed process in the same way.
        drop(guard.program.stdin.take());
        assert_eq!(sleeper.wait().unwrap().signal(), Some(9));
        guard.dismiss_guard();
    }

    #[test]
    fn a_dismissed_guard_leaves_the_group_alone() {
        for candidate in [python(), guard_programs(None).remove(0)] {
            let (mut sleeper, guard) = guarded(candidate);
            guard.dismiss_guard();
            assert!(sleeper.try_wait().unwrap().is_none());
            sleeper.kill().unwrap();
            sleeper.wait().unwrap();
        }
    }

    #[test]
    fn programs_that_cannot_be_started_are_named() {
        let group = rustix::process::getpid();
        let error = ProcessGroupGuard::spawn_first_working_guard(&[nowhere()], group)
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("/no/such/shell: No such file"), "{error}");
    }

    #[test]
    fn only_an_interpreter_is_asked_to_interpret() {
        let programs = |path: &str| -> Vec<PathBuf> {
            guard_programs(Some(path.into()))
                .into_iter()
                .map(|candidate| candidate.program)
                .collect()
        };
        assert_eq!(
            programs("/usr/bin/python3.11"),
            ["/bin/sh", "/usr/bin/python3.11"].map(PathBuf::from)
        );
        assert_eq!(programs("/usr/bin/driver"), [PathBuf::from("/bin/sh")]);
    }
}
