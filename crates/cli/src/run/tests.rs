// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use std::time::Duration;

use clap::ArgMatches;
use farandole::launcher::elastic::ElasticJob;

use super::flags::{FlagEffect, FlagValue, IGNORED_VARIABLES, RUN_FLAGS, knob_flags};
use super::options::RunOptions;
use crate::arguments;

fn matches(line: &[&str]) -> Result<ArgMatches, clap::Error> {
    let words: Vec<String> = line.iter().map(|word| (*word).to_owned()).collect();
    arguments::parse_arguments(&words, line[0] == "horovodrun").map(|(_, matches)| matches)
}

fn read(line: &[&str]) -> anyhow::Result<RunOptions> {
    let mut words = vec!["horovodrun"];
    words.extend(line);
    words.extend(["python", "train.py", "-np", "9"]);
    RunOptions::from_matches(&matches(&words).unwrap())
}

#[test]
fn the_help_shows_the_other_names_of_a_flag() {
    let help = super::build_command().render_long_help().to_string();
    assert!(help.contains("--min-num-proc <N>"), "{help}");
    assert!(help.contains("[alias: --min-np]"), "{help}");
}

fn written(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    file
}

/// Every flag of Horovod 0.28.1's launcher, with a value where it takes one.
const HOROVOD: &[&[&str]] = &[
    &["-np", "2"],
    &["--num-proc", "2"],
    &["-n", "2"],
    &["--disable-cache"],
    &["--start-timeout", "30"],
    &["--network-interfaces", "lo"],
    &["--network-interface", "lo"],
    &["--output-filename", "/tmp/out"],
    &["--verbose"],
    &["-p", "22"],
    &["--ssh-port", "22"],
    &["-i", "/key"],
    &["--ssh-identity-file", "/key"],
    &["--fusion-threshold-mb", "32"],
    &["--cycle-time-ms", "5"],
    &["--cache-capacity", "512"],
    &["--hierarchical-allreduce"],
    &["--no-hierarchical-allreduce"],
    &["--hierarchical-allgather"],
    &["--no-hierarchical-allgather"],
    &["--torus-allreduce"],
    &["--no-torus-allreduce"],
    &["--autotune"],
    &["--no-autotune"],
    &["--autotune-log-file", "log"],
    &["--autotune-warmup-samples", "1"],
    &["--autotune-steps-per-sample", "1"],
    &["--autotune-bayes-opt-max-samples", "1"],
    &["--autotune-gaussian-process-noise", "0.5"],
    &["--timeline-filename", "t.json"],
    &["--timeline-mark-cycles"],
    &["--no-timeline-mark-cycles"],
    &["--no-stall-check"],
    &["--stall-check"],
    &["--stall-check-warning-time-seconds", "1"],
    &["--stall-check-shutdown-time-seconds", "1"],
    &["--mpi-threads-disable"],
    &["--no-mpi-threads-disable"],
    &["--mpi-args", "-x NAME"],
    &["--mpi-args=--map-by node"],
    &["--tcp"],
    &["--binding-args=-bind-to none"],
    &["--num-nccl-streams", "2"],
    &["--thread-affinity", "0"],
    &["--gloo-timeout-seconds", "30"],
    &["--log-level", "DEBUG"],
    &["--log-with-timestamp"],
    &["--log-without-timestamp"],
    &["--log-hide-timestamp"],
    &["--no-log-hide-timestamp"],
    &["-prefix-timestamp"],
    &["--prefix-output-with-timestamp"],
    &["-H", "localhost:2"],
    &["--hosts", "localhost:2"],
    &["-hostfile", "/hosts"],
    &["--hostfile", "/hosts"],
    &["--gloo"],
    &["--mpi"],
    &["--jsrun"],
];

#[test]
fn every_flag_of_horovod_is_taken_and_the_programs_words_are_left_alone() {
    for flag in HOROVOD {
        let options = read(flag).unwrap_or_else(|error| panic!("{flag:?}: {error:#}"));
        assert_eq!(options.command, ["python", "train.py", "-np", "9"], "{flag:?}");
    }
    for (elastic, key) in [
        (&["--min-np", "1"][..], "min_num_proc"),
        (&["--min-num-proc", "1"], "min_num_proc"),
        (&["--max-np", "1"], "max_num_proc"),
        (&["--max-num-proc", "1"], "max_num_proc"),
        (&["--slots-per-host", "1"], "slots_per_host"),
        (&["--elastic-timeout", "1"], "elastic_timeout"),
        (&["--reset-limit", "0"], "reset_limit"),
        (&["--blacklist-cooldown-range", "1", "2"], "blacklist_cooldown_range"),
        (&["--host-discovery-script", "find"], "host_discovery_script"),
    ] {
        assert!(read(elastic).unwrap().config.given.contains(&key), "{elastic:?}");
    }
}

