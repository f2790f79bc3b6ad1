// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Converts flags and the configuration file to programs and hosts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::ArgMatches;
use clap::parser::ValueSource;
use farandole::config::{Config, FARANDOLE_PREFIX, HOROVOD_PREFIX, KNOBS, environment_variable};
use farandole::launcher::allocation::{BatchAllocation, LocalEnvironment, detect_allocation};
use farandole::launcher::elastic::{DiscoverySource, choose_discovery};
use farandole::launcher::hosts::{parse_hostfile, parse_hosts};
use farandole::launcher::{HostSlots, RemoteShell, recognize_cluster, split_local_tasks};
use farandole::registrar::local_host_facts::interface_networks;

use super::config_file::{self, RunConfigFile};
use super::flags::{
    FlagEffect, FlagValue, IGNORED_VARIABLES, RUN_FLAGS, RunFlag, check_flag_value,
    is_elastic_flag, is_switch_knob, knob_flags,
};

/// Value of the timeline knob with which agents send their workers' timelines.
const TIMELINE_GATHER_VALUE: &str = "GATHER";

/// Variable of workers that report to the run viewer themselves.
const SELF_REPORTING_VARIABLE: &str = "FARANDOLE_SPARK_TOLD";

/// Variables of OpenTelemetry for the collector's address; the same in
/// `farandole.runner.show.metrics_export`.
const OTLP_ENDPOINT_VARIABLES: [&str; 2] =
    ["OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];

/// Variable of Kubeflow's operator for the address that takes the status of a job; the same in
/// `farandole.runner.show.train_job_status`.
const TRAIN_JOB_STATUS_VARIABLE: &str = "KUBEFLOW_TRAINER_SERVER_URL";

/// Variable of workers whose launcher requeues its batch job.
const REQUEUE_VARIABLE: &str = "FARANDOLE_REQUEUE";

/// Variable with which torch's users turn off the plugins that `import torch` calls.
const TORCH_AUTOLOAD_VARIABLE: &str = "TORCH_DEVICE_BACKEND_AUTOLOAD";

/// The options of a run, from flags, file and environment.
#[derive(Debug)]
pub(crate) struct RunOptions {
    /// The configuration of this process.
    pub(crate) config: Config,
    /// Variables of the workers beyond this process's environment.
    pub(crate) environment: BTreeMap<String, Option<String>>,
    pub(crate) num_proc: Option<u32>,
    pub(crate) hosts: Option<String>,
    pub(crate) hostfile: Option<String>,
    pub(crate) ssh_command: Option<String>,
    pub(crate) ssh_port: Option<u16>,
    pub(crate) ssh_identity_file: Option<PathBuf>,
    pub(crate) output_folder: Option<PathBuf>,
    /// File for the timeline of all ranks.
    pub(crate) timeline: Option<PathBuf>,
    /// Whether the run viewer shows the job, and the store that keeps the run.
    pub(crate) ui: Option<Option<String>>,
    /// Whether SIGUSR1 suspends the job and requeues its batch job.
    pub(crate) requeue: bool,
    pub(crate) timestamps: bool,
    pub(crate) verbose: bool,
    pub(crate) command: Vec<String>,
    /// Remarks about flags without effect and about unknown keys.
    pub(crate) remarks: Vec<String>,
}

/// The hosts of a job, and the program that connects to them.
#[derive(Debug)]
pub(crate) struct JobPlacement {
    pub(crate) hosts: Vec<HostSlots>,
    pub(crate) num_proc: u32,
    pub(crate) shell: RemoteShell,
    /// The batch system that named the hosts.
    pub(crate) allocation: Option<BatchAllocation>,
}

impl RunOptions {
    /// Reads the flags, and the configuration file that they name.
    ///
    /// # Errors
    /// A description of the problem, with the flag, the file and key, or the variable.
    pub(crate) fn from_matches(matches: &ArgMatches) -> Result<Self> {
        let path = text_argument(matches, "config-file").unwrap_or_default();
        let file = if path.is_empty() {
            RunConfigFile::default()
        } else {
            let content = std::fs::read_to_string(&path)
                .with_context(|| format!("cannot read the configuration file {path}"))?;
            config_file::parse_config_file(&path, &content)?
        };
        let mut remarks = file.warnings;
        let mut given: BTreeMap<String, String> = file.knobs.into_iter().collect();
        for (name, value) in file.flags {
            if let Some(flag) = RUN_FLAGS.iter().find(|flag| flag.name == name) {
                apply_flag(
                    flag,
                    &value,
                    &config_file::flag_location(&path, flag),
                    &mut given,
                    &mut remarks,
                )?;
            }
        }
        // After the file, so that flags replace its values.
        for flag in RUN_FLAGS.iter().filter(|flag| is_given(matches, flag.name)) {
            let values = flag_value_text(matches, flag);
            apply_flag(flag, &values, &format!("--{}", flag.name), &mut given, &mut remarks)?;
        }
        for (name, knob) in knob_flags().filter(|(name, _)| is_given(matches, name)) {
            let value = if is_switch_knob(knob) {
                "1".to_owned()
            } else {
                text_argument(matches, name).unwrap_or_default()
            };
            given.insert(knob.key.to_owned(), value);
        }
        let mut extra = BTreeMap::new();
        if let Some(interfaces) = network_interfaces(matches, &mut remarks) {
            // NCCL chooses its interfaces itself, unless this variable names them.
            extra.insert("NCCL_SOCKET_IFNAME".to_owned(), Some(interfaces.join(",")));
            // Addresses are more exact than interfaces.
            if !given.contains_key("bind_address") {
                let networks = interface_networks(&interfaces)?;
                remarks.extend(
                    networks
                        .missing_network_warning()
                        .map(|warning| format!("--network-interfaces: {warning}")),
                );
                given.insert("bind_address".to_owned(), networks.bind_list);
            }
        }
        let timeline = text_argument(matches, "timeline").map(PathBuf::from);
        // The knob has one value: agents send the timelines, or ranks write files.
        if timeline.is_some()
            && given.insert("timeline".to_owned(), TIMELINE_GATHER_VALUE.to_owned()).is_some()
        {
            bail!(
                "--timeline and --timeline-filename exclude each other: each takes the ranks' \
                 timelines"
            );
        }
        let store = text_argument(matches, "ui-store");
        // A store for the viewer asks for the viewer.
        let ui = (matches.get_flag("ui") || store.is_some()).then_some(store);
        let requeue = matches.get_flag("requeue");
        // A job that a worker starts is not requeued with it.
        extra.insert(REQUEUE_VARIABLE.to_owned(), requeue.then(|| "1".to_owned()));
        remarks.extend(ignored_variable_remarks());
        remarks.dedup();
        let config = Config::read(environment_variable, &given)
            .map_err(|error| name_knob_by_source(error, matches, &path))?;
        if ui.is_some() || exports_metrics(&config) {
            extra.insert(SELF_REPORTING_VARIABLE.to_owned(), Some("1".to_owned()));
        }
        if config.as_gloo
            && environment_variable(TORCH_AUTOLOAD_VARIABLE).is_some_and(|value| value != "1")
        {
            bail!(
                "--as-gloo and FARANDOLE_AS_GLOO need torch's autoload of backends: unset \
                 {TORCH_AUTOLOAD_VARIABLE}, or set it to 1"
            );
        }
        let switched = config.min_num_proc.is_some() || !config.host_discovery_script.is_empty();
        for flag in RUN_FLAGS
            .iter()
            .filter(|flag| !switched && is_elastic_flag(flag) && is_given(matches, flag.name))
        {
            remarks.push(format!(
                "--{} means nothing without --min-num-proc or --host-discovery-script, which make \
                 a job elastic",
                flag.name
            ));
        }
        let number = |name: &str| text_argument(matches, name).map(|text| (name.to_owned(), text));
        Ok(Self {
            config,
            environment: worker_variables(&given)
                .into_iter()
                .chain(unset_launcher_variables())
                .chain(extra)
                .collect(),
            num_proc: number("num-proc").map(|(_, text)| parse_num_proc(&text)).transpose()?,
            hosts: text_argument(matches, "hosts"),
            hostfile: text_argument(matches, "hostfile"),
            ssh_command: text_argument(matches, "ssh-command"),
            ssh_port: number("ssh-port").map(|(_, text)| parse_ssh_port(&text)).transpose()?,
            ssh_identity_file: text_argument(matches, "ssh-identity-file").map(PathBuf::from),
            output_folder: text_argument(matches, "output-filename").map(PathBuf::from),
            timeline,
            ui,
            requeue,
            timestamps: matches.get_flag("prefix-output-with-timestamp"),
            verbose: matches.get_flag("verbose"),
            command: matches.get_many::<String>("command").unwrap_or_default().cloned().collect(),
            remarks,
        })
    }

    /// Returns whether the run viewer shows the job, or its metrics are exported.
    pub(crate) fn is_shown(&self) -> bool {
        self.ui.is_some() || exports_metrics(&self.config)
    }

    /// Returns whether processes may join and leave.
    pub(crate) fn is_elastic(&self) -> bool {
        self.config.min_num_proc.is_some() || !self.config.host_discovery_script.is_empty()
    }

    /// Returns the file from which another process can continue the job after this one was killed.
    pub(crate) fn journal_path(&self) -> Option<PathBuf> {
        Some(PathBuf::from(&self.config.journal)).filter(|path| !path.as_os_str().is_empty())
    }

    /// Returns whether this process continues the job of an earlier one.
    pub(crate) fn continues_earlier_job(&self) -> bool {
        // If the journal cannot be looked at, the job may be continued, so its output is kept.
        let left = |path: PathBuf| match path.metadata() {
            Ok(file) => file.len() > 0,
            Err(error) => error.kind() != std::io::ErrorKind::NotFound,
        };
        self.is_elastic() && self.journal_path().is_some_and(left)
    }

    /// Returns the hosts of the processes: from the command line, from the batch system, or else
    /// this host.
    ///
    /// # Errors
    /// Hosts that do not parse, or too few slots.
    pub(crate) fn job_placement(&self) -> Result<JobPlacement> {
        let named = self.requested_hosts()?;
        let given = detect_allocation(&LocalEnvironment)?;
        let asked = self.ssh_command.is_some()
            || self.ssh_port.is_some()
            || self.ssh_identity_file.is_some();
        // An option of ssh asks for ssh, even if the batch system has its own program.
        let own = given.as_ref().and_then(|given| given.shell.clone()).filter(|_| !asked);
        let shell = match own {
            Some(shell) => shell,
            None => RemoteShell::parse_ssh_command_option(
                self.ssh_command.as_deref().unwrap_or("ssh"),
                self.ssh_port,
                self.ssh_identity_file.as_deref().map(Path::new),
                self.config.start_timeout.min(std::time::Duration::from_secs(10)),
            )?,
        };
        if !self.config.host_discovery_script.is_empty() {
            return Ok(JobPlacement {
                hosts: Vec::new(),
                num_proc: self.initial_process_count()?,
                shell,
                allocation: None,
            });
        }
        let given = given.filter(|_| named.is_none());
        if let Some(given) = &given {
            given.check_launch_host()?;
        }
        let is_named = named.is_some();
        let hosts =
            named.or_else(|| given.as_ref().map(|given| given.hosts.clone())).unwrap_or_default();
        let slots: u64 = hosts.iter().map(|host| u64::from(host.slots)).sum();
        let num_proc = match self.num_proc.or(self.config.min_num_proc) {
            Some(num_proc) => num_proc,
            None if slots > 0 => {
                u32::try_from(slots).context("more slots than ranks can be counted")?
            }
            None => {
                let advice = recognize_cluster(&LocalEnvironment)
                    .map_or_else(String::new, |cluster| format!("; {}", cluster.describe()));
                bail!("say how many processes to start: -np N{advice}");
            }
        };
        // A job on this host alone may have any number of processes: the slots are then tasks of
        // the batch system, which do not limit it.
        let alone = !is_named && hosts.len() == 1 && split_local_tasks(&hosts, 1)?.1.is_empty();
        let hosts = if alone { Vec::new() } else { hosts };
        Ok(JobPlacement { hosts, num_proc, shell, allocation: given })
    }

    /// Returns the initial number of processes of an elastic job, if no other source has it.
    fn initial_process_count(&self) -> Result<u32> {
        let first = self.num_proc.or(self.config.min_num_proc);
        first.context("say how many processes to start: -np N or --min-num-proc N")
    }

    /// Returns the hosts that the user named.
    fn requested_hosts(&self) -> Result<Option<Vec<HostSlots>>> {
        Ok(match (&self.hosts, &self.hostfile) {
            (Some(text), _) => Some(parse_hosts(text)?),
            (None, Some(path)) => {
                let content = std::fs::read_to_string(path)
                    .with_context(|| format!("cannot read the host file {path}"))?;
                Some(parse_hostfile(path, &content)?)
            }
            (None, None) => None,
        })
    }

    /// Returns the host discovery of an elastic job. If it finds only this host, the host has slots
    /// for `most` processes.
    pub(crate) fn host_discovery(
        &self,
        place: &JobPlacement,
        most: u32,
    ) -> Box<dyn DiscoverySource> {
        // Without a maximum, there are slots for the initial processes.
        let slots = if most == u32::MAX { place.num_proc } else { most };
        let hostfile = self.hostfile.as_ref().map(PathBuf::from);
        let (hosts, allocation) = match &place.allocation {
            // A batch job of one host.
            Some(_) if place.hosts.is_empty() => (Vec::new(), None),
            Some(allocation) => (Vec::new(), Some(allocation)),
            None => (place.hosts.clone(), None),
        };
        choose_discovery(&self.config, hostfile, hosts, allocation, slots)
    }
}

/// Renames a knob in an error to the flag or the key of the file that the user wrote.
fn name_knob_by_source(
    mut error: farandole::config::KnobError,
    matches: &ArgMatches,
    file: &str,
) -> farandole::config::KnobError {
    let sets = |flag: &&RunFlag| match flag.effect {
        FlagEffect::SetKnob(key) | FlagEffect::SetKnobMib(key) | FlagEffect::SetKnobTo(key, _) => {
            key == error.name
        }
        _ => false,
    };
    let flag = RUN_FLAGS
        .iter()
        .filter(|flag| is_given(matches, flag.name))
        .find(sets)
        .map(|flag| flag.name);
    let own = knob_flags().find(|(name, knob)| knob.key == error.name && is_given(matches, name));
    // A flag has priority over the file, so it is the source of the value if both have one.
    if let Some(name) = flag.or(own.map(|(name, _)| name)) {
        error.name = format!("--{name}");
    } else if let Some(flag) = RUN_FLAGS.iter().filter(|flag| flag.key.is_some()).find(sets) {
        error.name = config_file::flag_location(file, flag);
    } else if KNOBS.iter().any(|knob| knob.key == error.name) {
        error.name = format!("{file}: farandole.{}", error.name);
    }
    error
}

/// Returns remarks about Horovod variables that are set but have no effect, with the reason.
fn ignored_variable_remarks() -> impl Iterator<Item = String> {
    IGNORED_VARIABLES.iter().filter_map(|(name, flag)| {
        // A variable that turns a feature off has its effect here, too.
        environment_variable(name).filter(|value| !["0", "false"].contains(&value.as_str()))?;
        let flag = RUN_FLAGS.iter().find(|known| known.name == *flag)?;
        let FlagEffect::Ignored(reason) = flag.effect else { return None };
        Some(format!("{name} means nothing here: {reason}"))
    })
}

/// Applies the effect of a flag.
fn apply_flag(
    flag: &RunFlag,
    value: &str,
    called: &str,
    given: &mut BTreeMap<String, String>,
    remarks: &mut Vec<String>,
) -> Result<()> {
    // `flag_value_text` joins the values of a flag by spaces.
    for part in value.split_whitespace().filter(|_| flag.value != FlagValue::Text) {
        if flag.value != FlagValue::Nothing
            && let Err(expected) = check_flag_value(flag.value, part)
        {
            bail!("{called} must be {expected}: {part}");
        }
    }
    let set = |given: &mut BTreeMap<String, String>, key: &str, value: String| {
        given.insert(key.to_owned(), value);
    };
    match flag.effect {
        FlagEffect::SetKnob(key) => set(given, key, value.trim().to_owned()),
        FlagEffect::SetKnobMib(key) => set(given, key, format!("{}MiB", value.trim())),
        // `false` in a file sets the opposite.
        FlagEffect::SetKnobTo(key, on) if value == "false" => {
            set(given, key, if on == "1" { "0" } else { "1" }.to_owned())
        }
        FlagEffect::SetKnobTo(key, on) => set(given, key, on.to_owned()),
        FlagEffect::Ignored(reason) if value != "false" => {
            remarks.push(format!("{called} means nothing here: {reason}"))
        }
        FlagEffect::Ignored(_) | FlagEffect::HandledByRun => {}
    }
    Ok(())
}

fn is_given(matches: &ArgMatches, name: &str) -> bool {
    matches.value_source(name) == Some(ValueSource::CommandLine)
}

fn text_argument(matches: &ArgMatches, name: &str) -> Option<String> {
    matches.get_one::<String>(name).cloned()
}

fn flag_value_text(matches: &ArgMatches, flag: &RunFlag) -> String {
    if flag.value == FlagValue::Nothing {
        return "true".to_owned();
    }
    matches.get_many::<String>(flag.name).unwrap_or_default().cloned().collect::<Vec<_>>().join(" ")
}

fn network_interfaces(matches: &ArgMatches, remarks: &mut Vec<String>) -> Option<Vec<String>> {
    let mut all = Vec::new();
    for name in ["network-interfaces", "network-interface"] {
        for value in matches.get_many::<String>(name).unwrap_or_default() {
            all.extend(
                value.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned),
            );
        }
    }
    if is_given(matches, "network-interface") {
        remarks.push("--network-interface is deprecated, use --network-interfaces".to_owned());
    }
    (!all.is_empty()).then_some(all)
}

