// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The variables of a worker.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use farandole_config::{HOROVOD_PREFIX, PREFIX};
use farandole_registrar::Ticket;
use farandole_world::{Rank, TaskId, World};

/// Address of rank 0 for frameworks with their own rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Master {
    pub(crate) address: IpAddr,
    pub(crate) port: u16,
}

impl Master {
    pub(crate) fn encode(&self) -> String {
        format!("{} {}", self.address, self.port)
    }

    pub(crate) fn decode(text: &[u8]) -> Option<Self> {
        let (address, port) = std::str::from_utf8(text).ok()?.split_once(' ')?;
        Some(Self { address: address.parse().ok()?, port: port.parse().ok()? })
    }
}

/// Returns the variables that every worker gets beyond its inherited environment: its place under
/// Farandole's, Horovod's and torch's names, and access to its job.
pub(crate) fn variables(
    ticket: &Ticket,
    world: &World,
    master: &Master,
) -> BTreeMap<String, String> {
    let seat = world.seat();
    let Rank(rank) = world.rank;
    let size = world.size();
    let mut all: BTreeMap<String, String> = [
        (format!("{PREFIX}JOB"), ticket.encode()),
        (format!("{PREFIX}TASK"), seat.task.to_string()),
        (format!("{PREFIX}GENERATION"), world.generation.to_string()),
    ]
    .into();
    let plain = [
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", size.to_string()),
        ("LOCAL_RANK", seat.local_rank.to_string()),
        ("LOCAL_WORLD_SIZE", seat.local_size.to_string()),
        ("MASTER_ADDR", master.address.to_string()),
        ("MASTER_PORT", master.port.to_string()),
    ];
    let horovod = [
        ("HOSTNAME", seat.host.to_string()),
        ("RANK", rank.to_string()),
        ("SIZE", size.to_string()),
        ("LOCAL_RANK", seat.local_rank.to_string()),
        ("LOCAL_SIZE", seat.local_size.to_string()),
        ("CROSS_RANK", seat.cross_rank.to_string()),
        ("CROSS_SIZE", seat.cross_size.to_string()),
    ];
    all.extend(plain.map(|(name, value)| (name.to_owned(), value)));
    all.extend(horovod.map(|(name, value)| (format!("{HOROVOD_PREFIX}{name}"), value)));
    all
}

/// Variables that only workers of elastic jobs have. A launcher that is such a worker itself
/// inherits them.
pub(crate) fn only_elastic() -> impl Iterator<Item = (String, Option<String>)> {
    let names =
        [format!("{PREFIX}ELASTIC"), format!("{HOROVOD_PREFIX}ELASTIC"), format!("{PREFIX}OUTAGE")];
    names.into_iter().map(|name| (name, None))
}

/// Returns the variables of a worker of an elastic job: access to its job, the time to wait for a
/// lost registrar, and no rank, because the worker asks for one. Ranks of the launcher's own
/// environment mean nothing to it.
pub(crate) fn unranked(
    ticket: &Ticket,
    task: TaskId,
    outage: Duration,
) -> BTreeMap<String, Option<String>> {
    const PLAIN: [&str; 6] =
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];
    const RANKS: [&str; 7] =
        ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "GENERATION"];
    let removed = PLAIN.into_iter().map(str::to_owned);
    let removed = removed.chain(RANKS.map(|name| format!("{HOROVOD_PREFIX}{name}")));
    let removed = removed.chain([format!("{PREFIX}GENERATION")]).map(|name| (name, None));
    let set = [
        (format!("{PREFIX}JOB"), ticket.encode()),
        (format!("{PREFIX}TASK"), task.to_string()),
        (format!("{PREFIX}ELASTIC"), "1".to_owned()),
        (format!("{HOROVOD_PREFIX}ELASTIC"), "1".to_owned()),
        (format!("{PREFIX}OUTAGE"), format!("{}ms", outage.as_millis())),
    ];
    removed.chain(set.map(|(name, value)| (name, Some(value)))).collect()
}

/// Like [`forwarded`], of this process's environment.
pub fn forwarded_environment() -> BTreeMap<String, Option<String>> {
    forwarded(farandole_config::variables())
}