#[test]
fn a_job_is_elastic_by_either_of_two_flags_and_the_others_say_so_when_it_is_not() {
    let elastic = |line: &[&str]| {
        let options = read(line).unwrap();
        (options.is_elastic(), options.remarks.len())
    };
    assert_eq!(elastic(&["-np", "2", "--min-np", "1", "--max-np", "4"]), (true, 0));
    assert_eq!(elastic(&["--host-discovery-script", "find", "--spares", "1"]), (true, 0));
    assert_eq!(elastic(&["-np", "2", "--max-np", "4", "--reset-limit", "3"]), (false, 2));
    let file = written("elastic: {min_num_proc: 2, blacklist_cooldown_range: 1 9, spares: 1}\n");
    let options = read(&["-np", "3", "--config-file", file.path().to_str().unwrap()]).unwrap();
    let rules = ElasticJob::elastic_rules_from_config(3, &options.config).unwrap();
    assert!(options.is_elastic() && options.remarks.is_empty());
    assert_eq!((rules.first, rules.min_workers, rules.max_workers, rules.spares), (3, 2, 3, 1));
    assert_eq!(rules.cooldown, (Duration::from_secs(1), Duration::from_secs(9)));
    assert_eq!((rules.timeout, rules.reset_limit), (Duration::from_secs(600), None));
    assert_eq!(read(&["--min-np", "2"]).unwrap().job_placement().unwrap().num_proc, 2);
}

#[test]
fn elastic_numbers_that_contradict_each_other_are_refused_by_their_flags() {
    let rules = |line: &[&str]| {
        let options = read(line).unwrap();
        let place = options.job_placement()?;
        ElasticJob::elastic_rules_from_config(place.num_proc, &options.config)
            .map_err(anyhow::Error::from)
    };
    for (line, part) in [
        (&["-np", "2", "--min-np", "3"][..], "--min-num-proc (3) is larger than --num-proc (2)"),
        (&["-np", "2", "--min-np", "0"], "at least one process"),
        (
            &["-np", "4", "--min-np", "2", "--max-np", "3"],
            "--max-num-proc (3) is smaller than --num-proc (4)",
        ),
        (&["--host-discovery-script", "find"], "-np N or --min-num-proc N"),
    ] {
        let error = rules(line).unwrap_err().to_string();
        assert!(error.contains(part), "{line:?}: {error}");
    }
    for range in [["0", "5"], ["9", "5"], ["5", "3601"]] {
        let line = ["--min-np", "1", "--blacklist-cooldown-range", range[0], range[1]];
        let error = read(&line).unwrap_err().to_string();
        assert!(
            error.starts_with("--blacklist-cooldown-range must be two whole numbers"),
            "{error}"
        );
    }
    for named in [["-H", "a:1"], ["--hostfile", "f"]] {
        let line = ["horovodrun", named[0], named[1], "--host-discovery-script", "find", "a"];
        assert!(matches(&line).unwrap_err().to_string().contains("cannot be used with"));
    }
}

#[test]
fn an_ignored_flag_is_named_once() {
    let options =
        read(&["--tcp", "--mpi-args", "-x A", "--cycle-time-ms", "2.5", "--gloo", "-np", "2"])
            .unwrap();
    assert_eq!(options.remarks.len(), 4, "{:?}", options.remarks);
    assert!(options.remarks.iter().all(|remark| remark.contains(" means nothing here: ")));
    assert!(read(&["-np", "2"]).unwrap().remarks.is_empty());
}

#[test]
fn every_variable_that_means_nothing_has_a_flag_that_says_why() {
    for (variable, name) in IGNORED_VARIABLES {
        let flag = RUN_FLAGS.iter().find(|flag| flag.name == name).unwrap();
        assert!(matches!(flag.effect, FlagEffect::Ignored(_)), "{variable}");
    }
}

#[test]
fn values_out_of_range_are_refused_by_name() {
    for (line, part) in [
        (
            &["--cache-capacity", "-1"][..],
            "--cache-capacity must be a whole number of at least 0: -1",
        ),
        (&["--fusion-threshold-mb", "x"], "--fusion-threshold-mb must be a whole number"),
        (&["--autotune-gaussian-process-noise", "2"], "must be a number from 0 to 1: 2"),
        (&["-np", "0"], "--num-proc must be a whole number of at least 1: 0"),
        (&["-p", "70000"], "--ssh-port must be a number from 1 to 65535: 70000"),
        (&["--network-interfaces", "no0"], "no0 (those with one"),
        (&["--config-file", "/no/such"], "cannot read the configuration file /no/such"),
        (&["--peer-timeout", "soon"], "--peer-timeout must be"),
        (&["--elastic-timeout", "never"], "--elastic-timeout must be a duration"),
        (&["--reset-limit", "-1"], "--reset-limit must be a whole number of at least 0: -1"),
    ] {
        let error = format!("{:#}", read(line).unwrap_err());
        assert!(error.contains(part), "{line:?}: {error}");
    }
}

