// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The batch job of Slurm in which this process runs, and its way back into the queue.

use std::process::Command;
use std::time::Duration;

use farandole_world::format_counted_noun;

use crate::elastic::DiscoveryStopFlag;
use crate::elastic::program_query::query_program;
use crate::error::{Error, Result};
use crate::launch_environment::LaunchEnvironment;

/// The program that shows and requeues jobs.
const CONTROL_PROGRAM: &str = "scontrol";
/// The state of a job that may be requeued.
const RUNNING_STATE: &str = "RUNNING";

/// A batch job of Slurm. The element of an array is a job of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlurmBatchJob {
    name: String,
    /// Number of earlier starts.
    restarts: u32,
    /// Longest time for an answer of Slurm's controller.
    limit: Duration,
}

impl SlurmBatchJob {
    /// Finds the job of this process. `limit` is the longest time for an answer of the controller.
    ///
    /// # Errors
    /// `Usage` if there is no such job, or Slurm would refuse to requeue it.
    pub fn find_own_job(environment: &dyn LaunchEnvironment, limit: Duration) -> Result<Self> {
        let refused = |reason| Err(Error::Usage { reason });
        let Some(name) = job_name(environment) else {
            return refused(
                "this process is in no job of Slurm: SLURM_JOB_ID is not set".to_owned(),
            );
        };
        if !environment.has_program(CONTROL_PROGRAM) {
            return refused(format!("{CONTROL_PROGRAM} is not on the PATH"));
        }
        let status = match query_job_status(&name, limit) {
            Ok(status) => status,
            Err(reason) => return refused(reason),
        };
        if !status.is_batch_job {
            return refused(format!("job {name} cannot be requeued: sbatch has not started it"));
        }
        if !status.may_be_requeued {
            return refused(format!(
                "job {name} cannot be requeued: submit it with sbatch --requeue"
            ));
        }
        Ok(Self { name, restarts: status.restarts, limit })
    }

    /// Returns the job's number, or the number of its array and its own: `7` or `7_2`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Puts the job back into the queue. Slurm then ends its processes. `max_requeues` is the
    /// number of requeues, by anything, after which it is not requeued any more: the state of a
    /// program may change without progress.
    ///
    /// # Errors
    /// The reason: something else has ended or requeued the job, it was requeued too often, or
    /// Slurm refuses.
    pub fn requeue(&self, max_requeues: u64) -> Result<(), String> {
        let status = query_job_status(&self.name, self.limit)?;
        if status.restarts != self.restarts {
            return Err("something else has requeued it".to_owned());
        }
        if u64::from(self.restarts) >= max_requeues {
            let count = format_counted_noun(self.restarts.into(), "requeue");
            return Err(format!("it has had {count}, and --max-requeues is {max_requeues}"));
        }
        if status.state != RUNNING_STATE {
            return Err(format!("its state is {}", status.state));
        }
        call_scontrol(&["requeue", &self.name], self.limit).map(drop)
    }
}

/// The properties of a job that decide whether it may be requeued.
#[derive(Debug, PartialEq, Eq)]
struct JobStatus {
    state: String,
    may_be_requeued: bool,
    restarts: u32,
    is_batch_job: bool,
}

/// Returns the name by which Slurm finds this process's job alone. The number of an element of an
/// array may also be the number of the array, and would requeue all of its elements.
fn job_name(environment: &dyn LaunchEnvironment) -> Option<String> {
    let array = environment.environment_variable("SLURM_ARRAY_JOB_ID");
    let element = environment.environment_variable("SLURM_ARRAY_TASK_ID");
    match array.zip(element) {
        Some((array, element)) => Some(format!("{array}_{element}")),
        None => environment.environment_variable("SLURM_JOB_ID"),
    }
}

fn query_job_status(name: &str, limit: Duration) -> Result<JobStatus, String> {
    let listing = call_scontrol(&["--oneliner", "show", "job", name], limit)?;
    parse_job_status(&listing).ok_or_else(|| {
        format!("{CONTROL_PROGRAM} does not show the state of job {name}: {listing}")
    })
}

