// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The name of a job: the same in all its processes, and different from the names of other jobs.

use std::fs;

use sha2::{Digest, Sha256};

use super::DetectedRank;

/// Bytes of the digest that a name holds.
// Enough to distinguish the jobs of a user, and short in the name of a file.
const DIGEST_BYTES: usize = 8;
/// Largest number of ancestors to search.
// Bounded, because `/proc` may change during the search and could lead in a circle.
const MAX_ANCESTORS: usize = 64;

/// Returns the job's name. `starter` returns the identity of the process that set a variable for
/// all ranks of this host.
///
/// # Errors
/// The environment has nothing that distinguishes this job from others.
pub(super) fn job_name(
    started: &DetectedRank,
    rendezvous: &str,
    starter: &dyn Fn(&str) -> Option<String>,
) -> Result<String, String> {
    let mut facts: Vec<(String, String)> =
        started.batch_variables.iter().chain(&started.start_variables).cloned().collect();
    if started.start_variables.is_empty() {
        if started.one_host
            // Two jobs of one user on one host need different names, and only their launchers
            // differ.
            && let Some(process) = starter(started.rank_variable)
        {
            facts.push(("process".to_owned(), process));
        } else if !rendezvous.is_empty() {
            facts.push(("rendezvous".to_owned(), rendezvous.to_owned()));
        } else if facts.is_empty() {
            return Err(format!(
                "nothing in the environment of {} names this job",
                started.launcher
            ));
        }
    }
    let mut digest = Sha256::new();
    for text in facts.iter().flat_map(|(name, value)| [name, value]) {
        // With lengths, two different lists of texts never give the same bytes.
        digest.update((text.len() as u64).to_le_bytes());
        digest.update(text.as_bytes());
    }
    let hex: String =
        digest.finalize().iter().take(DIGEST_BYTES).map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{}-{hex}-of-{}", started.launcher_key, started.size))
}

/// Returns the nearest ancestor that has no such variable in its environment: the process that set
/// it. The text has its number and its start, because the system reuses numbers.
pub(super) fn launcher_process(variable: &str) -> Option<String> {
    let assignment = format!("{variable}=");
    let mut process = "self".to_owned();
    for _ in 0..MAX_ANCESTORS {
        let (parent, _) = parent_pid_and_start_tick(&process)?;
        // An unreadable environment belongs to another user's process, so it is not one of our
        // ranks.
        let environment = fs::read(format!("/proc/{parent}/environ")).unwrap_or_default();
        let has = environment
            .split(|byte| *byte == 0)
            .any(|entry| entry.starts_with(assignment.as_bytes()));
        if !has {
            let (_, start) = parent_pid_and_start_tick(&parent)?;
            return Some(format!("{parent}@{start}"));
        }
        process = parent;
    }
    None
}

/// Returns the number of a process's parent, and the tick at which the process itself started.
fn parent_pid_and_start_tick(process: &str) -> Option<(String, String)> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name in parentheses may hold any characters, so fields are counted after it: field 3 is
    // the state, 4 the parent, 22 the start.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let parent = fields.nth(1)?.to_owned();
    Some((parent, fields.nth(17)?.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::process;

    use super::*;

    fn started() -> DetectedRank {
        DetectedRank {
            launcher: "Horovod's variables",
            launcher_key: "horovod",
            rank: 1,
            size: 4,
            one_host: true,
            start_variables: Vec::new(),
            batch_variables: Vec::new(),
            first_host: None,
            rank_variable: "HOROVOD_RANK",
        }
    }

    #[test]
    fn the_name_contains_the_identity_of_the_start() {
        let none = |_: &str| None;
        let pair = |value: &str| vec![("A".to_owned(), value.to_owned())];
        let name = |started: &DetectedRank| job_name(started, "", &none).unwrap();
        let one = DetectedRank { start_variables: pair("1"), ..started() };
        assert_eq!(name(&one), name(&DetectedRank { rank: 3, ..one.clone() }));
        assert!(
            name(&one).starts_with("horovod-") && name(&one).ends_with("-of-4"),
            "{}",
            name(&one)
        );
        assert_ne!(name(&one), name(&DetectedRank { start_variables: pair("2"), ..started() }));
        assert_ne!(name(&one), name(&DetectedRank { size: 5, ..one.clone() }));
        assert_ne!(name(&one), name(&DetectedRank { batch_variables: pair("1"), ..one.clone() }));
    }

    #[test]
    fn without_variables_it_is_the_process_that_started_the_ranks_of_one_host_or_where_they_meet() {
        let some = |_: &str| Some("7@9".to_owned());
        let by_process = job_name(&started(), "", &some).unwrap();
        assert_eq!(by_process, job_name(&started(), "/shared", &some).unwrap());
        let spread = DetectedRank { one_host: false, ..started() };
        assert_ne!(job_name(&spread, "/shared", &some).unwrap(), by_process);
        let error = job_name(&spread, "", &some).unwrap_err();
        assert_eq!(error, "nothing in the environment of Horovod's variables names this job");
        let batch = vec![("PBS_JOBID".to_owned(), "3".to_owned())];
        assert!(job_name(&DetectedRank { batch_variables: batch, ..spread }, "", &some).is_ok());
    }

    #[test]
    fn the_starter_is_the_nearest_ancestor_without_the_variable() {
        let found = launcher_process("FARANDOLE_NOBODY_SETS_THIS").unwrap();
        let (parent, own) = parent_pid_and_start_tick("self").unwrap();
        assert!(found.starts_with(&format!("{parent}@")), "{found}");
        assert_eq!(parent_pid_and_start_tick(&process::id().to_string()).unwrap(), (parent, own));
    }
}
