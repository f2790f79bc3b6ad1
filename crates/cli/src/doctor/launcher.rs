// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The way to launch a job from here: the batch system, its hosts, and the program that connects to
//! them. Also shows the launcher of this process.

use farandole::launcher::allocation::{BatchAllocation, LaunchEnvironment, detect_allocation};
use farandole::launcher::{HostSlots, recognize_cluster};
use farandole::world::format_counted_noun;

use super::page::DoctorPage;

/// Largest number of hosts that are listed by name.
const MAX_NAMED_HOSTS: usize = 16;

/// Variables with this process's rank: the required variables, and the launchers that set them. The
/// first variable has the rank.
const LAUNCHER_RANK_VARIABLES: [(&[&str], &str); 8] = [
    (&["OMPI_COMM_WORLD_RANK"], "mpirun of Open MPI"),
    (&["PMI_RANK"], "mpirun of MPICH or Intel MPI, or srun with PMI"),
    (&["MV2_COMM_WORLD_RANK"], "mpirun_rsh of MVAPICH"),
    (&["PMIX_RANK"], "a launcher with PMIx"),
    // A batch script has `SLURM_PROCID`, too, although no srun has started it.
    (&["SLURM_PROCID", "SLURM_STEP_ID"], "srun"),
    (&["JSM_NAMESPACE_RANK"], "jsrun"),
    // `RANK` alone is too common a name.
    (&["RANK", "WORLD_SIZE"], "torchrun or alike"),
    (&["HOROVOD_RANK", "HOROVOD_SIZE"], "horovodrun or alike"),
];

/// Writes the section.
pub(super) fn add_launcher_section(page: &mut DoctorPage, here: &dyn LaunchEnvironment) {
    page.add_section("Launching here");
    let ssh = here.has_program("ssh");
    match detect_allocation(here) {
        Ok(Some(found)) => add_batch_allocation(page, here, &found, ssh),
        Ok(None) => {
            page.add_line(
                "launcher",
                "none: processes start on this host, or on those of -H and --hostfile",
            );
            page.add_line("reached by", "ssh");
            if let Some(cluster) = recognize_cluster(here) {
                page.add_line("cluster", &cluster.describe());
            }
        }
        Err(error) => {
            page.add_line("launcher", &error.to_string());
            page.problems.push(format!("{error}: correct or unset the variable"));
        }
    }
    let detail =
        if ssh { "installed" } else { "not installed: other hosts cannot be reached by it" };
    page.add_check(ssh, "ssh", detail);
    page.add_line("this process", &describe_launchers(here));
}

fn add_batch_allocation(
    page: &mut DoctorPage,
    here: &dyn LaunchEnvironment,
    found: &BatchAllocation,
    ssh: bool,
) {
    let slots: u64 = found.hosts.iter().map(|host| u64::from(host.slots)).sum();
    let hosts = found.hosts.len();
    page.add_line(
        "launcher",
        &format!(
            "{}: {} with {}",
            found.system,
            format_counted_noun(hosts as u64, "host"),
            format_counted_noun(slots, "slot")
        ),
    );
    page.add_line("hosts", &format_host_list(&found.hosts));
    page.add_line("reached by", &remote_launch_program(here, found));
    if let Some(reason) = &found.refusal {
        page.problems.push(reason.clone());
    }
    // A job of one host needs no ssh.
    if found.shell.is_none() && hosts > 1 && !ssh {
        page.problems.push(format!(
            "the hosts of {} are reached by ssh, which is not installed: install OpenSSH's client",
            found.system
        ));
    }
}

/// Returns the batch system's own program, or ssh.
fn remote_launch_program(here: &dyn LaunchEnvironment, found: &BatchAllocation) -> String {
    // MPI jobs on Kubernetes name their program in these variables.
    const RSH_AGENT_VARIABLES: [&str; 2] = ["OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent"];
    let program = match (found.shell.is_some(), found.system) {
        (false, _) => "ssh",
        (true, "Slurm") => "srun",
        (true, "LSF") => "blaunch",
        (true, "Grid Engine") => "qrsh -inherit",
        (true, system) => {
            let agent = RSH_AGENT_VARIABLES
                .iter()
                .find_map(|name| Some((name, here.environment_variable(name)?)));
            return agent.map_or_else(
                || format!("a program of {system}"),
                |(name, program)| format!("{program} ({name})"),
            );
        }
    };
    program.to_owned()
}

fn format_host_list(hosts: &[HostSlots]) -> String {
    let first: Vec<String> = hosts
        .iter()
        .take(MAX_NAMED_HOSTS)
        .map(|host| format!("{}:{}", host.host, host.slots))
        .collect();
    let more = hosts.len().saturating_sub(MAX_NAMED_HOSTS);
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{rest}", first.join(","))
}

