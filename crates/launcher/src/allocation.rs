// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The allocation of a batch system: hosts, slots, and the program that connects to the hosts.
//!
//! | system | recognised by | hosts and slots from | hosts reached by |
//! | --- | --- | --- | --- |
//! | Slurm | `SLURM_JOB_ID` | `SLURM_JOB_NODELIST`, `SLURM_TASKS_PER_NODE` | `srun` |
//! | LSF | `LSB_JOBID` | `LSB_MCPU_HOSTS`, `LSB_DJOB_HOSTFILE` or `LSB_HOSTS` | `blaunch`, or ssh |
//! | PBS, Torque | `PBS_JOBID` | the file `PBS_NODEFILE` | ssh |
//! | Grid Engine | `PE_HOSTFILE` | the same file | `qrsh -inherit`, or ssh |
//! | Kubernetes MPIJob | host file of MPI | the same file | the rsh agent of MPI, or ssh |
//! | SkyPilot | `SKYPILOT_NODE_IPS` | the same, and `SKYPILOT_NUM_GPUS_PER_NODE` | ssh |
//! | Volcano | `/etc/volcano/*.host` | the same files, a slot for each host | ssh |
//! | SageMaker | `SM_HOSTS` or `resourceconfig.json` | the same, and `SM_NUM_GPUS` | ssh |
//!
//! The host file of an MPIJob is in `OMPI_MCA_orte_default_hostfile`, `I_MPI_HYDRA_HOST_FILE` or
//! `HYDRA_HOST_FILE`. The last three start the user's command on every host, so they say on which
//! of them a launcher belongs ([`BatchAllocation::check_launch_host`]).

use std::path::PathBuf;

use farandole_world::format_counted_noun;
use farandole_world::slurm_nodelist::{expand_counts, expand_nodes};

use crate::cloud_hosts::{CloudHosts, find_cloud_hosts};
use crate::error::{Error, Result};
use crate::hosts::{HostSlots, merge_hosts, parse_hostfile};
pub use crate::launch_environment::{LaunchEnvironment, LocalEnvironment};
use crate::shell::RemoteShell;

/// Path at which the MPI operator of Kubernetes installs kubectl.
const OPERATOR_KUBECTL_PATH: &str = "/opt/kube/kubectl";

/// The batch job in which this process runs.
#[derive(Clone, Debug)]
pub struct BatchAllocation {
    /// The batch system.
    pub system: &'static str,
    /// The hosts of the job.
    pub hosts: Vec<HostSlots>,
    /// The program of the batch system that connects to the hosts; `None` for ssh.
    pub shell: Option<RemoteShell>,
    /// The file that lists the hosts, if it changes while the job runs.
    pub file: Option<PathBuf>,
    /// The reason why a job on these hosts cannot be launched from this host, if there is one.
    pub refusal: Option<String>,
}

impl BatchAllocation {
    /// Checks that a job on these hosts is launched from this host.
    ///
    /// # Errors
    /// `Usage`: the system starts the command on every host, and this is not the first one.
    pub fn check_launch_host(&self) -> Result<()> {
        match &self.refusal {
            Some(reason) => Err(Error::Usage { reason: reason.clone() }),
            None => Ok(()),
        }
    }
}

/// Returns the batch job in which this process runs, if any.
///
/// # Errors
/// `Usage` naming the variable or the file that does not parse.
pub fn detect_allocation(environment: &dyn LaunchEnvironment) -> Result<Option<BatchAllocation>> {
    for find in [
        kubernetes_allocation,
        slurm_allocation,
        lsf_allocation,
        pbs_allocation,
        grid_engine_allocation,
    ] {
        if let Some(found) = find(environment)? {
            return Ok(Some(found));
        }
    }
    Ok(find_cloud_hosts(environment)?.map(|found| {
        let CloudHosts { system, hosts, refusal } = found;
        BatchAllocation { system, hosts, shell: None, file: None, refusal }
    }))
}

