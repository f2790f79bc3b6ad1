// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! From flags and the configuration file to programs and their hosts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::ArgMatches;
use clap::parser::ValueSource;
use farandole::config::{Config, HOROVOD_PREFIX, KNOBS, PREFIX, environment};
use farandole::launcher::allocation::{Allocation, Here, allocation};
use farandole::launcher::elastic::{Discovery, chosen};
use farandole::launcher::hosts::{parse_hostfile, parse_hosts};
use farandole::launcher::{HostSlots, Shell, placements};
use farandole::registrar::host::networks_of;

use super::file::{self, File};
use super::flags::{
    Does, FLAGS, Flag, IGNORED_VARIABLES, Takes, checked, is_elastic, is_switch, knob_flags,
};

/// Value of the knob by which agents send the timelines of their workers.
const GATHER: &str = "GATHER";

/// Variable of workers that say of themselves what the run viewer shows.
const TOLD: &str = "FARANDOLE_SPARK_TOLD";

/// The request of the user.
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
    pub(crate) timestamps: bool,
    pub(crate) verbose: bool,
    pub(crate) command: Vec<String>,
    /// Remarks about flags without effect and about unknown entries.
    pub(crate) remarks: Vec<String>,
}

/// Hosts, and how they are reached.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) hosts: Vec<HostSlots>,
    pub(crate) num_proc: u32,
    pub(crate) shell: Shell,
    /// The batch system that named the hosts.
    pub(crate) allocation: Option<Allocation>,
}

impl RunOptions {
    /// Reads the flags, and the file that they name.
    ///
    /// # Errors
    /// The problem, with the flag, the file and key, or the variable.
    pub(crate) fn read(matches: &ArgMatches) -> Result<Self> {
        let path = text(matches, "config-file").unwrap_or_default();
        let file = if path.is_empty() {
            File::default()
        } else {
            let content = std::fs::read_to_string(&path)
                .with_context(|| format!("cannot read the configuration file {path}"))?;
            file::read(&path, &content)?
        };
        let mut remarks = file.warnings;
        let mut given: BTreeMap<String, String> = file.knobs.into_iter().collect();
        for (name, value) in file.flags {
            if let Some(flag) = FLAGS.iter().find(|flag| flag.name == name) {
                apply(flag, &value, &file::place_of(&path, flag), &mut given, &mut remarks)?;
            }
        }
        for flag in FLAGS.iter().filter(|flag| is_given(matches, flag.name)) {
            let values = values(matches, flag);
            apply(flag, &values, &format!("--{}", flag.name), &mut given, &mut remarks)?;
        }
        for (name, knob) in knob_flags().filter(|(name, _)| is_given(matches, name)) {
            let value = if is_switch(knob) {
                "1".to_owned()
            } else {
                text(matches, name).unwrap_or_default()
            };
            given.insert(knob.key.to_owned(), value);
        }
        let mut extra = BTreeMap::new();
        if let Some(interfaces) = interfaces(matches, &mut remarks) {
            extra.insert("NCCL_SOCKET_IFNAME".to_owned(), Some(interfaces.join(",")));
            if !given.contains_key("bind_address") {
                let networks = networks_of(&interfaces)?;
                remarks.extend(
                    networks.warning().map(|warning| format!("--network-interfaces: {warning}")),
                );
                given.insert("bind_address".to_owned(), networks.wish);
            }
        }
        let timeline = text(matches, "timeline").map(PathBuf::from);
        if timeline.is_some() && given.insert("timeline".to_owned(), GATHER.to_owned()).is_some() {
            bail!(
                "--timeline and --timeline-filename exclude each other: each takes the ranks' \
                 timelines"
            );
        }
        let store = text(matches, "ui-store");
        let ui = (matches.get_flag("ui") || store.is_some()).then_some(store);
        if ui.is_some() {
            extra.insert(TOLD.to_owned(), Some("1".to_owned()));
        }
        remarks.extend(ignored_variables());
        remarks.dedup();
        let config =
            Config::read(environment, &given).map_err(|error| named(error, matches, &path))?;
        let switched = config.min_num_proc.is_some() || !config.host_discovery_script.is_empty();
        for flag in FLAGS
            .iter()
            .filter(|flag| !switched && is_elastic(flag) && is_given(matches, flag.name))
        {
            remarks.push(format!(
                "--{} means nothing without --min-num-proc or --host-discovery-script, which make \
                 a job elastic",
                flag.name
            ));
        }
        let number = |name: &str| text(matches, name).map(|text| (name.to_owned(), text));
        Ok(Self {
            config,
            environment: for_workers(&given)
                .into_iter()
                .chain(without_journal())
                .chain(extra)
                .collect(),
            num_proc: number("num-proc").map(|(_, text)| processes(&text)).transpose()?,
            hosts: text(matches, "hosts"),
            hostfile: text(matches, "hostfile"),
            ssh_command: text(matches, "ssh-command"),
            ssh_port: number("ssh-port").map(|(_, text)| port(&text)).transpose()?,
            ssh_identity_file: text(matches, "ssh-identity-file").map(PathBuf::from),
            output_folder: text(matches, "output-filename").map(PathBuf::from),
            timeline,
            ui,
            timestamps: matches.get_flag("prefix-output-with-timestamp"),
            verbose: matches.get_flag("verbose"),
            command: matches.get_many::<String>("command").unwrap_or_default().cloned().collect(),
            remarks,
        })
    }