/// Describes all launchers that seem to have started this process.
fn describe_launchers(here: &dyn LaunchEnvironment) -> String {
    let seen = LAUNCHER_RANK_VARIABLES.iter().filter_map(|(variables, who)| {
        let values: Option<Vec<String>> = variables
            .iter()
            .map(|name| here.environment_variable(name).map(|value| format!("{name}={value}")))
            .collect();
        Some(format!("{who} ({})", values?.join(", ")))
    });
    let seen: Vec<String> = seen.collect();
    match seen.is_empty() {
        true => {
            "has no rank in its environment: no mpirun, srun or torchrun has started it".to_owned()
        }
        false => format!("was started by {}", seen.join(", by ")),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io;

    use super::*;

    struct Played {
        variables: BTreeMap<&'static str, &'static str>,
        programs: Vec<&'static str>,
    }

    impl LaunchEnvironment for Played {
        fn environment_variable(&self, name: &str) -> Option<String> {
            self.variables.get(name).map(|value| (*value).to_owned())
        }

        fn read_file(&self, path: &str) -> io::Result<String> {
            match path {
                "/nodes" => Ok("a\na\nb\n".to_owned()),
                _ => Err(io::ErrorKind::NotFound.into()),
            }
        }

        fn file_names(&self, _directory: &str) -> io::Result<Vec<String>> {
            Ok(Vec::new())
        }

        fn has_program(&self, name: &str) -> bool {
            self.programs.contains(&name)
        }
    }

    fn page(variables: &[(&'static str, &'static str)], programs: &[&'static str]) -> DoctorPage {
        let here =
            Played { variables: variables.iter().copied().collect(), programs: programs.to_vec() };
        let mut page = DoctorPage::default();
        add_launcher_section(&mut page, &here);
        page
    }

    #[test]
    fn without_a_batch_system_there_is_this_host_and_ssh() {
        let page = page(&[], &["ssh"]);
        assert!(page.text.contains("launcher        none: "), "{}", page.text);
        assert!(page.text.contains("[X] ssh                     installed"), "{}", page.text);
        assert!(page.text.contains("this process    has no rank"), "{}", page.text);
        assert_eq!(page.problems, Vec::<String>::new());
    }

    #[test]
    fn a_cluster_that_names_no_hosts_has_an_advice() {
        let page = page(&[("DATABRICKS_RUNTIME_VERSION", "17.3")], &["ssh"]);
        let line = "cluster         this host is in a cluster of Databricks \
                    (DATABRICKS_RUNTIME_VERSION): farandole.spark.run";
        assert!(page.text.contains(line), "{}", page.text);
        assert_eq!(page.problems, Vec::<String>::new());
    }

    #[test]
    fn a_batch_system_has_hosts_slots_and_a_way_to_them() {
        let slurm = [
            ("SLURM_JOB_ID", "7"),
            ("SLURM_JOB_NODELIST", "n[1-2]"),
            ("SLURM_TASKS_PER_NODE", "4(x2)"),
        ];
        let page = page(&slurm, &["srun"]);
        for line in [
            "launcher        Slurm: 2 hosts with 8 slots\n",
            "hosts           n1:4,n2:4\n",
            "reached by      srun\n",
            "[ ] ssh                     not installed",
        ] {
            assert!(page.text.contains(line), "{line} is missing in\n{}", page.text);
        }
        assert_eq!(page.problems, Vec::<String>::new(), "srun reaches them");
    }

    #[test]
    fn hosts_that_only_a_missing_ssh_reaches_are_a_problem() {
        let pbs = [("PBS_JOBID", "7"), ("PBS_NODEFILE", "/nodes")];
        let without = page(&pbs, &[]);
        assert!(
            without.text.contains("launcher        PBS: 2 hosts with 3 slots\n"),
            "{}",
            without.text
        );
        assert!(
            without.problems[0].starts_with("the hosts of PBS are reached by ssh"),
            "{:?}",
            without.problems
        );
        assert_eq!(page(&pbs, &["ssh"]).problems, Vec::<String>::new());
    }

    #[test]
    fn a_host_that_must_not_launch_is_a_problem() {
        let mut sky = vec![("SKYPILOT_NODE_IPS", "a\nb"), ("SKYPILOT_NODE_RANK", "0")];
        let first = page(&sky, &["ssh"]);
        assert!(
            first.text.contains("launcher        SkyPilot: 2 hosts with 2 slots\n"),
            "{}",
            first.text
        );
        assert_eq!(first.problems, Vec::<String>::new());
        sky[1].1 = "1";
        let problems = page(&sky, &["ssh"]).problems;
        assert!(problems[0].contains("SKYPILOT_NODE_RANK"), "{problems:?}");
    }

    #[test]
    fn the_program_of_an_mpijob_is_the_one_it_names() {
        let job =
            [("HYDRA_HOST_FILE", "/nodes"), ("OMPI_MCA_plm_rsh_agent", "/etc/mpi/kubexec.sh")];
        let page = page(&job, &["kubectl"]);
        let line = "reached by      /etc/mpi/kubexec.sh (OMPI_MCA_plm_rsh_agent)\n";
        assert!(page.text.contains(line), "{}", page.text);
    }

    #[test]
    fn a_variable_that_cannot_be_understood_is_a_problem() {
        let page = page(&[("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "n[1-")], &["ssh"]);
        assert!(page.problems[0].contains("SLURM_JOB_NODELIST"), "{:?}", page.problems);
    }

    #[test]
    fn the_launcher_of_this_process_is_named_with_its_variables() {
        let page_text = |variables: &[(&'static str, &'static str)]| page(variables, &[]).text;
        let line = "was started by mpirun of Open MPI (OMPI_COMM_WORLD_RANK=3)\n";
        assert!(page_text(&[("OMPI_COMM_WORLD_RANK", "3")]).contains(line));
        // A batch script has SLURM_PROCID, but was not started by a step.
        assert!(page_text(&[("SLURM_PROCID", "0")]).contains("has no rank"));
        let line = "was started by srun (SLURM_PROCID=1, SLURM_STEP_ID=0), by torchrun or alike \
                    (RANK=1, WORLD_SIZE=4)\n";
        let both =
            [("SLURM_PROCID", "1"), ("SLURM_STEP_ID", "0"), ("RANK", "1"), ("WORLD_SIZE", "4")];
        assert!(page_text(&both).contains(line), "{}", page_text(&both));
    }

    #[test]
    fn many_hosts_are_counted() {
        let hosts: Vec<HostSlots> =
            (0..20).map(|index| HostSlots::new(format!("n{index}"), 1)).collect();
        assert!(
            format_host_list(&hosts).ends_with("n15:1 and 4 more"),
            "{}",
            format_host_list(&hosts)
        );
    }
}