fn slurm_allocation(environment: &dyn LaunchEnvironment) -> Result<Option<BatchAllocation>> {
    if environment.environment_variable("SLURM_JOB_ID").is_none() {
        return Ok(None);
    }
    let Some(list) = environment
        .environment_variable("SLURM_JOB_NODELIST")
        .or_else(|| environment.environment_variable("SLURM_NODELIST"))
    else {
        return Ok(None);
    };
    let nodes =
        expand_nodes(&list).ok_or_else(|| malformed_variable_error("SLURM_JOB_NODELIST", &list))?;
    let counts = match environment.environment_variable("SLURM_TASKS_PER_NODE") {
        Some(text) => expand_counts(&text)
            .ok_or_else(|| malformed_variable_error("SLURM_TASKS_PER_NODE", &text))?,
        None => vec![1; nodes.len()],
    };
    if counts.len() != nodes.len() {
        let reason = format!(
            "SLURM_TASKS_PER_NODE has {} and SLURM_JOB_NODELIST has {}",
            format_counted_noun(counts.len() as u64, "node"),
            nodes.len()
        );
        return Err(Error::Usage { reason });
    }
    let hosts =
        nodes.into_iter().zip(counts).map(|(host, slots)| HostSlots { host, slots }).collect();
    let shell = environment.has_program("srun").then(RemoteShell::via_srun);
    Ok(Some(BatchAllocation { system: "Slurm", hosts, shell, file: None, refusal: None }))
}

fn lsf_allocation(environment: &dyn LaunchEnvironment) -> Result<Option<BatchAllocation>> {
    if environment.environment_variable("LSB_JOBID").is_none() {
        return Ok(None);
    }
    let mut hosts = if let Some(text) = environment.environment_variable("LSB_MCPU_HOSTS") {
        let words: Vec<&str> = text.split_whitespace().collect();
        let pairs =
            words.chunks_exact(2).map(|pair| Some(HostSlots::new(pair[0], pair[1].parse().ok()?)));
        let hosts: Option<Vec<HostSlots>> =
            if words.len().is_multiple_of(2) { pairs.collect() } else { None };
        hosts.ok_or_else(|| malformed_variable_error("LSB_MCPU_HOSTS", &text))?
    } else if let Some(path) = environment.environment_variable("LSB_DJOB_HOSTFILE") {
        read_hostfile(environment, "LSB_DJOB_HOSTFILE", &path)?
    } else if let Some(text) = environment.environment_variable("LSB_HOSTS") {
        text.split_whitespace().map(|host| HostSlots::new(host, 1)).collect()
    } else {
        return Ok(None);
    };
    // IBM's Cluster System Manager runs the batch script on a separate host, which LSF lists first.
    if environment.environment_variable("CSM_ALLOCATION_ID").is_some() && hosts.len() > 1 {
        hosts.remove(0);
    }
    let shell = environment.has_program("blaunch").then(RemoteShell::via_blaunch);
    Ok(Some(BatchAllocation {
        system: "LSF",
        hosts: merge_hosts(hosts),
        shell,
        file: None,
        refusal: None,
    }))
}

fn pbs_allocation(environment: &dyn LaunchEnvironment) -> Result<Option<BatchAllocation>> {
    let (Some(_), Some(path)) = (
        environment.environment_variable("PBS_JOBID"),
        environment.environment_variable("PBS_NODEFILE"),
    ) else {
        return Ok(None);
    };
    Ok(Some(BatchAllocation {
        system: "PBS",
        hosts: read_hostfile(environment, "PBS_NODEFILE", &path)?,
        shell: None,
        file: None,
        refusal: None,
    }))
}

fn grid_engine_allocation(environment: &dyn LaunchEnvironment) -> Result<Option<BatchAllocation>> {
    let Some(path) = environment.environment_variable("PE_HOSTFILE") else { return Ok(None) };
    let text = read_named_file(environment, "PE_HOSTFILE", &path)?;
    // `host slots queue processors` on each line.
    let mut hosts = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let mut words = line.split_whitespace();
        let host = words.next().zip(words.next().and_then(|slots| slots.parse().ok()));
        let (host, slots) = host.ok_or_else(|| Error::Usage {
            reason: format!("{path} (PE_HOSTFILE) has a line without a host and its slots: {line}"),
        })?;
        hosts.push(HostSlots::new(host, slots));
    }
    let shell = environment.has_program("qrsh").then(RemoteShell::via_qrsh);
    Ok(Some(BatchAllocation {
        system: "Grid Engine",
        hosts: merge_hosts(hosts),
        shell,
        file: None,
        refusal: None,
    }))
}

