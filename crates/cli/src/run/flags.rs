// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Every flag of `farandole run`: Horovod's in one table, and those of knobs that Horovod does not
//! have.

use clap::builder::Str;
use clap::{Arg, ArgAction};
use farandole::config::{KNOBS, Knob, PREFIX, Value};

/// The value of a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Takes {
    /// Nothing.
    Nothing,
    /// A whole number of at least 0.
    Count,
    /// A number of at least 0.
    Number,
    /// A number from 0 to 1.
    Share,
    /// Any text.
    Text,
    /// Two whole numbers.
    Pair,
}

/// The description of a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Does {
    /// Gives its value to a knob.
    Sets(&'static str),
    /// Gives its value, in MiB, to a knob in bytes.
    SetsMib(&'static str),
    /// Gives a knob this value.
    Turns(&'static str, &'static str),
    /// Nothing; why.
    Nothing(&'static str),
    /// Something that `farandole run` itself does.
    Own,
}

/// A flag.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flag {
    /// Its name, without dashes.
    pub(crate) name: &'static str,
    /// Other names.
    pub(crate) aliases: &'static [&'static str],
    /// Its one-letter form.
    pub(crate) short: Option<char>,
    /// Names behind a single dash, as Horovod has them.
    pub(crate) single: &'static [&'static str],
    pub(crate) takes: Takes,
    pub(crate) does: Does,
    /// Section and key in the configuration file. For flags that take nothing, `true` there is the
    /// flag.
    pub(crate) key: Option<(&'static str, &'static str)>,
    pub(crate) help: &'static str,
}

const PLAIN: Flag = Flag {
    name: "",
    aliases: &[],
    short: None,
    single: &[],
    takes: Takes::Text,
    does: Does::Own,
    key: None,
    help: "",
};

const fn own(name: &'static str, takes: Takes, help: &'static str) -> Flag {
    Flag { name, takes, help, ..PLAIN }
}

const fn set(
    name: &'static str,
    takes: Takes,
    does: Does,
    key: (&'static str, &'static str),
    help: &'static str,
) -> Flag {
    Flag { name, takes, does, key: Some(key), help, ..PLAIN }
}

const fn elastic(
    name: &'static str,
    aliases: &'static [&'static str],
    takes: Takes,
    key: &'static str,
    help: &'static str,
) -> Flag {
    Flag { name, aliases, takes, does: Does::Sets(key), key: Some((ELASTIC, key)), help, ..PLAIN }
}

const fn ignored(name: &'static str, takes: Takes, why: &'static str) -> Flag {
    Flag { name, takes, does: Does::Nothing(why), help: why, ..PLAIN }
}

const fn ignored_in(
    name: &'static str,
    takes: Takes,
    key: (&'static str, &'static str),
    why: &'static str,
) -> Flag {
    Flag { key: Some(key), ..ignored(name, takes, why) }
}

/// Section of the configuration file for elastic training; Horovod has none.
const ELASTIC: &str = "elastic";
const NO_MPI: &str = "Farandole does not use MPI";
const NO_CYCLES: &str = "the engine has no cycles: it works as soon as there is something to do";
const BY_ITSELF: &str =
    "the engine chooses the algorithm by size and layout (FARANDOLE_ALLREDUCE_ALGORITHM)";
const ONE_ENGINE: &str = "there is one engine, and it needs no controller";
const NO_CACHE: &str = "nothing is cached from run to run";