fn parse_num_proc(text: &str) -> Result<u32> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => bail!("--num-proc must be a whole number of at least 1: {text}"),
    }
}

fn parse_ssh_port(text: &str) -> Result<u16> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => bail!("--ssh-port must be a number from 1 to 65535: {text}"),
    }
}

/// Returns the removals of the variables that are about this launcher alone: a `farandole run`
/// inside the job is a separate job, with a journal and a port of its own.
fn unset_launcher_variables() -> impl Iterator<Item = (String, Option<String>)> {
    // Horovod's prefix counts where ours is not set.
    [FARANDOLE_PREFIX, HOROVOD_PREFIX]
        .into_iter()
        .flat_map(|prefix| ["JOURNAL", "METRICS"].map(|name| (format!("{prefix}{name}"), None)))
}

/// Returns whether the metrics of the job are served, or sent to a collector of OpenTelemetry or to
/// the operator of Kubeflow.
fn exports_metrics(config: &Config) -> bool {
    !config.metrics.is_empty()
        || OTLP_ENDPOINT_VARIABLES
            .iter()
            .chain([&TRAIN_JOB_STATUS_VARIABLE])
            .any(|name| environment_variable(name).is_some())
}

/// Returns the given knobs that workers must know, as variables.
fn worker_variables(given: &BTreeMap<String, String>) -> BTreeMap<String, Option<String>> {
    let known = KNOBS.iter().filter(|knob| knob.propagate);
    known
        .filter_map(|knob| {
            Some((format!("{FARANDOLE_PREFIX}{}", knob.name), Some(given.get(knob.key)?.clone())))
        })
        .collect()
}
