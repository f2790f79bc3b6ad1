// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The variables of a worker.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use farandole_config::{FARANDOLE_PREFIX, HOROVOD_PREFIX};
use farandole_registrar::Ticket;
use farandole_world::{Rank, TaskId, World};

/// Address of rank 0 for frameworks with their own rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MasterAddress {
    pub(crate) address: IpAddr,
    pub(crate) port: u16,
}

impl MasterAddress {
    pub(crate) fn to_text(&self) -> String {
        format!("{} {}", self.address, self.port)
    }

    pub(crate) fn from_text(text: &[u8]) -> Option<Self> {
        let (address, port) = std::str::from_utf8(text).ok()?.split_once(' ')?;
        Some(Self { address: address.parse().ok()?, port: port.parse().ok()? })
    }
}

/// Returns the variables that every worker gets beyond its inherited environment: its rank under
/// the names of Farandole, Horovod and torch, and access to its job.
pub(crate) fn worker_variables(
    ticket: &Ticket,
    world: &World,
    master: &MasterAddress,
) -> BTreeMap<String, String> {
    let seat = world.own_placement();
    let Rank(rank) = world.rank;
    let size = world.size();
    let mut all: BTreeMap<String, String> = [
        (format!("{FARANDOLE_PREFIX}JOB"), ticket.encode_text()),
        (format!("{FARANDOLE_PREFIX}TASK"), seat.task.to_string()),
        (format!("{FARANDOLE_PREFIX}GENERATION"), world.generation.to_string()),
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
    // Horovod's scripts and frameworks read these names directly.
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

/// Returns the variables that only workers of elastic jobs have, to remove them: a launcher that is
/// itself such a worker inherits them.
pub(crate) fn unset_elastic_variables() -> impl Iterator<Item = (String, Option<String>)> {
    let names = [
        format!("{FARANDOLE_PREFIX}ELASTIC"),
        format!("{HOROVOD_PREFIX}ELASTIC"),
        format!("{FARANDOLE_PREFIX}OUTAGE"),
    ];
    names.into_iter().map(|name| (name, None))
}

/// Returns the variables of a worker of an elastic job: access to its job and the time to wait for
/// a lost registrar. It gets no rank, because the worker requests one, and inherits none from the
/// launcher's environment.
pub(crate) fn elastic_worker_variables(
    ticket: &Ticket,
    task: TaskId,
    outage: Duration,
) -> BTreeMap<String, Option<String>> {
    const TORCH_RANK_VARIABLES: [&str; 6] =
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];
    const HOROVOD_RANK_VARIABLES: [&str; 7] =
        ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "GENERATION"];
    let removed = TORCH_RANK_VARIABLES.into_iter().map(str::to_owned);
    let removed =
        removed.chain(HOROVOD_RANK_VARIABLES.map(|name| format!("{HOROVOD_PREFIX}{name}")));
    let removed = removed.chain([format!("{FARANDOLE_PREFIX}GENERATION")]).map(|name| (name, None));
    let set = [
        (format!("{FARANDOLE_PREFIX}JOB"), ticket.encode_text()),
        (format!("{FARANDOLE_PREFIX}TASK"), task.to_string()),
        (format!("{FARANDOLE_PREFIX}ELASTIC"), "1".to_owned()),
        (format!("{HOROVOD_PREFIX}ELASTIC"), "1".to_owned()),
        (format!("{FARANDOLE_PREFIX}OUTAGE"), format!("{}ms", outage.as_millis())),
    ];
    removed.chain(set.map(|(name, value)| (name, Some(value)))).collect()
}

/// Like [`filter_forwarded_variables`], for this process's environment.
pub fn forwarded_environment() -> BTreeMap<String, Option<String>> {
    filter_forwarded_variables(farandole_config::environment_variables())
}

/// Returns the variables that workers on other hosts get. Not forwarded are shell functions, the
/// previous working directory, the choice of GPUs (each host makes it for itself), secrets, and
/// variables of another job.
fn filter_forwarded_variables(
    variables: impl IntoIterator<Item = (String, String)>,
) -> BTreeMap<String, Option<String>> {
    const JOB_VARIABLES: [&str; 9] = [
        "JOB",
        "TASK",
        "GENERATION",
        "ELASTIC",
        "OUTAGE",
        "JOURNAL",
        "METRICS", // of the driver: a job inside of this one would take its port
        "JOB_SECRET",
        "SECRET_KEY",
    ];
    let stays = |name: &str| {
        let own = JOB_VARIABLES.iter().any(|knob| {
            name.strip_prefix(FARANDOLE_PREFIX).or_else(|| name.strip_prefix(HOROVOD_PREFIX))
                == Some(knob)
        });
        own || name.starts_with("BASH_FUNC_")
            || name == "OLDPWD"
            || name == "OTEL_EXPORTER_OTLP_HEADERS" // may have the driver's token
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
        let given = filter_forwarded_variables(all.map(|name| (name.to_owned(), "x".to_owned())));
        let names: Vec<&str> = given.keys().map(String::as_str).collect();
        assert_eq!(names, ["HOROVOD_FUSION_THRESHOLD", "OMP_NUM_THREADS", "PATH"]);
    }

    #[test]
    fn a_master_survives_its_text() {
        let master = MasterAddress { address: "::1".parse().unwrap(), port: 7 };
        assert_eq!(MasterAddress::from_text(master.to_text().as_bytes()), Some(master));
        assert_eq!(MasterAddress::from_text(b"nonsense"), None);
    }

    #[test]
    fn variables_of_elastic_workers_are_set_for_them_and_removed_for_others() {
        let secret =
            farandole_registrar::JobSecret::new("sixteen letters.", &JobId("job".to_owned()))
                .unwrap();
        let ticket = secret.make_ticket(vec!["a:1".to_owned()]).unwrap();
        let found = elastic_worker_variables(&ticket, TaskId(3), Duration::from_secs(7));
        assert_eq!(found["FARANDOLE_OUTAGE"].as_deref(), Some("7000ms"));
        for (name, value) in unset_elastic_variables() {
            assert!(value.is_none() && found[&name].is_some(), "{name}");
        }
    }

    #[test]
    fn a_worker_gets_its_rank_under_every_name() {
        let world = World::single_rank_world(HostHash("a".into()));
        let registrar =
            farandole_registrar::Registrar::start_job(farandole_registrar::RegistrarOptions {
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
        let master = MasterAddress { address: "127.0.0.1".parse().unwrap(), port: 7 };
        let variables = worker_variables(registrar.ticket(), &world, &master);
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