/// Horovod's flags, and those of `farandole run` that are no knobs.
pub(crate) const FLAGS: &[Flag] = &[
    Flag {
        aliases: &["np"],
        short: Some('n'),
        single: &["np"],
        ..own("num-proc", Takes::Text, "Number of processes; default: all slots of the hosts")
    },
    Flag {
        short: Some('H'),
        ..own("hosts", Takes::Text, "Hosts and their slots, in the order of ranks: a:2,b:4,[::1]:2")
    },
    Flag {
        single: &["hostfile"],
        ..own(
            "hostfile",
            Takes::Text,
            "A file with one host on each line: \"a slots=2\", \"a:2\" or \"a\"; # begins a \
             comment",
        )
    },
    Flag {
        short: Some('p'),
        ..own("ssh-port", Takes::Count, "Port for ssh; default: that of ssh's configuration")
    },
    Flag {
        short: Some('i'),
        ..own("ssh-identity-file", Takes::Text, "Key for ssh; default: that of ssh's configuration")
    },
    own(
        "ssh-command",
        Takes::Text,
        "Program that reaches other hosts. It is called with a host and a command; default: that \
         of the batch system, else ssh",
    ),
    own(
        "network-interfaces",
        Takes::Text,
        "Interfaces, such as eth0,eth1, which should be equally fast: links between hosts use the \
         networks of all of them side by side, the registrar that of the first one",
    ),
    own("network-interface", Takes::Text, "The older form of --network-interfaces"),
    own(
        "output-filename",
        Takes::Text,
        "Folder in which the output of each rank is also written, to rank.<N>/stdout and \
         rank.<N>/stderr",
    ),
    Flag {
        single: &["prefix-timestamp"],
        ..own(
            "prefix-output-with-timestamp",
            Takes::Nothing,
            "Begin each line of the workers with the time",
        )
    },
    own(
        "timeline",
        Takes::Text,
        "File for one timeline of all ranks, for Perfetto; clocks of hosts are aligned, a late \
         rank is named",
    ),
    own(
        "ui",
        Takes::Nothing,
        "Show the job in the run viewer, live, and print its link; the run stays in a store",
    ),
    own(
        "ui-store",
        Takes::Text,
        "Path or URL of that store; default: farandole-runs of the current directory",
    ),
    own(
        "config-file",
        Takes::Text,
        "YAML file with Horovod's keys, and any setting under `farandole`; flags have priority",
    ),
    own("verbose", Takes::Nothing, "Print where each rank runs and how it ended"),
    Flag {
        single: &["cb"],
        ..own("check-build", Takes::Nothing, "Print the features of this installation and exit")
    },
    Flag {
        takes: Takes::Count,
        does: Does::SetsMib("fusion_threshold"),
        key: Some(("params", "fusion_threshold_mb")),
        ..own("fusion-threshold-mb", Takes::Count, "Largest size of a fused operation, in MiB")
    },
    set(
        "cache-capacity",
        Takes::Count,
        Does::Sets("cache_capacity"),
        ("params", "cache_capacity"),
        "Tensors remembered per process set; 0 turns the response cache off",
    ),
    set(
        "autotune",
        Takes::Nothing,
        Does::Turns("autotune", "1"),
        ("autotune", "enabled"),
        "Tune the fusion threshold in the first steps",
    ),
    own_turn("no-autotune", Does::Turns("autotune", "0"), "Undo --autotune"),
    set(
        "autotune-log-file",
        Takes::Text,
        Does::Sets("autotune_log"),
        ("autotune", "log_file"),
        "CSV file for the samples of autotune",
    ),
    set(
        "autotune-warmup-samples",
        Takes::Count,
        Does::Sets("autotune_warmup_samples"),
        ("autotune", "warmup_samples"),
        "Number of first samples that are ignored",
    ),
    set(
        "autotune-steps-per-sample",
        Takes::Count,
        Does::Sets("autotune_steps_per_sample"),
        ("autotune", "steps_per_sample"),
        "Number of steps in a score; a sample is the median of five",
    ),
    set(
        "autotune-bayes-opt-max-samples",
        Takes::Count,
        Does::Sets("autotune_samples"),
        ("autotune", "bayes_opt_max_samples"),
        "Number of samples after which autotune stops",
    ),
    ignored_in(
        "autotune-gaussian-process-noise",
        Takes::Share,
        ("autotune", "gaussian_process_noise"),
        "the search has no Gaussian process",
    ),
    set(
        "timeline-filename",
        Takes::Text,
        Does::Sets("timeline"),
        ("timeline", "filename"),
        "File for the timeline; {rank} in it stands for the rank",
    ),
    set(
        "timeline-mark-cycles",
        Takes::Nothing,
        Does::Turns("timeline_mark_cycles", "1"),
        ("timeline", "mark_cycles"),
        "Mark every negotiation round in the timeline",
    ),
    own_turn(
        "no-timeline-mark-cycles",
        Does::Turns("timeline_mark_cycles", "0"),
        "Undo --timeline-mark-cycles",
    ),
    set(
        "stall-check",
        Takes::Nothing,
        Does::Turns("stall_check_disable", "0"),
        ("stall_check", "enabled"),
        "Undo --no-stall-check",
    ),
    own_turn("no-stall-check", Does::Turns("stall_check_disable", "1"), "Turn the stall check off"),
    set(
        "stall-check-warning-time-seconds",
        Takes::Count,
        Does::Sets("stall_check_time"),
        ("stall_check", "warning_time_seconds"),
        "A tensor waiting this long for other ranks is reported; 0 means never",
    ),
    set(
        "stall-check-shutdown-time-seconds",
        Takes::Count,
        Does::Sets("stall_shutdown_time"),
        ("stall_check", "shutdown_time_seconds"),
        "A tensor waiting this long ends the job; 0 means never",
    ),
    set(
        "log-level",
        Takes::Text,
        Does::Sets("log_level"),
        ("logging", "level"),
        "Lowest level of logged events: trace, debug, info, warning, error or fatal",
    ),
    set(
        "log-with-timestamp",
        Takes::Nothing,
        Does::Turns("log_hide_time", "0"),
        ("logging", "with_timestamp"),
        "Begin lines of the log with the time, which is the default",
    ),
    own_turn(
        "log-without-timestamp",
        Does::Turns("log_hide_time", "1"),
        "Begin lines of the log without the time",
    ),
    own_turn(
        "log-hide-timestamp",
        Does::Turns("log_hide_time", "1"),
        "The older form of --log-without-timestamp",
    ),
    own_turn(
        "no-log-hide-timestamp",
        Does::Turns("log_hide_time", "0"),
        "The older form of --log-with-timestamp",
    ),
    elastic(
        "min-num-proc",
        &["min-np"],
        Takes::Count,
        "min_num_proc",
        "Makes the job elastic: smallest number of processes; default in an elastic job: the \
         number of processes",
    ),
    elastic(
        "max-num-proc",
        &["max-np"],
        Takes::Count,
        "max_num_proc",
        "Elastic: largest number of processes; default: all slots; with spares, the number of \
         processes",
    ),
    elastic(
        "host-discovery-script",
        &[],
        Takes::Text,
        "host_discovery_script",
        "Makes the job elastic: a program that prints the available hosts, one `host` or \
         `host:slots` on each line; run every second",
    ),
    elastic(
        "slots-per-host",
        &[],
        Takes::Count,
        "slots_per_host",
        "Elastic: slots of a host for which the program prints no number",
    ),
    elastic(
        "spares",
        &[],
        Takes::Count,
        "spares",
        "Elastic: additional processes that have done their imports and wait to replace a lost \
         process",
    ),
    elastic(
        "elastic-timeout",
        &[],
        Takes::Text,
        "elastic_timeout",
        "Elastic: seconds with too few processes after which the job fails",
    ),
    elastic(
        "journal",
        &[],
        Takes::Text,
        "journal",
        "Elastic: a file that records the state of the job; if this command is killed and started \
         again with the same file, it continues the job with the same processes; contains the \
         job's secrets",
    ),
    elastic(
        "registrar-timeout",
        &[],
        Takes::Text,
        "registrar_timeout",
        "Elastic: seconds for which the processes of a job with a journal wait for a command that \
         was killed; then they end; default: 60",
    ),
    elastic(
        "reset-limit",
        &[],
        Takes::Count,
        "reset_limit",
        "Elastic: number of changes of the world after which the job fails; default: no limit",
    ),
    elastic(
        "blacklist-cooldown-range",
        &[],
        Takes::Pair,
        "blacklist_cooldown_range",
        "Elastic: seconds for which a host gets no new process after a failure there: after the \
         first failure, and at most; default: 5 300",
    ),
    elastic(
        "discovery-timeout",
        &[],
        Takes::Text,
        "discovery_timeout",
        "Elastic: seconds after which the program is killed and started again",
    ),
    ignored_in("cycle-time-ms", Takes::Number, ("params", "cycle_time_ms"), NO_CYCLES),
    ignored_in(
        "hierarchical-allreduce",
        Takes::Nothing,
        ("params", "hierarchical_allreduce"),
        BY_ITSELF,
    ),
    ignored("no-hierarchical-allreduce", Takes::Nothing, BY_ITSELF),
    ignored_in(
        "hierarchical-allgather",
        Takes::Nothing,
        ("params", "hierarchical_allgather"),
        BY_ITSELF,
    ),
    ignored("no-hierarchical-allgather", Takes::Nothing, BY_ITSELF),
    ignored_in("torus-allreduce", Takes::Nothing, ("params", "torus_allreduce"), BY_ITSELF),
    ignored("no-torus-allreduce", Takes::Nothing, BY_ITSELF),
    ignored_in(
        "mpi-threads-disable",
        Takes::Nothing,
        ("library_options", "mpi_threads_disable"),
        NO_MPI,
    ),
    ignored("no-mpi-threads-disable", Takes::Nothing, NO_MPI),
    ignored("mpi-args", Takes::Text, NO_MPI),
    ignored("binding-args", Takes::Text, NO_MPI),
    ignored(
        "tcp",
        Takes::Nothing,
        "links between hosts always use TCP; for NCCL, set NCCL_IB_DISABLE",
    ),
    ignored_in(
        "num-nccl-streams",
        Takes::Count,
        ("library_options", "num_nccl_streams"),
        "each communicator has one stream of its own",
    ),
    ignored_in(
        "thread-affinity",
        Takes::Count,
        ("library_options", "thread_affinity"),
        "the engine's threads are not pinned",
    ),
    ignored_in(
        "gloo-timeout-seconds",
        Takes::Count,
        ("library_options", "gloo_timeout_seconds"),
        "there is no Gloo; deadlines are --peer-timeout and --collective-timeout",
    ),
    ignored("gloo", Takes::Nothing, ONE_ENGINE),
    ignored("mpi", Takes::Nothing, ONE_ENGINE),
    ignored("jsrun", Takes::Nothing, ONE_ENGINE),
    ignored("disable-cache", Takes::Nothing, NO_CACHE),
];

