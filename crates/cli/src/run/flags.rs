// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Every flag of `farandole run`: Horovod's flags in one table, and flags of knobs that Horovod
//! does not have.

use clap::builder::Str;
use clap::{Arg, ArgAction};
use farandole::config::{FARANDOLE_PREFIX, KNOBS, KnobDefinition, KnobValue};

/// The kind of value that a flag takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlagValue {
    /// No value.
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

/// The effect of a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlagEffect {
    /// Sets a knob to the flag's value.
    SetKnob(&'static str),
    /// Sets a knob in bytes to the flag's value in MiB.
    SetKnobMib(&'static str),
    /// Sets a knob to this value.
    SetKnobTo(&'static str, &'static str),
    /// Has no effect, for this reason.
    Ignored(&'static str),
    /// Has an effect in `farandole run` itself.
    HandledByRun,
}

/// A flag of `farandole run`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunFlag {
    /// Name, without dashes.
    pub(crate) name: &'static str,
    /// Other names.
    pub(crate) aliases: &'static [&'static str],
    /// One-letter form.
    pub(crate) short: Option<char>,
    /// Names that Horovod writes behind a single dash.
    pub(crate) single_dash: &'static [&'static str],
    pub(crate) value: FlagValue,
    pub(crate) effect: FlagEffect,
    /// Section and key in the configuration file. For flags without a value, `true` sets the flag.
    pub(crate) key: Option<(&'static str, &'static str)>,
    pub(crate) help: &'static str,
}

const FLAG_DEFAULTS: RunFlag = RunFlag {
    name: "",
    aliases: &[],
    short: None,
    single_dash: &[],
    value: FlagValue::Text,
    effect: FlagEffect::HandledByRun,
    key: None,
    help: "",
};

const fn farandole_only_flag(name: &'static str, takes: FlagValue, help: &'static str) -> RunFlag {
    RunFlag { name, value: takes, help, ..FLAG_DEFAULTS }
}

const fn flag_with_config_key(
    name: &'static str,
    takes: FlagValue,
    does: FlagEffect,
    key: (&'static str, &'static str),
    help: &'static str,
) -> RunFlag {
    RunFlag { name, value: takes, effect: does, key: Some(key), help, ..FLAG_DEFAULTS }
}

const fn elastic_flag(
    name: &'static str,
    aliases: &'static [&'static str],
    takes: FlagValue,
    key: &'static str,
    help: &'static str,
) -> RunFlag {
    RunFlag {
        name,
        aliases,
        value: takes,
        effect: FlagEffect::SetKnob(key),
        key: Some((ELASTIC_SECTION, key)),
        help,
        ..FLAG_DEFAULTS
    }
}

const fn ignored_flag(name: &'static str, takes: FlagValue, reason: &'static str) -> RunFlag {
    RunFlag {
        name,
        value: takes,
        effect: FlagEffect::Ignored(reason),
        help: reason,
        ..FLAG_DEFAULTS
    }
}

const fn ignored_keyed_flag(
    name: &'static str,
    takes: FlagValue,
    key: (&'static str, &'static str),
    reason: &'static str,
) -> RunFlag {
    RunFlag { key: Some(key), ..ignored_flag(name, takes, reason) }
}

/// Section of the configuration file for elastic training, which Horovod does not have.
const ELASTIC_SECTION: &str = "elastic";
const NO_MPI_REASON: &str = "Farandole does not use MPI";
const NO_CYCLES_REASON: &str =
    "the engine has no cycles: it works as soon as there is something to do";
const AUTOMATIC_ALGORITHM_REASON: &str =
    "the engine chooses the algorithm by size and layout (FARANDOLE_ALLREDUCE_ALGORITHM)";
const ONE_ENGINE_REASON: &str = "there is one engine, and it needs no controller";
const NO_CACHE_REASON: &str = "nothing is cached from run to run";