fn call_scontrol(arguments: &[&str], limit: Duration) -> Result<String, String> {
    let mut scontrol = Command::new(CONTROL_PROGRAM);
    scontrol.args(arguments);
    let answer = query_program(scontrol, limit, &DiscoveryStopFlag::default())
        .map_err(|reason| format!("{CONTROL_PROGRAM} {reason}"))?;
    if answer.exit_code == Some(0) {
        return Ok(answer.stdout);
    }
    Err(format!("{CONTROL_PROGRAM} {} failed: {}", arguments.join(" "), answer.stderr_line))
}

/// Reads a line of `scontrol show job`. The user chooses some of its values, such as the name of
/// the job, so a field counts only in front of the field that follows it in Slurm's own order.
fn parse_job_status(listing: &str) -> Option<JobStatus> {
    let words: Vec<&str> = listing.split_whitespace().collect();
    let (state, _) = words.windows(2).find_map(|pair| {
        Some((pair[0].strip_prefix("JobState=")?, pair[1].strip_prefix("Reason=")?))
    })?;
    let (requeue, restarts, batch) = words.windows(3).find_map(|fields| {
        Some((
            fields[0].strip_prefix("Requeue=")?,
            fields[1].strip_prefix("Restarts=")?,
            fields[2].strip_prefix("BatchFlag=")?,
        ))
    })?;
    Some(JobStatus {
        state: state.to_owned(),
        may_be_requeued: requeue == "1",
        restarts: restarts.parse().ok()?,
        // 2 after a node has failed.
        is_batch_job: batch != "0",
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io;

    use super::*;

    struct PlayedVariables(BTreeMap<&'static str, &'static str>);

    impl LaunchEnvironment for PlayedVariables {
        fn environment_variable(&self, name: &str) -> Option<String> {
            self.0.get(name).map(|value| (*value).to_owned())
        }

        fn read_file(&self, _path: &str) -> io::Result<String> {
            Err(io::ErrorKind::NotFound.into())
        }

        fn file_names(&self, _directory: &str) -> io::Result<Vec<String>> {
            Ok(Vec::new())
        }

        fn has_program(&self, _name: &str) -> bool {
            false
        }
    }

    #[test]
    fn an_element_of_an_array_is_not_named_like_its_array() {
        let named = |variables: &[(&'static str, &'static str)]| {
            job_name(&PlayedVariables(variables.iter().copied().collect()))
        };
        assert_eq!(named(&[]), None);
        assert_eq!(named(&[("SLURM_JOB_ID", "7")]).as_deref(), Some("7"));
        // The last element has the array's own number.
        let last =
            [("SLURM_JOB_ID", "7"), ("SLURM_ARRAY_JOB_ID", "7"), ("SLURM_ARRAY_TASK_ID", "2")];
        assert_eq!(named(&last).as_deref(), Some("7_2"));
    }

    #[test]
    fn a_process_outside_of_slurm_has_no_job() {
        let find = |variables: &[(&'static str, &'static str)]| {
            let environment = PlayedVariables(variables.iter().copied().collect());
            SlurmBatchJob::find_own_job(&environment, Duration::from_secs(5))
                .unwrap_err()
                .to_string()
        };
        assert!(find(&[]).ends_with("SLURM_JOB_ID is not set"));
        assert!(find(&[("SLURM_JOB_ID", "7")]).ends_with("scontrol is not on the PATH"));
    }

    #[test]
    fn a_listing_shows_state_and_restarts_whatever_the_job_is_called() {
        let listing = "JobId=8 ArrayJobId=7 ArrayTaskId=1 JobName=a Requeue=0 JobState=FAILED b \
                       UserId=root(0) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 \
                       Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0 Command=/x Requeue=0";
        let status = parse_job_status(listing).unwrap();
        assert_eq!(
            status,
            JobStatus {
                state: RUNNING_STATE.to_owned(),
                may_be_requeued: true,
                restarts: 2,
                is_batch_job: true,
            }
        );
        let salloc = listing.replace("BatchFlag=1", "BatchFlag=0");
        assert!(!parse_job_status(&salloc).unwrap().is_batch_job);
        assert_eq!(parse_job_status("JobId=8 JobState=RUNNING Reason=None"), None);
    }
}
