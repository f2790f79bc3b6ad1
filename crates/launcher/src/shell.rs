// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The program that runs a command on another host: ssh, that of a batch system, or a similar one.

use std::path::Path;
use std::time::Duration;

use crate::error::{Error, Result};

/// The placeholder of the host in a shell's words.
const HOST: &str = "{host}";
/// Time that ssh waits for a connection by default.
const CONNECT: Duration = Duration::from_secs(10);
/// The longest that ssh waits for a connection.
const LONGEST_CONNECT: Duration = Duration::from_secs(30);

/// The words of such a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shell {
    words: Vec<String>,
}

impl Default for Shell {
    /// OpenSSH as the user has configured it.
    fn default() -> Self {
        Self::over_ssh(vec!["ssh".to_owned()], None, None, CONNECT)
    }
}

impl Shell {
    /// OpenSSH, or a program with its options. It reads keys, known hosts, jump hosts and
    /// `~/.ssh/config` itself; it must not ask for a password, because there may be no user to type
    /// it.
    ///
    /// # Errors
    /// `Usage` for a command that no shell could read.
    pub fn ssh(
        command: &str,
        port: Option<u16>,
        identity: Option<&Path>,
        connect: Duration,
    ) -> Result<Self> {
        Ok(Self::over_ssh(split(command)?, port, identity, connect))
    }

    fn over_ssh(
        mut words: Vec<String>,
        port: Option<u16>,
        identity: Option<&Path>,
        connect: Duration,
    ) -> Self {
        let connect = connect.clamp(Duration::from_secs(1), LONGEST_CONNECT).as_secs();
        let options = ["-T", "-o", "BatchMode=yes", "-o"];
        words.extend(options.map(str::to_owned));
        words.push(format!("ConnectTimeout={connect}"));
        if let Some(port) = port {
            words.extend(["-p".to_owned(), port.to_string()]);
        }
        if let Some(identity) = identity {
            words.extend(["-i".to_owned(), identity.display().to_string()]);
        }
        words.push(HOST.to_owned());
        Self { words }
    }

    /// Any program that is called as `PROGRAM HOST COMMAND` and hands its standard input on, such
    /// as an MPI's rsh agent. A word `{host}` among its own says where the host goes instead.
    ///
    /// # Errors
    /// `Usage` for a command that no shell could read.
    pub fn custom(command: &str) -> Result<Self> {
        let mut words = split(command)?;
        if !words.iter().any(|word| word.contains(HOST)) {
            words.push(HOST.to_owned());
        }
        Ok(Self { words })
    }

    /// Like `--ssh-command` has it: a program whose name is ssh gets ssh's options.
    ///
    /// # Errors
    /// Like [`Shell::ssh`].
    pub fn of(
        command: &str,
        port: Option<u16>,
        identity: Option<&Path>,
        connect: Duration,
    ) -> Result<Self> {
        let program = split(command)?.into_iter().next().unwrap_or_default();
        if Path::new(&program).file_name().is_some_and(|name| name == "ssh") {
            return Self::ssh(command, port, identity, connect);
        }
        if port.is_some() || identity.is_some() {
            let reason = format!(
                "a port and an identity file are for ssh, and hosts are reached by: {command}"
            );
            return Err(Error::Usage { reason });
        }
        Self::custom(command)
    }

    /// Slurm's: a step of one task on the host, beside the steps that run there.
    pub(crate) fn srun() -> Self {
        Self::fixed(&[
            "srun",
            "--quiet",
            "--nodes=1",
            "--ntasks=1",
            "--overlap",
            "--mpi=none",
            "--unbuffered",
            "--nodelist={host}",
            "/bin/sh",
            "-c",
        ])
    }

    /// This host's: no program in between.
    pub(crate) fn here() -> Self {
        Self::fixed(&["/bin/sh", "-c"])
    }

    /// LSF's.
    pub(crate) fn blaunch() -> Self {
        Self::fixed(&["blaunch", HOST])
    }

    /// Grid Engine's.
    pub(crate) fn qrsh() -> Self {
        Self::fixed(&["qrsh", "-inherit", HOST])
    }

    /// Kubernetes's.
    pub(crate) fn kubectl(program: &str) -> Self {
        Self::fixed(&[program, "exec", "-i", HOST, "--", "/bin/sh", "-c"])
    }

    /// Returns the program and its arguments that run `script`, a line of POSIX shell, on `host`.
    pub(crate) fn argv(&self, host: &str, script: &str) -> Vec<String> {
        let words = self.words.iter().map(|word| word.replace(HOST, host));
        words.chain([script.to_owned()]).collect()
    }

    /// Returns the program.
    pub(crate) fn program(&self) -> &str {
        self.words.first().map_or("", String::as_str)
    }

    fn fixed(words: &[&str]) -> Self {
        Self { words: words.iter().map(|word| (*word).to_owned()).collect() }
    }
}

/// Returns a word as a POSIX shell reads it back.
pub(crate) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn split(command: &str) -> Result<Vec<String>> {
    match shlex::split(command) {
        Some(words) if !words.is_empty() => Ok(words),
        _ => Err(Error::Usage {
            reason: format!("hosts cannot be reached by this command: {command:?}"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ssh_must_not_ask_and_keeps_its_own_settings() {
        let shell =
            Shell::of("ssh -F 'my config'", Some(2222), Some(Path::new("/key")), CONNECT).unwrap();
        let words = shell.argv("n1", "true");
        assert_eq!(
            words.join(" "),
            "ssh -F my config -T -o BatchMode=yes -o ConnectTimeout=10 -p 2222 -i /key n1 true"
        );
    }

    #[test]
    fn another_program_takes_the_host_where_it_says() {
        let words = |command| Shell::of(command, None, None, CONNECT).unwrap().argv("n1", "a b");
        assert_eq!(words("/etc/mpi/kubexec.sh"), ["/etc/mpi/kubexec.sh", "n1", "a b"]);
        assert_eq!(words("run --on={host} --"), ["run", "--on=n1", "--", "a b"]);
        let error = Shell::of("rsh", Some(1), None, CONNECT).unwrap_err().to_string();
        assert!(error.ends_with("reached by: rsh"), "{error}");
        for wrong in ["", "  ", "ssh 'open"] {
            assert!(Shell::of(wrong, None, None, CONNECT).is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn a_quoted_word_is_read_back_as_it_was(word in "[^\0]*") {
            prop_assert_eq!(shlex::split(&quoted(&word)), Some(vec![word]));
        }
    }
}
