// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Jobs with agents behind a connection: the program that reaches "hosts" is a script that runs its
//! command here, and the interpreter there is this test's own program. Real hosts and a real ssh
//! are in `tests/launch`.

#![expect(clippy::unwrap_used, clippy::disallowed_methods, reason = "tests")]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use farandole_config::Config;
use farandole_launcher::elastic::{ElasticJob, StaticHostList};
use farandole_launcher::hosts::parse_hosts;
use farandole_launcher::{
    AgentHello, Error, JobReport, RemoteShell, StaticJob, StopLevel, WorkerProgram,
    serve_one_launcher,
};
use farandole_registrar::ExitKind;
use farandole_telemetry::{RecordSink, WorkerRecord};
use parking_lot::Mutex;

/// Set in a process that plays an agent.
const AGENT: &str = "TEST_AGENT";

struct Lines(Mutex<mpsc::Sender<String>>);

impl RecordSink for Lines {
    fn accept_record(&self, record: WorkerRecord) {
        if let WorkerRecord::Log(line) = record {
            // A test that does not look at lines has dropped the other end.
            drop(self.0.lock().send(format!("{} {}", line.rank.unwrap(), line.text)));
        }
    }
}

/// A folder with the program that reaches hosts, and the one that is their interpreter.
struct Bed {
    folder: tempfile::TempDir,
}

impl Bed {
    fn new() -> Self {
        let bed = Self { folder: tempfile::tempdir().unwrap() };
        bed.script(
            "reach",
            "host=$1; shift; case $host in down*) echo \"reach: no route to $host\" >&2; exit \
                             255;; esac\n\
                             echo \"Last login: today\"; HOST=$host exec sh -c \"$*\"",
        );
        let this = std::env::current_exe().unwrap();
        bed.script(
            "python",
            &format!(
                "{AGENT}=1 exec {} --exact remote::plays_an_agent --nocapture",
                this.display()
            ),
        );
        bed
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn script(&self, name: &str, body: &str) {
        fs::write(self.path(name), format!("#!/bin/sh\n{body}\n")).unwrap();
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(0o700)).unwrap();
    }

    fn program(&self, script: &str, settings: &[(&str, &str)]) -> WorkerProgram {
        let given = [("start_timeout", "30")].iter().chain(settings);
        let given = given.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let config = Config::read(|_| None, &given).unwrap();
        let command = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
        let environment = BTreeMap::from([("GIVEN".to_owned(), Some("x y".to_owned()))]);
        WorkerProgram {
            shell: RemoteShell::from_command(&self.path("reach").display().to_string()).unwrap(),
            python: self.path("python").display().to_string(),
            ..WorkerProgram::for_this_host(command, environment, config)
        }
    }

    fn job(&self, hosts: &str, num_proc: u32, script: &str) -> StaticJob {
        let program = self.program(script, &[]);
        StaticJob { num_proc, hosts: parse_hosts(hosts).unwrap(), program }
    }

    /// Runs an elastic job with a worker on this host and one behind a connection.
    fn run_elastic(&self, script: &str, stop_level: impl Fn() -> StopLevel) -> JobReport {
        let settings = [("elastic_timeout", "2"), ("blacklist_cooldown_range", "600 600")];
        let program = self.program(script, &settings);
        let rules = ElasticJob::elastic_rules_from_config(2, &program.config).unwrap();
        let hosts = StaticHostList(parse_hosts("localhost:1,far:1").unwrap());
        let (sender, _lines) = mpsc::channel();
        let sink = Arc::new(Lines(Mutex::new(sender))) as Arc<dyn RecordSink>;
        let job = ElasticJob { rules, program, journal: None };
        job.run(Box::new(hosts), &sink, &stop_level, &|_| {}).unwrap()
    }
}

