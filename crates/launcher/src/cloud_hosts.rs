// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The hosts of systems that start the user's command on every host: SkyPilot, Volcano, SageMaker.
//!
//! Each of them describes the job in two places. If the places contradict each other, one of them
//! is of another job, and the error names both.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::hosts::{HostSlots, merge_hosts, parse_hostfile};
use crate::launch_environment::LaunchEnvironment;

/// The directory in which Volcano's plugin `svc` lists the hosts of each task.
const VOLCANO_DIRECTORY: &str = "/etc/volcano";
/// The directory of SageMaker's `resourceconfig.json`, where `SM_INPUT_CONFIG_DIR` names no other.
const SAGEMAKER_DIRECTORY: &str = "/opt/ml/input/config";

/// The hosts of a job, and whether it is launched from this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CloudHosts {
    pub(crate) system: &'static str,
    pub(crate) hosts: Vec<HostSlots>,
    /// The reason why the job cannot be launched from this host, if there is one.
    pub(crate) refusal: Option<String>,
}

/// Returns the hosts of the first system that describes this job.
///
/// # Errors
/// `Usage` naming the variable or the file that does not parse, or the two that contradict each
/// other.
pub(crate) fn find_cloud_hosts(environment: &dyn LaunchEnvironment) -> Result<Option<CloudHosts>> {
    for find in [skypilot_hosts, volcano_hosts, sagemaker_hosts] {
        if let Some(found) = find(environment)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn skypilot_hosts(environment: &dyn LaunchEnvironment) -> Result<Option<CloudHosts>> {
    let Some(list) = environment.environment_variable("SKYPILOT_NODE_IPS") else {
        return Ok(None);
    };
    let addresses: Vec<&str> = list.split_whitespace().collect();
    if addresses.is_empty() {
        return Err(usage("SKYPILOT_NODE_IPS has no address".to_owned()));
    }
    let count = addresses.len();
    if let Some(nodes) = number_variable(environment, "SKYPILOT_NUM_NODES")?
        && nodes as usize != count
    {
        return Err(usage(format!(
            "SKYPILOT_NODE_IPS and SKYPILOT_NUM_NODES contradict each other: {count} and {nodes}"
        )));
    }
    let rank = number_variable(environment, "SKYPILOT_NODE_RANK")?;
    if let Some(rank) = rank.filter(|rank| *rank as usize >= count) {
        return Err(usage(format!(
            "SKYPILOT_NODE_IPS and SKYPILOT_NODE_RANK contradict each other: the number of \
             addresses is {count}, and this is node {rank}"
        )));
    }
    let slots = number_variable(environment, "SKYPILOT_NUM_GPUS_PER_NODE")?.unwrap_or_default();
    let hosts = addresses.iter().map(|address| HostSlots::new(*address, slots.max(1))).collect();
    let refusal = rank.filter(|rank| *rank > 0).map(|rank| {
        format!(
            "this is node {rank} of SkyPilot's job (SKYPILOT_NODE_RANK), and node 0 starts the \
             processes of all nodes: if [ \"$SKYPILOT_NODE_RANK\" = 0 ]; then farandole run ...; fi"
        )
    });
    Ok(Some(CloudHosts { system: "SkyPilot", hosts: merge_hosts(hosts), refusal }))
}

fn volcano_hosts(environment: &dyn LaunchEnvironment) -> Result<Option<CloudHosts>> {
    let names = environment.file_names(VOLCANO_DIRECTORY).map_err(|error| {
        usage(format!("cannot list the host files in {VOLCANO_DIRECTORY}: {error}"))
    })?;
    let mut tasks: BTreeMap<String, Vec<HostSlots>> = BTreeMap::new();
    for task in names.iter().filter_map(|name| name.strip_suffix(".host")) {
        let path = volcano_file(task);
        let hosts = parse_hostfile(&path, &read_file(environment, &path)?)?;
        check_volcano_variables(environment, task, &hosts)?;
        tasks.insert(task.to_owned(), hosts);
    }
    if tasks.is_empty() {
        return Ok(None);
    }
    // The launcher is often a separate task, without processes of the training.
    let pod = environment.environment_variable("HOSTNAME");
    let own_task = pod.as_deref().and_then(|pod| {
        let is_own = |host: &HostSlots| host.host.split('.').next() == Some(pod);
        tasks.iter().find(|(_, hosts)| hosts.iter().any(is_own)).map(|(task, _)| task.clone())
    });
    if let Some(own) = &own_task
        && tasks.len() > 1
    {
        tasks.remove(own);
    }
    if tasks.len() > 1 {
        let files: Vec<String> = tasks.keys().map(|task| volcano_file(task)).collect();
        let refusal = format!(
            "several files list hosts of Volcano's job: {}; say which one to use (--hostfile)",
            files.join(", ")
        );
        let hosts = tasks.into_values().flatten().collect();
        return Ok(Some(CloudHosts { system: "Volcano", hosts, refusal: Some(refusal) }));
    }
    let Some((task, hosts)) = tasks.pop_first() else { return Ok(None) };
    let index = volcano_index(environment)?;
    // The pods of a task without a launcher all start the command.
    let refusal = index.filter(|index| *index > 0 && own_task.as_ref() == Some(&task)).map(|index| {
        format!(
            "this is pod {index} of Volcano's task {task} (VC_TASK_INDEX), and pod 0 starts the \
             processes of all pods: if [ \"$VC_TASK_INDEX\" = 0 ]; then farandole run ...; fi"
        )
    });
    Ok(Some(CloudHosts { system: "Volcano", hosts, refusal }))
}

fn volcano_file(task: &str) -> String {
    format!("{VOLCANO_DIRECTORY}/{task}.host")
}

/// Checks that the variables of a task say the same as its file.
fn check_volcano_variables(
    environment: &dyn LaunchEnvironment,
    task: &str,
    hosts: &[HostSlots],
) -> Result<()> {
    let path = volcano_file(task);
    let prefix = format!("VC_{}", task.to_uppercase().replace('-', "_"));
    let number = format!("{prefix}_NUM");
    if let Some(count) = number_variable(environment, &number)?
        && count as usize != hosts.len()
    {
        return Err(usage(format!(
            "{path} and {number} contradict each other: {} and {count}",
            hosts.len()
        )));
    }
    let variable = format!("{prefix}_HOSTS");
    let Some(text) = environment.environment_variable(&variable) else { return Ok(()) };
    let listed: BTreeSet<&str> = text.split(',').map(str::trim).collect();
    let written: BTreeSet<&str> = hosts.iter().map(|host| host.host.as_str()).collect();
    if listed != written {
        let written: Vec<&str> = hosts.iter().map(|host| host.host.as_str()).collect();
        return Err(usage(format!(
            "{path} and {variable} contradict each other: {} and {text}",
            written.join(",")
        )));
    }
    Ok(())
}

/// Returns the number of this pod in its task. Volcano sets it under its old name, too.
fn volcano_index(environment: &dyn LaunchEnvironment) -> Result<Option<u32>> {
    let index = number_variable(environment, "VC_TASK_INDEX")?;
    let old = number_variable(environment, "VK_TASK_INDEX")?;
    match (index, old) {
        (Some(index), Some(old)) if index != old => Err(usage(format!(
            "VC_TASK_INDEX and VK_TASK_INDEX contradict each other: {index} and {old}"
        ))),
        _ => Ok(index.or(old)),
    }
}

/// The parts of SageMaker's `resourceconfig.json` that are used.
#[derive(Deserialize)]
struct ResourceConfig {
    hosts: Vec<String>,
    current_host: String,
    #[serde(default)]
    instance_groups: Vec<InstanceGroup>,
}

#[derive(Deserialize)]
struct InstanceGroup {
    instance_type: String,
}

fn sagemaker_hosts(environment: &dyn LaunchEnvironment) -> Result<Option<CloudHosts>> {
    let directory = environment
        .environment_variable("SM_INPUT_CONFIG_DIR")
        .unwrap_or_else(|| SAGEMAKER_DIRECTORY.to_owned());
    let path = format!("{}/resourceconfig.json", directory.trim_end_matches('/'));
    let config = read_resource_config(environment, &path)?;
    let listed = match environment.environment_variable("SM_HOSTS") {
        Some(text) => Some(
            serde_json::from_str::<Vec<String>>(&text)
                .map_err(|_| usage(format!("SM_HOSTS is no list of names as JSON: {text}")))?,
        ),
        None => None,
    };
    let current = environment.environment_variable("SM_CURRENT_HOST");
    let sorted = |hosts: &[String]| -> Vec<String> {
        let unique: BTreeSet<&String> = hosts.iter().collect();
        unique.into_iter().cloned().collect()
    };
    if let (Some(config), Some(listed)) = (&config, &listed)
        && sorted(&config.hosts) != sorted(listed)
    {
        return Err(usage(format!(
            "SM_HOSTS and {path} contradict each other: {} and {}",
            listed.join(","),
            config.hosts.join(",")
        )));
    }
    if let (Some(config), Some(current)) = (&config, &current)
        && config.current_host != *current
    {
        return Err(usage(format!(
            "SM_CURRENT_HOST and {path} contradict each other: {current} and {}",
            config.current_host
        )));
    }
    // The same order on every host, so that all agree on the first one.
    let (Some(names), source) = (match (&listed, &config) {
        (Some(listed), _) => (Some(sort_by_number(sorted(listed))), "SM_HOSTS".to_owned()),
        (None, Some(config)) => (Some(sort_by_number(sorted(&config.hosts))), path.clone()),
        (None, None) => (None, String::new()),
    }) else {
        return Ok(None);
    };
    let Some(first) = names.first() else { return Err(usage(format!("{source} has no host"))) };
    let current = current.or_else(|| config.as_ref().map(|config| config.current_host.clone()));
    if let Some(current) = current.as_ref().filter(|current| !names.contains(current)) {
        return Err(usage(format!(
            "{source} and the name of this host (SM_CURRENT_HOST, or current_host in {path}) \
             contradict each other: {} and {current}",
            names.join(",")
        )));
    }
    let types: BTreeSet<&str> = config
        .iter()
        .flat_map(|config| &config.instance_groups)
        .map(|group| group.instance_type.as_str())
        .collect();
    let refusal = if types.len() > 1 {
        Some(format!(
            "the hosts in {path} have different instance types ({}), so their slots are unknown: \
             name hosts and slots with -H",
            types.into_iter().collect::<Vec<_>>().join(", ")
        ))
    } else {
        current.filter(|current| current != first).map(|current| {
            format!(
                "this is {current} of SageMaker's job (SM_CURRENT_HOST), and {first} starts the \
                 processes of all hosts: if [ \"$SM_CURRENT_HOST\" = {first} ]; then farandole run \
                 ...; fi"
            )
        })
    };
    let slots = number_variable(environment, "SM_NUM_GPUS")?.unwrap_or_default().max(1);
    let hosts = names.iter().map(|name| HostSlots::new(name.as_str(), slots)).collect();
    Ok(Some(CloudHosts { system: "SageMaker", hosts, refusal }))
}

fn read_resource_config(
    environment: &dyn LaunchEnvironment,
    path: &str,
) -> Result<Option<ResourceConfig>> {
    let text = match environment.read_file(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(usage(format!("cannot read {path}: {error}"))),
    };
    serde_json::from_str(&text).map(Some).map_err(|error| {
        usage(format!("{path} is no resource configuration of SageMaker: {error}"))
    })
}

/// Sorts names such as `algo-2` and `algo-10` by their numbers.
fn sort_by_number(mut names: Vec<String>) -> Vec<String> {
    names.sort_by_key(|name| {
        let digits = name.rsplit(|letter: char| !letter.is_ascii_digit()).next().unwrap_or("");
        let (word, number) = (name.len() - digits.len(), digits.parse::<u64>().unwrap_or(0));
        (name[..word].to_owned(), number)
    });
    names
}

fn number_variable(environment: &dyn LaunchEnvironment, name: &str) -> Result<Option<u32>> {
    let Some(text) = environment.environment_variable(name) else { return Ok(None) };
    text.trim().parse().map(Some).map_err(|_| usage(format!("{name} is no number: {text}")))
}

fn read_file(environment: &dyn LaunchEnvironment, path: &str) -> Result<String> {
    environment.read_file(path).map_err(|error| usage(format!("cannot read {path}: {error}")))
}

fn usage(reason: String) -> Error {
    Error::Usage { reason }
}

#[cfg(test)]
mod tests;
