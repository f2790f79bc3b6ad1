// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The allocation of a batch system: hosts, slots, and the program that reaches the hosts.
//!
//! | system | recognised by | hosts and slots from | hosts reached by |
//! | --- | --- | --- | --- |
//! | Slurm | `SLURM_JOB_ID` | `SLURM_JOB_NODELIST`, `SLURM_TASKS_PER_NODE` | `srun` |
//! | LSF | `LSB_JOBID` | `LSB_MCPU_HOSTS`, `LSB_DJOB_HOSTFILE` or `LSB_HOSTS` | `blaunch`, or ssh |
//! | PBS, Torque | `PBS_JOBID` | the file `PBS_NODEFILE` | ssh |
//! | Grid Engine | `PE_HOSTFILE` | that file | `qrsh -inherit`, or ssh |
//! | Kubernetes MPIJob | `OMPI_MCA_orte_default_hostfile`, `I_MPI_HYDRA_HOST_FILE` or `HYDRA_HOST_FILE` | that file | the rsh agent it names, or ssh |

use std::path::PathBuf;

use farandole_world::nodelist::{expand, repeated};

use crate::error::{Error, Result};
use crate::hosts::{HostSlots, merged, parse_hostfile};
use crate::shell::Shell;

/// Folder in which the MPI operator of Kubernetes puts the program.
const KUBECTL: &str = "/opt/kube/kubectl";

/// Looks up variables of the environment, and reads files: a test replaces both.
pub trait Surroundings {
    /// Returns the variable's value, if it is set and not empty.
    fn variable(&self, name: &str) -> Option<String>;

    /// Returns the file's text.
    ///
    /// # Errors
    /// The system's.
    fn file(&self, path: &str) -> std::io::Result<String>;

    /// Returns whether a program can be started by this name or path.
    fn program(&self, name: &str) -> bool;
}

/// This process's own environment and files.
#[derive(Clone, Copy, Debug, Default)]
pub struct Here;

impl Surroundings for Here {
    fn variable(&self, name: &str) -> Option<String> {
        farandole_config::environment(name)
    }

    fn file(&self, path: &str) -> std::io::Result<String> {
        std::fs::read_to_string(path)
    }

    fn program(&self, name: &str) -> bool {
        let path = farandole_config::environment("PATH").unwrap_or_default();
        std::env::split_paths(&path).any(|folder| folder.join(name).is_file())
    }
}

/// A batch system's job that this process runs in.
#[derive(Clone, Debug)]
pub struct Allocation {
    /// The batch system.
    pub system: &'static str,
    /// Its hosts.
    pub hosts: Vec<HostSlots>,
    /// Its program that reaches them; `None` for ssh.
    pub shell: Option<Shell>,
    /// The file that names them, where that changes while the job runs.
    pub file: Option<PathBuf>,
}

