// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The program that runs a command on another host: ssh, a batch system's program, or a similar
//! one.

use std::path::Path;
use std::time::Duration;

use crate::error::{Error, Result};

/// Placeholder of the host in the words of a [`RemoteShell`].
const HOST_PLACEHOLDER: &str = "{host}";
/// Time that ssh waits for a connection by default.
const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time for which ssh waits for a connection.
const MAX_CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// Time between two keep-alive messages of ssh. Routers forget an idle connection after four
/// minutes or more, and output does not use the connection.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// Number of unanswered keep-alive messages after which ssh gives a connection up. The registrar
/// detects lost hosts much earlier.
const MAX_UNANSWERED_KEEP_ALIVES: u32 = 10;

/// The words of a command that connects to another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteShell {
    words: Vec<String>,
}

impl Default for RemoteShell {
    /// Returns OpenSSH with the user's configuration.
    fn default() -> Self {
        Self::with_ssh_options(vec!["ssh".to_owned()], None, None, DEFAULT_CONNECT_TIMEOUT)
    }
}

impl RemoteShell {
    /// Returns OpenSSH, or a program with the same options. ssh reads keys, known hosts, jump hosts
    /// and `~/.ssh/config` itself. It must not ask for a password, because there may be no user to
    /// type it.
    ///
    /// # Errors
    /// `Usage` for a command that a shell could not parse.
    pub fn from_ssh_command(
        command: &str,
        port: Option<u16>,
        identity: Option<&Path>,
        connect: Duration,
    ) -> Result<Self> {
        Ok(Self::with_ssh_options(split_shell_command(command)?, port, identity, connect))
    }

    fn with_ssh_options(
        mut words: Vec<String>,
        port: Option<u16>,
        identity: Option<&Path>,
        connect: Duration,
    ) -> Self {
        let connect = connect.clamp(Duration::from_secs(1), MAX_CONNECT_TIMEOUT).as_secs();
        // Without a terminal: one would change the bytes of the protocol, such as line feeds.
        words.push("-T".to_owned());
        for option in [
            // A prompt for a password would wait for ever, and would read the protocol as the
            // answer.
            "BatchMode=yes".to_owned(),
            format!("ConnectTimeout={connect}"),
            format!("ServerAliveInterval={}", KEEP_ALIVE_INTERVAL.as_secs()),
            format!("ServerAliveCountMax={MAX_UNANSWERED_KEEP_ALIVES}"),
        ] {
            words.extend(["-o".to_owned(), option]);
        }
        if let Some(port) = port {
            words.extend(["-p".to_owned(), port.to_string()]);
        }
        if let Some(identity) = identity {
            words.extend(["-i".to_owned(), identity.display().to_string()]);
        }
        words.push(HOST_PLACEHOLDER.to_owned());
        Self { words }
    }

    /// Returns any program that is called as `PROGRAM HOST COMMAND` and forwards its standard
    /// input, such as the rsh agent of an MPI. If one of its words contains `{host}`, the host
    /// replaces that instead.
    ///
    /// # Errors
    /// `Usage` for a command that a shell could not parse.
    pub fn from_command(command: &str) -> Result<Self> {
        let mut words = split_shell_command(command)?;
        if !words.iter().any(|word| word.contains(HOST_PLACEHOLDER)) {
            words.push(HOST_PLACEHOLDER.to_owned());
        }
        Ok(Self { words })
    }

    /// Parses the value of `--ssh-command`: a program with the name ssh gets ssh's options.
    ///
    /// # Errors
    /// Like [`RemoteShell::from_ssh_command`].
    pub fn parse_ssh_command_option(
        command: &str,
        port: Option<u16>,
        identity: Option<&Path>,
        connect: Duration,
    ) -> Result<Self> {
        let program = split_shell_command(command)?.into_iter().next().unwrap_or_default();
        if Path::new(&program).file_name().is_some_and(|name| name == "ssh") {
            return Self::from_ssh_command(command, port, identity, connect);
        }
        if port.is_some() || identity.is_some() {
            let reason = format!(
                "a port and an identity file are for ssh, and hosts are reached by: {command}"
            );
            return Err(Error::Usage { reason });
        }
        Self::from_command(command)
    }