const fn own_turn(name: &'static str, does: Does, help: &'static str) -> Flag {
    Flag { name, takes: Takes::Nothing, does, help, ..PLAIN }
}

/// Horovod variables that mean nothing here, and the flag that says why.
pub(crate) const IGNORED_VARIABLES: [(&str, &str); 10] = [
    ("HOROVOD_CYCLE_TIME", "cycle-time-ms"),
    ("HOROVOD_HIERARCHICAL_ALLREDUCE", "hierarchical-allreduce"),
    ("HOROVOD_HIERARCHICAL_ALLGATHER", "hierarchical-allgather"),
    ("HOROVOD_TORUS_ALLREDUCE", "torus-allreduce"),
    ("HOROVOD_MPI_THREADS_DISABLE", "mpi-threads-disable"),
    ("HOROVOD_NUM_NCCL_STREAMS", "num-nccl-streams"),
    ("HOROVOD_THREAD_AFFINITY", "thread-affinity"),
    ("HOROVOD_GLOO_TIMEOUT_SECONDS", "gloo-timeout-seconds"),
    ("HOROVOD_CONTROLLER", "gloo"),
    ("HOROVOD_CPU_OPERATIONS", "gloo"),
];

/// Pairs of which the last one given counts.
const OPPOSITES: [(&str, &str); 9] = [
    ("log-with-timestamp", "log-without-timestamp"),
    ("autotune", "no-autotune"),
    ("timeline-mark-cycles", "no-timeline-mark-cycles"),
    ("stall-check", "no-stall-check"),
    ("hierarchical-allreduce", "no-hierarchical-allreduce"),
    ("hierarchical-allgather", "no-hierarchical-allgather"),
    ("torus-allreduce", "no-torus-allreduce"),
    ("mpi-threads-disable", "no-mpi-threads-disable"),
    ("network-interfaces", "network-interface"),
];