/// Horovod's flags, and flags of `farandole run` that are not knobs.
pub(crate) const RUN_FLAGS: &[RunFlag] = &[
    RunFlag {
        aliases: &["np"],
        short: Some('n'),
        single_dash: &["np"],
        ..farandole_only_flag(
            "num-proc",
            FlagValue::Text,
            "Number of processes; default: all slots of the hosts",
        )
    },
    RunFlag {
        short: Some('H'),
        ..farandole_only_flag(
            "hosts",
            FlagValue::Text,
            "Hosts and their slots, in the order of ranks: a:2,b:4,[::1]:2",
        )
    },
    RunFlag {
        single_dash: &["hostfile"],
        ..farandole_only_flag(
            "hostfile",
            FlagValue::Text,
            "A file with one host on each line: \"a slots=2\", \"a:2\" or \"a\"; # begins a \
             comment",
        )
    },
    RunFlag {
        short: Some('p'),
        ..farandole_only_flag(
            "ssh-port",
            FlagValue::Count,
            "Port for ssh; default: that of ssh's configuration",
        )
    },
    RunFlag {
        short: Some('i'),
        ..farandole_only_flag(
            "ssh-identity-file",
            FlagValue::Text,
            "Key for ssh; default: that of ssh's configuration",
        )
    },
    farandole_only_flag(
        "ssh-command",
        FlagValue::Text,
        "Program that reaches other hosts. It is called with a host and a command; default: that \
         of the batch system, else ssh",
    ),
    farandole_only_flag(
        "network-interfaces",
        FlagValue::Text,
        "Interfaces, such as eth0,eth1, which should be equally fast: links between hosts use the \
         networks of all of them side by side, the registrar that of the first one",
    ),
    farandole_only_flag(
        "network-interface",
        FlagValue::Text,
        "The older form of --network-interfaces",
    ),
    farandole_only_flag(
        "output-filename",
        FlagValue::Text,
        "Folder in which the output of each rank is also written, to rank.<N>/stdout and \
         rank.<N>/stderr",
    ),
    RunFlag {
        single_dash: &["prefix-timestamp"],
        ..farandole_only_flag(
            "prefix-output-with-timestamp",
            FlagValue::Nothing,
            "Begin each line of the workers with the time",
        )
    },
    farandole_only_flag(
        "timeline",
        FlagValue::Text,
        "File for one timeline of all ranks, for Perfetto; clocks of hosts are aligned, a late \
         rank is named",
    ),
    farandole_only_flag(
        "ui",
        FlagValue::Nothing,
        "Show the job in the run viewer, live, and print its link; the run stays in a store",
    ),
    farandole_only_flag(
        "ui-store",
        FlagValue::Text,
        "Path or URL of that store; default: farandole-runs of the current directory",
    ),
    farandole_only_flag(
        "requeue",
        FlagValue::Nothing,
        "In a batch job of Slurm: at SIGUSR1, have the ranks commit to their store and end, and put \
         the job back into the queue if it has made progress",
    ),
    farandole_only_flag(
        "config-file",
        FlagValue::Text,
        "YAML file with Horovod's keys, and any setting under `farandole`; flags have priority",
    ),
    farandole_only_flag(
        "verbose",
        FlagValue::Nothing,
        "Print where each rank runs and how it ended",
    ),
    RunFlag {
        single_dash: &["cb"],
        ..farandole_only_flag(
            "check-build",
            FlagValue::Nothing,
            "Print the features of this installation and exit",
        )
    },
    RunFlag {
        value: FlagValue::Count,
        effect: FlagEffect::SetKnobMib("fusion_threshold"),
        key: Some(("params", "fusion_threshold_mb")),
        ..farandole_only_flag(
            "fusion-threshold-mb",
            FlagValue::Count,
            "Largest size of a fused operation, in MiB",
        )
    },
    flag_with_config_key(
        "cache-capacity",
        FlagValue::Count,
        FlagEffect::SetKnob("cache_capacity"),
        ("params", "cache_capacity"),
        "Tensors remembered per process set; 0 turns the response cache off",
    ),
    flag_with_config_key(
        "autotune",
        FlagValue::Nothing,
        FlagEffect::SetKnobTo("autotune", "1"),
        ("autotune", "enabled"),
        "Tune the fusion threshold in the first steps",
    ),
    toggle_flag("no-autotune", FlagEffect::SetKnobTo("autotune", "0"), "Undo --autotune"),
    flag_with_config_key(
        "autotune-log-file",
        FlagValue::Text,
        FlagEffect::SetKnob("autotune_log"),
        ("autotune", "log_file"),
        "CSV file for the samples of autotune",
    ),
    flag_with_config_key(
        "autotune-warmup-samples",
        FlagValue::Count,
        FlagEffect::SetKnob("autotune_warmup_samples"),
        ("autotune", "warmup_samples"),
        "Number of first samples that are ignored",
    ),
    flag_with_config_key(
        "autotune-steps-per-sample",
        FlagValue::Count,
        FlagEffect::SetKnob("autotune_steps_per_sample"),
        ("autotune", "steps_per_sample"),
        "Number of steps in a score; a sample is the median of five",
    ),
    flag_with_config_key(
        "autotune-bayes-opt-max-samples",
        FlagValue::Count,
        FlagEffect::SetKnob("autotune_samples"),
        ("autotune", "bayes_opt_max_samples"),
        "Number of samples after which autotune stops",
    ),
    ignored_keyed_flag(
        "autotune-gaussian-process-noise",
        FlagValue::Share,
        ("autotune", "gaussian_process_noise"),
        "the search has no Gaussian process",
    ),
    flag_with_config_key(
        "timeline-filename",
        FlagValue::Text,
        FlagEffect::SetKnob("timeline"),
        ("timeline", "filename"),
        "File for the timeline; {rank} in it stands for the rank",
    ),
    flag_with_config_key(
        "timeline-mark-cycles",
        FlagValue::Nothing,
        FlagEffect::SetKnobTo("timeline_mark_cycles", "1"),
        ("timeline", "mark_cycles"),
        "Mark every negotiation round in the timeline",
    ),
    toggle_flag(
        "no-timeline-mark-cycles",
        FlagEffect::SetKnobTo("timeline_mark_cycles", "0"),
        "Undo --timeline-mark-cycles",
    ),
    flag_with_config_key(
        "stall-check",
        FlagValue::Nothing,
        FlagEffect::SetKnobTo("stall_check_disable", "0"),
        ("stall_check", "enabled"),
        "Undo --no-stall-check",
    ),
    toggle_flag(
        "no-stall-check",
        FlagEffect::SetKnobTo("stall_check_disable", "1"),
        "Turn the stall check off",
    ),
    flag_with_config_key(
        "stall-check-warning-time-seconds",
        FlagValue::Count,
        FlagEffect::SetKnob("stall_check_time"),
        ("stall_check", "warning_time_seconds"),
        "A tensor waiting this long for other ranks is reported; 0 means never",
    ),
    flag_with_config_key(
        "stall-check-shutdown-time-seconds",
        FlagValue::Count,
        FlagEffect::SetKnob("stall_shutdown_time"),
        ("stall_check", "shutdown_time_seconds"),
        "A tensor waiting this long ends the job; 0 means never",
    ),
    flag_with_config_key(
        "log-level",
        FlagValue::Text,
        FlagEffect::SetKnob("log_level"),
        ("logging", "level"),
        "Lowest level of logged events: trace, debug, info, warning, error or fatal",
    ),
    flag_with_config_key(
        "log-with-timestamp",
        FlagValue::Nothing,
        FlagEffect::SetKnobTo("log_hide_time", "0"),
        ("logging", "with_timestamp"),
        "Begin lines of the log with the time, which is the default",
    ),
    toggle_flag(
        "log-without-timestamp",
        FlagEffect::SetKnobTo("log_hide_time", "1"),
        "Begin lines of the log without the time",
    ),
    toggle_flag(
        "log-hide-timestamp",
        FlagEffect::SetKnobTo("log_hide_time", "1"),
        "The older form of --log-without-timestamp",
    ),
    toggle_flag(
        "no-log-hide-timestamp",
        FlagEffect::SetKnobTo("log_hide_time", "0"),
        "The older form of --log-with-timestamp",
    ),
    elastic_flag(
        "min-num-proc",
        &["min-np"],
        FlagValue::Count,
        "min_num_proc",
        "Makes the job elastic: smallest number of processes; default in an elastic job: the \
         number of processes",
    ),
    elastic_flag(
        "max-num-proc",
        &["max-np"],
        FlagValue::Count,
        "max_num_proc",
        "Elastic: largest number of processes; default: all slots; with spares, the number of \
         processes",
    ),
    elastic_flag(
        "host-discovery-script",
        &[],
        FlagValue::Text,
        "host_discovery_script",
        "Makes the job elastic: a program that prints the available hosts, one `host` or \
         `host:slots` on each line; run every second",
    ),
    elastic_flag(
        "slots-per-host",
        &[],
        FlagValue::Count,
        "slots_per_host",
        "Elastic: slots of a host for which the program prints no number",
    ),
    elastic_flag(
        "spares",
        &[],
        FlagValue::Count,
        "spares",
        "Elastic: additional processes that have done their imports and wait to replace a lost \
         process",
    ),
    elastic_flag(
        "elastic-timeout",
        &[],
        FlagValue::Text,
        "elastic_timeout",
        "Elastic: seconds with too few processes after which the job fails",
    ),
    elastic_flag(
        "journal",
        &[],
        FlagValue::Text,
        "journal",
        "Elastic: a file that records the state of the job; if this command is killed and started \
         again with the same file, it continues the job with the same processes; contains the \
         job's secrets",
    ),
    elastic_flag(
        "registrar-timeout",
        &[],
        FlagValue::Text,
        "registrar_timeout",
        "Elastic: seconds for which the processes of a job with a journal wait for a command that \
         was killed; then they end; default: 60",
    ),
    elastic_flag(
        "reset-limit",
        &[],
        FlagValue::Count,
        "reset_limit",
        "Elastic: number of changes of the world after which the job fails; default: no limit",
    ),
    elastic_flag(
        "blacklist-cooldown-range",
        &[],
        FlagValue::Pair,
        "blacklist_cooldown_range",
        "Elastic: seconds for which a host gets no new process after a failure there: after the \
         first failure, and at most; default: 5 300",
    ),
    elastic_flag(
        "discovery-timeout",
        &[],
        FlagValue::Text,
        "discovery_timeout",
        "Elastic: seconds after which the program is killed and started again",
    ),
    ignored_keyed_flag(
        "cycle-time-ms",
        FlagValue::Number,
        ("params", "cycle_time_ms"),
        NO_CYCLES_REASON,
    ),
    ignored_keyed_flag(
        "hierarchical-allreduce",
        FlagValue::Nothing,
        ("params", "hierarchical_allreduce"),
        AUTOMATIC_ALGORITHM_REASON,
    ),
    ignored_flag("no-hierarchical-allreduce", FlagValue::Nothing, AUTOMATIC_ALGORITHM_REASON),
    ignored_keyed_flag(
        "hierarchical-allgather",
        FlagValue::Nothing,
        ("params", "hierarchical_allgather"),
        AUTOMATIC_ALGORITHM_REASON,
    ),
    ignored_flag("no-hierarchical-allgather", FlagValue::Nothing, AUTOMATIC_ALGORITHM_REASON),
    ignored_keyed_flag(
        "torus-allreduce",
        FlagValue::Nothing,
        ("params", "torus_allreduce"),
        AUTOMATIC_ALGORITHM_REASON,
    ),
    ignored_flag("no-torus-allreduce", FlagValue::Nothing, AUTOMATIC_ALGORITHM_REASON),
    ignored_keyed_flag(
        "mpi-threads-disable",
        FlagValue::Nothing,
        ("library_options", "mpi_threads_disable"),
        NO_MPI_REASON,
    ),
    ignored_flag("no-mpi-threads-disable", FlagValue::Nothing, NO_MPI_REASON),
    ignored_flag("mpi-args", FlagValue::Text, NO_MPI_REASON),
    ignored_flag("binding-args", FlagValue::Text, NO_MPI_REASON),
    ignored_flag(
        "tcp",
        FlagValue::Nothing,
        "links between hosts always use TCP; for NCCL, set NCCL_IB_DISABLE",
    ),
    ignored_keyed_flag(
        "num-nccl-streams",
        FlagValue::Count,
        ("library_options", "num_nccl_streams"),
        "each communicator has one stream of its own",
    ),
    ignored_keyed_flag(
        "thread-affinity",
        FlagValue::Count,
        ("library_options", "thread_affinity"),
        "the engine's threads are not pinned",
    ),
    ignored_keyed_flag(
        "gloo-timeout-seconds",
        FlagValue::Count,
        ("library_options", "gloo_timeout_seconds"),
        "there is no Gloo; deadlines are --peer-timeout and --collective-timeout",
    ),
    ignored_flag("gloo", FlagValue::Nothing, ONE_ENGINE_REASON),
    ignored_flag("mpi", FlagValue::Nothing, ONE_ENGINE_REASON),
    ignored_flag("jsrun", FlagValue::Nothing, ONE_ENGINE_REASON),
    ignored_flag("disable-cache", FlagValue::Nothing, NO_CACHE_REASON),
];