    /// Returns Slurm's program: a step of one task on the host, beside the steps that run there.
    pub(crate) fn via_srun() -> Self {
        Self::from_words(&[
            "srun",
            "--quiet",
            "--nodes=1",
            "--ntasks=1",
            // The step runs beside the step of the launcher, which already has the resources.
            "--overlap",
            "--mpi=none",
            // The agent's frames must arrive at once and not at the end of a line.
            "--unbuffered",
            "--nodelist={host}",
            "/bin/sh",
            "-c",
        ])
    }

    /// Returns a shell on this host, without a connecting program.
    pub(crate) fn without_connecting_program() -> Self {
        Self::from_words(&["/bin/sh", "-c"])
    }

    /// Returns LSF's program.
    pub(crate) fn via_blaunch() -> Self {
        Self::from_words(&["blaunch", HOST_PLACEHOLDER])
    }

    /// Returns Grid Engine's program.
    pub(crate) fn via_qrsh() -> Self {
        Self::from_words(&["qrsh", "-inherit", HOST_PLACEHOLDER])
    }

    /// Returns Kubernetes' program.
    pub(crate) fn via_kubectl(program: &str) -> Self {
        Self::from_words(&[program, "exec", "-i", HOST_PLACEHOLDER, "--", "/bin/sh", "-c"])
    }

    /// Returns the program and its arguments that run `script`, a line of POSIX shell, on `host`.
    pub(crate) fn build_argv(&self, host: &str, script: &str) -> Vec<String> {
        let words = self.words.iter().map(|word| word.replace(HOST_PLACEHOLDER, host));
        words.chain([script.to_owned()]).collect()
    }

    /// Returns the program.
    pub(crate) fn program_name(&self) -> &str {
        self.words.first().map_or("", String::as_str)
    }

    fn from_words(words: &[&str]) -> Self {
        Self { words: words.iter().map(|word| (*word).to_owned()).collect() }
    }
}

/// Quotes a word for a POSIX shell.
pub(crate) fn quote_word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn split_shell_command(command: &str) -> Result<Vec<String>> {
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
        let shell = RemoteShell::parse_ssh_command_option(
            "ssh -F 'my config'",
            Some(2222),
            Some(Path::new("/key")),
            DEFAULT_CONNECT_TIMEOUT,
        )
        .unwrap();
        let words = shell.build_argv("n1", "true");
        assert_eq!(
            words.join(" "),
            "ssh -F my config -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=30 \
             -o ServerAliveCountMax=10 -p 2222 -i /key n1 true"
        );
    }

    #[test]
    fn another_program_takes_the_host_where_it_says() {
        let words = |command| {
            RemoteShell::parse_ssh_command_option(command, None, None, DEFAULT_CONNECT_TIMEOUT)
                .unwrap()
                .build_argv("n1", "a b")
        };
        assert_eq!(words("/etc/mpi/kubexec.sh"), ["/etc/mpi/kubexec.sh", "n1", "a b"]);
        assert_eq!(words("run --on={host} --"), ["run", "--on=n1", "--", "a b"]);
        let error =
            RemoteShell::parse_ssh_command_option("rsh", Some(1), None, DEFAULT_CONNECT_TIMEOUT)
                .unwrap_err()
                .to_string();
        assert!(error.ends_with("reached by: rsh"), "{error}");
        for wrong in ["", "  ", "ssh 'open"] {
            assert!(
                RemoteShell::parse_ssh_command_option(wrong, None, None, DEFAULT_CONNECT_TIMEOUT)
                    .is_err(),
                "{wrong}"
            );
        }
    }

    proptest! {
        #[test]
        fn a_quoted_word_is_read_back_as_it_was(word in "[^\0]*") {
            prop_assert_eq!(shlex::split(&quote_word(&word)), Some(vec![word]));
        }
    }
}
