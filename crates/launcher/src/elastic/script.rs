// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `--host-discovery-script`.

use std::process::Command;
use std::time::Duration;

use super::discovery::{DiscoverySource, DiscoveryStopFlag};
use super::program_query::query_program;
use crate::hosts::{HostSlots, split_host_slots};

/// A program that prints one host per line.
#[derive(Clone, Debug)]
pub struct DiscoveryScript {
    /// The command for the shell.
    pub command: String,
    /// Slots of a host that is printed without a number.
    pub slots_per_host: Option<u32>,
    /// Longest time for one run of the script.
    pub limit: Duration,
}

impl DiscoverySource for DiscoveryScript {
    fn find_hosts(&mut self, stop: &DiscoveryStopFlag) -> Result<Vec<HostSlots>, String> {
        let mut shell = Command::new("/bin/sh");
        // A shell, as in Horovod: the option may have arguments and pipes.
        shell.args(["-c", &self.command]);
        let answer = query_program(shell, self.limit, stop).map_err(|reason| {
            format!("Failed to execute discovery script: {} {reason}", self.command)
        })?;
        if answer.exit_code != Some(0) {
            let code = answer
                .exit_code
                .map_or_else(|| "none, it was killed".to_owned(), |code| code.to_string());
            let words = if answer.stderr_line.is_empty() {
                String::new()
            } else {
                format!(": {}", answer.stderr_line)
            };
            return Err(format!(
                "Failed to execute discovery script: {}. Exit code: {code}{words}",
                self.command
            ));
        }
        self.parse_output(&answer.stdout)
    }
}

impl DiscoveryScript {
    /// Parses the output of the program. A host that is printed twice counts once, with the slots
    /// of its last line.
    fn parse_output(&self, text: &str) -> Result<Vec<HostSlots>, String> {
        let mut hosts: Vec<HostSlots> = Vec::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let wrong = |reason: &str| {
                format!("the discovery script {} printed {reason}: {line}", self.command)
            };
            let (host, slots) = split_host_slots(line)
                .ok_or_else(|| wrong("a line that is not a host such as node1 or node1:4"))?;
            let slots = slots.or(self.slots_per_host).ok_or_else(|| {
                wrong("a host without slots, and --slots-per-host does not say how many it has")
            })?;
            match hosts.iter_mut().find(|known| known.host == host) {
                Some(known) => known.slots = slots,
                None => hosts.push(HostSlots::new(host, slots)),
            }
        }
        Ok(hosts)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn script(command: &str) -> DiscoveryScript {
        DiscoveryScript {
            command: command.to_owned(),
            slots_per_host: None,
            limit: Duration::from_secs(20),
        }
    }

    fn found(script: &mut DiscoveryScript) -> Result<String, String> {
        let hosts = script.find_hosts(&DiscoveryStopFlag::default())?;
        Ok(hosts.iter().map(|host| format!("{}:{} ", host.host, host.slots)).collect())
    }

    #[test]
    fn lines_are_hosts_in_their_order_and_twice_counts_once() {
        let mut one = script(r"printf 'b:2\n\n a:1 \nb:2\n[::1]:3\n'");
        assert_eq!(found(&mut one).unwrap(), "b:2 a:1 ::1:3 ");
        let mut two =
            DiscoveryScript { slots_per_host: Some(4), ..script("echo a; echo b:1; echo ::1") };
        assert_eq!(found(&mut two).unwrap(), "a:4 b:1 ::1:4 ");
        assert_eq!(found(&mut script("true")).unwrap(), "");
    }

    #[test]
    fn a_failure_has_horovods_words_and_the_scripts_own() {
        let error = found(&mut script("echo no cluster >&2; exit 3")).unwrap_err();
        let start = "Failed to execute discovery script: echo no cluster >&2; exit 3. Exit code: 3";
        assert_eq!(error, format!("{start}: no cluster"));
        let error = found(&mut script("/no/such/script")).unwrap_err();
        assert!(
            error.starts_with(
                "Failed to execute discovery script: /no/such/script. Exit code: 127: "
            )
        );
        let error = found(&mut script("kill -9 $$")).unwrap_err();
        assert!(error.contains("it was killed"), "{error}");
    }

    #[test]
    fn an_invalid_host_is_named() {
        let error = found(&mut script("echo a:2; echo b:x")).unwrap_err();
        assert!(
            error.ends_with("printed a line that is not a host such as node1 or node1:4: b:x"),
            "{error}"
        );
        let error = found(&mut script("echo a")).unwrap_err();
        assert!(error.contains("--slots-per-host") && error.ends_with(": a"), "{error}");
    }

    #[test]
    fn a_script_that_hangs_is_killed_with_all_that_it_started() {
        // EL-2. The pipe ends only when all processes that hold it have ended.
        let mut hanging = DiscoveryScript {
            limit: Duration::from_millis(300),
            ..script("sleep 600 & sleep 600")
        };
        let began = Instant::now();
        let error = found(&mut hanging).unwrap_err();
        assert!(error.contains("did not end within 0.3 s and was killed"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(10));
        let mut leaving = script("sleep 600 & echo a:1");
        assert_eq!(found(&mut leaving).unwrap(), "a:1 ");
        assert!(began.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn a_script_without_a_waiter_is_killed() {
        let stop = DiscoveryStopFlag::default();
        stop.request_stop();
        let began = Instant::now();
        assert!(script("sleep 600").find_hosts(&stop).unwrap_err().contains("no longer needed"));
        assert!(began.elapsed() < Duration::from_secs(10));
    }
}
