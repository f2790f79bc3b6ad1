// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A tiny process that outlives this one just long enough to end a worker's whole process group.
//!
//! The kernel's parent-death signal reaches the worker alone; its children (data loaders) would live on. The guard is
//! a shell blocked on a pipe that only this process holds: a line means all is well, an end of file that we are gone.

use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use rustix::process::Pid;

const SCRIPT: &str = r#"read -r word || kill -9 "-$1""#;

/// The guard of one process group.
pub(crate) struct Guard {
    shell: Child,
}

impl Guard {
    /// Starts to guard `group`.
    ///
    /// # Errors
    /// As `Command::spawn`.
    pub(crate) fn start(group: Pid) -> io::Result<Self> {
        let shell = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "farandole-guard", &group.as_raw_nonzero().to_string()])
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Out of the terminal's foreground group, so that Ctrl-C does not end it.
            .process_group(0)
            .spawn()?;
        Ok(Self { shell })
    }

    /// Dismisses the guard: the group is gone.
    pub(crate) fn dismiss(mut self) {
        if let Some(mut pipe) = self.shell.stdin.take() {
            // A guard that is gone already needs no dismissal.
            drop(pipe.write_all(b"done\n"));
        }
        drop(self.shell.wait());
    }
}