    /// Returns whether processes may come and go.
    pub(crate) fn is_elastic(&self) -> bool {
        self.config.min_num_proc.is_some() || !self.config.host_discovery_script.is_empty()
    }

    /// Returns the file from which the job is continued after this process was killed.
    pub(crate) fn journal(&self) -> Option<PathBuf> {
        Some(PathBuf::from(&self.config.journal)).filter(|path| !path.as_os_str().is_empty())
    }

    /// Returns whether an earlier process has left a job that this one continues.
    pub(crate) fn is_continued(&self) -> bool {
        let left = |path: PathBuf| path.metadata().is_ok_and(|file| file.len() > 0);
        self.is_elastic() && self.journal().is_some_and(left)
    }

    /// Returns the hosts of the processes: those of the command line, of the batch system, or this
    /// host.
    ///
    /// # Errors
    /// Hosts that cannot be understood, and too few slots.
    pub(crate) fn place(&self) -> Result<Place> {
        let named = self.named()?;
        let given = allocation(&Here)?;
        let asked = self.ssh_command.is_some()
            || self.ssh_port.is_some()
            || self.ssh_identity_file.is_some();
        let own = given.as_ref().and_then(|given| given.shell.clone()).filter(|_| !asked);
        let shell = match own {
            Some(shell) => shell,
            None => Shell::of(
                self.ssh_command.as_deref().unwrap_or("ssh"),
                self.ssh_port,
                self.ssh_identity_file.as_deref().map(Path::new),
                self.config.start_timeout.min(std::time::Duration::from_secs(10)),
            )?,
        };
        if !self.config.host_discovery_script.is_empty() {
            return Ok(Place {
                hosts: Vec::new(),
                num_proc: self.first()?,
                shell,
                allocation: None,
            });
        }
        let given = given.filter(|_| named.is_none());
        let is_named = named.is_some();
        let hosts =
            named.or_else(|| given.as_ref().map(|given| given.hosts.clone())).unwrap_or_default();
        let slots: u64 = hosts.iter().map(|host| u64::from(host.slots)).sum();
        let num_proc = match self.num_proc.or(self.config.min_num_proc) {
            Some(num_proc) => num_proc,
            None if slots > 0 => {
                u32::try_from(slots).context("more slots than ranks can be counted")?
            }
            None => bail!("say how many processes to start: -np N"),
        };
        // A job of one host, which this is, may have any number of processes: slots are then tasks
        // of the batch system.
        let alone = !is_named && hosts.len() == 1 && placements(&hosts, 1)?.1.is_empty();
        let hosts = if alone { Vec::new() } else { hosts };
        Ok(Place { hosts, num_proc, shell, allocation: given })
    }

    /// Returns the number of processes with which an elastic job begins, if nothing else says it.
    fn first(&self) -> Result<u32> {
        let first = self.num_proc.or(self.config.min_num_proc);
        first.context("say how many processes to start: -np N or --min-num-proc N")
    }