fn run(
    job: &StaticJob,
    stop_level: impl Fn() -> StopLevel,
) -> (Result<JobReport, Error>, Vec<String>) {
    let (sender, lines) = mpsc::channel();
    let sink = Arc::new(Lines(Mutex::new(sender))) as Arc<dyn RecordSink>;
    let report = job.run(&sink, &stop_level);
    drop(sink);
    let mut lines: Vec<String> = lines.iter().collect();
    lines.sort();
    (report, lines)
}

fn appears(path: &Path) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !path.exists() {
        assert!(Instant::now() < deadline, "{} does not appear", path.display());
        std::thread::yield_now();
    }
}

#[test]
fn plays_an_agent() {
    if std::env::var(AGENT).is_ok() {
        serve_one_launcher(
            &AgentHello::new("3.11.2".into(), "python".into()),
            std::io::stdin(),
            std::io::stdout(),
        )
        .unwrap();
        std::process::exit(0);
    }
}

#[test]
fn ranks_follow_the_order_of_hosts_and_lines_and_variables_come_through() {
    let bed = Bed::new();
    let job = bed.job("localhost:1,far1:2,far2:2", 5, r#"echo "$HOST:$GIVEN:$WORLD_SIZE""#);
    let (report, lines) = run(&job, || StopLevel::Continue);
    let report = report.unwrap();
    assert_eq!(report.exit_code(), 0, "{report:?}");
    let ranks: Vec<u32> = report.outcomes.iter().map(|outcome| outcome.rank.unwrap().0).collect();
    assert_eq!(ranks, [0, 1, 2, 3, 4]);
    assert_eq!(
        lines[1..],
        ["1 far1:x y:5", "2 far1:x y:5", "3 far2:x y:5", "4 far2:x y:5"].map(str::to_owned)
    );
    assert!(lines[0].ends_with(":x y:5"), "{lines:?}");
}

#[test]
fn hosts_that_cannot_be_reached_are_all_named_and_no_worker_starts() {
    let bed = Bed::new();
    let touched = bed.path("touched");
    let job =
        bed.job("localhost:1,down1:1,far:1,down2:1", 4, &format!("touch {}", touched.display()));
    let (report, _) = run(&job, || StopLevel::Continue);
    let error = report.unwrap_err().message_with_causes();
    assert_eq!(
        error,
        "2 hosts cannot be used: down1: reach: no route to down1; down2: reach: no route to down2"
    );
    assert!(!touched.exists());
}

#[test]
fn a_missing_interpreter_is_reported_in_the_shells_words() {
    let bed = Bed::new();
    let mut job = bed.job("far:1", 1, "true");
    job.program.python = "/no/such/python".to_owned();
    let error = run(&job, || StopLevel::Continue).0.unwrap_err().message_with_causes();
    assert!(
        error.starts_with("far: ")
            && error.contains("/no/such/python")
            && error.contains("not found"),
        "{error}"
    );
}

#[test]
fn the_failure_of_a_worker_elsewhere_is_the_jobs() {
    let bed = Bed::new();
    let job = bed.job("localhost:1,far:2", 3, r#"test "$RANK" = 2 && exit 7; exec sleep 600"#);
    let report = run(&job, || StopLevel::Continue).0.unwrap();
    assert_eq!(report.exit_code(), 7);
    assert_eq!(report.first_failure().unwrap().rank.unwrap().0, 2);
    assert!(report.job_failure_reason().unwrap().contains("rank 2"), "{report:?}");
}

#[test]
fn a_connection_that_breaks_ends_the_job_and_the_workers_behind_it() {
    let bed = Bed::new();
    let pids = bed.path("pids");
    let script = format!(
        r#"echo $$ >>{0}; test "$RANK" = 1 && echo "$PPID" >{0}.agent; exec sleep 600"#,
        pids.display()
    );
    let job = bed.job("localhost:1,far:1", 2, &script);
    let agent = bed.path("pids.agent");
    let killer = std::thread::spawn(move || {
        appears(&agent);
        let pid: i32 = loop {
            if let Ok(pid) = fs::read_to_string(&agent).unwrap().trim().parse() {
                break pid;
            }
        };
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(pid).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
    });
    let error = run(&job, || StopLevel::Continue).0.unwrap_err().message_with_causes();
    killer.join().unwrap();
    assert_eq!(error, "far: the connection was ended by SIGKILL");
    for pid in fs::read_to_string(&pids).unwrap().lines() {
        let deadline = Instant::now() + Duration::from_secs(10);
        while fs::read_to_string(format!("/proc/{pid}/stat"))
            .is_ok_and(|stat| !stat.contains(") Z "))
        {
            assert!(Instant::now() < deadline, "worker {pid} outlived its agent");
            std::thread::yield_now();
        }
    }
}

#[test]
fn an_interrupt_leaves_time_and_a_second_one_does_not() {
    let bed = Bed::new();
    let ready = bed.path("ready");
    let polite = format!(
        r#"trap 'echo saved; exit 3' INT; touch {}.$RANK; while :; do sleep 0.05; done"#,
        ready.display()
    );
    let both = |ready: &Path| (0..2).all(|rank| ready.with_extension(rank.to_string()).exists());
    let job = bed.job("localhost:1,far:1", 2, &polite);
    let (report, lines) =
        run(&job, || if both(&ready) { StopLevel::Interrupt } else { StopLevel::Continue });
    assert!(report.unwrap().interrupted);
    assert_eq!(lines, ["0 saved", "1 saved"]);

    for rank in 0..2 {
        fs::remove_file(ready.with_extension(rank.to_string())).unwrap();
    }
    let deaf = format!(
        r#"trap '' INT TERM; touch {}.$RANK; while :; do sleep 0.05; done"#,
        ready.display()
    );
    let job = bed.job("localhost:1,far:1", 2, &deaf);
    let asked = std::cell::Cell::new(None);
    let began = std::cell::Cell::new(None);
    let (report, _) = run(&job, || {
        if !both(&ready) {
            return StopLevel::Continue;
        }
        if began.get().is_none() {
            began.set(Some(Instant::now()));
        }
        // The second stop request comes when the first has been applied.
        if asked.replace(Some(())).is_none() { StopLevel::Interrupt } else { StopLevel::Kill }
    });
    let report = report.unwrap();
    assert!(began.get().unwrap().elapsed() < Duration::from_secs(8), "a kill takes no grace");
    assert!(
        report.interrupted
            && report.outcomes.iter().all(|outcome| outcome.exit_kind == Some(ExitKind::Signal(9))),
        "{report:?}"
    );
}

#[test]
fn workers_of_an_elastic_job_that_fail_before_a_world_end_it_with_their_code() {
    let report = Bed::new().run_elastic("exit 4", || StopLevel::Continue);
    assert_eq!(report.exit_code(), 4, "{report:?}");
    assert!(!report.interrupted && report.job_failure_reason().is_some(), "{report:?}");
}

#[test]
fn an_elastic_job_that_is_interrupted_ends_its_workers_here_and_elsewhere() {
    for slower in ["here", "far"] {
        let bed = Bed::new();
        let ready = bed.path("ready");
        // The end of the faster worker must not end the slower one before it has saved.
        let polite = format!(
            r#"trap '[ ${{HOST:-here}} = {slower} ] && sleep 0.7
                     touch {0}.saved.${{HOST:-here}}; exit 3' INT
               touch {0}.${{HOST:-here}}; while :; do sleep 0.05; done"#,
            ready.display()
        );
        let exist = |names: [&str; 2]| names.iter().all(|name| ready.with_extension(name).exists());
        let report = bed.run_elastic(&polite, || {
            if exist(["here", "far"]) { StopLevel::Interrupt } else { StopLevel::Continue }
        });
        assert!(report.interrupted && report.exit_code() != 0, "{report:?}");
        assert!(exist(["saved.here", "saved.far"]), "the {slower} worker was ended too early");
    }
}