fn kubernetes_allocation(environment: &dyn LaunchEnvironment) -> Result<Option<BatchAllocation>> {
    const HOSTFILE_VARIABLES: [&str; 4] = [
        "OMPI_MCA_orte_default_hostfile",
        "PRTE_MCA_prte_default_hostfile",
        "I_MPI_HYDRA_HOST_FILE",
        "HYDRA_HOST_FILE",
    ];
    let Some((name, path)) = HOSTFILE_VARIABLES
        .iter()
        .find_map(|name| Some((*name, environment.environment_variable(name)?)))
    else {
        return Ok(None);
    };
    let hosts = read_hostfile(environment, name, &path)?;
    let agent = ["OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent"]
        .iter()
        .find_map(|name| environment.environment_variable(name));
    let shell = match agent.as_deref() {
        None | Some("ssh" | "") => None,
        // The operator's script calls kubectl without standard input, which our protocol needs.
        Some(agent) if agent.ends_with("kubexec.sh") => {
            let on_path = environment.has_program("kubectl")
                && !environment.has_program(OPERATOR_KUBECTL_PATH);
            Some(RemoteShell::via_kubectl(if on_path { "kubectl" } else { OPERATOR_KUBECTL_PATH }))
        }
        Some(agent) => Some(RemoteShell::from_command(agent)?),
    };
    let file = Some(path.into());
    Ok(Some(BatchAllocation { system: "MPIJob", hosts, shell, file, refusal: None }))
}

/// Returns the hosts of a file with one host per line.
fn read_hostfile(
    environment: &dyn LaunchEnvironment,
    name: &str,
    path: &str,
) -> Result<Vec<HostSlots>> {
    parse_hostfile(&format!("{path} ({name})"), &read_named_file(environment, name, path)?)
}

fn read_named_file(environment: &dyn LaunchEnvironment, name: &str, path: &str) -> Result<String> {
    environment
        .read_file(path)
        .map_err(|error| Error::Usage { reason: format!("cannot read {path} ({name}): {error}") })
}