    /// Returns the hosts that were asked for.
    fn named(&self) -> Result<Option<Vec<HostSlots>>> {
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

    /// Returns the host discovery of an elastic job. If it is this host alone, it has room for
    /// `most`.
    pub(crate) fn discovery(&self, place: &Place, most: u32) -> Box<dyn Discovery> {
        // Without a largest number there is one process for each that was asked for.
        let slots = if most == u32::MAX { place.num_proc } else { most };
        let hostfile = self.hostfile.as_ref().map(PathBuf::from);
        let (hosts, allocation) = match &place.allocation {
            // A batch job of one host.
            Some(_) if place.hosts.is_empty() => (Vec::new(), None),
            Some(allocation) => (Vec::new(), Some(allocation)),
            None => (place.hosts.clone(), None),
        };
        chosen(&self.config, hostfile, hosts, allocation, slots)
    }
}

/// Calls a knob by what the user has written: its flag, or its key in the file.
fn named(
    mut error: farandole::config::Error,
    matches: &ArgMatches,
    file: &str,
) -> farandole::config::Error {
    let sets = |flag: &&Flag| match flag.does {
        Does::Sets(key) | Does::SetsMib(key) | Does::Turns(key, _) => key == error.name,
        _ => false,
    };
    let flag =
        FLAGS.iter().filter(|flag| is_given(matches, flag.name)).find(sets).map(|flag| flag.name);
    let own = knob_flags().find(|(name, knob)| knob.key == error.name && is_given(matches, name));
    if let Some(name) = flag.or(own.map(|(name, _)| name)) {
        error.name = format!("--{name}");
    } else if let Some(flag) = FLAGS.iter().filter(|flag| flag.key.is_some()).find(sets) {
        error.name = file::place_of(file, flag);
    } else if KNOBS.iter().any(|knob| knob.key == error.name) {
        error.name = format!("{file}: farandole.{}", error.name);
    }
    error
}

/// Horovod variables that are set and mean nothing here, with the reason.
fn ignored_variables() -> impl Iterator<Item = String> {
    IGNORED_VARIABLES.iter().filter_map(|(name, flag)| {
        environment(name).filter(|value| !["0", "false"].contains(&value.as_str()))?;
        let flag = FLAGS.iter().find(|known| known.name == *flag)?;
        let Does::Nothing(why) = flag.does else { return None };
        Some(format!("{name} means nothing here: {why}"))
    })
}

/// Lets a flag have its effect.
fn apply(
    flag: &Flag,
    value: &str,
    called: &str,
    given: &mut BTreeMap<String, String>,
    remarks: &mut Vec<String>,
) -> Result<()> {
    for part in value.split_whitespace().filter(|_| flag.takes != Takes::Text) {
        if flag.takes != Takes::Nothing
            && let Err(expected) = checked(flag.takes, part)
        {
            bail!("{called} must be {expected}: {part}");
        }
    }
    let set = |given: &mut BTreeMap<String, String>, key: &str, value: String| {
        given.insert(key.to_owned(), value);
    };
    match flag.does {
        Does::Sets(key) => set(given, key, value.trim().to_owned()),
        Does::SetsMib(key) => set(given, key, format!("{}MiB", value.trim())),
        // `false` in a file is the opposite.
        Does::Turns(key, on) if value == "false" => {
            set(given, key, if on == "1" { "0" } else { "1" }.to_owned())
        }
        Does::Turns(key, on) => set(given, key, on.to_owned()),
        Does::Nothing(why) if value != "false" => {
            remarks.push(format!("{called} means nothing here: {why}"))
        }
        Does::Nothing(_) | Does::Own => {}
    }
    Ok(())
}

fn is_given(matches: &ArgMatches, name: &str) -> bool {
    matches.value_source(name) == Some(ValueSource::CommandLine)
}

fn text(matches: &ArgMatches, name: &str) -> Option<String> {
    matches.get_one::<String>(name).cloned()
}

fn values(matches: &ArgMatches, flag: &Flag) -> String {
    if flag.takes == Takes::Nothing {
        return "true".to_owned();
    }
    matches.get_many::<String>(flag.name).unwrap_or_default().cloned().collect::<Vec<_>>().join(" ")
}

fn interfaces(matches: &ArgMatches, remarks: &mut Vec<String>) -> Option<Vec<String>> {
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

fn processes(text: &str) -> Result<u32> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => bail!("--num-proc must be a whole number of at least 1: {text}"),
    }
}

fn port(text: &str) -> Result<u16> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => bail!("--ssh-port must be a number from 1 to 65535: {text}"),
    }
}

/// A `farandole run` that a process of the job starts has a job of its own.
fn without_journal() -> impl Iterator<Item = (String, Option<String>)> {
    [PREFIX, HOROVOD_PREFIX].into_iter().map(|prefix| (format!("{prefix}JOURNAL"), None))
}

/// Returns the knobs given, as variables, for those that workers are to know.
fn for_workers(given: &BTreeMap<String, String>) -> BTreeMap<String, Option<String>> {
    let known = KNOBS.iter().filter(|knob| knob.propagate);
    known
        .filter_map(|knob| {
            Some((format!("{PREFIX}{}", knob.name), Some(given.get(knob.key)?.clone())))
        })
        .collect()
}