/// Pairs of which only one may be given.
const EXCLUDING: [(&str, &str); 6] = [
    ("hosts", "hostfile"),
    ("hosts", "host-discovery-script"),
    ("hostfile", "host-discovery-script"),
    ("gloo", "mpi"),
    ("gloo", "jsrun"),
    ("mpi", "jsrun"),
];

/// Knobs that are flags of `run` by themselves: Horovod has none for them.
pub(crate) fn knob_flags() -> impl Iterator<Item = (&'static str, &'static Knob)> {
    KNOBS.iter().filter_map(|knob| {
        let name = knob.flag?.trim_start_matches('-');
        (!FLAGS.iter().any(|flag| flag.name == name)).then_some((name, knob))
    })
}

/// Returns whether a flag has an effect only on elastic jobs.
pub(crate) fn is_elastic(flag: &Flag) -> bool {
    flag.key.is_some_and(|(section, _)| section == ELASTIC)
}

/// Returns whether a knob's flag takes no value.
pub(crate) fn is_switch(knob: &Knob) -> bool {
    knob.expected == <bool as Value>::EXPECTED
}

/// Returns all of them, for clap.
pub(crate) fn arguments() -> impl Iterator<Item = Arg> {
    let table = FLAGS.iter().map(argument);
    table.chain(knob_flags().map(|(name, knob)| {
        let arg =
            Arg::new(name).long(name).help(format!("{} [{PREFIX}{}]", knob.doc.trim(), knob.name));
        // A negative number is a wrong value, and no flag.
        if is_switch(knob) {
            arg.action(ArgAction::SetTrue)
        } else {
            arg.value_name("VALUE").allow_negative_numbers(true)
        }
    }))
}