/// Returns the batch system's job that this process runs in, if it is in one.
///
/// # Errors
/// `Usage` naming the variable or the file that cannot be understood.
pub fn allocation(here: &dyn Surroundings) -> Result<Option<Allocation>> {
    for find in [kubernetes, slurm, lsf, pbs, grid_engine] {
        if let Some(found) = find(here)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn slurm(here: &dyn Surroundings) -> Result<Option<Allocation>> {
    if here.variable("SLURM_JOB_ID").is_none() {
        return Ok(None);
    }
    let Some(list) =
        here.variable("SLURM_JOB_NODELIST").or_else(|| here.variable("SLURM_NODELIST"))
    else {
        return Ok(None);
    };
    let nodes = expand(&list).ok_or_else(|| wrong("SLURM_JOB_NODELIST", &list))?;
    let counts = match here.variable("SLURM_TASKS_PER_NODE") {
        Some(text) => repeated(&text).ok_or_else(|| wrong("SLURM_TASKS_PER_NODE", &text))?,
        None => vec![1; nodes.len()],
    };
    if counts.len() != nodes.len() {
        let reason = format!(
            "SLURM_TASKS_PER_NODE has {} nodes and SLURM_JOB_NODELIST has {}",
            counts.len(),
            nodes.len()
        );
        return Err(Error::Usage { reason });
    }
    let hosts =
        nodes.into_iter().zip(counts).map(|(host, slots)| HostSlots { host, slots }).collect();
    let shell = here.program("srun").then(Shell::srun);
    Ok(Some(Allocation { system: "Slurm", hosts, shell, file: None }))
}

fn lsf(here: &dyn Surroundings) -> Result<Option<Allocation>> {
    if here.variable("LSB_JOBID").is_none() {
        return Ok(None);
    }
    let mut hosts = if let Some(text) = here.variable("LSB_MCPU_HOSTS") {
        let words: Vec<&str> = text.split_whitespace().collect();
        let pairs =
            words.chunks_exact(2).map(|pair| Some(HostSlots::new(pair[0], pair[1].parse().ok()?)));
        let hosts: Option<Vec<HostSlots>> =
            if words.len().is_multiple_of(2) { pairs.collect() } else { None };
        hosts.ok_or_else(|| wrong("LSB_MCPU_HOSTS", &text))?
    } else if let Some(path) = here.variable("LSB_DJOB_HOSTFILE") {
        listed(here, "LSB_DJOB_HOSTFILE", &path)?
    } else if let Some(text) = here.variable("LSB_HOSTS") {
        text.split_whitespace().map(|host| HostSlots::new(host, 1)).collect()
    } else {
        return Ok(None);
    };
    // IBM's Cluster System Manager runs the batch script on a host of its own, which LSF names
    // first.
    if here.variable("CSM_ALLOCATION_ID").is_some() && hosts.len() > 1 {
        hosts.remove(0);
    }
    let shell = here.program("blaunch").then(Shell::blaunch);
    Ok(Some(Allocation { system: "LSF", hosts: merged(hosts), shell, file: None }))
}

fn pbs(here: &dyn Surroundings) -> Result<Option<Allocation>> {
    let (Some(_), Some(path)) = (here.variable("PBS_JOBID"), here.variable("PBS_NODEFILE")) else {
        return Ok(None);
    };
    Ok(Some(Allocation {
        system: "PBS",
        hosts: listed(here, "PBS_NODEFILE", &path)?,
        shell: None,
        file: None,
    }))
}

fn grid_engine(here: &dyn Surroundings) -> Result<Option<Allocation>> {
    let Some(path) = here.variable("PE_HOSTFILE") else { return Ok(None) };
    let text = read(here, "PE_HOSTFILE", &path)?;
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
    let shell = here.program("qrsh").then(Shell::qrsh);
    Ok(Some(Allocation { system: "Grid Engine", hosts: merged(hosts), shell, file: None }))
}

fn kubernetes(here: &dyn Surroundings) -> Result<Option<Allocation>> {
    const FILES: [&str; 4] = [
        "OMPI_MCA_orte_default_hostfile",
        "PRTE_MCA_prte_default_hostfile",
        "I_MPI_HYDRA_HOST_FILE",
        "HYDRA_HOST_FILE",
    ];
    let Some((name, path)) = FILES.iter().find_map(|name| Some((*name, here.variable(name)?)))
    else {
        return Ok(None);
    };
    let hosts = listed(here, name, &path)?;
    let agent = ["OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent"]
        .iter()
        .find_map(|name| here.variable(name));
    let shell = match agent.as_deref() {
        None | Some("ssh" | "") => None,
        // The operator's script asks kubectl for no standard input, which carries our words.
        Some(agent) if agent.ends_with("kubexec.sh") => {
            let on_path = here.program("kubectl") && !here.program(KUBECTL);
            Some(Shell::kubectl(if on_path { "kubectl" } else { KUBECTL }))
        }
        Some(agent) => Some(Shell::custom(agent)?),
    };
    Ok(Some(Allocation { system: "MPIJob", hosts, shell, file: Some(path.into()) }))
}

/// Returns the hosts of a file with a host a line.
fn listed(here: &dyn Surroundings, name: &str, path: &str) -> Result<Vec<HostSlots>> {
    parse_hostfile(&format!("{path} ({name})"), &read(here, name, path)?)
}

fn read(here: &dyn Surroundings, name: &str, path: &str) -> Result<String> {
    here.file(path)
        .map_err(|error| Error::Usage { reason: format!("cannot read {path} ({name}): {error}") })
}

fn wrong(name: &str, text: &str) -> Error {
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

    impl Surroundings for Played {
        fn variable(&self, name: &str) -> Option<String> {
            self.variables.get(name).map(|value| (*value).to_owned())
        }

        fn file(&self, path: &str) -> io::Result<String> {
            self.files
                .get(path)
                .map(|text| (*text).to_owned())
                .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
        }

        fn program(&self, name: &str) -> bool {
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

    fn shown(here: &Played) -> String {
        let found = allocation(here).unwrap().unwrap();
        let hosts: Vec<String> =
            found.hosts.iter().map(|host| format!("{}:{}", host.host, host.slots)).collect();
        format!("{} {}", found.system, hosts.join(" "))
    }

    #[test]
    fn every_system_tells_its_hosts() {
        assert!(allocation(&Played::default()).unwrap().is_none());
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
        let message = |here: &Played| allocation(here).unwrap_err().to_string();
        let slurm = [("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "a[1-")];
        assert!(
            message(&played(&slurm, &[]))
                .ends_with("SLURM_JOB_NODELIST cannot be understood: a[1-")
        );
        let slurm =
            [("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "a,b"), ("SLURM_TASKS_PER_NODE", "2")];
        assert!(message(&played(&slurm, &[])).contains("has 1 nodes and SLURM_JOB_NODELIST has 2"));
        let pbs = [("PBS_JOBID", "7"), ("PBS_NODEFILE", "/gone")];
        assert!(message(&played(&pbs, &[])).contains("cannot read /gone (PBS_NODEFILE)"));
        let lsf = [("LSB_JOBID", "7"), ("LSB_MCPU_HOSTS", "a b 2")];
        assert!(message(&played(&lsf, &[])).contains("LSB_MCPU_HOSTS cannot be understood: a b 2"));
    }

    #[test]
    fn hosts_are_reached_by_the_systems_own_program_where_there_is_one() {
        let mut here = played(&[("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "a")], &[]);
        assert!(allocation(&here).unwrap().unwrap().shell.is_none());
        here.programs = vec!["srun"];
        let shell = allocation(&here).unwrap().unwrap().shell.unwrap();
        assert_eq!(shell.argv("a", "true")[0], "srun");
        let mut here = played(
            &[("HYDRA_HOST_FILE", "/hosts"), ("OMPI_MCA_plm_rsh_agent", "/etc/mpi/kubexec.sh")],
            &[("/hosts", "w-0\n")],
        );
        for (programs, expected) in
            [(&[][..], KUBECTL), (&["kubectl"], "kubectl"), (&["kubectl", KUBECTL], KUBECTL)]
        {
            here.programs = programs.to_vec();
            let shell = allocation(&here).unwrap().unwrap().shell.unwrap();
            assert_eq!(shell.argv("w-0", "true")[..4], [expected, "exec", "-i", "w-0"]);
        }
    }
}