const fn toggle_flag(name: &'static str, does: FlagEffect, help: &'static str) -> RunFlag {
    RunFlag { name, value: FlagValue::Nothing, effect: does, help, ..FLAG_DEFAULTS }
}

/// Horovod variables without effect, and the flag that has the reason.
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

/// Pairs of flags; the last one given counts.
const OPPOSITE_FLAGS: [(&str, &str); 9] = [
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

/// Pairs of flags that exclude each other.
const CONFLICTING_FLAGS: [(&str, &str); 6] = [
    ("hosts", "hostfile"),
    ("hosts", "host-discovery-script"),
    ("hostfile", "host-discovery-script"),
    ("gloo", "mpi"),
    ("gloo", "jsrun"),
    ("mpi", "jsrun"),
];

/// Returns the knobs that are flags of `run` and that Horovod has no flag for.
pub(crate) fn knob_flags() -> impl Iterator<Item = (&'static str, &'static KnobDefinition)> {
    KNOBS.iter().filter_map(|knob| {
        let name = knob.flag?.trim_start_matches('-');
        (!RUN_FLAGS.iter().any(|flag| flag.name == name)).then_some((name, knob))
    })
}

/// Returns whether a flag has an effect only on elastic jobs.
pub(crate) fn is_elastic_flag(flag: &RunFlag) -> bool {
    flag.key.is_some_and(|(section, _)| section == ELASTIC_SECTION)
}

/// Returns whether a knob's flag takes no value.
pub(crate) fn is_switch_knob(knob: &KnobDefinition) -> bool {
    knob.expected == <bool as KnobValue>::EXPECTED_FORMAT
}

/// Returns all flags, for clap.
pub(crate) fn run_arguments() -> impl Iterator<Item = Arg> {
    let table = RUN_FLAGS.iter().map(flag_argument);
    table.chain(knob_flags().map(|(name, knob)| {
        let arg = Arg::new(name).long(name).help(format!(
            "{} [{FARANDOLE_PREFIX}{}]",
            knob.doc.trim(),
            knob.name
        ));
        // A negative number is an invalid value, not a flag.
        if is_switch_knob(knob) {
            arg.action(ArgAction::SetTrue)
        } else {
            arg.value_name("VALUE").allow_negative_numbers(true)
        }
    }))
}

fn flag_argument(flag: &RunFlag) -> Arg {
    let mut arg = Arg::new(flag.name).long(flag.name).help(flag_help(flag));
    for alias in flag.aliases {
        // The beginning of the help describes `-np`.
        arg = if *alias == "np" { arg.alias(*alias) } else { arg.visible_alias(*alias) };
    }
    if let Some(short) = flag.short {
        arg = arg.short(short);
    }
    arg = match flag.value {
        FlagValue::Nothing => arg.action(ArgAction::SetTrue),
        FlagValue::Pair => arg.num_args(2).value_names(["MIN", "MAX"]),
        FlagValue::Count => arg.value_name("N").allow_negative_numbers(true),
        FlagValue::Number | FlagValue::Share => {
            arg.value_name("NUMBER").allow_negative_numbers(true)
        }
        FlagValue::Text => {
            let arg = arg.value_name("VALUE").allow_negative_numbers(true);
            // Ignored flags have values for other programs, such as `--mpi-args "-x A"`.
            arg.allow_hyphen_values(matches!(flag.effect, FlagEffect::Ignored(_)))
        }
    };
    if flag.name.starts_with("network-interface") {
        arg = arg.action(ArgAction::Append);
    } else if flag.value != FlagValue::Nothing {
        // As in Horovod, the last value of a repeated flag counts.
        arg = arg.overrides_with(flag.name);
    }
    for (one, other) in OPPOSITE_FLAGS {
        // Both names of the network interfaces add to one list.
        if one == flag.name && !one.starts_with("network") {
            arg = arg.overrides_with(other);
        }
    }
    for (one, other) in CONFLICTING_FLAGS {
        if one == flag.name {
            arg = arg.conflicts_with(Str::from(other));
        }
    }
    arg.hide(matches!(flag.effect, FlagEffect::Ignored(_)))
}

fn flag_help(flag: &RunFlag) -> String {
    let variable = match flag.effect {
        FlagEffect::SetKnob(key) | FlagEffect::SetKnobMib(key) | FlagEffect::SetKnobTo(key, _) => {
            KNOBS
                .iter()
                .find(|knob| knob.key == key)
                .map(|knob| format!(" [{FARANDOLE_PREFIX}{}]", knob.name))
        }
        FlagEffect::Ignored(_) | FlagEffect::HandledByRun => None,
    };
    format!("{}{}", flag.help, variable.unwrap_or_default())
}

/// Checks a value against the kind that its flag takes; returns the text as knobs parse it.
///
/// # Errors
/// A description of the expected values.
pub(crate) fn check_flag_value(takes: FlagValue, text: &str) -> Result<String, &'static str> {
    let text = text.trim();
    // NaN fails the comparison, too.
    let number = || text.parse::<f64>().ok().filter(|number| *number >= 0.0);
    let (holds, expected) = match takes {
        FlagValue::Nothing | FlagValue::Text => (true, ""),
        FlagValue::Count | FlagValue::Pair => {
            (text.parse::<u64>().is_ok(), "a whole number of at least 0")
        }
        FlagValue::Number => (number().is_some(), "a number of at least 0"),
        FlagValue::Share => (number().is_some_and(|number| number <= 1.0), "a number from 0 to 1"),
    };
    if holds { Ok(text.to_owned()) } else { Err(expected) }
}