fn argument(flag: &Flag) -> Arg {
    let mut arg = Arg::new(flag.name).long(flag.name).help(help(flag));
    for alias in flag.aliases {
        // The first lines of the help tell of `-np`.
        arg = if *alias == "np" { arg.alias(*alias) } else { arg.visible_alias(*alias) };
    }
    if let Some(short) = flag.short {
        arg = arg.short(short);
    }
    arg = match flag.takes {
        Takes::Nothing => arg.action(ArgAction::SetTrue),
        Takes::Pair => arg.num_args(2).value_names(["MIN", "MAX"]),
        Takes::Count => arg.value_name("N").allow_negative_numbers(true),
        Takes::Number | Takes::Share => arg.value_name("NUMBER").allow_negative_numbers(true),
        Takes::Text => {
            let arg = arg.value_name("VALUE").allow_negative_numbers(true);
            arg.allow_hyphen_values(matches!(flag.does, Does::Nothing(_)))
        }
    };
    if flag.name.starts_with("network-interface") {
        arg = arg.action(ArgAction::Append);
    } else if flag.takes != Takes::Nothing {
        arg = arg.overrides_with(flag.name);
    }
    for (one, other) in OPPOSITES {
        if one == flag.name && !one.starts_with("network") {
            arg = arg.overrides_with(other);
        }
    }
    for (one, other) in EXCLUDING {
        if one == flag.name {
            arg = arg.conflicts_with(Str::from(other));
        }
    }
    arg.hide(matches!(flag.does, Does::Nothing(_)))
}

fn help(flag: &Flag) -> String {
    let variable = match flag.does {
        Does::Sets(key) | Does::SetsMib(key) | Does::Turns(key, _) => KNOBS
            .iter()
            .find(|knob| knob.key == key)
            .map(|knob| format!(" [{PREFIX}{}]", knob.name)),
        Does::Nothing(_) | Does::Own => None,
    };
    format!("{}{}", flag.help, variable.unwrap_or_default())
}

/// Checks a value against what its flag takes; the text as knobs read it.
///
/// # Errors
/// What the flag takes.
pub(crate) fn checked(takes: Takes, text: &str) -> Result<String, &'static str> {
    let text = text.trim();
    let number = || text.parse::<f64>().ok().filter(|number| *number >= 0.0);
    let (holds, expected) = match takes {
        Takes::Nothing | Takes::Text => (true, ""),
        Takes::Count | Takes::Pair => (text.parse::<u64>().is_ok(), "a whole number of at least 0"),
        Takes::Number => (number().is_some(), "a number of at least 0"),
        Takes::Share => (number().is_some_and(|number| number <= 1.0), "a number from 0 to 1"),
    };
    if holds { Ok(text.to_owned()) } else { Err(expected) }
}