/// Returns the variables that workers on other hosts get: all except functions of the shell, the
/// folder before this one, the choice of GPUs, which each host makes for itself, secrets, and
/// variables of another job.
fn forwarded(
    variables: impl IntoIterator<Item = (String, String)>,
) -> BTreeMap<String, Option<String>> {
    const OURS: [&str; 8] =
        ["JOB", "TASK", "GENERATION", "ELASTIC", "OUTAGE", "JOURNAL", "JOB_SECRET", "SECRET_KEY"];
    let stays = |name: &str| {
        let own = OURS.iter().any(|knob| {
            name.strip_prefix(PREFIX).or_else(|| name.strip_prefix(HOROVOD_PREFIX)) == Some(knob)
        });
        own || name.starts_with("BASH_FUNC_")
            || name == "OLDPWD"
            || name == "_HOROVOD_SECRET_KEY"
            || name.ends_with("CUDA_VISIBLE_DEVICES")
    };
    variables
        .into_iter()
        .filter(|(name, _)| !stays(name))
        .map(|(name, value)| (name, Some(value)))
        .collect()
}

#[cfg(test)]
mod tests {
    use farandole_world::{HostHash, JobId};

    use super::*;

    #[test]
    fn other_hosts_get_the_environment_without_secrets_and_choices_of_this_host() {
        let all = [
            "PATH",
            "OMP_NUM_THREADS",
            "BASH_FUNC_which%%",
            "OLDPWD",
            "CUDA_VISIBLE_DEVICES",
            "NVIDIA_CUDA_VISIBLE_DEVICES",
            "_HOROVOD_SECRET_KEY",
            "FARANDOLE_JOB",
            "FARANDOLE_JOB_SECRET",
            "FARANDOLE_JOURNAL",
            "FARANDOLE_OUTAGE",
            "HOROVOD_FUSION_THRESHOLD",
        ];
        let given = forwarded(all.map(|name| (name.to_owned(), "x".to_owned())));
        let names: Vec<&str> = given.keys().map(String::as_str).collect();
        assert_eq!(names, ["HOROVOD_FUSION_THRESHOLD", "OMP_NUM_THREADS", "PATH"]);
    }

    #[test]
    fn a_master_survives_its_text() {
        let master = Master { address: "::1".parse().unwrap(), port: 7 };
        assert_eq!(Master::decode(master.encode().as_bytes()), Some(master));
        assert_eq!(Master::decode(b"nonsense"), None);
    }

    #[test]
    fn variables_of_elastic_workers_are_set_for_them_and_removed_for_others() {
        let secret =
            farandole_registrar::Secret::new("sixteen letters.", &JobId("job".to_owned())).unwrap();
        let ticket = secret.ticket(vec!["a:1".to_owned()]).unwrap();
        let told = unranked(&ticket, TaskId(3), Duration::from_secs(7));
        assert_eq!(told["FARANDOLE_OUTAGE"].as_deref(), Some("7000ms"));
        for (name, value) in only_elastic() {
            assert!(value.is_none() && told[&name].is_some(), "{name}");
        }
    }

    #[test]
    fn a_worker_gets_its_rank_under_every_name() {
        let world = World::alone(HostHash("a".into()));
        let registrar = farandole_registrar::Registrar::start(farandole_registrar::Options {
            tasks: 1,
            job_id: None,
            host: Some("127.0.0.1".into()),
            bind: String::new(),
            port_range: farandole_config::PortRange { first: 0, last: 0 },
            start_timeout: std::time::Duration::from_secs(5),
            peer_timeout: std::time::Duration::from_secs(5),
            relays: false,
        })
        .unwrap();
        let master = Master { address: "127.0.0.1".parse().unwrap(), port: 7 };
        let variables = variables(registrar.ticket(), &world, &master);
        for (name, value) in
            [("RANK", "0"), ("HOROVOD_SIZE", "1"), ("MASTER_PORT", "7"), ("FARANDOLE_TASK", "0")]
        {
            assert_eq!(variables[name], value);
        }
        assert_eq!(
            variables["FARANDOLE_JOB"].parse::<Ticket>().unwrap().job_id(),
            registrar.ticket().job_id()
        );
    }
}