fn malformed_variable_error(name: &str, text: &str) -> Error {
    Error::Usage { reason: format!("{name} cannot be understood: {text}") }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io;

    use super::*;

    #[derive(Default)]
    struct Played {
        variables: BTreeMap<&'static str, &'static str>,
        files: BTreeMap<&'static str, &'static str>,
        programs: Vec<&'static str>,
    }

    impl LaunchEnvironment for Played {
        fn environment_variable(&self, name: &str) -> Option<String> {
            self.variables.get(name).map(|value| (*value).to_owned())
        }

        fn read_file(&self, path: &str) -> io::Result<String> {
            self.files
                .get(path)
                .map(|text| (*text).to_owned())
                .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
        }

        fn file_names(&self, _directory: &str) -> io::Result<Vec<String>> {
            Ok(Vec::new())
        }

        fn has_program(&self, name: &str) -> bool {
            self.programs.contains(&name)
        }
    }

    fn played(
        variables: &[(&'static str, &'static str)],
        files: &[(&'static str, &'static str)],
    ) -> Played {
        Played {
            variables: variables.iter().copied().collect(),
            files: files.iter().copied().collect(),
            programs: vec![],
        }
    }

    fn shown(environment: &Played) -> String {
        let found = detect_allocation(environment).unwrap().unwrap();
        let hosts: Vec<String> =
            found.hosts.iter().map(|host| format!("{}:{}", host.host, host.slots)).collect();
        format!("{} {}", found.system, hosts.join(" "))
    }

    #[test]
    fn every_system_tells_its_hosts() {
        assert!(detect_allocation(&Played::default()).unwrap().is_none());
        let slurm = [
            ("SLURM_JOB_ID", "7"),
            ("SLURM_JOB_NODELIST", "gpu[01-03],login"),
            ("SLURM_TASKS_PER_NODE", "4(x3),1"),
        ];
        assert_eq!(shown(&played(&slurm, &[])), "Slurm gpu01:4 gpu02:4 gpu03:4 login:1");
        let lsf = [("LSB_JOBID", "7"), ("LSB_MCPU_HOSTS", "a 2 b 4")];
        assert_eq!(shown(&played(&lsf, &[])), "LSF a:2 b:4");
        let csm = [
            ("LSB_JOBID", "7"),
            ("LSB_MCPU_HOSTS", "batch1 1 a 42 b 42"),
            ("CSM_ALLOCATION_ID", "3"),
        ];
        assert_eq!(shown(&played(&csm, &[])), "LSF a:42 b:42");
        let lsf = [("LSB_JOBID", "7"), ("LSB_HOSTS", "a a b")];
        assert_eq!(shown(&played(&lsf, &[])), "LSF a:2 b:1");
        let pbs = [("PBS_JOBID", "7"), ("PBS_NODEFILE", "/nodes")];
        assert_eq!(shown(&played(&pbs, &[("/nodes", "a\na\nb\n")])), "PBS a:2 b:1");
        let engine = [("PE_HOSTFILE", "/hosts")];
        let file = [("/hosts", "a.org 4 all.q@a UNDEFINED\nb.org 2 all.q@b UNDEFINED\n")];
        assert_eq!(shown(&played(&engine, &file)), "Grid Engine a.org:4 b.org:2");
        let job = [("OMPI_MCA_orte_default_hostfile", "/etc/mpi/hostfile")];
        let file = [("/etc/mpi/hostfile", "w-0 slots=2\nw-1 slots=2\n")];
        assert_eq!(shown(&played(&job, &file)), "MPIJob w-0:2 w-1:2");
    }

    #[test]
    fn an_invalid_value_is_named() {
        let message =
            |environment: &Played| detect_allocation(environment).unwrap_err().to_string();
        let slurm = [("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "a[1-")];
        assert!(
            message(&played(&slurm, &[]))
                .ends_with("SLURM_JOB_NODELIST cannot be understood: a[1-")
        );
        let slurm =
            [("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "a,b"), ("SLURM_TASKS_PER_NODE", "2")];
        assert!(message(&played(&slurm, &[])).contains("has 1 node and SLURM_JOB_NODELIST has 2"));
        let pbs = [("PBS_JOBID", "7"), ("PBS_NODEFILE", "/gone")];
        assert!(message(&played(&pbs, &[])).contains("cannot read /gone (PBS_NODEFILE)"));
        let lsf = [("LSB_JOBID", "7"), ("LSB_MCPU_HOSTS", "a b 2")];
        assert!(message(&played(&lsf, &[])).contains("LSB_MCPU_HOSTS cannot be understood: a b 2"));
    }

    #[test]
    fn hosts_are_reached_by_the_systems_own_program_where_there_is_one() {
        let mut environment = played(&[("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "a")], &[]);
        assert!(detect_allocation(&environment).unwrap().unwrap().shell.is_none());
        environment.programs = vec!["srun"];
        let shell = detect_allocation(&environment).unwrap().unwrap().shell.unwrap();
        assert_eq!(shell.build_argv("a", "true")[0], "srun");
        let mut environment = played(
            &[("HYDRA_HOST_FILE", "/hosts"), ("OMPI_MCA_plm_rsh_agent", "/etc/mpi/kubexec.sh")],
            &[("/hosts", "w-0\n")],
        );
        for (programs, expected) in [
            (&[][..], OPERATOR_KUBECTL_PATH),
            (&["kubectl"], "kubectl"),
            (&["kubectl", OPERATOR_KUBECTL_PATH], OPERATOR_KUBECTL_PATH),
        ] {
            environment.programs = programs.to_vec();
            let shell = detect_allocation(&environment).unwrap().unwrap().shell.unwrap();
            assert_eq!(shell.build_argv("w-0", "true")[..4], [expected, "exec", "-i", "w-0"]);
        }
    }
}
