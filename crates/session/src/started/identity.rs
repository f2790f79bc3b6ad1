// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A name of the job that is the same in all its processes and differs from that of other jobs.

use std::fs;

use sha2::{Digest, Sha256};

use super::Started;

/// Bytes of the digest that a name holds.
const DIGEST: usize = 8;
/// Most ancestors that are looked at.
const ANCESTORS: usize = 64;

/// The job's name. `starter` tells the process that started all ranks of this host.
///
/// # Errors
/// Nothing tells this job from others.
pub(super) fn job(
    started: &Started,
    rendezvous: &str,
    starter: &dyn Fn(&str) -> Option<String>,
) -> Result<String, String> {
    let mut facts: Vec<(String, String)> =
        started.batch.iter().chain(&started.exact).cloned().collect();
    if started.exact.is_empty() {
        if started.one_host
            && let Some(process) = starter(started.variable)
        {
            facts.push(("process".to_owned(), process));
        } else if !rendezvous.is_empty() {
            facts.push(("rendezvous".to_owned(), rendezvous.to_owned()));
        } else if facts.is_empty() {
            return Err(format!(
                "nothing in the environment of {} names this job",
                started.starter
            ));
        }
    }
    let mut digest = Sha256::new();
    for text in facts.iter().flat_map(|(name, value)| [name, value]) {
        digest.update((text.len() as u64).to_le_bytes());
        digest.update(text.as_bytes());
    }
    let hex: String =
        digest.finalize().iter().take(DIGEST).map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{}-{hex}-of-{}", started.key, started.size))
}

/// The nearest ancestor that was itself started without this variable: what set it. Number and
/// start, as a number is used again one day.
pub(super) fn starter(variable: &str) -> Option<String> {
    let assignment = format!("{variable}=");
    let mut process = "self".to_owned();
    for _ in 0..ANCESTORS {
        let (parent, _) = parent_and_start(&process)?;
        // One that may not be read is not one of ours.
        let environment = fs::read(format!("/proc/{parent}/environ")).unwrap_or_default();
        let has = environment
            .split(|byte| *byte == 0)
            .any(|entry| entry.starts_with(assignment.as_bytes()));
        if !has {
            let (_, start) = parent_and_start(&parent)?;
            return Some(format!("{parent}@{start}"));
        }
        process = parent;
    }
    None
}

/// The number of a process's parent, and the tick at which the process itself started.
fn parent_and_start(process: &str) -> Option<(String, String)> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // Counting starts behind the name, which may hold anything: field 3 is the state, field 4 the
    // parent, 22 the start.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let parent = fields.nth(1)?.to_owned();
    Some((parent, fields.nth(17)?.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::process;

    use super::*;

    fn started() -> Started {
        Started {
            starter: "Horovod's variables",
            key: "horovod",
            rank: 1,
            size: 4,
            one_host: true,
            exact: Vec::new(),
            batch: Vec::new(),
            first_host: None,
            variable: "HOROVOD_RANK",
        }
    }

    #[test]
    fn the_name_contains_the_identity_of_the_start() {
        let none = |_: &str| None;
        let pair = |value: &str| vec![("A".to_owned(), value.to_owned())];
        let name = |started: &Started| job(started, "", &none).unwrap();
        let one = Started { exact: pair("1"), ..started() };
        assert_eq!(name(&one), name(&Started { rank: 3, ..one.clone() }));
        assert!(
            name(&one).starts_with("horovod-") && name(&one).ends_with("-of-4"),
            "{}",
            name(&one)
        );
        assert_ne!(name(&one), name(&Started { exact: pair("2"), ..started() }));
        assert_ne!(name(&one), name(&Started { size: 5, ..one.clone() }));
        assert_ne!(name(&one), name(&Started { batch: pair("1"), ..one.clone() }));
    }

    #[test]
    fn without_variables_it_is_the_process_that_started_the_ranks_of_one_host_or_where_they_meet() {
        let some = |_: &str| Some("7@9".to_owned());
        let by_process = job(&started(), "", &some).unwrap();
        assert_eq!(by_process, job(&started(), "/shared", &some).unwrap());
        let spread = Started { one_host: false, ..started() };
        assert_ne!(job(&spread, "/shared", &some).unwrap(), by_process);
        let error = job(&spread, "", &some).unwrap_err();
        assert_eq!(error, "nothing in the environment of Horovod's variables names this job");
        let batch = vec![("PBS_JOBID".to_owned(), "3".to_owned())];
        assert!(job(&Started { batch, ..spread }, "", &some).is_ok());
    }

    #[test]
    fn the_starter_is_the_nearest_ancestor_without_the_variable() {
        let found = starter("FARANDOLE_NOBODY_SETS_THIS").unwrap();
        let (parent, own) = parent_and_start("self").unwrap();
        assert!(found.starts_with(&format!("{parent}@")), "{found}");
        assert_eq!(parent_and_start(&process::id().to_string()).unwrap(), (parent, own));
    }
}