#[test]
fn an_unknown_flag_names_the_nearest_one_and_flags_that_exclude_each_other_are_refused() {
    let error = matches(&["horovodrun", "-np", "2", "--fusion-treshold-mb", "1", "a"])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("--fusion-threshold-mb") && error.contains("Usage: horovodrun "),
        "{error}"
    );
    for line in [["--gloo", "--mpi", "a"].as_slice(), &["-H", "a:1", "--hostfile", "f", "a"]] {
        let mut words = vec!["farandole", "run"];
        words.extend(line);
        assert!(matches(&words).unwrap_err().to_string().contains("cannot be used with"));
    }
    assert!(
        matches(&["farandole", "run", "-np", "2"]).unwrap_err().to_string().contains("COMMAND")
    );
    assert!(matches(&["horovodrun", "-cb"]).unwrap().get_flag("check-build"));
}

#[test]
fn a_flag_wins_over_the_file_and_the_last_of_two_opposites_counts() {
    let file = written(
        "params: {cache_capacity: 7, fusion_threshold_mb: 32}\nautotune: {enabled: true}\n\
         stall_check: {enabled: false, warning_time_seconds: 9}\nfarandole: {peer_timeout: 7s}\n",
    );
    let path = file.path().to_str().unwrap();
    let options =
        read(&["--config-file", path, "--cache-capacity", "8", "--autotune", "--no-autotune"])
            .unwrap();
    let config = &options.config;
    assert_eq!(
        (config.cache_capacity, config.fusion_threshold, config.autotune),
        (8, 32 << 20, false)
    );
    assert!(config.stall_check_disable);
    assert_eq!(
        (config.stall_check_time, config.peer_timeout),
        (Duration::from_secs(9), Duration::from_secs(7))
    );
    let told = |name: &str| options.environment[name].as_deref();
    assert_eq!(told("FARANDOLE_CACHE_CAPACITY"), Some("8"));
    assert_eq!(told("FARANDOLE_PEER_TIMEOUT"), Some("7s"));
}

#[test]
fn processes_of_a_job_with_a_journal_do_not_inherit_it() {
    let options = read(&["--min-np", "1", "--journal", "f", "--registrar-timeout", "7"]).unwrap();
    assert_eq!(options.journal_path(), Some("f".into()));
    assert_eq!(options.config.registrar_timeout, Duration::from_secs(7));
    for name in ["FARANDOLE_JOURNAL", "HOROVOD_JOURNAL", "FARANDOLE_METRICS", "HOROVOD_METRICS"] {
        assert_eq!(options.environment.get(name), Some(&None), "{name}");
    }
    assert_eq!(options.environment.get("FARANDOLE_REGISTRAR_TIMEOUT"), None);
}

#[test]
fn hosts_give_the_number_of_processes_and_too_few_slots_are_refused_when_it_is_placed() {
    let options = read(&["-H", "a:2,b:4", "-p", "2222"]).unwrap();
    let place = options.job_placement().unwrap();
    assert_eq!((place.num_proc, place.hosts.len()), (6, 2));
    let hosts = written("# two\nlocalhost slots=2\n\nb\n");
    let options = read(&["-hostfile", hosts.path().to_str().unwrap()]).unwrap();
    assert_eq!(options.job_placement().unwrap().num_proc, 3);
    let none = read(&[]).unwrap().job_placement().unwrap_err().to_string();
    assert!(none.contains("-np N"), "{none}");
    let rsh = read(&["-np", "1", "--ssh-command", "rsh", "-p", "1"])
        .unwrap()
        .job_placement()
        .unwrap_err()
        .to_string();
    assert!(rsh.contains("hosts are reached by: rsh"), "{rsh}");
}

#[test]
fn every_knob_with_a_flag_is_one() {
    // CL-2.
    let run = super::build_command();
    let names: Vec<&str> = run.get_arguments().filter_map(clap::Arg::get_long).collect();
    for (name, _) in knob_flags() {
        assert!(names.contains(&name), "{name}");
    }
    let twice =
        RUN_FLAGS.iter().filter(|flag| flag.value == FlagValue::Nothing && flag.key.is_some());
    assert!(twice.count() > 3);
    run.debug_assert();
}

#[test]
fn a_wrong_value_is_called_as_the_user_has_written_it() {
    let file = written("params: {fusion_threshold_mb: many}\n");
    let (level, own) =
        (written("logging: {level: loud}\n"), written("farandole: {start_timeout: soon}\n"));
    let [path, level, own] = [&file, &level, &own].map(|file| file.path().display().to_string());
    for (line, told) in [
        (&["--start-timeout", "-5"][..], "--start-timeout must be a duration".to_owned()),
        (&["--log-level", "loud"], "--log-level must be trace, ".to_owned()),
        (&["-np", "-1"], "--num-proc must be a whole number of at least 1: -1".to_owned()),
        (
            &["--config-file", &path],
            format!("{path}: params.fusion_threshold_mb must be a whole number"),
        ),
        (&["--config-file", &level], format!("{level}: logging.level must be trace, ")),
        (&["--config-file", &own], format!("{own}: farandole.start_timeout must be a duration")),
    ] {
        let error = read(line).unwrap_err().to_string();
        assert!(error.starts_with(&told), "{line:?}: {error}");
    }
}
